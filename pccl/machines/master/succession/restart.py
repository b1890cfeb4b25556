"""``Restartable``: a registrar that can take up a run which another master has coordinated before.

A master that is started knows nothing, or only which run it had. Members of a run that find a
master of another incarnation *return*: they report what they know. The master collects that until
all are back or the recovery window ends, rebuilds the run (``recovery``), takes
the next term and goes on; whoever did not come back is removed. Newcomers wait meanwhile.

A master that was started without any memory admits newcomers at once, into a new run. It can't
know that there was one before. If members of one return while the new run is young, and at least as
many as there are in the new one, they come first: the new run is given up.

A standby takes up the run that its master has named, and no other (``standby``).

Where a run has more than one master, none moves it without a majority of its members
(``majority``), nor tells a final that another one could contradict before a
majority has stored it (``proposals``). A master that has lost the majority starts
over and waits for the members to return.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from pccl.machines.master.credible import check_return, registration_flaw
from pccl.machines.master.dial_plans import DialPlans
from pccl.machines.master.events import (
    AskMaster,
    CloseControl,
    Remember,
    Send,
    Warn,
)
from pccl.machines.master.membership import Membership
from pccl.machines.master.status import Removal
from pccl.machines.master.succession.majority import Majority
from pccl.machines.master.succession.origin import Origin
from pccl.machines.master.succession.ratifying import Ratifying
from pccl.machines.master.succession.recovery import Recovered, Recovery
from pccl.machines.master.succession.report import Report
from pccl.machines.master.succession.revival import revive, revive_all
from pccl.machines.master.succession.standby import StandbyWatch
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.machines.reachability import Reachability
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.allowance import Trust
from pccl.protocol.guards.source_shares import of_the_largest
from pccl.protocol.handshake import NO_RUN
from pccl.protocol.limits import ID_JUMP_BYTES, ID_JUMP_MAX, PENDING_MAX, TERM_GAP, Timing
from pccl.protocol.shared_state import Elect, elect_nothing
from pccl.protocol.types import NS_PER_MS, PeerId, RemovalCause, RoundKind
from pccl.topology.link_measures import Choose, ring_always

_ANOTHER_RUN = "this master coordinates another run"


class Restartable(Ratifying):
    """What a master is to the peers of its run, and of a run that it takes up.

    Args:
        timing: deadlines.
        run: the run's id, 16 bytes; of a standby the one that it has learnt before, or ``NO_RUN``.
        term: number of this incarnation, at least.
        random_bytes: source of resume tokens; must be unpredictable outside simulation.
        now_ns: the present.
        origin: what is known at the start.
        incumbent: id of this master, the same after a restart if it has kept it.
        standbys: where other masters of the run listen.
        choose: finds out which algorithms are the quickest in a ring.
        elect: finds out which shared state everybody gets.
        stands_by_for: of a standby, the masters whose run it takes up, as people know them.
        vouched: the members of the run, as this master or the one before knew them.
        tests_addresses: whether newcomers are dialled, to find out if they can be.
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
        choose: Choose = ring_always,
        elect: Elect = elect_nothing,
        stands_by_for: Sequence[str] = (),
        vouched: Vouched = NOT_TOLD,
        *,
        tests_addresses: bool = False,
    ) -> None:
        sole = not standbys and origin is not Origin.STANDBY
        super().__init__(
            timing,
            run,
            term,
            random_bytes,
            now_ns,
            incumbent,
            standbys,
            choose,
            sole,
            tests_addresses=tests_addresses,
        )
        self._elect = elect
        self._origin = origin
        self._term_min = term
        self._first_peer_ns: int | None = None
        """When somebody registered in a run that was begun here."""
        self._waiting: dict[int, msg.Register] = {}
        """Newcomers that have to wait until the run is rebuilt, by connection."""
        self._reporting: set[int] = set()
        """Connections of peers that return, until they have said all that they know."""
        self._recovery: Recovery | None = None
        self._older: Recovery | None = None
        """What members of an older run report while the one begun here is young, and goes on."""
        self._asked_term: int | None = None
        """The term in which it will go on, once enough of the members follow it."""
        self._asked_in_vain = False
        """Whether some that seemed enough were not: next time all of them are heard first. Who is
        asked again and again believes that he has a master."""
        self._asked_ns = now_ns
        known = None if run == NO_RUN else run
        self._watch = StandbyWatch(timing, stands_by_for, known, term - 1, vouched)
        if origin is not Origin.BLANK:
            self._recovery = Recovery(timing, known, incumbent, now_ns, vouched=vouched)
        self._forget_run()

    @property
    def recovering(self) -> bool:
        """Whether it waits for members to return."""
        return self._recovery is not None

    def _waits_for(self) -> str:
        """What it waits for if it coordinates nothing; otherwise empty."""
        recovery = self._recovery
        if recovery is None:
            return ""
        if recovery.run is None:
            return self._watch.waits_for() if self._is_idle else "no member has returned to it"
        words = recovery.progress()
        return f"it is a standby: {words}" if self._is_idle else words

    @property
    def _is_idle(self) -> bool:
        """Whether it is a standby that has not coordinated its master's run."""
        return self._recovery is not None and self._origin is Origin.STANDBY

    @property
    def shown_run(self) -> bytes:
        """The run that it says to coordinate; none as long as another one may be taken up."""
        return NO_RUN if self._recovery is not None or self._is_young else self.run

    @property
    def shown_term(self) -> int:
        """The term that it says to be in; 0 as long as that is open."""
        return 0 if self._recovery is not None or self._is_young else self.term

    @property
    def _is_young(self) -> bool:
        """Whether a run that was begun here gives way to one that was there before."""
        if self._origin is not Origin.BLANK:
            return False
        first_ns = self._first_peer_ns
        return first_ns is None or self._now_ns - first_ns < self.timing.ns(self.timing.recovery_s)

    # -- what rounds and operations have to do with it -------------------------------------------

    @abstractmethod
    def _forget_run(self) -> None:
        """Know of no round and no operation; called by the constructor first."""

    @abstractmethod
    def _take_up(self, recovered: Recovered) -> None:
        """Forget everything about rounds and operations but what is recovered."""

    def _stand_down(self) -> None:
        """A majority is gone, to another master perhaps: start over, and see who returns."""
        for connection in list(self._hosts):
            reason = "this master has lost the majority of the members"
            self._effects.append(CloseControl(connection, reason))
        self._hosts.clear()
        self._by_connection.clear()
        self._origin = Origin.RESTARTED
        self._term_min = self.term + 1
        self._begin_recovery(self.run)

    # -- connections ---------------------------------------------------------------------------

    def trust_in(self, connection: int) -> Trust:
        """See ``Registrar``."""
        if connection not in self._hosts:
            return Trust.STRANGER  # closed by us
        if connection in self._reporting:
            return Trust.LATE if connection in self._by_connection else Trust.RETURNING
        if self._recovery is not None and self._recovery.report_on(connection) is not None:
            return Trust.MEMBER
        return super().trust_in(connection)

    def _on_message(self, connection: int, message: msg.Message) -> None:
        if isinstance(message, msg.Reported):
            self._reporting.discard(connection)
        match message:
            case _ if connection not in self._hosts:
                return
            case msg.RunQuery() if not self._is_known(connection):
                self._part_with(connection, self._run_is(message), "its question is answered")
            case msg.Return() if connection not in self._by_connection:
                self._on_return(connection, message)
                self._reporting.add(connection)
            case msg.KnownRoster() | msg.KnownOutcome() | msg.KnownAnswer() | msg.Reported() if (
                connection in self._by_connection
            ):
                pass  # it has returned to a run that goes on
            case _ if self._recovery is not None:
                self._collect(self._recovery, connection, message)
            case _ if self._older is not None and self._older.report_on(connection) is not None:
                self._collect(self._older, connection, message)
            case _:
                super()._on_message(connection, message)

    def _on_closed(self, connection: int, reason: str, *, damaged: bool = False) -> None:
        self._waiting.pop(connection, None)
        recovery = self._recovery or self._older
        if recovery is not None:
            recovery.closed(connection)
        super()._on_closed(connection, reason, damaged=damaged)

    def _register(self, connection: int, message: msg.Register) -> None:
        if self._first_peer_ns is None:
            self._first_peer_ns = self._now_ns
        super()._register(connection, message)

    def _is_known(self, connection: int) -> bool:
        """Whether it is a peer's, of whatever standing."""
        recovery = self._recovery or self._older
        returned = recovery is not None and recovery.report_on(connection) is not None
        return returned or connection in self._by_connection or connection in self._waiting

    def _on_return(self, connection: int, header: msg.Return) -> None:
        if self._is_known(connection):
            raise RemoteProtocolError(reason="it returns, and is somebody already")
        check_return(header)
        if self._recovery is None and header.run == self.run:
            self._return_late(connection, header)
            return
        recovery = self._recovery or self._older
        if recovery is None and self._is_young:
            recovery = self._expect_older_run()
        if self._is_idle and self._watch.run is None:
            # No answer for good: its master may be about to say so.
            self._close(connection, self._watch.waits_for())
        elif recovery is None or recovery.run not in (None, header.run):
            self._refuse(connection, _ANOTHER_RUN)
        else:
            host = self._hosts[connection]
            for closed in recovery.begins(connection, host, header, self._now_ns):
                self._close(closed, "superseded")

    def _expect_older_run(self) -> Recovery:
        """A member of a run that was there before is back, as it says: hear it, and what it knows.

        A run that has peers goes on meanwhile: the claim of a single stranger does not end it.
        """
        if not self._by_connection:
            return self._begin_recovery(None)
        self._older = Recovery(self.timing, None, self.incumbent, self._now_ns)
        return self._older

    def _close(self, connection: int, reason: str) -> None:
        """Close a connection of somebody who may come again."""
        self._hosts.pop(connection, None)
        self._effects.append(CloseControl(connection, reason))

    def _return_late(self, connection: int, header: msg.Return) -> None:
        """The run goes on already; perhaps with this peer."""
        if header.term > self.term:
            raise RemoteProtocolError(reason="it follows a later master")
        known = self.membership.peers.get(header.peer)
        if (
            known is not None
            and known.admitted
            and not self._sole
            and (header.term, header.incumbent) != (self.term, self.incumbent)
        ):
            # Who knows whom it has followed since its report? What it had said is void.
            raise RemoteProtocolError(reason="it has not followed this master")
        if known is not None:
            resume = msg.Resume(header.peer, header.token, header.roster_version, self.incumbent)
            self._resume(connection, resume)
        elif header.peer in self._removed or header.roster_version or not self._may_have_id(header):
            self._tell_removed(connection, header)
        elif not self._has_room(self._hosts[connection]):
            self._refuse(connection, "the run is full")
        else:
            peer = revive(header, self._hosts[connection], connection, None, self._now_ns)
            self._last_peer = max(self._last_peer, peer.id)  # nobody else gets this id
            self.membership.peers[peer.id] = peer
            self.membership.sort_peers()
            self._by_connection[connection] = peer
            self._welcome_back(peer, 0)
            self._plans.comes(peer)
            self._admit_into_empty_run()

    def _may_have_id(self, header: msg.Return) -> bool:
        """Whether a master before this one may have given out the id, though nobody knew of it.

        Each has jumped from what it was told, and this one not always the furthest.
        """
        had_master = self._origin is not Origin.BLANK
        return had_master and header.peer <= self._last_peer + ID_JUMP_MAX

    def _tell_removed(self, connection: int, header: msg.Return) -> None:
        """The run has gone on without a peer; who removed it, and why, may be forgotten."""
        removal = self._removed.get(header.peer)
        if removal is None:
            group, reason = header.registration.group, "the run went on without it"
            cause = RemovalCause.CONTROL_LOST
            removal = Removal(header.peer, group, cause, reason, self._now_ns)
        self._part_with(connection, self._refusal(removal), removal.reason)

    def _give_way_if_older(self, older: Recovery) -> None:
        """Members of a run that was there before are back: the own one, just begun, gives way.

        At least as many have to be back as there are peers here.
        """
        came = older.complete_reports()
        if len(came) < max(1, len(self._by_connection)):
            return
        for connection in list(self._by_connection):
            self._close(connection, "members of an older run are back")
            del self._by_connection[connection]
        self._sole &= all(report.header.registration.masters < 2 for report in came)
        self._recovery, self._older = older, None
        self._recover_if_over()

    def _begin_recovery(self, run: bytes | None) -> Recovery:
        self._asked_term, self._asked_in_vain = None, False
        ratified = self._majority.ratified if run is not None else 0
        vouched = self.vouched() if run is not None else NOT_TOLD
        known = (run, self.incumbent, self._now_ns, ratified, vouched)
        self._recovery = Recovery(self.timing, *known)
        return self._recovery

    def _collect(self, recovery: Recovery, connection: int, message: msg.Message) -> None:
        report = recovery.report_on(connection)
        match message:
            case msg.Register() if report is None:
                self._let_wait(recovery, connection, message)
            case msg.Goodbye() if report is not None or connection in self._waiting:
                if report is not None:
                    recovery.leave(connection)
                self._waiting.pop(connection, None)
                self._close(connection, "it left")
            case msg.StatusRequest() if report is None:
                self._part_with(connection, self._status(), "its question is answered")
            case msg.Resume() if report is None:
                self._refuse(connection, "this master does not know you")
            case _ if report is not None:
                self._hear_report(recovery, report, message)
            case _:
                raise RemoteProtocolError(reason="did not begin with Register, Resume or Return")

    def _hear_report(self, recovery: Recovery, report: Report, message: msg.Message) -> None:
        for connection in recovery.take(report, message):
            self._close(connection, "its report is the largest, and there is no room for all")
        if report.connection is None or report.connection not in self._hosts:
            return
        if recovery is self._older:
            if isinstance(message, msg.Reported):
                self._give_way_if_older(recovery)
            return
        promises = isinstance(message, msg.Heartbeat) and message.term == self._asked_term
        if promises and not report.promised:
            report.promised = True
            self._recover_if_over()
        elif isinstance(message, msg.Reported):
            if self._asked_term is not None:
                self._ask_for_promise(recovery, report)
            self._recover_if_over()

    def _let_wait(self, recovery: Recovery, connection: int, message: msg.Register) -> None:
        flaw = registration_flaw(message)
        if self._is_idle and not recovery.has_reports:
            self._refuse(connection, "this is a standby, and its run has not come to it")
        elif connection in self._waiting:
            raise RemoteProtocolError(reason="it registers twice")
        elif flaw:
            self._refuse(connection, flaw)
        else:
            if len(self._waiting) >= PENDING_MAX:
                hosts = {waiting: self._hosts[waiting] for waiting in self._waiting}
                goes = of_the_largest(hosts, self._hosts[connection])
                del self._waiting[goes]
                self._refuse(goes, f"{PENDING_MAX} newcomers wait; call connect() again")
            self._waiting[connection] = message

    # -- the masters that a standby stands by for ----------------------------------------------

    def _run_is(self, query: msg.RunQuery) -> msg.RunIs:
        """What a standby is told: a run that this master coordinates, or has coordinated."""
        if self._recovery is not None and self._origin is not Origin.RESTARTED:
            return msg.RunIs(NO_RUN, 0, False)
        vouched = self.vouched() if self._recovery is None else self._recovery.vouched
        if vouched.digests is None or (query.run, query.version) == (self.run, vouched.version):
            return msg.RunIs(self.run, self.term, not self._is_young)
        known = (vouched.version or 0, vouched.proofs())
        return msg.RunIs(self.run, self.term, not self._is_young, *known)

    def _on_master_answered(self, master: int, answer: msg.RunIs) -> None:
        changes = self._watch.answered(master, answer)
        if not self._is_idle or self._watch.run is None:
            return
        assert self._recovery is not None
        if changes or answer.run == self._watch.run:
            learnt = (self._watch.run, self._watch.vouched, self._now_ns)
            for connection in self._recovery.learn(*learnt):
                self._close(connection, "its token is not that of the peer as which it returned")
        if changes:
            self.run = self._watch.run
            self._term_min = max(self._term_min, self._watch.term + 1)
            known = (self.run, self._watch.term, self.incumbent)
            self._effects.append(Remember(*known, False, self._watch.vouched))

    def _on_master_unanswered(self, master: int, reason: str) -> None:
        if self._watch.failed(master, reason) and self._is_idle and self._watch.run is None:
            self._effects.append(Warn(self._watch.waits_for()))

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self, busy_ns: int) -> None:
        self._reporting &= self._hosts.keys()
        if self._recovery is None:
            super()._on_tick(busy_ns)
            if self._older is not None and not self._is_young:
                for connection in self._older.connections():
                    self._refuse(connection, _ANOTHER_RUN)
                self._older = None
            if not self._sole and not self._majority.consents(self.membership):
                lacking_ns = self._majority.lacks_for_ns(self._now_ns)
                if lacking_ns >= self.timing.ns(self.timing.recovery_s):
                    self._stand_down()
            return
        tick = self._ticks.note(self._now_ns, busy_ns)
        if self._now_ns - self._beat_ns >= self.timing.ns(self.timing.heartbeat_s):
            self._beat_ns = self._now_ns
            for connection in self._hosts:
                if connection in self._waiting or self._recovery.report_on(connection):
                    beat = msg.MasterHeartbeat(self._now_ns // NS_PER_MS)
                    self._effects.append(Send(connection, beat))
        if self._is_idle:
            query = msg.RunQuery(self._watch.run or NO_RUN, self._watch.vouched.version)
            self._effects += [AskMaster(n, query) for n in self._watch.due(self._now_ns)]
        self._recovery.look_again(self._now_ns)
        if tick.slept_ns:
            self._recovery.shift(tick.slept_ns, self._now_ns)
        if tick.may_judge:
            self._recover_if_over()

    def _shift_deadlines(self, gap_ns: int) -> None:
        super()._shift_deadlines(gap_ns)
        self._majority.shift(gap_ns, self._now_ns)

    def _recover_if_over(self) -> None:
        recovery = self._recovery
        if recovery is None or recovery.run is None or not recovery.is_over(self._now_ns):
            return
        if self._is_idle and not recovery.has_reports:
            return  # there is no time by which members have to come to a standby
        self._sole &= not recovery.knows_another_master
        if self._sole:
            self._rebuild(recovery.run, recovery.result())
        elif self._asked_term is None:
            is_late = recovery.is_late(self._now_ns)
            if recovery.has_majority() and (is_late or not self._asked_in_vain):
                self._ask_for_promises(recovery)
            elif is_late:
                self._begin_anew(recovery)
        else:
            asked_ns = self._now_ns - self._asked_ns
            late = asked_ns >= self.timing.ns(self.timing.resume_s)
            if (late or recovery.all_promised()) and recovery.has_promises():
                self._rebuild(recovery.run, recovery.result(promised=True))
            elif late:
                self._begin_anew(recovery)

    def _ask_for_promises(self, recovery: Recovery) -> None:
        """Enough members have come: choose the term; they have to follow it before it begins."""
        assert recovery.run is not None
        self._term_min = max(self._term_min, recovery.result().term + 1)
        self._asked_term, self._asked_ns = self._term_min, self._now_ns
        self._effects.append(Remember(recovery.run, self._term_min, self.incumbent))
        for report in recovery.complete_reports():
            self._ask_for_promise(recovery, report)

    def _ask_for_promise(self, recovery: Recovery, report: Report) -> None:
        assert self._asked_term is not None
        assert report.connection is not None
        elsewhere = report.header.incumbent != self.incumbent
        if report.header.term >= self._asked_term + (not elsewhere):
            if recovery.believes(report):
                self._begin_anew(recovery)  # another master was faster
            return
        asked = msg.Resumed(self._asked_term, self.incumbent, self.standbys)
        self._effects.append(Send(report.connection, asked))

    def _begin_anew(self, recovery: Recovery) -> None:
        """Too few follow this master; whoever still comes may have news."""
        if self._asked_term is not None:
            self._term_min = self._asked_term + 1
            self._asked_term = None
            self._asked_in_vain = True
        reason = recovery.shortage()
        for connection in recovery.begin_anew(self._now_ns):
            self._close(connection, reason)
        for connection in list(self._waiting):
            del self._waiting[connection]
            self._refuse(connection, reason)

    # -- the run as it was -----------------------------------------------------------------------

    def _rebuild(self, run: bytes, recovered: Recovered) -> None:
        """Go on with the run: whoever is missing is removed when all others have been heard."""
        assert self._recovery is not None
        bases, ratified = self._recovery.bases(), self._recovery.ratified
        self._acknowledged = dict(self._recovery.vouched.digests or {})
        connections = self._recovery.connections()
        self._recovery = None
        self._origin = Origin.RESTARTED
        self.run = run
        if self._asked_term is not None:
            self.term = self._asked_term
        else:
            self.term = max(self._term_min, recovered.term + 1)
            self._effects.append(Remember(self.run, self.term, self.incumbent))
        # Two restarts may follow each other with nobody to tell of whom the first one registered.
        jump = TERM_GAP + int.from_bytes(self._random_bytes(ID_JUMP_BYTES))
        self._last_peer = PeerId(recovered.last_peer + jump)
        reports = {r.peer: r for r in (*recovered.returned, *recovered.newcomers)}
        peers = revive_all(recovered, self._now_ns)
        self.membership = Membership(self.term, self._choose)
        if self._reachability is not None:  # ids may mean others from now on
            self._reachability = Reachability(self._now_ns)
        self.membership.updates = recovered.counts[RoundKind.UPDATE_TOPOLOGY]
        self.membership.restore(recovered.membership, peers, shared=not self._sole)
        self._by_connection = {p.connection: p for p in peers if p.connection is not None}
        self._majority = Majority(bases, ratified)
        self._plans = DialPlans(self.membership, self._was_reached)
        self._take_up(recovered)
        for report in reports.values():
            peer = self.membership.peers[report.peer]
            self._welcome_back(peer, max(report.rosters, default=0))
        for report in reports.values():
            self._replay(report)
        still = [peer for peer in recovered.missing if peer in self.membership.peers]
        missing = [self.membership.peers[peer] for peer in still]
        left = [peer for peer in missing if peer.id in recovered.left]
        lost = [peer for peer in missing if peer.id not in recovered.left]
        if left:
            self._remove_all(left, RemovalCause.GOODBYE, "it left")
        if lost:
            reason = "it did not come back to the restarted master"
            self._remove_all(lost, RemovalCause.CONTROL_LOST, reason)
        for report in recovered.strangers:
            if report.connection in self._hosts:
                self._tell_removed(report.connection, report.header)
        for connection in connections:
            if connection in self._hosts and connection not in self._by_connection:
                self._close(connection, "the run went on before its report was complete")
        self._admit_into_empty_run()
        waiting, self._waiting = self._waiting, {}
        for connection, message in waiting.items():
            if connection in self._hosts:
                self._register(connection, message)


__all__ = ["Origin", "Restartable"]
