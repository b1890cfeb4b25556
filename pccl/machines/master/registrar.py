"""``Registrar``: who is in the run, and how each of them is reached.

Connections, registration, resuming, links, silence, removal, and the rosters that tell of it.
``MasterMachine`` builds rounds and operations on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

from pccl.machines.machine import Machine
from pccl.machines.master.credible import registration_flaw
from pccl.machines.master.dial_plans import DialPlans
from pccl.machines.master.events import (
    Announce,
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    ControlPaused,
    MasterAnswered,
    MasterEffect,
    MasterEvent,
    MasterUnanswered,
    Send,
    Tick,
)
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.status import Removal, admission_waits_for
from pccl.machines.master.succession.report import Report
from pccl.machines.reachability import AddressTried, Reachability, dialled_at
from pccl.machines.ticks import Ticks
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.allowance import Trust
from pccl.protocol.limits import (
    PEERS_MAX,
    PENDING_MAX,
    REMOVED_KEPT_MAX,
    RESUME_TOKEN_BYTES,
    Timing,
)
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import NS_PER_MS, NS_PER_S, Member, PeerId, RemovalCause
from pccl.topology.link_measures import Choose


class Registrar(Machine[MasterEvent, MasterEffect]):
    """What a master is to the peers of its run.

    Args:
        timing: deadlines.
        run: the run's id, 16 bytes.
        term: number of this incarnation.
        random_bytes: source of resume tokens; must be unpredictable outside simulation.
        now_ns: the present.
        incumbent: id of this master.
        standbys: where other masters of the run listen.
        choose: finds out which algorithms are the quickest in a ring.
        tests_addresses: whether newcomers are dialled, to find out if they can be.
    """

    def __init__(
        self,
        timing: Timing,
        run: bytes,
        term: int,
        random_bytes: Callable[[int], bytes],
        now_ns: int,
        incumbent: bytes,
        standbys: tuple[msg.MasterAddress, ...],
        choose: Choose,
        *,
        tests_addresses: bool = False,
    ) -> None:
        super().__init__("master", now_ns)
        self.timing = timing
        self.run = run
        self.term = term
        self.incumbent = incumbent
        self.standbys = standbys
        self._choose = choose
        self.membership = Membership(term, choose)
        self._random_bytes = random_bytes
        self._hosts: dict[int, str] = {}
        """Connection -> where it comes from, of all that are open."""
        self._by_connection: dict[int, RegisteredPeer] = {}
        self._last_peer = PeerId(0)
        self._removed: dict[PeerId, Removal] = {}
        self._began_ns = now_ns
        self._plans = DialPlans(self.membership, self._was_reached)
        self._ticks = Ticks(timing.ns(timing.tick_s), now_ns)
        self._reachability: Reachability | None = Reachability(now_ns) if tests_addresses else None
        self._beat_ns = now_ns

    # -- what rounds and operations have to do with it -------------------------------------------

    @abstractmethod
    def _on_request(self, peer: RegisteredPeer, message: msg.Message) -> None:
        """A registered peer has sent something that is not about its links or its leaving."""

    @abstractmethod
    def _admission(self, peer: RegisteredPeer) -> msg.Admitted:
        """What a newcomer is told when it becomes a member."""

    @abstractmethod
    def _admit_into_empty_run(self, *, at_tick: bool = False) -> None:
        """Something may have changed for the newcomers of a run without members."""

    @abstractmethod
    def _owed_to(self, peer: RegisteredPeer) -> Iterator[msg.MasterMessage]:
        """What a member may have missed while its connection was lost, rosters apart."""

    @abstractmethod
    def _acknowledges(self, peer: RegisteredPeer) -> bool:
        """Whether a member acknowledges what it gets, or at least has not got too much yet."""

    @abstractmethod
    def _draw_conclusions(self, peers: Sequence[RegisteredPeer], why: str) -> None:
        """``peers`` were removed; the others know."""

    @abstractmethod
    def _settled(self) -> int:
        """Everybody has whatever was decided before this place in the sequence."""

    @abstractmethod
    def _status(self) -> StatusReport:
        """The run as it is now; changes nothing."""

    @abstractmethod
    def _ratified(self) -> int:
        """The newest roster to which enough members have consented."""

    @abstractmethod
    def awaited(self) -> set[PeerId]:
        """Whose calls or results others wait for, newcomers among them."""

    @abstractmethod
    def _on_master_answered(self, master: int, answer: msg.RunIs) -> None:
        """A master that this standby has asked for its run has answered."""

    @abstractmethod
    def _on_master_unanswered(self, master: int, reason: str) -> None:
        """It has not."""

    @abstractmethod
    def _judge_waits(self) -> None:
        """A tick: see whether anything waits in vain."""

    def _told_as(self, effect: MasterEffect) -> object:
        match effect:
            case Send(connection, StatusReport()):
                return f"Send(connection={connection}, the status)"
            case _:
                return effect

    # -- connections ---------------------------------------------------------------------------

    def trust_in(self, connection: int) -> Trust:
        """What is known of a connection: that decides how much is taken from it."""
        peer = self._by_connection.get(connection)
        if peer is None:
            return Trust.STRANGER
        return Trust.MEMBER if peer.admitted else Trust.NEWCOMER

    def _take(self, event: MasterEvent) -> None:
        match event:
            case ControlOpened(connection, host):
                self._hosts[connection] = host
            case ControlMessage(connection, message):
                try:
                    self._on_message(connection, message)
                except RemoteProtocolError as error:
                    self._effects.append(CloseControl(connection, error.reason))
                    self._on_closed(connection, error.reason)
            case ControlPaused(connection, until_ns):
                if connection in self._by_connection:
                    self._by_connection[connection].held_until_ns = until_ns
            case ControlClosed(connection, reason, damaged):
                self._on_closed(connection, reason, damaged=damaged)
            case Tick(busy_ns):
                self._on_tick(busy_ns)
            case MasterAnswered(master, answer):
                self._on_master_answered(master, answer)
            case MasterUnanswered(master, reason):
                self._on_master_unanswered(master, reason)
            case AddressTried(peer, host, reason):
                self._on_tested(peer, None, host, reason)

    def _on_message(self, connection: int, message: msg.Message) -> None:
        if connection not in self._hosts:
            return  # closed by us; what it still had on its way no longer counts
        peer = self._by_connection.get(connection)
        if peer is None:
            match message:
                case msg.Register():
                    self._register(connection, message)
                case msg.Resume():
                    self._resume(connection, message)
                case msg.StatusRequest():
                    self._part_with(connection, self._status(), "its question is answered")
                case _:
                    raise RemoteProtocolError(reason="did not begin with Register or Resume")
            return
        self._on_registered_message(peer, message)

    def _on_registered_message(self, peer: RegisteredPeer, message: msg.Message) -> None:
        peer.heard_ns = self._now_ns
        match message:
            case msg.LinkReport(other, up, reason):
                self._on_link_report(peer, other, None if up else reason)
                self._admit_into_empty_run()
            case msg.LinksMeasured(links):
                for link in links:
                    self.membership.note_measure(peer.id, link.peer, link.measure)
            case msg.AddressProbed(other, reason):
                newcomer = self.membership.peers.get(other)
                host = "" if reason or newcomer is None else newcomer.member.host
                self._on_tested(other, peer.id, host, reason)
            case msg.Prefetched():
                peer.prefetching = False
                self._admit_into_empty_run()
            case msg.Goodbye():
                self._remove(peer, RemovalCause.GOODBYE, "it left")
            case _:
                self._on_request(peer, message)

    def _on_closed(self, connection: int, reason: str, *, damaged: bool = False) -> None:
        self._hosts.pop(connection, None)
        peer = self._by_connection.pop(connection, None)
        if peer is None or peer.connection != connection:
            return
        peer.connection = None
        peer.control_lost_ns = self._now_ns
        peer.control_damaged = damaged
        trouble = None if damaged else self._link_trouble(peer)
        if trouble is not None:
            self._remove(peer, RemovalCause.CONNECTIONS_LOST, f"{reason}; {trouble}")

    def _register(self, connection: int, message: msg.Register) -> None:
        flaw = registration_flaw(message)
        if not flaw and not self._has_room(self._hosts[connection]):
            flaw = "the run is full"
        if flaw:
            self._refuse(connection, flaw)
            return
        self._last_peer = PeerId(self._last_peer + 1)
        seen = self._hosts[connection]
        host = dialled_at(message.host, seen)
        peer = RegisteredPeer(
            id=self._last_peer,
            group=message.group,
            member=Member(self._last_peer, host, message.port),
            token=self._random_bytes(RESUME_TOKEN_BYTES),
            seen=seen,
            min_peers=message.min_peers,
            masters=message.masters,
            prefetching=message.prefetches,
            connection=connection,
            heard_ns=self._now_ns,
            pending_ns=self._now_ns,
            registered_ns=self._now_ns,
        )
        self.membership.peers[peer.id] = peer
        self._by_connection[connection] = peer
        self._send(
            peer,
            msg.Registered(peer.id, self.term, self.run, peer.token, self.incumbent, self.standbys),
        )
        self._send(peer, msg.LinkPlan(self._plans.elders(peer)))
        self._announce("registered", peer, f"from {host}:{message.port}")
        self._test_addresses(peer)
        self._admit_into_empty_run()

    def _has_room(self, host: str) -> bool:
        """Whether one more newcomer may come from ``host``; of too many that wait one has to go."""
        crowded = self.membership.crowded_out(host)
        if crowded is not None:
            why = f"{PENDING_MAX} newcomers wait, the most from its address; call connect() again"
            self._remove(crowded, RemovalCause.CROWDED_OUT, why)
        return len(self.membership.peers) < PEERS_MAX

    # -- who can be dialled --------------------------------------------------------------------

    def _test_addresses(self, newcomer: RegisteredPeer) -> None:
        """Find out whether a newcomer can be dialled, from here and from another machine."""
        if self._reachability is None:
            return
        tester = self.membership.tester_of(newcomer)
        test = self._reachability.begin(newcomer.member, newcomer.seen, tester, self._now_ns)
        if test is None:
            return
        newcomer.untested = True
        self._effects.append(test)
        if tester is not None:
            probe = msg.ProbeAddress(newcomer.member, newcomer.seen)
            self._send(self.membership.peers[tester], probe)

    def _on_tested(self, tested: PeerId, by: PeerId | None, host: str, reason: str) -> None:
        if self._reachability is None:
            return
        if not self._reachability.tested(tested, by, host, reason):
            return
        peer = self.membership.peers[tested]
        why = self._reachability.news_of(tested)
        if why:
            reason = f"at {peer.member.host}:{peer.member.port} ({why})"
            self._send(peer, msg.Undialable(reason))
            self._announce("undialable", peer, reason)
        if self._reachability.was_reached(tested):
            if self._plans.leaves_out:
                self._plans.comes(peer)
            for member in self.membership.members(peer.group):
                if member.id < tested and self._reachability.why_undialable(member.id):
                    self._ask(member, peer)
        self._wait_for_tests(peer)

    def _wait_for_tests(self, newcomer: RegisteredPeer) -> None:
        """A newcomer is not admitted before it is tested, but for long enough it was waited."""
        if newcomer.untested and self._reachability is not None:
            in_time = self._now_ns - newcomer.registered_ns < self.timing.ns(self.timing.dial_s)
            newcomer.untested = in_time and self._reachability.awaits(newcomer.id)
            if not newcomer.untested:
                self._admit_into_empty_run()

    def _was_reached(self, peer: PeerId) -> bool:
        return self._reachability is None or self._reachability.was_reached(peer)

    def _ask(self, elder: RegisteredPeer, newcomer: RegisteredPeer) -> bool:
        """Ask an elder to dial a newcomer that cannot reach it; False: the limits forbid that."""
        if elder.group != newcomer.group or self._plans.is_asked(elder.id, newcomer.id):
            return True
        known, proven = self._reachability, self._was_reached(newcomer.id)
        if not self._plans.has_room(elder.id, proven=proven):
            return False
        if known is not None and not proven and not known.may_dial(self._now_ns):
            return False
        if self._plans.ask(elder.id, newcomer.id, proven=proven):
            self._send(elder, msg.DialNewcomers(self._plans.asked(elder.id)))
        return True

    def _link(self, newcomer: RegisteredPeer, neighbour: PeerId, *, leaves_out: bool) -> None:
        """A tick: a newcomer still lacks a link; it has time until the elder may be asked."""
        elder, links = self.membership.peers.get(neighbour), self.membership.links
        if elder is None or elder.id > newcomer.id:
            return
        if links.why_down(newcomer.id, neighbour) is not None:
            if not self._ask(elder, newcomer):
                newcomer.pending_ns = self._now_ns
        elif leaves_out and not (elder.admitted or self._was_reached(neighbour)):
            self._send(newcomer, msg.LinkPlan((elder.member,)))

    def _resume(self, connection: int, message: msg.Resume) -> None:
        peer = self.membership.peers.get(message.peer)
        if peer is None or peer.token != message.token:
            removal = self._removed.get(message.peer)
            if removal is None:
                self._refuse(connection, "this master does not know you")
            else:
                self._part_with(connection, self._refusal(removal), removal.reason)
            return
        if not self._acknowledges(peer):
            self._refuse(connection, "it acknowledges nothing")
            return
        if message.incumbent != self.incumbent:
            raise RemoteProtocolError(reason="it follows another master in this term")
        if peer.connection is not None:  # superseded: the old one's end means nothing any more
            self._effects.append(CloseControl(peer.connection, "superseded"))
            self._hosts.pop(peer.connection, None)
            del self._by_connection[peer.connection]
        peer.connection = connection
        peer.control_lost_ns = None
        peer.heard_ns = self._now_ns
        peer.seen_version = max(peer.seen_version, message.roster_version)
        self._by_connection[connection] = peer
        self._welcome_back(peer, message.roster_version)
        if not peer.admitted:
            self._admit_into_empty_run()

    def _welcome_back(self, peer: RegisteredPeer, roster_version: int) -> None:
        """Tell a peer what it has missed; ``roster_version`` is the newest roster it knows."""
        self._send(peer, msg.Resumed(self.term, self.incumbent, self.standbys))
        self._send(peer, msg.LinkPlan(self._plans.elders(peer)))
        if asked := self._plans.asked(peer.id):
            self._send(peer, msg.DialNewcomers(asked))
        if not peer.admitted:
            return
        if roster_version == 0:  # it was admitted, but that news was lost
            self._send(peer, self._admission(peer))
        else:
            for roster in self.membership.rosters_after(peer.group, roster_version):
                self._send(peer, msg.RosterChanged(roster))
        for owed in self._owed_to(peer):
            self._send(peer, owed)

    def _refuse(self, connection: int, reason: str) -> None:
        self._part_with(connection, msg.Refused(None, reason), reason)

    def _refusal(self, removal: Removal) -> msg.Refused:
        removed_ms, now_ms = removal.at_ns // NS_PER_MS, self._now_ns // NS_PER_MS
        return msg.Refused(removal.cause, removal.reason, removed_ms, now_ms)

    def _part_with(self, connection: int, message: msg.MasterMessage, reason: str) -> None:
        self._effects.append(Send(connection, message))
        self._effects.append(CloseControl(connection, reason))
        self._hosts.pop(connection, None)

    def _on_link_report(self, peer: RegisteredPeer, other: PeerId, why: str | None) -> None:
        self._note_link(peer, other, why)
        accused = self.membership.peers.get(other)
        if why is None or accused is None or accused.connection is not None:
            return
        if accused.control_damaged:
            return  # it lost its connection for another reason than its death
        trouble = self._link_trouble(accused)
        if trouble is not None:
            self._remove(accused, RemovalCause.CONNECTIONS_LOST, trouble)

    def _note_link(self, peer: RegisteredPeer, other: PeerId, why: str | None) -> None:
        self.membership.report_link(peer.id, other, why, self._now_ns)
        elder = self.membership.peers.get(other)
        if why is None:
            self._plans.linked(peer.id, other)
        if why is None or elder is None or other > peer.id:
            return
        if not (peer.admitted and elder.admitted):  # members know each other, and both dial
            self._ask(elder, peer)

    def _link_trouble(self, peer: RegisteredPeer) -> str | None:
        """What shows, with a lost control connection, that a peer is gone.

        That others can't reach it shows nothing of who can't be dialled anyway.
        """
        if self._reachability is not None and self._reachability.why_undialable(peer.id):
            return None
        since_ns = self._now_ns - self.timing.ns(self.timing.resume_s)
        return self.membership.link_trouble(peer.id, since_ns)

    def _replay(self, report: Report) -> None:
        """Deal with what a peer wants, as if it had come just now.

        That removes nobody: the missing are removed together, when everybody has been heard.
        """
        peer = self.membership.peers.get(report.peer)
        if peer is None:
            return  # another one's request has cost it its place
        for other, why_down in report.links.items():
            self._note_link(peer, other, why_down)
        for message in report.requests:
            try:
                match message:
                    case msg.LinksMeasured(links):
                        for link in links:
                            self.membership.note_measure(peer.id, link.peer, link.measure)
                    case msg.Prefetched():
                        peer.prefetching = False
                    case _:
                        self._on_request(peer, message)
            except RemoteProtocolError as error:
                if peer.connection is not None:
                    self._effects.append(CloseControl(peer.connection, error.reason))
                    self._on_closed(peer.connection, error.reason)
                return
            if peer.id not in self.membership.peers:
                return

    # -- removal -------------------------------------------------------------------------------

    def _remove(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        """Take a peer out of the run, and draw every conclusion from that."""
        self._remove_all([peer], cause, reason)

    def _remove_all(
        self, peers: Sequence[RegisteredPeer], cause: RemovalCause, reason: str
    ) -> None:
        """Take peers out of the run in one step, and draw every conclusion from that."""
        for peer in peers:
            self._dismiss(peer, cause, reason)
        self._plans.remove(peers)
        self.membership.remove(peers)
        if self._reachability is not None:
            self._reachability.forget(peer.id for peer in peers)
        if any(peer.admitted for peer in peers):
            self._tell_rosters(self.membership.members())
        self._draw_conclusions(peers, f"{cause.name.lower()}, {reason}")
        self._admit_into_empty_run()

    def _dismiss(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        """Tell a peer that it is removed, and remember why."""
        self._announce("removed", peer, f"{cause.name}: {reason}")
        removal = Removal(peer.id, peer.group, cause, reason, self._now_ns)
        self._removed[peer.id] = removal
        if len(self._removed) > REMOVED_KEPT_MAX:
            del self._removed[next(iter(self._removed))]
        if peer.connection is not None:
            if cause is not RemovalCause.GOODBYE:
                self._send(peer, self._refusal(removal))
            self._effects.append(CloseControl(peer.connection, reason))
            self._hosts.pop(peer.connection, None)
            self._by_connection.pop(peer.connection, None)
            peer.connection = None

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, busy_ns: int) -> None:
        if self._now_ns - self._beat_ns >= self.timing.ns(self.timing.heartbeat_s):
            self._beat_ns = self._now_ns
            for connection in self._by_connection:
                self._effects.append(Send(connection, self._heartbeat()))
            for peer, plan in self._plans.beat():
                self._send(peer, plan)
        tick = self._ticks.note(self._now_ns, busy_ns)
        if tick.slept_ns:
            self._shift_deadlines(tick.slept_ns)
        if not tick.may_judge:
            return
        self._note_who_is_waited_for()
        for peer in self.membership.pending():
            self._wait_for_tests(peer)
        self._admit_into_empty_run(at_tick=True)
        unlinked, leaves_out = self.membership.unlinked(), self._plans.leaves_out
        for peer in list(self.membership.peers.values()):
            if peer.connection is not None and not self._acknowledges(peer):
                self._effects.append(CloseControl(peer.connection, "it acknowledges nothing"))
                self._on_closed(peer.connection, "it acknowledges nothing")
            if peer.id in unlinked:
                self._link(peer, unlinked[peer.id][0], leaves_out=leaves_out)
            if peer.id in self.membership.peers:
                self._judge(peer, unlinked.get(peer.id))
        self._judge_waits()
        self._report_admissions()

    def _heartbeat(self) -> msg.MasterHeartbeat:
        now_ms = self._now_ns // NS_PER_MS
        return msg.MasterHeartbeat(now_ms, self._settled(), self._ratified())

    def _report_admissions(self) -> None:
        """Tell newcomers what they wait for, after pauses that double."""
        pending = [peer for peer in self.membership.pending() if peer.connection is not None]
        size = len(self.membership.members()) + len(pending)
        for peer in pending:
            waited_s = (self._now_ns - peer.registered_ns) // NS_PER_S
            if waited_s < max(self.timing.waiting_report_s, 2 * peer.waits_told_s):
                continue
            peer.waits_told_s = waited_s
            whom = admission_waits_for(peer, size)
            self._send(peer, msg.AdmissionWaits(waited_s, whom))

    def _shift_deadlines(self, gap_ns: int) -> None:
        self.membership.shift(gap_ns, self._now_ns)

    def _note_who_is_waited_for(self) -> None:
        awaited = self.awaited()
        for peer in self.membership.peers.values():
            if peer.id not in awaited:
                peer.waited_for_ns = None
            elif peer.waited_for_ns is None:
                peer.waited_for_ns = self._now_ns

    def _judge(self, peer: RegisteredPeer, missing: tuple[PeerId, str] | None) -> None:
        """Remove ``peer`` if one of its deadlines has passed."""
        timing, now_ns = self.timing, self._now_ns
        if peer.control_lost_ns is not None:
            if now_ns - peer.control_lost_ns >= timing.ns(timing.resume_s):
                self._remove(peer, RemovalCause.CONTROL_LOST, "its connection was not resumed")
            return
        silent_since = max(peer.heard_ns, peer.held_until_ns)
        if peer.admitted:
            if peer.waited_for_ns is None:
                return
            silent_since = max(silent_since, peer.waited_for_ns)
        if now_ns - silent_since >= timing.ns(timing.deadline_s):
            silence_s = (now_ns - peer.heard_ns) / 1e9
            awaited = " while awaited" if peer.admitted else ""
            self._remove(peer, RemovalCause.SILENT, f"silent for {silence_s:.1f} s{awaited}")
            return
        if missing is None:
            peer.pending_ns = now_ns
        elif now_ns - max(peer.pending_ns, peer.held_until_ns) >= timing.ns(timing.link_s):
            neighbour, _ = missing
            if neighbour in self.membership.peers:  # otherwise it was removed just now
                self._remove(
                    peer, RemovalCause.UNREACHABLE, self.membership.why_apart(peer, neighbour)
                )

    # -- helpers -------------------------------------------------------------------------------

    def _tell_rosters(self, peers: list[RegisteredPeer]) -> None:
        for peer in peers:
            self._send(peer, msg.RosterChanged(self.membership.roster(peer.group)))

    def _send(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        if peer.connection is not None:
            self._effects.append(Send(peer.connection, message))

    def _announce(self, what: str, peer: RegisteredPeer, text: str) -> None:
        self._effects.append(Announce(what, peer.id, peer.group, text))
