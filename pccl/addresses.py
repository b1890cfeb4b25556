"""Parses the addresses that users write, such as ``host:port``."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from pccl.protocol.handshake.proxy_header import IPNetwork
from pccl.protocol.types import HOST_CHARACTERS_MAX
from pccl.transports.base import Address

DEFAULT_PORT = 48148
PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Advertised:
    """The address that a peer announces.

    Attributes:
        host: host that other peers dial; empty: the address from which the master sees the peer.
        ports: the peer listens on the first free port from first to last; None: any free port.
    """

    host: str = ""
    ports: tuple[int, int] | None = None


def parse_address(text: str) -> Address:
    """Parse ``host:port`` or ``[v6]:port``.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: ``text`` is not an address; the message shows the format.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"an address is a string such as '127.0.0.1:{DEFAULT_PORT}', not {text!r}")
    host, colon, port = text.rpartition(":")
    number = _port(port)
    if not colon or number is None or not _is_host(host):
        raise ValueError(
            f"{text!r} is not an address; write HOST:PORT, such as '127.0.0.1:{DEFAULT_PORT}' "
            f"or '[::1]:{DEFAULT_PORT}'. HOST is an IP address (IPv6 in brackets) or a host name, "
            "each part of which has 1 to 63 characters"
        )
    return Address(_canonical(host), number)


def parse_masters(text: str) -> tuple[Address, ...]:
    """Parse one address or several, separated by commas, in order of preference.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: an address is malformed, has port 0, or appears twice.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"an address is a string such as '127.0.0.1:{DEFAULT_PORT}', not {text!r}")
    addresses = tuple(parse_address(part.strip()) for part in text.split(","))
    if any(address.port == 0 for address in addresses):
        raise ValueError(f"{text!r} has port 0; write the port that the master listens on")
    if len(set(addresses)) < len(addresses):
        raise ValueError(f"{text!r} names a master twice; name each once")
    return addresses


def parse_advertised(text: str, name: str = "advertise") -> Advertised:
    """Parse ``HOST``, ``HOST:PORT``, ``HOST:FIRST-LAST``, ``:PORT`` or ``:FIRST-LAST``.

    ``name``: argument or variable that errors name.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: ``text`` has none of these formats.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} is a string such as 'HOST:PORT', not {text!r}")
    if _is_host(text) and (":" not in text or text.endswith("]")):
        return Advertised(_canonical(text))
    host, _, ports = text.rpartition(":")
    first, dash, last = ports.partition("-")
    lowest = _port(first)
    highest = _port(last) if dash else lowest
    if (host and not _is_host(host)) or not lowest or not highest or lowest > highest:
        raise ValueError(
            f"{name}: {text!r} is not an address; write HOST, HOST:PORT, HOST:FIRST-LAST, "
            f":PORT or :FIRST-LAST, with ports from 1 to {PORT_MAX} and IPv6 in brackets"
        )
    return Advertised(_canonical(host), (lowest, highest))


def parse_proxies(text: str) -> tuple[IPNetwork, ...]:
    """Parse the addresses and networks of proxies, separated by commas.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: an address or a network is malformed, or a network contains every address.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"proxies are a string such as '192.0.2.1,10.0.0.0/24', not {text!r}")
    return tuple(_proxy(part.strip()) for part in text.split(","))


def _proxy(text: str) -> IPNetwork:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise ValueError(
            f"{text!r} names no proxy: {error}; write the IP address from which the proxy connects "
            "to the master, such as 192.0.2.1, or a network, such as 10.0.0.0/24"
        ) from None
    if not network.prefixlen:
        raise ValueError(
            f"{text} contains every address, so each process could claim any source; name only the "
            "addresses from which your proxy connects to the master"
        )
    return network


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. Of names, only localhost counts."""
    try:
        return ip_address(_canonical(host)).is_loopback
    except ValueError:
        return False


def _canonical(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"  # the same address everywhere: resolvers may return ::1 first
    return host.strip("[]")


def _is_host(text: str) -> bool:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if (
        not bare
        or not bare.isprintable()
        or len(bare.encode()) > HOST_CHARACTERS_MAX
        or any(c.isspace() or c in "[]/" for c in bare)
    ):
        return False
    return bare != text if ":" in bare else _is_name(bare)


def _is_name(text: str) -> bool:
    """Whether a resolver accepts this host name: no label is empty or too long."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _port(text: str) -> int | None:
    good = text.isascii() and text.isdigit() and len(text) <= len(str(PORT_MAX))
    return int(text) if good and int(text) <= PORT_MAX else None
