"""``host:port`` as people write it."""

from __future__ import annotations

from pccl.transports.base import Address

DEFAULT_PORT = 48148


def parse_address(text: str) -> Address:
    """Parse ``host:port`` or ``[v6]:port``.

    Raises:
        TypeError: not a string.
        ValueError: not an address; the message shows what one looks like.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"an address is a string such as '127.0.0.1:{DEFAULT_PORT}', not {text!r}")
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    good_port = port.isascii() and port.isdigit() and int(port) < 65536
    if not colon or not host or not good_port or (":" in host and not bracketed):
        raise ValueError(
            f"{text!r} is not an address; write HOST:PORT, such as '127.0.0.1:{DEFAULT_PORT}' "
            f"or '[::1]:{DEFAULT_PORT}'"
        )
    if host == "localhost":
        host = "127.0.0.1"  # one meaning for all: resolvers differ in which loopback comes first
    return Address(host.strip("[]"), int(port))
