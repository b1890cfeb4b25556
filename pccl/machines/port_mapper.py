"""``PortMapper``: decides when to ask the router for a port, in which protocol, and when again.

It asks in PCP, then in NAT-PMP, then in UPnP, and takes the first port that the router grants. It
renews the mapping after half of its lifetime. A failed renewal is repeated after half of the
remaining time; when the mapping has expired, all begins anew. If no protocol works, it tries again
after ``RETRY_S``. An answer that belongs to no open request changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from pccl.machines.router_path import ForwardedPort, MappingProtocol, RouterPath, why_not_asked
from pccl.protocol.port_mapping import nat_pmp, pcp
from pccl.protocol.port_mapping.answers import (
    OtherVersion,
    PortDenied,
    PortGranted,
    RouterAddress,
    RouterAnswer,
)
from pccl.protocol.types import NS_PER_MS, NS_PER_S

LIFETIME_S = 1200
"""For how long a mapping is asked for. It ends so long after a crash at the latest, and so is the
time short in which a restarted router forwards nothing: it is asked after half of it."""

LIFETIME_S_MIN = 60
"""A router that grants less is not used."""

FIRST_WAIT_NS = 250 * NS_PER_MS
"""How long the first request waits for its answer; each further one waits twice as long."""

FIRST_TRIES = 2
"""Requests in one protocol, before the next protocol is tried."""

RENEWAL_TRIES = 4
"""Requests to renew a mapping, before a pause."""

CLOSE_TRIES = 2
"""Requests to delete a mapping."""

PAUSE_S_MIN = 30
"""Shortest pause after a failed renewal."""

RETRY_S = 1800
"""Pause after all protocols have failed."""

UPNP_S = 3.0
"""Longest time for one request in UPnP, which takes several connections."""

UPNP_CLOSE_S = 1.0
"""Longest time to delete a mapping in UPnP."""

UPNP_GRACE_S = 1.0
"""How much later than that an answer still counts."""


@dataclass(frozen=True, slots=True)
class StartMapping:
    """An event: ask for the forwarding of this own port. Only the first one counts."""

    port: int


@dataclass(frozen=True, slots=True)
class RouterFound:
    """An event: how this machine reaches its router, after a ``FindRouter``."""

    path: RouterPath


@dataclass(frozen=True, slots=True)
class RouterMissing:
    """An event: why a ``FindRouter`` has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class RouterAnswered:
    """An event: a datagram has arrived. It may come from anyone."""

    host: str
    port: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RouterRefused:
    """An event: the router has answered that nothing listens at its port."""


@dataclass(frozen=True, slots=True)
class UpnpAnswered:
    """An event: the end of an ``AskUpnp``.

    Attributes:
        granted: what the router forwards; None: nothing.
        reason: why it forwards nothing.
        lifetime_s: ``lifetime_s`` of the request; 0: a deletion.
    """

    granted: PortGranted | None
    reason: str = ""
    lifetime_s: int = 0


@dataclass(frozen=True, slots=True)
class MapperTick:
    """An event: the time ``due_ns`` has come."""


@dataclass(frozen=True, slots=True)
class StopMapping:
    """An event: delete the mapping, if there is one."""


@dataclass(frozen=True, slots=True)
class FindRouter:
    """An effect: find out how this machine reaches the master and its router."""


@dataclass(frozen=True, slots=True)
class SendDatagram:
    """An effect: send a datagram from the own address toward the router."""

    host: str
    port: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AskUpnp:
    """An effect: ask the router in UPnP.

    Attributes:
        path: where it is.
        port: own port.
        outer: the router's port that is wanted, or that is to be deleted.
        lifetime_s: for how long to forward; 0: delete the mapping.
        limit_s: longest time until the answer.
    """

    path: RouterPath
    port: int
    outer: int
    lifetime_s: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class PortMapped:
    """An effect: the router forwards this port. It comes again if that has changed."""

    forwarded: ForwardedPort


@dataclass(frozen=True, slots=True)
class PortUnmapped:
    """An effect: the router has stopped forwarding this port."""

    forwarded: ForwardedPort
    reason: str


@dataclass(frozen=True, slots=True)
class NotMapped:
    """An effect: no port is forwarded, and the next attempt is far.

    Attributes:
        reason: why.
        was_asked: whether a router was asked; if not, nobody misses the port.
    """

    reason: str
    was_asked: bool


@dataclass(frozen=True, slots=True)
class MappingClosed:
    """An effect: all is done after a ``StopMapping``."""


MapperEvent: TypeAlias = (
    StartMapping
    | RouterFound
    | RouterMissing
    | RouterAnswered
    | RouterRefused
    | UpnpAnswered
    | MapperTick
    | StopMapping
)
MapperEffect: TypeAlias = (
    FindRouter | SendDatagram | AskUpnp | PortMapped | PortUnmapped | NotMapped | MappingClosed
)

_IN_ORDER = tuple(MappingProtocol)


class MapperPhase(Enum):
    """What a ``PortMapper`` waits for."""

    NEW = auto()
    FINDING = auto()
    ASKING = auto()
    RESTING = auto()
    CLOSING = auto()
    CLOSED = auto()


class PortMapper:
    """The mapping of one port, or the search for it.

    Args:
        random_bytes: makes nonces.
    """

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self.phase = MapperPhase.NEW
        self.forwarded: ForwardedPort | None = None
        """The port that the router forwards now."""
        self.reason = ""
        """Why no port is forwarded; empty: one is, or that is not known yet."""
        self.was_asked = False
        """Whether a router was asked in the last attempt that has ended."""
        self.due_ns: int | None = None
        """When to feed a ``MapperTick``; None: not now."""
        self._random_bytes = random_bytes
        self._port = 0
        self._path = RouterPath("", "")
        self._protocol = MappingProtocol.PCP
        """The protocol of the open request, or of the mapping."""
        self._request = pcp.PortRequest(b"", "0.0.0.0", 0)
        self._sent = 0
        """How often the open request was sent."""
        self._failures: list[str] = []
        """Why protocols have failed in this attempt."""
        self._granted: PortGranted | None = None
        """In NAT-PMP: the port, while the router's address is not known."""
        self._address = ""
        """In NAT-PMP: the router's address, while the port is not known."""
        self._expires_ns = 0
        self._epoch: tuple[int, int] | None = None
        """The epoch in the router's last answer, in seconds, and when that came."""
        self._was_restarted = False
        """Whether the router has lost its mappings since the last ``PortMapped``."""
        self._effects: list[MapperEffect] = []

    @property
    def awaits_datagrams(self) -> bool:
        """Whether a datagram of the router may be an answer."""
        is_open = self.phase in (MapperPhase.ASKING, MapperPhase.CLOSING)
        return is_open and self._protocol is not MappingProtocol.UPNP

    @property
    def is_settled(self) -> bool:
        """Whether it is known whether the router forwards a port."""
        return self.forwarded is not None or bool(self.reason)

    def handle(self, event: MapperEvent, now_ns: int) -> list[MapperEffect]:
        """Process one event; return the effects to carry out, in order."""
        match event, self.phase:
            case StartMapping(port), MapperPhase.NEW:
                self._port = port
                self._find()
            case RouterFound(path), MapperPhase.FINDING:
                self._found(path, now_ns)
            case RouterMissing(reason), MapperPhase.FINDING:
                self._give_up(reason, now_ns, was_asked=False)
            case RouterAnswered(host, port, data), _ if self.awaits_datagrams:
                if (host, port) == (self._path.router, self._path.router_port):
                    self._answered(data, now_ns)
            case RouterRefused(), _ if self.awaits_datagrams:
                self._refused(now_ns)
            case UpnpAnswered(granted, reason), MapperPhase.ASKING if not self.awaits_datagrams:
                if granted is not None:
                    self._granted_now(granted, granted.host, now_ns)
                else:
                    self._protocol_failed(reason, now_ns)
            case UpnpAnswered(lifetime_s=0), MapperPhase.CLOSING if not self.awaits_datagrams:
                self._closed()
            case MapperTick(), _ if self.due_ns is not None and now_ns >= self.due_ns:
                self._timed_out(now_ns)
            case StopMapping(), _ if self.phase not in (MapperPhase.CLOSING, MapperPhase.CLOSED):
                self._stop(now_ns)
            case _:
                pass  # of a request that is not open any more
        effects, self._effects = self._effects, []
        return effects

    # -- requests ----------------------------------------------------------------------------------

    def _find(self) -> None:
        self.phase, self.due_ns = MapperPhase.FINDING, None
        self._effects.append(FindRouter())

    def _found(self, path: RouterPath, now_ns: int) -> None:
        before, self._path = self._path, path
        moved = (before.router, before.own_inside) != (path.router, path.own_inside)
        if self.forwarded is not None and moved:
            self._lose("this machine is in another network now")
        if reason := why_not_asked(path):
            if self.forwarded is not None:
                self._lose(reason)
            self._give_up(reason, now_ns, was_asked=False)
            return
        self._failures.clear()
        if self.forwarded is None:
            nonce = self._random_bytes(pcp.NONCE_BYTES)
            self._request = pcp.PortRequest(nonce, path.own_inside, self._port)
            self._ask(MappingProtocol.PCP, now_ns)
        else:
            self._ask(self.forwarded.by, now_ns)

    def _ask(self, protocol: MappingProtocol, now_ns: int) -> None:
        self.phase, self._protocol, self._sent = MapperPhase.ASKING, protocol, 0
        self._granted, self._address = None, ""
        self._send(now_ns)

    def _send(self, now_ns: int) -> None:
        self.due_ns = now_ns + (FIRST_WAIT_NS << self._sent)
        self._sent += 1
        is_closing = self.phase is MapperPhase.CLOSING
        lifetime_s = 0 if is_closing else LIFETIME_S
        outer = self._port if self.forwarded is None else self.forwarded.port
        match self._protocol:
            case MappingProtocol.PCP:
                self._post(self._request.pack(0 if is_closing else outer, lifetime_s))
            case MappingProtocol.NAT_PMP:
                if not is_closing and not self._address:
                    self._post(nat_pmp.ADDRESS_REQUEST)
                if self._granted is None:
                    outer = 0 if is_closing else outer
                    self._post(nat_pmp.pack_map(self._port, outer, lifetime_s))
            case MappingProtocol.UPNP:
                limit_s = UPNP_CLOSE_S if is_closing else UPNP_S
                self.due_ns = now_ns + round((limit_s + UPNP_GRACE_S) * NS_PER_S)
                asked = AskUpnp(self._path, self._port, outer, lifetime_s, limit_s)
                self._effects.append(asked)

    def _post(self, data: bytes) -> None:
        self._effects.append(SendDatagram(self._path.router, self._path.router_port, data))

    def _timed_out(self, now_ns: int) -> None:
        if self.phase is MapperPhase.RESTING:
            if self.forwarded is not None and now_ns >= self._expires_ns:
                self._lose(f"the router did not renew it ({'; '.join(self._failures)})")
            self._find()
            return
        tries = RENEWAL_TRIES if self.forwarded is not None else FIRST_TRIES
        if self.phase is MapperPhase.CLOSING:
            tries = CLOSE_TRIES
        if self._protocol is not MappingProtocol.UPNP and self._sent < tries:
            self._send(now_ns)
        elif self.phase is MapperPhase.CLOSING:
            self._closed()
        elif self._granted is not None:  # without an address, the one that the master sees counts
            self._granted_now(self._granted, "", now_ns)
        else:
            self._protocol_failed("no answer", now_ns)

    # -- answers -----------------------------------------------------------------------------------

    def _answered(self, data: bytes, now_ns: int) -> None:
        answer: RouterAnswer | None
        if self._protocol is MappingProtocol.PCP:
            answer = self._request.read(data)
        else:
            answer = nat_pmp.read(data, self._port)
        if isinstance(answer, PortGranted | PortDenied | RouterAddress):
            self._note_epoch(answer.epoch_s, now_ns)
        if self.phase is MapperPhase.CLOSING:
            is_renewal = isinstance(answer, PortGranted) and answer.lifetime_s > 0  # it comes late
            if not (is_renewal or isinstance(answer, RouterAddress | None)):
                self._closed()
            return
        match answer:
            case PortGranted() if self._protocol is MappingProtocol.PCP:
                self._granted_now(answer, answer.host, now_ns)
            case PortGranted():
                self._granted = answer
            case RouterAddress(host):
                self._address = host
            case PortDenied(reason):
                self._protocol_failed(reason, now_ns)
            case OtherVersion():
                self._protocol_failed("the router does not know it", now_ns)
            case None:
                pass
        if self._granted is not None and self._address:
            self._granted_now(self._granted, self._address, now_ns)

    def _refused(self, now_ns: int) -> None:
        if self.phase is MapperPhase.CLOSING:
            self._closed()
            return
        if self._protocol is MappingProtocol.PCP and self.forwarded is None:
            self._failures.append("PCP: the router does not know it")
            self._protocol = MappingProtocol.NAT_PMP  # at the same port
        self._protocol_failed("the router does not know it", now_ns)

    def _granted_now(self, granted: PortGranted, host: str, now_ns: int) -> None:
        if not granted.port or granted.lifetime_s < LIFETIME_S_MIN:
            self._protocol_failed("the router grants no usable port", now_ns)
            return
        lifetime_ns = min(granted.lifetime_s, LIFETIME_S) * NS_PER_S
        self.phase, self.due_ns = MapperPhase.RESTING, now_ns + lifetime_ns // 2
        self._expires_ns = now_ns + lifetime_ns
        self._granted, self._address = None, ""
        before = self.forwarded
        self.forwarded = ForwardedPort(self._protocol, host, granted.port)
        self.reason, self.was_asked = "", True
        if self.forwarded != before or self._was_restarted:
            self._was_restarted = False
            self._effects.append(PortMapped(self.forwarded))

    def _protocol_failed(self, reason: str, now_ns: int) -> None:
        self._failures.append(f"{self._protocol}: {reason}")
        if self.forwarded is not None and self._was_restarted:
            self._lose(f"the router was restarted ({self._failures[-1]})")
            self._find()
        elif self.forwarded is not None:
            left_ns = self._expires_ns - now_ns
            pause_ns = max(left_ns // 2, min(left_ns, PAUSE_S_MIN * NS_PER_S))
            self.phase, self.due_ns = MapperPhase.RESTING, now_ns + pause_ns
        elif self._protocol is _IN_ORDER[-1]:
            self._give_up("; ".join(self._failures), now_ns, was_asked=True)
        else:
            self._ask(_IN_ORDER[_IN_ORDER.index(self._protocol) + 1], now_ns)

    def _note_epoch(self, epoch_s: int, now_ns: int) -> None:
        """Notice that the router's epoch went back: it was restarted, and forwards nothing."""
        if self._epoch is not None:
            before_s, at_ns = self._epoch
            expected_s = before_s + 7 * (now_ns - at_ns) // (8 * NS_PER_S)  # clocks drift
            self._was_restarted |= self.forwarded is not None and epoch_s + 2 < expected_s
        self._epoch = epoch_s, now_ns

    # -- ends --------------------------------------------------------------------------------------

    def _give_up(self, reason: str, now_ns: int, *, was_asked: bool) -> None:
        """Rest; an attempt to renew a mapping that still lives is repeated earlier."""
        self.phase, self.due_ns = MapperPhase.RESTING, now_ns + RETRY_S * NS_PER_S
        if self.forwarded is not None:
            self._failures.append(reason)
            self.due_ns = max(now_ns, min(self._expires_ns, now_ns + PAUSE_S_MIN * NS_PER_S))
        elif (self.reason, self.was_asked) != (reason, was_asked):
            self.reason, self.was_asked = reason, was_asked
            self._effects.append(NotMapped(reason, was_asked))

    def _lose(self, reason: str) -> None:
        assert self.forwarded is not None
        self._effects.append(PortUnmapped(self.forwarded, reason))
        self.forwarded, self._epoch, self._was_restarted = None, None, False

    def _stop(self, now_ns: int) -> None:
        """Delete the mapping, even if the router has not answered the request for it yet."""
        has_asked = self.phase is MapperPhase.ASKING and self.awaits_datagrams
        if self.forwarded is None and not has_asked:
            self._closed()
            return
        self.phase, self._sent = MapperPhase.CLOSING, 0
        self._granted, self._address = None, ""
        if self.forwarded is not None:
            self._protocol = self.forwarded.by
        self._send(now_ns)
        if self.forwarded is not None:
            self._lose("this peer is closed")

    def _closed(self) -> None:
        self.phase, self.due_ns = MapperPhase.CLOSED, None
        self._effects.append(MappingClosed())
