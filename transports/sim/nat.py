"""Address translators: which address a connection gets outside, and what comes in. Pure.

The words are those of RFC 4787 and, for TCP, RFC 5382. A NAT gives an *inside* endpoint, the host
and port of a process, a port of its own address: a *mapping*. It is made by what the process sends,
and *filtering* decides which answers, or dials, the process gets there.

Of a translator that forwards no port, all mappings come from dials. So a port that a process only
listens on has none, whatever the kind of the NAT.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address

IDLE_NS = 240 * NS_PER_S

_PORTS = 1 << 16


class Dependence(enum.Enum):
    """The part of the other side's address that a mapping or a filter depends on."""

    NOTHING = "endpoint-independent"
    ADDRESS = "address-dependent"
    ADDRESS_AND_PORT = "address and port-dependent"

    def part(self, remote: Address) -> Address | None:
        """Return that part of ``remote``; None: nothing."""
        match self:
            case Dependence.NOTHING:
                return None
            case Dependence.ADDRESS:
                return Address(remote.host, 0)
            case Dependence.ADDRESS_AND_PORT:
                return remote


@dataclass(frozen=True, slots=True)
class NatKind:
    """How a NAT, or a firewall, treats connections."""

    mapping: Dependence = Dependence.NOTHING
    """What another outside port is used for: nothing, another address, or another endpoint."""
    filtering: Dependence = Dependence.ADDRESS_AND_PORT
    """Where the inside endpoint must have sent something before it gets something from there."""
    hairpins: bool = False
    """Whether two hosts inside reach each other at outside addresses (RFC 4787, section 6)."""
    refuses: bool = False
    """Whether a dial that may not pass is refused at once; otherwise it is never answered."""
    idle_ns: int = IDLE_NS
    """Time after which a mapping ends that no connection uses (RFC 5382, REQ-5)."""
    ports: tuple[int, ...] = ()
    """Ports that hosts inside may dial; empty: all."""


FULL_CONE = NatKind(filtering=Dependence.NOTHING)
ADDRESS_RESTRICTED = NatKind(filtering=Dependence.ADDRESS)
PORT_RESTRICTED = NatKind()
SYMMETRIC = NatKind(mapping=Dependence.ADDRESS_AND_PORT)
"""The names that RFC 3489 gave to the four usual combinations."""


class Nat:
    """One NAT with one outside address.

    A port outside is that of the host inside, if it is free (RFC 4787, section 4.2.1). Where
    the mapping depends on the other side, it is another one for each.

    Args:
        kind: what it does.
        host: its outside address.
        holds: whether a connection from an inside endpoint to an address outside is open; its
            keep-alive probes then keep its mapping.
    """

    def __init__(
        self,
        kind: NatKind,
        host: str,
        holds: Callable[[Address, Address], bool] = lambda inside, remote: False,
    ) -> None:
        self.kind = kind
        self.host = host
        self._holds = holds
        self._sent_ns: dict[tuple[Address, Address], int] = {}
        """Inside endpoint, and where it sent something -> time of the last packet."""
        self._mappings: dict[tuple[Address, Address | None], int] = {}
        """Inside endpoint, and the part of the other side that counts -> outside port."""

    def lets_out(self, remote: Address) -> bool:
        """Whether hosts inside may dial ``remote``."""
        return not self.kind.ports or remote.port in self.kind.ports

    def outbound(self, inside: Address, remote: Address, now_ns: int) -> Address:
        """Let a packet out; return the address that ``remote`` sees."""
        assert self.lets_out(remote), "what may not pass is not translated"
        self._expire(now_ns)
        self._sent_ns[inside, remote] = now_ns
        part = self.kind.mapping.part(remote)
        port = self._mappings.get((inside, part))
        if port is None:
            wanted = inside.port if part is None else inside.port + crc32(str(part).encode())
            port = self._mappings[inside, part] = self._free_port(wanted)
        return Address(self.host, port)

    def inbound(self, port: int, remote: Address, now_ns: int) -> Address | None:
        """Return the inside endpoint that gets a packet to ``port``; None: it may not pass.

        ``remote``: where the packet comes from. Of a host inside that is its outside address.
        """
        self._expire(now_ns)
        if remote.host == self.host and not self.kind.hairpins:
            return None
        mapped = (inside for (inside, _), taken in self._mappings.items() if taken == port)
        target, part = next(mapped, None), self.kind.filtering.part
        sent_to = {part(there) for inside, there in self._sent_ns if inside == target}
        return target if part(remote) in sent_to else None

    def _free_port(self, wanted: int) -> int:
        taken, port = set(self._mappings.values()), wanted % _PORTS
        while not port or port in taken:
            port = (port + 1) % _PORTS
        return port

    def _expire(self, now_ns: int) -> None:
        """Drop what was not used for too long."""
        since_ns = now_ns - self.kind.idle_ns
        old = [pair for pair, sent_ns in self._sent_ns.items() if sent_ns < since_ns]
        ended = [pair for pair in old if not self._holds(*pair)]
        if not ended:
            return
        for pair in ended:
            del self._sent_ns[pair]
        part = self.kind.mapping.part
        used = {(inside, part(remote)) for inside, remote in self._sent_ns}
        self._mappings = {key: port for key, port in self._mappings.items() if key in used}
