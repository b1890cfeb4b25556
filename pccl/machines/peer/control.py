"""The control connection of one peer: it joins over it, comes back over it, gives the master up."""

from __future__ import annotations

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import MasterLiveness, PeerOutbox
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.membership import KnownMembership, OwnLinks, PeerIdentity, Standing
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.peer.rounds import OpenRounds
from pccl.machines.peer.synchronization import Synchronizations
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake import RUN_BYTES
from pccl.protocol.limits import JOIN_REASONS_MAX, Timing


class JoinAttempt:
    """What a ``JoinCall`` has set off, until it is admitted or fails."""

    def __init__(self, event: ev.JoinCall) -> None:
        self.call = event.call
        self.rejoins = event.rejoins
        self.masters = event.masters
        self.waits_for = ""
        """What the admission waits for, as far as the master has said."""
        self._event = event
        self._failures = 0
        self._reasons: dict[str, None] = {}

    def register(self) -> msg.Register:
        """The first message to a master."""
        event = self._event
        return msg.Register(
            event.group, event.host, event.port, event.min_peers, event.masters, event.prefetches
        )

    def failed(self, reason: str) -> errors.MasterLost | None:
        """No master this time; return what to raise if that was the last attempt."""
        self._failures += 1
        self._reasons[reason] = None
        attempts = self._event.attempts
        if self._failures < attempts:
            return None
        reasons = "; ".join(list(self._reasons)[-JOIN_REASONS_MAX:])
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        text = f"no master after {tries}: {reasons}; is it running there?"
        return errors.MasterLost(errors.Result.MASTER_CONNECTION_FAILED, reason=text)


class ControlConnection:
    """One peer's dialogue with its master, apart from its calls.

    Methods that may find that this peer is lost to the run return why.

    Args:
        timing: deadlines.
        out: for effects.
        contact: whether the master is connected, and alive.
        own: this peer.
        membership: the rosters that have arrived.
        heartbeats: the signs of life.
        links: what this and the parts below know is told to a master that may not know it.
        finals: outcomes and answers.
        rounds: joint decisions.
        operations: everything that is posted.
        synchronizations: what this peer expects of the shared state.
    """

    def __init__(
        self,
        timing: Timing,
        out: PeerOutbox,
        contact: MasterLiveness,
        own: PeerIdentity,
        membership: KnownMembership,
        heartbeats: Heartbeats,
        links: OwnLinks,
        finals: SeenFinals,
        rounds: OpenRounds,
        operations: OpenOperations,
        synchronizations: Synchronizations,
    ) -> None:
        self._timing, self._out, self._contact = timing, out, contact
        self._own, self._membership, self._heartbeats = own, membership, heartbeats
        self._links, self._finals, self._rounds = links, finals, rounds
        self._operations, self._synchronizations = operations, synchronizations
        self.join: JoinAttempt | None = None
        """Until this peer is admitted."""
        self._registration: msg.Register | None = None
        self._has_prefetched = False
        self._why_closed = ""
        """How the last connection to the master, or the last attempt to make one, ended."""

    # -- joining ---------------------------------------------------------------------------------

    def begin_join(self, event: ev.JoinCall, now_ns: int) -> None:
        """The caller wants to join."""
        if self._own.standing is not Standing.OUTSIDE:
            self._out.raise_(event.call, words.connected_already())
            return
        self._own.become(Standing.JOINING)
        self._own.group, self._own.rejoins = event.group, event.rejoins
        self.join = JoinAttempt(event)
        self._contact.begins(now_ns)
        self._out.add(ev.DialControl(0))

    def registered(self, message: msg.Registered, now_ns: int) -> None:
        """The master has given this peer an id."""
        own = self._own
        is_whole = len(message.run) == RUN_BYTES and message.token
        if own.standing is not Standing.JOINING or not is_whole:
            raise errors.RemoteProtocolError(func="control", reason="a registration out of place")
        assert self.join is not None
        own.become(Standing.PENDING)
        own.peer, own.term, own.run = message.peer, message.term, message.run
        own.token, own.incumbent = message.token, message.incumbent
        own.has_standby = bool(message.standbys) or self.join.masters > 1
        self._contact.served(now_ns)

    def prefetched(self) -> None:
        """This peer can be admitted."""
        if self._own.standing is Standing.PENDING:
            self._has_prefetched = True
            self._out.send(msg.Prefetched())

    def admission_waits(self, message: msg.AdmissionWaits) -> None:
        """The master says whom the admission waits for."""
        if self.join is not None:
            self.join.waits_for = message.whom
            self._out.report_wait(f"connect waits for {message.whom}", message.waited_s)

    def end_join(self) -> int | None:
        """This peer is admitted, or lost; return the call that has joined, if it is open."""
        join, self.join = self.join, None
        return join.call if join is not None else None

    @property
    def join_waits_for(self) -> str:
        """Whom or what the caller waits for who joins."""
        if not self._own.token:
            return f"a master ({self._why_closed or 'none has answered yet'})"
        return self.join.waits_for if self.join is not None else ""

    # -- the connection --------------------------------------------------------------------------

    def opened(self, run: bytes, term: int, now_ns: int) -> None:
        """There is a connection to a master, which says to coordinate ``run`` in ``term``."""
        own = self._own
        if not own.takes_part:
            self._out.add(ev.CloseControl("not needed any more"))
            return
        self._contact.opened(now_ns)
        if not own.token:
            assert self.join is not None
            self._registration = self.join.register()
            self._out.send(self._registration)
        elif (run, term) == (own.run, own.term):
            version = self._membership.version
            self._out.send(msg.Resume(own.peer, own.token, version, own.incumbent))
        else:
            self._return()

    def _return(self) -> None:
        """Tell a master of another incarnation everything that it may have to know."""
        own = self._own
        assert self._registration is not None
        self._out.send(
            msg.Return(
                own.peer,
                own.token,
                own.run,
                own.term,
                self._registration,
                self._membership.version,
                self._rounds.counts(),
                own.incumbent,
                self._membership.ratified,
                self._synchronizations.expected,
            )
        )
        for report in (*self._membership.roster_reports(), *self._finals.report()):
            self._out.send(report)
        self._repeat()
        self._out.send(msg.Reported())

    def resumed(self, message: msg.Resumed, now_ns: int) -> None:
        """A master coordinates the run, with this peer in it."""
        own = self._own
        another = message.incumbent != own.incumbent
        if not own.token or message.term < own.term + another:
            raise errors.RemoteProtocolError(func="control", reason="a master of the past")
        if (message.term, message.incumbent) != (own.term, own.incumbent):
            self._heartbeats.follows_another()
        own.term, own.incumbent = message.term, message.incumbent
        own.has_standby |= bool(message.standbys)
        self._links.forget_plans()  # the master sends them again
        self._contact.served(now_ns)
        if own.has_standby:
            self._heartbeats.send()
        self._repeat()

    def refused(self, message: msg.Refused, now_ns: int) -> errors.MembershipError:
        """The master wants nothing of this peer (any more)."""
        ago_s, member = self._contact.ago_s(message, now_ns), self._own.standing is Standing.MEMBER
        return words.refused(message.reason, message.cause, ago_s, member=member)

    def _repeat(self) -> None:
        """Repeat what a master has to know that has not seen this connection before."""
        self._links.repeat()
        if self._has_prefetched and self._own.standing is Standing.PENDING:
            self._out.send(msg.Prefetched())
        self._rounds.repeat()
        for message in self._operations.unanswered():
            self._out.send(message)

    def closed(self, reason: str, now_ns: int) -> errors.PCCLError | None:
        """The connection is gone, or an attempt to make one has failed: dial again, or give up."""
        self._contact.connected = False
        self._why_closed = reason
        if not self._own.takes_part:
            return None
        if self.join is not None and not self._own.token:
            loss, delay_ns = self.join.failed(reason), self._timing.ns(self._timing.connect_retry_s)
        else:
            loss = self._give_up(reason, now_ns)
            delay_ns = self._contact.redial_delay_ns() if loss is None else 0
        if loss is None:
            self._out.add(ev.DialControl(delay_ns))
        return loss

    def watch(self, now_ns: int, busy_ns: int, *, waits: bool) -> errors.PCCLError | None:
        """A tick: judge the silence of the master; ``waits``: something open waits for it."""
        contact = self._contact
        if not contact.tick(now_ns, busy_ns):
            return None
        registered = bool(self._own.token)
        if registered and not (contact.connected and contact.resumed):
            reason = self._why_closed
            if contact.connected:
                reason = "the one that answers lacks too many members to go on"
            loss = self._give_up(reason, now_ns)
            if loss is not None:
                return loss
        waits = waits or self.join is not None
        if contact.connected and waits and contact.is_silent(now_ns, known=registered):
            self._out.add(ev.CloseControl("the master is silent"))
            reason = "it takes connections but does not answer as a master does"
            return self.closed(reason, now_ns)
        return None

    def _give_up(self, reason: str, now_ns: int) -> errors.MasterLost | None:
        if not self._contact.is_lost(now_ns):
            return None
        return words.master_lost(self._contact.unserved_ns(now_ns) / 1e9, reason)
