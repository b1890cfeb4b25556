"""The addresses of hosts, which address other hosts see, and which hosts may reach which.

The name of a host, or of a NAT with an address of its own, is its first address. It keeps its name
when it moves to another address; the old address then belongs to no host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pccl.transports.base import Address
from pccl.transports.sim.nat import Nat, NatKind

_LOCAL = ".local"


def inside(name: str) -> str:
    """Return the address of a host in its local network."""
    return name + _LOCAL


def _outside(address: str) -> str:
    """Return the name of the host that has this address in its local network."""
    return address.removesuffix(_LOCAL)


class Addresses:
    """The addresses of all hosts.

    Args:
        now_ns: returns the current time in nanoseconds.
        has_connection: whether a connection from an inside endpoint to an address is open.

    Attributes:
        nats: the NAT of each host that is behind one, by its name, and by all addresses of the NAT.
        local: local network of each host that is in one, by name.
        versions: host name -> the only version of IP that this host has; other hosts have both.
    """

    def __init__(
        self, now_ns: Callable[[], int], has_connection: Callable[[Address, Address], bool]
    ) -> None:
        self.nats: dict[str, Nat] = {}
        self.local: dict[str, int] = {}
        self.versions: dict[str, int] = {}
        self._now_ns = now_ns
        self._has_connection = has_connection
        self._newest: dict[str, str] = {}
        """Name of a host or NAT that has moved -> its present address."""
        self._names: dict[str, str] = {}
        """Any later address -> the name."""
        self._moves = 0

    def translate(self, kind: NatKind, *names: str, outside: str = "") -> None:
        """Put hosts behind one NAT; ``outside``: its address, or else the first host's name."""
        nat = Nat(kind, outside or names[0], self._has_connection)
        self.nats |= dict.fromkeys((*names, nat.host), nat)

    def move(self, name: str) -> list[str]:
        """Give a host, or the NAT before it, another address; return the names of all that moved.

        The NAT forgets all mappings. Addresses in a local network stay.
        """
        nat = self.nats.get(name)
        place = name if nat is None else self.name_of(nat.host)
        self._moves += 1
        address = f"{place}-{self._moves}"
        self._newest[place], self._names[address] = address, place
        if nat is None:
            return [name]
        moved = [key for key, known in self.nats.items() if known is nat]
        self.nats |= dict.fromkeys((*moved, address), Nat(nat.kind, address, self._has_connection))
        return moved

    # -- names and addresses ---------------------------------------------------------------------

    def name_of(self, address: str) -> str:
        """Return the name of the host, or of the NAT, that has or had an address."""
        return self._names.get(_outside(address), _outside(address))

    def address_of(self, name: str) -> str:
        """Return the address at which others see a host."""
        nat = self.nats.get(name)
        return nat.host if nat is not None else self._newest.get(name, name)

    def is_left(self, address: str) -> bool:
        """Whether the host that had an address has moved to another one."""
        place = self.name_of(address)
        return _outside(address) == address != self._newest.get(place, address)

    def process_at(self, host: str, hosts: Sequence[str]) -> str:
        """Return the name of the host that others see at ``host``, and inside at ``hosts``."""
        return self.name_of(hosts[0] if hosts else host)

    def seen(self, local: Address, remote: Address) -> Address:
        """Return the address that ``remote`` sees of a connection from ``local``."""
        if self.are_inside(local.host, remote.host):
            return local
        nat = self.nats.get(local.host)
        if nat is None:
            return Address(self.address_of(local.host), local.port)
        return nat.outbound(local, remote, self._now_ns())

    # -- which host may reach which --------------------------------------------------------------

    def are_inside(self, name: str, address: str) -> bool:
        """Whether ``address`` is that of a host in its local network, which ``name`` is in, too."""
        local = self.local.get(name)
        return address != _outside(address) and local == self.local.get(_outside(address), -1)

    def may_leave(self, name: str, remote: Address) -> bool:
        """Whether the NAT of a host lets its dial of ``remote`` out."""
        nat = self.nats.get(name)
        return nat is None or self.are_inside(name, remote.host) or nat.lets_out(remote)

    def are_apart(self, one: str, other: str) -> bool:
        """Whether two hosts have no version of IP in common."""
        versions = {self.versions[name] for name in (one, other) if name in self.versions}
        return len(versions) > 1
