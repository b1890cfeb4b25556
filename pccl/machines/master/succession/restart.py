"""How a master continues a run that an earlier master has coordinated.

A master that starts knows nothing, or only which run it had. Members that find a master of another
incarnation *return*: they report what they know. The master collects reports until all members are
back or the recovery window ends. Then it rebuilds the run (``recovery``), takes the next term,
removes missing members and continues. Newcomers wait meanwhile.

A master without stored state admits newcomers at once, into a new run, because it cannot know of an
earlier run. Members of that run may return while the new run is young. If these members are at
least as many as the peers of the new run, the master gives up the new run.

A standby continues only the run that its master has named (``standby``).

If a run has several masters, none moves it without a majority of its members (``majority``). None
sends a final that another master could contradict before a majority has stored it
(``proposals``). A master that has lost the majority starts over and waits for the members to
return.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from pccl.machines.master.connections import Connections, Outbox
from pccl.machines.master.credible import registration_flaw
from pccl.machines.master.events import AskMaster, ForgetRun, Remember, SendTo, Warn
from pccl.machines.master.membership import Membership
from pccl.machines.master.registration import Registration
from pccl.machines.master.succession.origin import Incarnation, Origin
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import TakeUp
from pccl.machines.master.succession.recovery import Recovery
from pccl.machines.master.succession.report import Report
from pccl.machines.master.succession.standby import StandbyWatch
from pccl.machines.master.succession.vouched import Vouched
from pccl.machines.ticks import Wakefulness
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.source_shares import of_the_largest
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import PENDING_MAX, Timing
from pccl.protocol.types import NS_PER_MS

_ANOTHER_RUN = "this master coordinates another run"


class _Step(enum.Enum):
    """The next step with a run whose members have returned, or have had enough time."""

    WAIT = enum.auto()
    ASK = enum.auto()
    """Enough members have returned. The master asks whether they follow it."""
    TAKE_UP = enum.auto()
    BEGIN_ANEW = enum.auto()
    """Too few members have returned, or follow this master."""


class Succession:
    """Decides which run this master coordinates, and continues an earlier run."""

    def __init__(
        self,
        timing: Timing,
        origin: Origin,
        incarnation: Incarnation,
        stands_by_for: Sequence[str],
        vouched: Vouched,
        membership: Membership,
        connections: Connections,
        registration: Registration,
        ratification: Ratification,
        outbox: Outbox,
    ) -> None:
        self._timing = timing
        self._origin = origin
        self._incarnation = incarnation
        self._membership = membership
        self._connections = connections
        self._registration = registration
        self._ratification = ratification
        self._outbox = outbox
        self._term_min = incarnation.term
        self._waiting: dict[int, msg.Register] = {}
        """By connection: newcomers that have to wait until the run is rebuilt."""
        self.reporting: set[int] = set()
        """Connections of returning peers whose reports are not complete."""
        self._recovery: Recovery | None = None
        self._older: Recovery | None = None
        """Reports of members of an older run, while the young run of this master continues."""
        self._asked_term: int | None = None
        """The term in which this master will continue, once enough members follow it."""
        self._asked_in_vain = False
        """Whether too few members followed when asked. The next time, this master first waits for
        the rest: members that it asks repeatedly believe that they have a master."""
        self._asked_ns = outbox.now_ns
        self._has_members = False
        """Whether the run had members after the last event."""
        self._is_forgotten = False
        """Whether the next start of this master would begin another run."""
        known = None if incarnation.run == NO_RUN else incarnation.run
        self._watch = StandbyWatch(timing, stands_by_for, known, incarnation.term - 1, vouched)
        if origin is not Origin.BLANK:
            now_ns, incumbent = outbox.now_ns, incarnation.incumbent
            self._recovery = Recovery(timing, known, incumbent, now_ns, vouched=vouched)

    # -- what the master shows -----------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        """Whether the master waits for members to return."""
        return self._recovery is not None

    @property
    def had_master(self) -> bool:
        """Whether the run is known to have had a master before this one."""
        return self._origin is not Origin.BLANK

    @property
    def shows_run(self) -> bool:
        """Whether the master shows its run; False while it may still change to another run."""
        return self._recovery is None and not self._is_young

    def waits_for(self) -> str:
        """Return what a master without a run waits for; empty if it coordinates a run."""
        recovery = self._recovery
        if recovery is None:
            return ""
        if recovery.run is None:
            return self._watch.waits_for() if self._is_idle else "no member has returned to it"
        words = recovery.progress()
        return f"it is a standby: {words}" if self._is_idle else words

    @property
    def vouched(self) -> Vouched:
        """The members of the run, as far as this master knows them."""
        recovery = self._recovery
        return self._ratification.vouched() if recovery is None else recovery.vouched

    def run_is(self, query: msg.RunQuery) -> msg.RunIs:
        """Return the answer to a standby: the run that this master coordinates or coordinated."""
        if self._recovery is not None and self._origin is not Origin.RESTARTED:
            return msg.RunIs(NO_RUN, 0, False)
        run, term, vouched = self._incarnation.run, self._incarnation.term, self.vouched
        if vouched.keys is None or (query.run, query.version) == (run, vouched.version):
            return msg.RunIs(run, term, not self._is_young)
        return msg.RunIs(run, term, not self._is_young, vouched.version or 0, vouched.proofs())

    @property
    def _is_idle(self) -> bool:
        """Whether this is a standby that does not coordinate its master's run yet."""
        return self._recovery is not None and self._origin is Origin.STANDBY

    @property
    def _is_young(self) -> bool:
        """Whether a run that this master began may still end in favour of an older run."""
        if self._origin is not Origin.BLANK:
            return False
        first_ns = self._registration.first_ns
        young_ns = self._timing.ns(self._timing.recovery_s)
        return first_ns is None or self._outbox.now_ns - first_ns < young_ns

    # -- connections ---------------------------------------------------------------------------

    @property
    def _hears(self) -> Recovery | None:
        """The recovery that collects reports now; None if there is none."""
        return self._recovery or self._older

    def knows(self, connection: int) -> bool:
        """Whether a peer has returned on a connection, or waits until the run is rebuilt."""
        return self.hears(connection) or connection in self._waiting

    def hears(self, connection: int) -> bool:
        """Whether the master collects the report of a peer on this connection."""
        return self._hears is not None and self._hears.report_on(connection) is not None

    def has_returned(self, connection: int) -> bool:
        """Whether a peer has returned on a connection to the run that this master recovers."""
        return self._recovery is not None and self._recovery.report_on(connection) is not None

    def begin_report(self, connection: int) -> None:
        """Record that a peer has returned and begins its report."""
        self.reporting.add(connection)

    def end_report(self, connection: int) -> None:
        """Record that the report on a connection is complete."""
        self.reporting.discard(connection)

    def closed(self, connection: int) -> None:
        """Forget a closed connection."""
        self._waiting.pop(connection, None)
        if self._hears is not None:
            self._hears.closed(connection)

    # -- reports -------------------------------------------------------------------------------

    def returns(self, connection: int, header: msg.Return) -> None:
        """Begin the report of a peer that returns, but not to the present run of this master.

        Raises:
            RemoteProtocolError: another process has returned as this peer, or too many peers have.
        """
        recovery = self._hears
        if recovery is None and self._is_young:
            recovery = self._expect_older_run()
        if self._is_idle and self._watch.run is None:
            # This is no refusal, because its master may name the run soon.
            self._connections.close(connection, self._watch.waits_for())
        elif recovery is None or recovery.run not in (None, header.run):
            self._connections.refuse(connection, _ANOTHER_RUN)
        else:
            caller, now_ns = self._connections.callers[connection], self._outbox.now_ns
            for closed in recovery.begins(connection, caller, header, now_ns):
                self._connections.close(closed, "superseded")

    def _expect_older_run(self) -> Recovery:
        """Begin to collect reports, because a peer has returned to an older run, as it claims.

        If this master has peers, their run continues: the claim of one stranger does not end it.
        """
        incumbent, now_ns = self._incarnation.incumbent, self._outbox.now_ns
        recovery = Recovery(self._timing, None, incumbent, now_ns)
        if self._connections.peers:
            self._older = recovery
        else:
            self._begin(recovery)
        return recovery

    def _begin(self, recovery: Recovery) -> None:
        self._asked_term, self._asked_in_vain = None, False
        self._recovery = recovery

    def hear(self, connection: int, message: msg.Message) -> TakeUp | None:
        """Handle a message while the run is not known, or of a peer that returns to an older run.

        Returns:
            The run, if it is known now.

        Raises:
            RemoteProtocolError: the peer may not send this message.
        """
        recovery = self._hears
        assert recovery is not None
        report = recovery.report_on(connection)
        match message:
            case msg.Register() if report is None:
                self._let_wait(recovery, connection, message)
            case msg.Goodbye() if report is not None or connection in self._waiting:
                if report is not None:
                    recovery.leave(connection)
                self._waiting.pop(connection, None)
                self._connections.close(connection, "it left")
            case msg.Resume() if report is None and connection not in self._waiting:
                self._connections.refuse(connection, "this master does not know this peer")
            case _ if report is not None:
                return self._hear_report(recovery, report, message)
            case _:
                raise RemoteProtocolError(
                    reason=f"an unregistered peer sent {type(message).__name__}, "
                    "not Register, Resume or Return"
                )
        return None

    def _hear_report(
        self, recovery: Recovery, report: Report, message: msg.Message
    ) -> TakeUp | None:
        for connection in recovery.take(report, message):
            reason = "all reports together take too much memory, so this one was dropped"
            self._connections.close(connection, reason)
        if report.connection is None or report.connection not in self._connections.callers:
            return None
        if recovery is self._older:
            is_complete = isinstance(message, msg.Reported)
            return self._give_way_if_older(recovery) if is_complete else None
        promises = isinstance(message, msg.Heartbeat) and message.term == self._asked_term
        if promises and not report.promised:
            report.promised = True
            return self._take_up_if_over()
        if isinstance(message, msg.Reported):
            if self._asked_term is not None:
                self._ask_for_promise(recovery, report)
            return self._take_up_if_over()
        return None

    def _let_wait(self, recovery: Recovery, connection: int, message: msg.Register) -> None:
        flaw = registration_flaw(message)
        if self._is_idle and not recovery.has_reports:
            reason = "this is a standby, and no member of its run has returned to it"
            self._connections.refuse(connection, reason)
        elif connection in self._waiting:
            raise RemoteProtocolError(reason="the newcomer registered twice")
        elif flaw:
            self._connections.refuse(connection, flaw)
        else:
            if len(self._waiting) >= PENDING_MAX:
                known = self._connections.callers
                hosts = {waiting: known[waiting].host for waiting in self._waiting}
                goes = of_the_largest(hosts, known[connection].host)
                del self._waiting[goes]
                reason = f"{PENDING_MAX} newcomers are pending"
                self._connections.refuse(goes, reason)
            self._waiting[connection] = message

    def _give_way_if_older(self, older: Recovery) -> TakeUp | None:
        """Give up the young run of this master, if enough members of an older run have returned.

        The returned members have to be at least as many as the connected peers of the young run.
        """
        came = older.complete_reports()
        if len(came) < max(1, len(self._connections.peers)):
            return None
        for connection in list(self._connections.peers):
            self._connections.close(connection, "members of an older run have returned")
        masters = [report.header.registration.masters for report in came]
        self._ratification.is_sole &= max(masters) < 2
        self._recovery, self._older = older, None
        return self._take_up_if_over()

    # -- the masters that a standby stands by for ----------------------------------------------

    def master_answered(self, master: int, answer: msg.RunIs) -> None:
        """Handle the answer of a master that this standby has asked for its run."""
        changes = self._watch.answered(master, answer)
        if not self._is_idle or self._watch.run is None:
            return
        assert self._recovery is not None
        if changes or answer.run == self._watch.run:
            now_ns = self._outbox.now_ns
            for connection in self._recovery.learn(self._watch.run, self._watch.vouched, now_ns):
                reason = "the process returned under a member's id without its key"
                self._connections.close(connection, reason)
        if changes:
            self._incarnation.run = self._watch.run
            self._term_min = max(self._term_min, self._watch.term + 1)
            run, term, vouched = self._watch.run, self._watch.term, self._watch.vouched
            incumbent = self._incarnation.incumbent
            self._outbox.add(Remember(run, term, incumbent, coordinated=False, vouched=vouched))

    def master_unanswered(self, master: int, reason: str) -> None:
        """Record that a master did not answer; warn of a new reason."""
        if self._watch.failed(master, reason) and self._is_idle:
            self._outbox.add(Warn(self._watch.waits_for() or f"this standby's question: {reason}"))

    # -- time ----------------------------------------------------------------------------------

    def forget_closed(self) -> None:
        """Forget, at a tick, closed connections, whose reports do not continue."""
        self.reporting &= self._connections.callers.keys()

    def beat(self) -> None:
        """Send heartbeats to waiting and returning peers, while there is no run."""
        assert self._recovery is not None
        beat = msg.MasterHeartbeat(self._outbox.now_ns // NS_PER_MS)
        for connection in self._connections.callers:
            if connection in self._waiting or self._recovery.report_on(connection):
                self._outbox.add(SendTo(connection, beat))

    def tick(self, tick: Wakefulness) -> TakeUp | None:
        """Handle a tick while there is no run; return the run, if it is known now."""
        recovery, now_ns = self._recovery, self._outbox.now_ns
        assert recovery is not None
        if self._is_idle:
            query = msg.RunQuery(self._watch.run or NO_RUN, self._watch.vouched.version)
            for master in self._watch.due(now_ns):
                self._outbox.add(AskMaster(master, query))
        recovery.look_again(now_ns)
        if tick.slept_ns:
            recovery.shift(tick.slept_ns, now_ns)
        return self._take_up_if_over() if tick.may_judge else None

    def tick_in_run(self) -> None:
        """Handle a tick in a run: refuse a late older run, or start over without a majority."""
        if self._older is not None and not self._is_young:
            for connection in self._older.connections():
                self._connections.refuse(connection, _ANOTHER_RUN)
            self._older = None
        lacking_ns = self._ratification.lacks_consent_for_ns()
        if lacking_ns is not None and lacking_ns >= self._timing.ns(self._timing.recovery_s):
            self._stand_down()

    def _stand_down(self) -> None:
        """Start over and wait for members, because the majority may follow another master."""
        for connection in list(self._connections.callers):
            reason = "this master has lost the majority of the members"
            self._connections.close(connection, reason)
        self._origin = Origin.RESTARTED
        self._term_min = self._incarnation.term + 1
        run, incumbent = self._incarnation.run, self._incarnation.incumbent
        ratified, vouched = self._ratification.ratified, self._ratification.vouched()
        now_ns = self._outbox.now_ns
        self._begin(Recovery(self._timing, run, incumbent, now_ns, ratified, vouched))

    def settle(self) -> None:
        """After an event, send the messages that have consent now.

        If the last member has left, with consent, forget the stored run. Store it again when new
        members come.
        """
        if self._recovery is not None:
            return
        if not self._ratification.is_sole:
            self._ratification.settle()
        has_members = self._membership.size > 0
        if has_members == self._has_members:
            return
        us = self._incarnation
        if has_members and self._is_forgotten:
            self._is_forgotten = False
            self._outbox.add(Remember(us.run, us.term, us.incumbent))
        elif not has_members and self._ratification.has_consent:
            self._is_forgotten = True
            self._outbox.add(ForgetRun())
        self._has_members = has_members

    # -- whether it goes on --------------------------------------------------------------------

    def _take_up_if_over(self) -> TakeUp | None:
        recovery = self._recovery
        if recovery is None or recovery.run is None or not recovery.is_over(self._outbox.now_ns):
            return None
        if self._is_idle and not recovery.has_reports:
            return None  # a standby waits for its first member without a deadline
        self._ratification.is_sole &= not recovery.knows_another_master
        match self._next_step(recovery):
            case _Step.TAKE_UP:
                return self._take_up(recovery)
            case _Step.ASK:
                self._ask_for_promises(recovery)
            case _Step.BEGIN_ANEW:
                self._begin_anew(recovery)
            case _Step.WAIT:
                pass
        return None

    def _next_step(self, recovery: Recovery) -> _Step:
        """Return the next step with a run whose members have returned, or have had enough time."""
        if self._ratification.is_sole:
            return _Step.TAKE_UP
        now_ns = self._outbox.now_ns
        if self._asked_term is None:
            is_late = recovery.is_late(now_ns)
            if recovery.has_majority() and (is_late or not self._asked_in_vain):
                return _Step.ASK
        else:
            is_late = now_ns - self._asked_ns >= self._timing.ns(self._timing.resume_s)
            if (is_late or recovery.all_promised()) and recovery.has_promises():
                return _Step.TAKE_UP
        return _Step.BEGIN_ANEW if is_late else _Step.WAIT

    def _ask_for_promises(self, recovery: Recovery) -> None:
        """Choose the next term, and ask the members to follow this master in it."""
        assert recovery.run is not None
        self._term_min = max(self._term_min, recovery.result().term + 1)
        self._asked_term, self._asked_ns = self._term_min, self._outbox.now_ns
        self._outbox.add(Remember(recovery.run, self._term_min, self._incarnation.incumbent))
        for report in recovery.complete_reports():
            self._ask_for_promise(recovery, report)

    def _ask_for_promise(self, recovery: Recovery, report: Report) -> None:
        assert self._asked_term is not None
        assert report.connection is not None
        us = self._incarnation
        elsewhere = report.header.incumbent != us.incumbent
        if report.header.term >= self._asked_term + (not elsewhere):
            if recovery.believes(report):
                self._begin_anew(recovery)  # another master was faster
            return
        asked = msg.Resumed(self._asked_term, us.incumbent, us.standbys)
        self._outbox.add(SendTo(report.connection, asked))

    def _begin_anew(self, recovery: Recovery) -> None:
        """Close all connections and wait again, because too few members follow this master."""
        if self._asked_term is not None:
            self._term_min = self._asked_term + 1
            self._asked_term = None
            self._asked_in_vain = True
        reason = recovery.shortage()
        for connection in recovery.begin_anew(self._outbox.now_ns):
            self._connections.close(connection, reason)
        for connection in list(self._waiting):
            del self._waiting[connection]
            self._connections.refuse(connection, reason)

    def _take_up(self, recovery: Recovery) -> TakeUp:
        """Coordinate this run from now on, in the next term."""
        assert recovery.run is not None
        us, recovered = self._incarnation, recovery.result(promised=not self._ratification.is_sole)
        self._ratification.take_up(recovery.bases(), recovery.ratified, recovery.vouched)
        self._recovery = None
        self._origin = Origin.RESTARTED
        us.run = recovery.run
        if self._asked_term is not None:
            us.term = self._asked_term
        else:
            us.term = max(self._term_min, recovered.term + 1)
            self._outbox.add(Remember(us.run, us.term, us.incumbent))
        waiting, self._waiting = self._waiting, {}
        return TakeUp(recovered, recovery.connections(), waiting)
