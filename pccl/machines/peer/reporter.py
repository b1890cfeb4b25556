"""``PeerReporter``: finds in the events and effects of a peer machine what people want to know.

Pure. It outlives the machine of one membership, so a peer that was evicted and has rejoined can
still tell why, and for how long it was away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccl.machines.peer.events import (
    ControlClosed,
    ControlMessage,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    RaiseCall,
    ReportUndialable,
    ReportWait,
    ReturnCall,
    Tick,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, Member, PeerId, Roster
from pccl.telemetry import events as tell
from pccl.telemetry.names import Names
from pccl.telemetry.stream import EventStream

SAID_AFTER_NS = NS_PER_S
"""How long a master or a link must be away before that is an event: it may just end with the run,
and a lost link is replaced at once if the other peer lives."""


class PeerReporter:
    """Puts the events of one peer into its stream.

    Args:
        stream: takes the events.
        names: learns the names of all members.
        timing: deadlines.
    """

    def __init__(self, stream: EventStream, names: Names, timing: Timing) -> None:
        self._stream, self._names, self._timing = stream, names, timing
        self._members: dict[PeerId, Member] = {}
        self._run = b""
        self._standing = Standing.OUTSIDE
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
            case ControlMessage(msg.RosterChanged(roster, departures)):
                self._learn(roster, departures, machine.peer, now_ns)
            case ControlMessage(msg.Admitted(roster)) if machine.standing is Standing.MEMBER:
                self._joined(machine, roster, now_ns)
            case ControlMessage(msg.Resumed(term=term)):
                self._master_is_back(term, now_ns)
            case ControlClosed(reason) if machine.standing is Standing.MEMBER:
                self._master_is_gone(reason, now_ns)
            case LinkChanged(peer, reason):
                self._link_changed(peer, reason, now_ns)
            case Tick() if self._lost_links:
                self._say_lost_links(now_ns)
            case _:
                pass
        for effect in effects:
            match effect:
                case ReturnCall(call) | RaiseCall(call) if call in self._waiting:
                    what, since_ns = self._waiting.pop(call)
                    waited_s = (now_ns - since_ns) / NS_PER_S
                    self._stream.put(tell.WaitingEnded(call=what, waited_s=waited_s), now_ns)
                case ReportWait(call, what, whom, waited_s):
                    self._waiting.setdefault(call, (what, now_ns - waited_s * NS_PER_S))
                    whom = self._names.explain(whom)
                    waiting = tell.Waiting(call=what, waits_for=whom, waited_s=waited_s)
                    self._stream.put(waiting, now_ns)
                case ReportUndialable(text):
                    self._stream.put(tell.AddressUnreachable(reason=text), now_ns)
                case _:
                    pass
        if machine.standing is not self._standing:
            self._standing = machine.standing
            if self._members and machine.standing in (Standing.LOST, Standing.CLOSED):
                self._membership_lost(machine.loss, now_ns)

    def _joined(self, machine: PeerMachine, roster: Roster, now_ns: int) -> None:
        """Report that this peer is a member; ``Admitted`` may arrive twice."""
        self._names.learn(roster.members)
        if self._members:
            return
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
        self, roster: Roster, departures: Iterable[msg.Departure], own: PeerId, now_ns: int
    ) -> None:
        self._names.learn(roster.members)
        if not self._members:
            return  # this peer is no member yet
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
        for peer in self._members.keys() - before.keys() - {own}:
            host = self._members[peer].host
            new = tell.MemberJoined(
                peer_id=peer, name=self._names.of(peer), host=host, world_size=size
            )
            self._stream.put(new, now_ns)

    def _membership_lost(self, loss: errors.PCCLError | None, now_ns: int) -> None:
        self._members, self._master_lost_ns = {}, None
        self._lost_links.clear()
        self._lost_ns = now_ns
        cause = getattr(loss, "cause", None)
        match loss:
            case errors.Evicted() if cause is not None:
                name = cause.name
            case errors.MasterLost():
                name = "MASTER_LOST"
            case errors.NotConnected():
                name = "CLOSED"
            case _:
                name = type(loss).__name__
        reason = self._names.explain(loss.reason) if loss is not None else ""
        self._stream.put(tell.MembershipLost(cause=name, reason=reason), now_ns)

    def _master_is_gone(self, reason: str, now_ns: int) -> None:
        """Report, at a failed attempt to reach it, that the master has been away for a while."""
        if self._master_lost_ns is None:
            self._master_lost_ns, self._master_said = now_ns, False
        elif not self._master_said and now_ns - self._master_lost_ns >= SAID_AFTER_NS:
            self._master_said = True
            limit_s = self._timing.master_lost_s
            self._stream.put(tell.MasterDisconnected(reason=reason, gives_up_s=limit_s), now_ns)

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
        elif (lost := self._lost_links.pop(peer, None)) is not None:
            self._lost_links_said.discard(peer)
            away_s = (now_ns - lost[0]) / NS_PER_S
            name = self._names.of(peer)
            self._stream.put(tell.LinkRestored(peer_id=peer, name=name, away_s=away_s), now_ns)

    def _say_lost_links(self, now_ns: int) -> None:
        """Report links that have been away for a while."""
        self._lost_links_said &= self._lost_links.keys()
        for peer, (since_ns, why) in self._lost_links.items():
            if peer not in self._lost_links_said and now_ns - since_ns >= SAID_AFTER_NS:
                self._lost_links_said.add(peer)
                name, reason = self._names.of(peer), self._names.explain(why)
                self._stream.put(tell.LinkLost(peer_id=peer, name=name, reason=reason), now_ns)
