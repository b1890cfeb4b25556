"""``MasterMachine`` closes rounds and decides operations for the peers of a run.

Pure: :meth:`MasterMachine.handle` takes one event and the time. It returns effects in the order in
which the shell must carry them out. A connection is a number that the shell assigns.

Invariants:

* An operation starts when every member of its view has made the same request. It has one
  outcome (``Ballot``), which the master sends to every remaining member.
* The master keeps outcomes and round answers until every member concerned has acknowledged them.
  With a standby, a majority first stores an outcome that another master could contradict.
* The master removes a member only for a cause in :class:`~pccl.protocol.types.RemovalCause`.
* A peer receives a change of the membership before any decision that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from pccl.machines.history import InvariantViolation
from pccl.machines.key_value.server import StoreServer
from pccl.machines.machine import Machine
from pccl.machines.master.admission import Admission
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.ballots.stalls import StallWatch
from pccl.machines.master.connections import Caller, Connections, Outbox
from pccl.machines.master.credible import check_return
from pccl.machines.master.events import (
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    ConnectionPaused,
    MasterAnswered,
    MasterEffect,
    MasterEvent,
    MasterTick,
    MasterUnanswered,
    ProcessInspected,
    SendTo,
    TokensChanged,
)
from pccl.machines.master.inquiries import Inquiries
from pccl.machines.master.links.peer_links import PeerLinks
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.registration import Registration
from pccl.machines.master.removal import Removals, overdue
from pccl.machines.master.rounds import JointRounds
from pccl.machines.master.status import RunState, status_report
from pccl.machines.master.succession.origin import Incarnation, Origin
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import TakeUp
from pccl.machines.master.succession.report import Report
from pccl.machines.master.succession.restart import Succession
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.machines.master.tokens import OPEN, Tokens
from pccl.machines.master.waits import Waits
from pccl.machines.publication.tracker import Publications
from pccl.machines.reachability import AddressTried, CallerTried
from pccl.machines.ticks import Ticks, Wakefulness
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.allowance import REPORTS, Trust
from pccl.protocol.handshake.keys import Signer
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import Timing
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import PeerId, RemovalCause


class MasterMachine(Machine[MasterEvent, MasterEffect]):
    """Coordinates one run: its members, its rounds and its operations.

    Args:
        timing: deadlines.
        run: the run's id, 16 bytes. A standby passes the run that it learnt before, or ``NO_RUN``.
        term: the lowest term that this incarnation may have.
        random_bytes: source of ids; must be unpredictable outside simulation.
        now_ns: current time.
        origin: what the master knows when it starts.
        incumbent: id of this master; the same after a restart if the master has stored it.
        standbys: addresses of the run's other masters.
        stands_by_for: for a standby: addresses of the masters whose run it may continue, for logs.
        vouched: the members of the run, as this master or an earlier one named them.
        signer: key of this master.
        tokens: with which tokens processes may join the run.
        tests_addresses: whether the master tests if newcomers can be dialled.
    """

    def __init__(
        self,
        timing: Timing,
        run: bytes,
        term: int,
        random_bytes: Callable[[int], bytes],
        now_ns: int,
        origin: Origin = Origin.BLANK,
        incumbent: bytes = b"",
        standbys: tuple[msg.MasterAddress, ...] = (),
        stands_by_for: Sequence[str] = (),
        vouched: Vouched = NOT_TOLD,
        *,
        signer: Signer,
        tokens: Tokens = OPEN,
        tests_addresses: bool = False,
        relays: bool = False,
    ) -> None:
        super().__init__("master", now_ns)
        self.timing = timing
        self._began_ns = self._beat_ns = now_ns
        self._ticks = Ticks(timing.ns(timing.tick_s), now_ns)
        self.incarnation = us = Incarnation(run, term, incumbent, standbys, signer)
        self.outbox = out = Outbox(now_ns, self._effects)
        self.connections = Connections(out)
        self.membership = who = Membership(term)
        is_sole = not standbys and origin is not Origin.STANDBY
        self.ratification = Ratification(who, out, is_sole=is_sole)
        self.finals = Finals(who, self.ratification, out)

        self.ballots = OpenBallots(us, who, self.finals, self.ratification, out)
        self.rounds = JointRounds(who, self.ballots, self.finals, self.ratification, out)
        self.waits = Waits(timing, who, self.rounds, self.ballots, out)
        self.store = StoreServer()
        self.links = PeerLinks(timing, who, out, tests_addresses=tests_addresses, relays=relays)
        self.stalls = StallWatch(timing, who, self.ballots, self.finals, out, self.links)
        self.admission = Admission(tokens, signer.key, who, self.connections)
        self.removals = Removals(
            who, self.connections, self.links, self.ballots, self.finals, self.rounds,
            self.ratification, out, self.store,
        )  # fmt: skip
        self.registration = Registration(
            timing, us, random_bytes, who, self.connections, self.links, self.removals,
            self.ballots, self.finals, self.rounds, self.ratification, out, self.admission,
        )  # fmt: skip
        self.succession = Succession(
            timing, origin, us, stands_by_for, vouched, who, self.connections,
            self.registration, self.ratification, out,
        )  # fmt: skip
        self.publications = Publications(timing, us, who, self.connections, out)
        self.inquiries = Inquiries(who, self.connections, self.succession, out)
        self.admission.note(has_run=self.succession.shows_run)

    # -- what others may ask -------------------------------------------------------------------

    @property
    def run(self) -> bytes:
        """The run's id."""
        return self.incarnation.run

    @property
    def term(self) -> int:
        """The number of this incarnation of the master."""
        return self.incarnation.term

    @property
    def incumbent(self) -> bytes:
        """The id of this master."""
        return self.incarnation.incumbent

    @property
    def standbys(self) -> tuple[msg.MasterAddress, ...]:
        """The addresses of the run's other masters."""
        return self.incarnation.standbys

    @property
    def shown_run(self) -> bytes:
        """The run id that the master shows; ``NO_RUN`` while it may still change to another run."""
        return self.run if self.succession.shows_run else NO_RUN

    @property
    def shown_term(self) -> int:
        """The term that the master shows; 0 while it may still change to another run."""
        return self.term if self.succession.shows_run else 0

    @property
    def recovering(self) -> bool:
        """Whether the master waits for members to return."""
        return self.succession.recovering

    def vouched(self) -> Vouched:
        """Return the members of the run, for a standby and for the next start of this master."""
        return self.ratification.vouched()

    def awaited(self) -> set[PeerId]:
        """Return the members whose calls or results other members or newcomers wait for."""
        return self.waits.awaited()

    def trust_in(self, connection: int) -> Trust:
        """Return how far the master trusts a connection; this limits how much the master reads."""
        if connection not in self.connections.callers:
            return Trust.STRANGER  # the master has closed it
        peer = self.connections.peers.get(connection)
        if self.publications.is_reader(connection):
            return Trust.READER
        if connection in self.succession.reporting:
            return Trust.RETURNING if peer is None else Trust.LATE
        if peer is not None:
            return Trust.MEMBER if peer.admitted else Trust.NEWCOMER
        return Trust.MEMBER if self.succession.has_returned(connection) else Trust.STRANGER

    def status(self) -> StatusReport:
        """Return a report about the present run, and change nothing."""
        state = RunState(
            self.run,
            self.term,
            self._began_ns,
            Membership(self.term) if self.recovering else self.membership,
            [] if self.recovering else self.waits.all(),
            self.waits.lockstep.since_ns,
            {} if self.recovering else self.ballots.open,
            self.finals.ended,
            self.removals.recent,
            self.succession.waits_for(),
            self.links.dialable,
        )
        return status_report(state, self._now_ns)

    def check(self) -> None:
        """Assert the invariants of all parts. Tests and the simulator do so after every event.

        Raises:
            InvariantViolation: an invariant is broken; the error carries the machine's history.
        """
        if self.recovering and self.connections.peers:
            raise InvariantViolation("a peer is registered while the run is unknown", self.history)
        self.ballots.check(self.history)
        self.finals.check(self.history)
        self.rounds.check(self.history)
        self.store.check(self.history)
        self.inquiries.check(self.history)
        self.publications.check(self.history)

    # -- events --------------------------------------------------------------------------------

    def _take(self, event: MasterEvent) -> None:
        self.outbox.now_ns = self._now_ns
        match event:
            case ConnectionOpened(connection, host, key, token):
                self.connections.opened(connection, Caller(host, key, token))
            case TokensChanged(tokens):
                self.admission.tokens = tokens
                if not self.recovering:
                    self.removals.expel(self.admission.expelled())
            case ConnectionMessage(connection, message):
                if isinstance(message, msg.Reported):
                    self.succession.end_report(connection)
                peer = self.connections.peers.get(connection)
                try:
                    if peer is not None:
                        self._on_peers_message(peer, message)
                    elif self.publications.hears(connection):
                        pass  # a reader lives
                    elif connection in self.connections.callers:  # else the master has closed it
                        self._on_strangers_message(connection, message)
                except RemoteProtocolError as error:
                    self._give_up(connection, error.reason)
            case ConnectionPaused(connection, until_ns):
                if connection in self.connections.peers:
                    self.connections.peers[connection].held_until_ns = until_ns
            case ConnectionClosed(connection, damaged=damaged):
                self._on_closed(connection, damaged=damaged)
            case MasterTick(busy_ns):
                self._on_tick(busy_ns)
            case MasterAnswered(master, answer):
                self.succession.master_answered(master, answer)
            case MasterUnanswered(master, reason):
                self.succession.master_unanswered(master, reason)
            case AddressTried():
                if self.links.tried(event):
                    self.rounds.admit_into_empty_run()
            case CallerTried(connection, reason):
                self.inquiries.caller_tried(connection, reason)
            case ProcessInspected():
                self.inquiries.inspected(event)
        self.succession.settle()
        self.admission.note(has_run=self.succession.shows_run)

    def _on_strangers_message(self, connection: int, message: msg.Message) -> None:
        """Handle a message on a connection without a registered peer."""
        is_known = self.succession.knows(connection)
        self.inquiries.check_only(connection)
        if not is_known and self.admission.refuses(connection, message):
            return
        match message:
            case _ if not is_known and self.inquiries.take(connection, message):
                pass
            case msg.Subscribe() if not is_known:
                waits_for = self.succession.waits_for()
                self.publications.subscribe(connection, message, waits_for)
            case msg.Return():
                self._on_return(connection, message, is_known=is_known)
            case _ if self.recovering or self.succession.hears(connection):
                self._take_up(self.succession.hear(connection, message))
            case msg.Register():
                self.registration.register(connection, message)
            case msg.Resume():
                self.registration.resume(connection, message)
            case _:
                raise RemoteProtocolError(
                    reason=f"an unregistered peer sent {type(message).__name__}, "
                    "not Register, Resume or Return"
                )

    def _on_peers_message(self, peer: RegisteredPeer, message: msg.Message) -> None:
        """Handle a message of a peer, sent now or in its report to a new master."""
        peer.heard_ns = self._now_ns
        match message:
            case msg.LinkReport():
                self.removals.expel(self.links.report(peer, message))
                self.rounds.admit_into_empty_run()
            case msg.AddressProbed():
                if self.links.probed(peer.id, message):
                    self.rounds.admit_into_empty_run()
            case msg.Goodbye():
                self.removals.remove(peer, RemovalCause.GOODBYE, "it left")
            case msg.Heartbeat():
                self._on_heartbeat(peer, message)
            case msg.LinksMeasured(links):
                self.membership.note_measures(peer.id, links)
            case msg.StoreRequest() if peer.admitted:
                for asker, answer in self.store.take(peer.id, message, self.term):
                    self.ratification.tell_current(self.membership.peers[asker], answer)
            case msg.AnnounceVersions() if peer.admitted:
                self.publications.announced(peer, message)
            case msg.Prefetched():
                peer.prefetching = False
                self.rounds.admit_into_empty_run()
            case msg.EvidenceReply():
                self.inquiries.answered(peer, message)
            case msg.BlockedReply():
                self.waits.answered(peer, message)
            case msg.RoundRequest(round_id, quorum, leaves):
                peer.blocked = peer.left_out = False
                peer.pace.called(message, self._now_ns)
                self.rounds.request(peer, round_id, quorum, leaves=leaves)
            case _ if isinstance(message, REPORTS):
                pass  # the peer has returned to this run, which does not need its report
            case _:
                expel = self.ballots.take(peer, message)
                if expel is not None:
                    self.removals.expel(expel)

    def _on_heartbeat(self, peer: RegisteredPeer, message: msg.Heartbeat) -> None:
        peer.blocked = message.blocked
        peer.pace.beat(message, self._now_ns)
        if message.term == self.term:
            peer.has_roster(message.roster_version)
            peer.stored_place = max(peer.stored_place, message.proposed)
        self.ballots.note_progress(peer.id, message.progress)
        self.finals.acknowledge(peer.id, message.operations, message.rounds)

    def _give_up(self, connection: int, reason: str) -> None:
        """Close a connection, and treat it as if the other side had closed it."""
        self.outbox.add(CloseConnection(connection, reason))
        self._on_closed(connection)

    def _on_closed(self, connection: int, *, damaged: bool = False) -> None:
        self.succession.closed(connection)
        self.inquiries.closed(connection)
        self.publications.closed(connection)
        peer = self.connections.lost(connection)
        if peer is None:
            return
        peer.connection = None
        peer.control_lost_ns = self._now_ns
        peer.control_damaged = damaged
        trouble = None if damaged else self.links.trouble(peer)
        if trouble is not None:
            self.removals.remove(peer, RemovalCause.CONNECTIONS_LOST, trouble)

    def _on_return(self, connection: int, header: msg.Return, *, is_known: bool) -> None:
        if is_known:
            raise RemoteProtocolError(reason="the peer sent Return after Register or Return")
        check_return(header)
        self.admission.spend(connection)
        if not self.recovering and header.run == self.run:
            had_master = self.succession.had_master
            self.registration.return_late(connection, header, had_master=had_master)
        else:
            self.succession.returns(connection, header)
        self.succession.begin_report(connection)

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, busy_ns: int) -> None:
        self.succession.forget_closed()
        tick = self._ticks.note(self._now_ns, busy_ns)
        is_beat = self._now_ns - self._beat_ns >= self.timing.ns(self.timing.heartbeat_s)
        if is_beat:
            self._beat_ns = self._now_ns
        if self.recovering:
            if is_beat:
                self.succession.beat()
            self._take_up(self.succession.tick(tick))
        else:
            self._tick_in_run(tick, is_beat=is_beat)
        self.inquiries.look(tick)

    def _tick_in_run(self, tick: Wakefulness, *, is_beat: bool) -> None:
        """Handle a tick in a run."""
        if is_beat:
            self._beat()
        if tick.slept_ns:
            self.membership.shift(tick.slept_ns, self._now_ns)
            self.ratification.shift(tick.slept_ns)
            self.rounds.shift(tick.slept_ns)
        if tick.may_judge:
            self._judge()
        self.succession.tick_in_run()

    def _beat(self) -> None:
        now_ns, ratified, settled = self._now_ns, self.ratification.ratified, self.finals.settled
        for connection, peer in self.connections.peers.items():
            echo_ns, held_ns = peer.pace.echo(now_ns)
            beat = msg.MasterHeartbeat(now_ns, settled, ratified, echo_ns, held_ns)
            self.outbox.add(SendTo(connection, beat))
        self.registration.beat()
        self.publications.beat()

    def _judge(self) -> None:
        """Find newcomers to admit, peers to remove, and calls that cannot complete."""
        self.waits.note_awaited()
        for peer in self.membership.pending():
            if self.links.end_tests(peer):
                self.rounds.admit_into_empty_run()
        self.rounds.admit_into_empty_run(at_tick=True)
        unlinked, leaves_out = self.membership.unlinked(), self.links.leaves_out
        for peer in list(self.membership.peers.values()):
            if peer.connection is not None and not self.finals.are_acknowledged_by(peer.id):
                self._give_up(peer.connection, "the peer has too many unacknowledged results")
            missing = unlinked[peer.id][0] if peer.id in unlinked else None
            if missing is not None:
                self.links.bring_up(peer, missing, leaves_out=leaves_out)
            if peer.id in self.membership.peers:
                late = overdue(peer, self.timing, self._now_ns)
                self.removals.expel(late or self.links.overdue(peer, missing))
        self.rounds.go_on()
        for expel in chain(self.ballots.go_on(), self.stalls.look()):
            self.removals.expel(expel)
        self.waits.look()
        self.registration.report_admissions()
        self.publications.look()

    # -- a master before this one --------------------------------------------------------------

    def _take_up(self, taken: TakeUp | None) -> None:
        """Continue a recovered run: replay all reports, then remove the missing members."""
        if taken is None:
            return
        recovered, callers = taken.recovered, self.connections.callers
        self.registration.restore(recovered)
        self.rounds.take_up(recovered.counts)
        self.ballots.take_up(recovered, self.finals.take_up(recovered))
        self.store.take_up(recovered.entries, self.membership.peers)
        self.waits.begin_anew()
        reports = {r.peer: r for r in (*recovered.returned, *recovered.newcomers)}
        for report in reports.values():
            peer = self.membership.peers[report.peer]
            self.registration.welcome_back(peer, max(report.rosters, default=0))
        for report in reports.values():
            self._replay(report)
        self.removals.expel_missing(recovered)
        for report in recovered.strangers:
            if report.connection in callers:
                group = report.header.registration.group
                self.removals.turn_away(report.connection, report.peer, group)
        for connection in taken.connections:
            if connection in callers and connection not in self.connections.peers:
                reason = "the run continued before the peer's report was complete"
                self.connections.close(connection, reason)
        self.removals.expel(self.admission.expelled())
        self.rounds.admit_into_empty_run()
        for connection, message in taken.waiting.items():
            if connection in callers:
                self.registration.register(connection, message)

    def _replay(self, report: Report) -> None:
        """Handle the link states and requests of a report as if they arrived now.

        Broken links remove no peer here: ``_take_up`` removes all missing members together.
        """
        peer = self.membership.peers.get(report.peer)
        if peer is None:
            return  # a request of another peer has evicted this one
        for link in report.links.values():
            self.links.note_link(peer, link)
        for message in report.requests:
            if isinstance(message, msg.Prefetched):
                peer.prefetching = False  # newcomers are admitted after all reports
                continue
            try:
                self._on_peers_message(peer, message)
            except RemoteProtocolError as error:
                if peer.connection is not None:
                    self._give_up(peer.connection, error.reason)
                return
            if peer.id not in self.membership.peers:
                return
