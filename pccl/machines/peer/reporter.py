"""``PeerReporter``: finds in the events and effects of a peer machine what people want to know.

It puts events into the stream, and phases of operations into the recorder.

Pure. It outlives the machine of one membership, so a peer that was evicted and has rejoined can
still tell why, and for how long it was away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccl.machines.peer.events import (
    Begin,
    BeginSync,
    ControlMessage,
    End,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    Post,
    PostSync,
    RaiseCall,
    ReduceDone,
    ReportUndialable,
    ReportWait,
    ReturnCall,
    Tick,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.results import ReduceResult
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.operation import Eager, Phase
from pccl.protocol.types import NS_PER_S, Member, PeerId
from pccl.protocol.vocabulary.tags import shown_tag
from pccl.telemetry import events as tell
from pccl.telemetry.names import Names
from pccl.telemetry.recorder import Recorder
from pccl.telemetry.stream import EventStream

SAID_AFTER_NS = NS_PER_S
"""How long a master or a link must be away before that is an event: a member that leaves, or a run
that ends, closes them, too. A link that is back sooner is reported then."""


class PeerReporter:
    """Puts the events of one peer into its stream.

    Args:
        stream: takes the events.
        names: learns the names of all members.
        recorder: takes the phases of operations.
        timing: deadlines.
    """

    def __init__(
        self, stream: EventStream, names: Names, recorder: Recorder, timing: Timing
    ) -> None:
        self._stream, self._names, self._timing = stream, names, timing
        self._phases = recorder.phases
        self._members: dict[PeerId, Member] = {}
        """The members of the group, this peer included; empty while it is no member."""
        self._run = b""
        self._lost_ns: int | None = None
        """When this peer lost its membership; None before that, and after it has rejoined."""
        self._master_lost_ns: int | None = None
        """When the connection to the master was lost; None while a master serves this peer."""
        self._master_said = False
        """Whether that was reported."""
        self._lost_links: dict[PeerId, tuple[int, str]] = {}
        """Links without a connection: since when, and why."""
        self._lost_links_said: set[PeerId] = set()
        """Those of them that were reported."""
        self._waiting: dict[int, tuple[str, int]] = {}
        """Calls that were reported to wait: each one's words, and since when."""

    def note(
        self, machine: PeerMachine, event: PeerEvent, effects: Sequence[PeerEffect], now_ns: int
    ) -> None:
        """Report what has happened in ``event`` and its ``effects``; ``machine`` has taken it."""
        match event:
            case ControlMessage(msg.RosterChanged(_, departures)) if self._members:
                self._learn(machine, departures, now_ns)
            case ControlMessage(msg.Admitted()) if machine.standing is Standing.MEMBER:
                if not self._members:  # the message may come twice
                    self._joined(machine, now_ns)
            case ControlMessage(msg.Resumed(term=term)):
                self._master_is_back(term, now_ns)
            case LinkChanged(peer, reason):
                self._link_changed(peer, reason, now_ns)
            case Tick():
                for peer, (since_ns, why) in self._lost_links.items():
                    if now_ns - since_ns >= SAID_AFTER_NS:
                        self._say_lost(peer, why, now_ns)
            case ReduceDone(operation):
                self._phases.append((now_ns, Phase.DONE, operation, None))
            case _:
                pass
        for effect in effects:
            match effect:
                case ReturnCall(call, ReduceResult() as result):
                    self._flagged(result, now_ns)
                    self._waiting_ended(call, now_ns)
                case ReturnCall(call) | RaiseCall(call):
                    self._waiting_ended(call, now_ns)
                case ReportWait(call, what, whom, waited_s, others):
                    self._waiting.setdefault(call, (what, now_ns - waited_s * NS_PER_S))
                    whom = self._names.explain(whom)
                    waiting = tell.Waiting(
                        call=what, waits_for=whom, waited_s=waited_s, others=others
                    )
                    self._stream.put(waiting, now_ns)
                case Post(_, operation, descriptor):
                    self._phases.append((now_ns, Phase.REQUESTED, operation, descriptor))
                case PostSync(_, operation):
                    self._phases.append((now_ns, Phase.REQUESTED, operation, None))
                case Begin(operation, Eager.NOTHING) | BeginSync(operation):
                    self._phases.append((now_ns, Phase.STARTED, operation, None))
                case End(operation, committed):
                    phase = Phase.COMMITTED if committed else Phase.ABORTED
                    self._phases.append((now_ns, phase, operation, None))
                case ReportUndialable(text):
                    self._stream.put(tell.AddressUnreachable(reason=text), now_ns)
                case _:
                    pass
        if machine.standing is Standing.MEMBER:
            self._look_for_master(machine, now_ns)
        elif self._members:
            self._membership_lost(machine.loss, now_ns)

    def broke_down(self, bug: errors.LocalProtocolError, now_ns: int) -> None:
        """Report that the machine of this peer takes no further events, because of a bug."""
        for what, since_ns in self._waiting.values():
            waited_s = (now_ns - since_ns) / NS_PER_S
            self._stream.put(tell.WaitingEnded(call=what, waited_s=waited_s), now_ns)
        self._waiting.clear()
        if self._members:
            self._membership_lost(bug, now_ns)

    def _waiting_ended(self, call: int, now_ns: int) -> None:
        if call in self._waiting:
            what, since_ns = self._waiting.pop(call)
            waited_s = (now_ns - since_ns) / NS_PER_S
            self._stream.put(tell.WaitingEnded(call=what, waited_s=waited_s), now_ns)

    def _flagged(self, result: ReduceResult, now_ns: int) -> None:
        for one in result.flagged:
            peer = result.contributors[one.rank]
            told = tell.ContributionFlagged(
                tag=shown_tag(result.operation.tag),
                peer_id=peer,
                name=self._names.of(peer),
                norm=one.norm,
                limit=one.limit,
                excluded=one.excluded,
            )
            self._stream.put(told, now_ns)

    def _joined(self, machine: PeerMachine, now_ns: int) -> None:
        roster = machine.newest
        assert roster is not None
        self._names.learn(roster.members)
        lost_ns, self._lost_ns = self._lost_ns, None
        rejoined = lost_ns is not None and machine.run == self._run
        self._members = {member.peer: member for member in roster.members}
        self._run = machine.run
        self._stream.put(
            tell.Joined(
                peer_id=machine.peer,
                name=self._names.of(machine.peer),
                run=machine.run.hex(),
                rank=roster.ring.index(machine.peer),
                world_size=len(roster.members),
                rejoined=rejoined,
                away_s=(now_ns - lost_ns) / NS_PER_S if rejoined and lost_ns is not None else 0.0,
            ),
            now_ns,
        )

    def _learn(
        self, machine: PeerMachine, departures: Iterable[msg.Departure], now_ns: int
    ) -> None:
        roster, own = machine.newest, machine.peer  # the machine ignores an outdated roster
        assert roster is not None
        self._names.learn(roster.members)
        before, self._members = self._members, {member.peer: member for member in roster.members}
        why = {departure.peer: departure for departure in departures}
        size = len(roster.members)
        for peer in before.keys() - self._members.keys() - {own}:
            told = why.get(peer)
            lost = tell.MemberLost(
                peer_id=peer,
                name=self._names.of(peer),
                cause=told.cause.name if told is not None else "",
                reason=self._names.explain(told.reason) if told is not None else "",
                world_size=size,
            )
            self._stream.put(lost, now_ns)
            self._lost_links.pop(peer, None)
            self._lost_links_said.discard(peer)
        for peer in self._members.keys() - before.keys() - {own}:
            host = self._members[peer].host
            new = tell.MemberJoined(
                peer_id=peer, name=self._names.of(peer), host=host, world_size=size
            )
            self._stream.put(new, now_ns)

    def _membership_lost(self, loss: errors.PCCLError | None, now_ns: int) -> None:
        self._members, self._master_lost_ns = {}, None
        self._lost_links.clear()
        self._lost_links_said.clear()
        self._lost_ns = now_ns
        cause = getattr(loss, "cause", None)
        match loss:
            case errors.Evicted() if cause is not None:
                name = cause.name
            case errors.MasterLost():
                name = "MASTER_LOST"
            case errors.NotConnected():
                name = "CLOSED"
            case errors.LocalProtocolError():
                name = "INTERNAL_ERROR"
            case _:
                name = type(loss).__name__
        reason = self._names.explain(loss.reason) if loss is not None else ""
        self._stream.put(tell.MembershipLost(cause=name, reason=reason), now_ns)

    def _look_for_master(self, machine: PeerMachine, now_ns: int) -> None:
        """Report that the master has been away for a while."""
        if self._master_lost_ns is None:
            if not machine.contact.connected:
                self._master_lost_ns, self._master_said = now_ns, False
        elif not self._master_said and now_ns - self._master_lost_ns >= SAID_AFTER_NS:
            self._master_said = True
            left_ns = self._timing.ns(self._timing.master_lost_s)
            left_ns -= machine.contact.unserved_ns(now_ns)
            gone = tell.MasterDisconnected(
                reason=machine.control.why_closed, gives_up_s=max(0, left_ns) / NS_PER_S
            )
            self._stream.put(gone, now_ns)

    def _master_is_back(self, term: int, now_ns: int) -> None:
        since_ns, self._master_lost_ns = self._master_lost_ns, None
        if since_ns is not None and self._master_said:
            away_s = (now_ns - since_ns) / NS_PER_S
            self._stream.put(tell.MasterReconnected(away_s=away_s, term=term), now_ns)

    def _link_changed(self, peer: PeerId, reason: str | None, now_ns: int) -> None:
        if peer not in self._members:
            return  # links to newcomers come and go
        if reason is not None:
            self._lost_links.setdefault(peer, (now_ns, reason))
        elif (lost := self._lost_links.get(peer)) is not None:
            self._say_lost(peer, lost[1], now_ns)
            del self._lost_links[peer]
            self._lost_links_said.discard(peer)
            away_s, name = (now_ns - lost[0]) / NS_PER_S, self._names.of(peer)
            self._stream.put(tell.LinkRestored(peer_id=peer, name=name, away_s=away_s), now_ns)

    def _say_lost(self, peer: PeerId, why: str, now_ns: int) -> None:
        """Report a lost link, once."""
        if peer not in self._lost_links_said:
            self._lost_links_said.add(peer)
            name, reason = self._names.of(peer), self._names.explain(why)
            self._stream.put(tell.LinkLost(peer_id=peer, name=name, reason=reason), now_ns)
