"""``ReaderMachine``: one process outside the run, which reads what a group publishes.

It subscribes at a master, dials the members and older readers that the master names, and fetches
the version that counts: as a chain of deltas from the version that it has, or as a whole. It
finishes a version that it has begun, even if a newer one counts, as long as a source has it:
otherwise a slow reader would never finish one. It shows a version only when all of it is verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pccl.machines.machine import Machine
from pccl.machines.peer.events import (
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    DialControl,
    Send,
)
from pccl.protocol import messages as msg
from pccl.protocol.errors import MembershipError, NotAdmitted, RemoteProtocolError
from pccl.protocol.handshake.certificates import NO_CERTIFICATE
from pccl.protocol.limits import Timing
from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.protocol.types import NOBODY, NS_PER_S, Member, PeerId
from pccl.state.versions import chain_to

REDIAL_MIN_NS = NS_PER_S // 4
REDIAL_MAX_NS = 8 * NS_PER_S
"""Bounds of the pause before a reader dials a peer again; it doubles."""

_WRONG_MAX = 64
"""Deltas that a reader remembers as wrong; older ones may cost it their bytes again."""


# -- events and effects ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceLinked:
    """The link to a member or reader is up or down; a failed dial, too, is a link that is down."""

    peer: PeerId
    up: bool


@dataclass(frozen=True, slots=True)
class StateFetched:
    """The state of ``FetchState`` has arrived and is verified, or it is wrong."""

    name: StateName
    fits: bool


@dataclass(frozen=True, slots=True)
class VersionAssembled:
    """The version of ``AssembleVersion`` is ready, or its deltas do not lead to it."""

    version: PublishedVersion
    fits: bool


@dataclass(frozen=True, slots=True)
class ReaderTick:
    """Some time has passed."""

    moves: bool
    """Whether the running fetch has a piece, and gets more."""
    starves: bool
    """Whether it has needed something for a while that no source can send."""


@dataclass(frozen=True, slots=True)
class DialSource:
    """Dial a member or another reader."""

    member: Member


@dataclass(frozen=True, slots=True)
class SetSources:
    """These members have the version that counts; all other peers are readers."""

    holders: tuple[PeerId, ...]
    rank: int
    """Place of this reader among ``count`` readers."""
    count: int


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a state: a whole version, or a delta. It replaces a fetch that runs."""

    name: StateName
    nbytes: int
    is_delta: bool
    is_first: bool
    """Whether no delta of a chain came before it."""


@dataclass(frozen=True, slots=True)
class AssembleVersion:
    """Make a version from the fetched states: apply deltas to the version before."""

    version: PublishedVersion
    chain: tuple[VersionDelta, ...]


@dataclass(frozen=True, slots=True)
class ShowVersion:
    """Show the program a complete version."""

    version: PublishedVersion


@dataclass(frozen=True, slots=True)
class RaiseToReader:
    """This process cannot read from the run: raise the error in calls of the program."""

    error: MembershipError


ReaderEvent = (
    ControlOpened | ControlMessage | ControlClosed | SourceLinked | StateFetched |
    VersionAssembled | ReaderTick
)  # fmt: skip
ReaderEffect = (
    Send | DialControl | CloseControl | DialSource | SetSources | FetchState | AssembleVersion |
    ShowVersion | RaiseToReader
)  # fmt: skip


class ReaderMachine(Machine[ReaderEvent, ReaderEffect]):
    """The decisions of a reader.

    Args:
        timing: deadlines.
        group: the group whose versions it reads.
        port: the port at which it serves other readers.
        host: the host that it announces; empty: the one that the master sees.
        name: its name, for people.
        now_ns: current time.
    """

    def __init__(
        self, timing: Timing, group: int, port: int, host: str, name: str, now_ns: int
    ) -> None:
        super().__init__("reader", now_ns)
        self.peer = NOBODY
        self.run = b""
        self.term = 0
        self.certificate = NO_CERTIFICATE
        self.held: PublishedVersion | None = None
        """The version that the program sees."""
        self.current: PublishedVersion | None = None
        """The version that counts, as the master has said last."""
        self.fetching: PublishedVersion | None = None
        self.waits_for = "the master has not answered yet"
        self._timing = timing
        self._group = group
        self._port = port
        self._host = host
        self._name = name
        self._chain: tuple[VersionDelta, ...] = ()
        self._fetched = 0
        """Fetched deltas of the chain."""
        self._assembles = False
        self._wrong: dict[VersionDelta, None] = {}
        self._wanted: dict[PeerId, Member] = {}
        self._up: dict[PeerId, int] = {}
        """Peer with a link -> since when."""
        self._pauses: dict[PeerId, tuple[int, int]] = {}
        """Peer -> when to dial it again, and the pause before that; in 0 ns: it is dialled now."""
        self._is_open = False
        self._has_ended = False
        self._heard_ns = self._beat_ns = now_ns

    # -- events --------------------------------------------------------------------------------

    def _take(self, event: ReaderEvent) -> None:
        match event:
            case ControlOpened(hosts=hosts):
                self._is_open, self._heard_ns = True, self._now_ns
                self._beat_ns = self._now_ns
                words = msg.Subscribe(self._group, self._port, self._host, hosts, self._name)
                self._effects.append(Send(words))
            case ControlMessage(message):
                self._heard_ns = self._now_ns
                self._hear(message)
            case ControlClosed(reason):
                self._lose_master(reason)
            case SourceLinked(peer, up):
                self._linked(peer, up=up)
            case StateFetched(name, fits):
                self._fetched_state(name, fits=fits)
            case VersionAssembled(version, fits):
                self._assembled(version, fits=fits)
            case ReaderTick(moves, starves):
                self._tick(moves=moves, starves=starves)

    def _hear(self, message: msg.Message) -> None:
        match message:
            case msg.Subscribed(peer, term, run, certificate):
                self.peer, self.term, self.run = peer, term, run
                self.certificate = certificate
                self.waits_for = "no version has been published by more than half of the group yet"
            case msg.CurrentVersion():
                self._learn(message)
            case msg.MasterHeartbeat():
                pass
            case msg.Refused(cause, reason):
                if cause is not None or not self._is_open:  # else another master may answer
                    self._has_ended = True
                    self._effects.append(RaiseToReader(NotAdmitted(reason=reason)))
                self._effects.append(CloseControl(reason))
                self._lose_master(reason)
            case _:
                reason = f"the master sent an unexpected {type(message).__name__} to a reader"
                raise RemoteProtocolError(func="control", reason=reason)

    def _lose_master(self, reason: str) -> None:
        """Dial a master again. Links to sources stay: versions need no master to arrive."""
        self._is_open = False
        self.waits_for = f"there is no master: {reason}"
        if not self._has_ended:
            pause_ns = self._timing.ns(self._timing.connect_retry_s)
            self._effects.append(DialControl(pause_ns))

    def _tick(self, *, moves: bool, starves: bool) -> None:
        now_ns, timing = self._now_ns, self._timing
        if self._is_open and now_ns - self._beat_ns >= timing.ns(timing.heartbeat_s):
            self._beat_ns = now_ns
            self._effects.append(Send(msg.ReaderLives()))
        if self._is_open and now_ns - self._heard_ns >= timing.ns(timing.deadline_s):
            reason = "the connection is open, but the master sends nothing"
            self._effects.append(CloseControl(reason))
            self._lose_master(reason)
        self._dial()
        if self.fetching is not None and not self._assembles:
            is_old = self.current is not None and self.current.key != self.fetching.key
            if is_old and (starves or not (moves or self._fetched)):
                self.fetching = None
                self._aim()
            elif starves and self._chain:
                self._give_up(self._chain[self._fetched : self._fetched + 1])

    # -- sources -------------------------------------------------------------------------------

    def _learn(self, told: msg.CurrentVersion) -> None:
        holding = {member.peer: member for member in told.holders}
        self._wanted = {**{one.peer: one for one in told.readers}, **holding}
        self._wanted.pop(self.peer, None)
        self._pauses = {peer: due for peer, due in self._pauses.items() if peer in self._wanted}
        count = max(told.count, 1)
        self._effects.append(SetSources(tuple(holding), min(told.rank, count - 1), count))
        self._dial()
        version = told.version
        if version is not None:
            self.current = version
            self.waits_for = f"version {version.number} is being fetched"
            self._aim()

    def _dial(self) -> None:
        """Dial wanted peers without a link, after a pause that doubles."""
        for peer, member in self._wanted.items():
            due_ns, pause_ns = self._pauses.get(peer, (0, REDIAL_MIN_NS))
            if peer in self._up or self._now_ns < due_ns:
                continue
            # A dial ends long before the next one is due.
            ends_ns = self._now_ns + self._timing.ns(2 * self._timing.dial_s)
            self._pauses[peer] = ends_ns, pause_ns
            self._effects.append(DialSource(member))

    def _linked(self, peer: PeerId, *, up: bool) -> None:
        if up:
            self._up.setdefault(peer, self._now_ns)
            return
        since_ns = self._up.pop(peer, self._now_ns)
        if self._now_ns - since_ns >= REDIAL_MAX_NS:
            self._pauses.pop(peer, None)  # else it may have too many readers, and close links
        if peer in self._wanted:
            _, pause_ns = self._pauses.get(peer, (0, REDIAL_MIN_NS))
            next_ns = min(2 * pause_ns, REDIAL_MAX_NS)
            self._pauses[peer] = self._now_ns + pause_ns, next_ns

    # -- versions ------------------------------------------------------------------------------

    def _aim(self) -> None:
        """Begin to fetch the version that counts, unless a fetch runs or there is nothing new."""
        version, held = self.current, self.held
        if version is None or self.fetching is not None or self._assembles:
            return
        if held is not None and version.key == held.key:
            self.waits_for = f"version {version.number} is still the newest"
            return
        self.fetching = version
        self._fetched = 0
        self._chain = chain_to(version, held.state if held is not None else None, self._wrong)
        if held is not None and version.state == held.state:
            self._assemble()
        else:
            self._fetch_next()

    def _fetch_next(self) -> None:
        version = self.fetching
        assert version is not None
        if self._chain:
            delta = self._chain[self._fetched]
            wanted = FetchState(
                delta.state, delta.nbytes, is_delta=True, is_first=not self._fetched
            )
        else:
            wanted = FetchState(version.state, version.nbytes, is_delta=False, is_first=True)
        self._effects.append(wanted)

    def _fetched_state(self, name: StateName, *, fits: bool) -> None:
        version = self.fetching
        if version is None or self._assembles:
            return
        wanted = self._chain[self._fetched].state if self._chain else version.state
        if name != wanted:
            return  # of a fetch that was replaced
        if not fits:
            self._give_up(self._chain[self._fetched : self._fetched + 1])
            return
        self._fetched += 1
        if self._fetched < len(self._chain):
            self._fetch_next()
        else:
            self._assemble()

    def _assemble(self) -> None:
        assert self.fetching is not None
        self._assembles = True
        self._effects.append(AssembleVersion(self.fetching, self._chain))

    def _assembled(self, version: PublishedVersion, *, fits: bool) -> None:
        self._assembles = False
        if not fits:
            self._give_up(self._chain)
            return
        self.held, self.fetching = version, None
        self._effects.append(ShowVersion(version))
        self._aim()

    def _give_up(self, wrong: Iterable[VersionDelta]) -> None:
        """Begin again without deltas that are wrong, or that no source has."""
        if not self._chain:
            self.current = None  # the members have agreed on nonsense: wait for another version
        self._wrong.update(dict.fromkeys(wrong))
        for old in list(self._wrong)[:-_WRONG_MAX]:
            del self._wrong[old]
        self.fetching = None
        self._aim()
