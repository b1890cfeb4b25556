"""The control connection of one peer: joining, resuming, returning, and giving the master up."""

from __future__ import annotations

from dataclasses import replace

from pccl.machines.key_value.client import StoreClient
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import MasterLiveness, PeerOutbox
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.membership import KnownMembership, OwnLinks, PeerIdentity, Standing
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.peer.rounds import OpenRounds
from pccl.machines.peer.synchronization import Synchronizations
from pccl.machines.publication.announcer import VersionAnnouncer
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake.certificates import NO_CERTIFICATE
from pccl.protocol.handshake.opening import RUN_BYTES
from pccl.protocol.limits import JOIN_REASONS_MAX, Timing
from pccl.protocol.types import NOBODY, Hosts


class JoinAttempt:
    """The attempt to join of one ``JoinCall``, until the peer is admitted or the call fails."""

    def __init__(self, event: ev.JoinCall) -> None:
        self.call = event.call
        self.rejoins = event.rejoins
        self.masters = event.masters
        self.waits_for = ""
        """Which members or events the admission waits for, as the master last reported."""
        self.has_returned = False
        """Whether an earlier master may have admitted this peer already."""
        self._event = event
        self._failures = 0
        self._reasons: dict[str, None] = {}

    def register(self, hosts: Hosts) -> msg.Register:
        """Return the first message to a master; ``hosts``: the addresses of this machine."""
        event = self._event
        return msg.Register(
            event.group, event.host, event.port, event.min_peers, event.masters, event.prefetches,
            event.machine, event.name, hosts,
        )  # fmt: skip

    def failed(self, reason: str) -> errors.MasterLost | None:
        """Count a failed attempt; return the error to raise if it was the last one."""
        self._failures += 1
        self._reasons[reason] = None
        attempts = self._event.attempts
        if self._failures < attempts:
            return None
        reasons = "; ".join(list(self._reasons)[-JOIN_REASONS_MAX:])
        tries = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        text = f"no master answered after {tries}: {reasons}; check the address and the master"
        lost = errors.MasterLost(errors.Result.MASTER_CONNECTION_FAILED, reason=text)
        lost.is_gone = True
        return lost


class ControlConnection:
    """The dialogue of one peer with its master, apart from calls.

    Methods return the error if they find that this peer has lost its membership.

    Args:
        timing: deadlines.
        out: for effects.
        contact: whether the master is connected and alive.
        own: this peer.
        membership: the rosters that have arrived.
        heartbeats: heartbeats to the master.
        links: reported again on a new connection, like the parts below.
        finals: outcomes and answers.
        rounds: requested rounds.
        operations: posted operations.
        synchronizations: what this peer expects of the shared state.
        store: requests to the run's store.
        announcer: the versions that this peer publishes.
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
        store: StoreClient,
        announcer: VersionAnnouncer,
    ) -> None:
        self._timing, self._out, self._contact = timing, out, contact
        self._own, self._membership, self._heartbeats = own, membership, heartbeats
        self._links, self._finals, self._rounds = links, finals, rounds
        self._operations, self._synchronizations = operations, synchronizations
        self._store = store
        self._announcer = announcer
        self.join: JoinAttempt | None = None
        """The open attempt to join; None once this peer is admitted or lost."""
        self._registration: msg.Register | None = None
        self._has_prefetched = False
        self.why_closed = ""
        """Why the last connection to the master, or the last attempt to connect, ended."""

    # -- joining ---------------------------------------------------------------------------------

    def begin_join(self, event: ev.JoinCall, now_ns: int) -> None:
        """Begin to join: dial a master. A second call raises in the caller."""
        if self._own.standing is not Standing.OUTSIDE:
            self._out.raise_(event.call, words.connected_already())
            return
        self._own.become(Standing.JOINING)
        self._own.group, self._own.rejoins = event.group, event.rejoins
        self.join = JoinAttempt(event)
        self._contact.begins(now_ns)
        self._out.add(ev.DialControl(0))

    def registered(self, message: msg.Registered, now_ns: int) -> None:
        """Record the id that the master has given this peer."""
        own = self._own
        is_whole = len(message.run) == RUN_BYTES and message.peer != NOBODY
        if own.standing is not Standing.JOINING or not is_whole:
            raise errors.RemoteProtocolError(func="control", reason="invalid Registered message")
        assert self.join is not None
        own.become(Standing.PENDING)
        own.peer, own.term, own.run = message.peer, message.term, message.run
        own.incumbent, own.certificate = message.incumbent, message.certificate
        own.has_standby = bool(message.standbys) or self.join.masters > 1
        self._contact.served(now_ns)

    def prefetched(self) -> None:
        """Report to the master that the prefetch has ended, so that this peer may be admitted."""
        if self._own.standing is Standing.PENDING:
            self._has_prefetched = True
            self._out.send(msg.Prefetched())

    def admission_waits(self, message: msg.AdmissionWaits) -> None:
        """Record and report for which members the admission waits."""
        if self.join is not None:
            self.join.waits_for = message.whom
            self._out.report_wait(self.join.call, "connect", message.whom, message.waited_s)

    def end_join(self) -> int | None:
        """End the attempt to join, on admission or loss; return its call if it is open."""
        join, self.join = self.join, None
        return join.call if join is not None else None

    @property
    def join_waits_for(self) -> str:
        """Which master, members or events the open ``connect`` waits for."""
        if not self._own.is_registered:
            return f"a master ({self.why_closed or 'none has answered yet'})"
        return self.join.waits_for if self.join is not None else ""

    # -- the connection --------------------------------------------------------------------------

    def opened(self, run: bytes, term: int, hosts: Hosts, now_ns: int) -> None:
        """Register with a connected master, resume on it, or return if its run or term differs.

        ``hosts``: the addresses of this machine, which may have changed.
        """
        own = self._own
        if not own.takes_part:
            self._out.add(ev.CloseControl("this peer has left the run"))
            return
        self._contact.opened(now_ns)
        if not own.is_registered:
            assert self.join is not None
            self._registration = self.join.register(hosts)
            self._out.send(self._registration)
        elif (run, term) == (own.run, own.term):
            version = self._membership.version
            self._out.send(msg.Resume(own.peer, version, own.incumbent, hosts))
        else:
            self._return(hosts)

    def _return(self, hosts: Hosts) -> None:
        """Return to a master of another run or term: report all that it may need."""
        own = self._own
        assert self._registration is not None
        self._registration = replace(self._registration, hosts=hosts)
        self._out.send(
            msg.Return(
                own.peer,
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
        rosters, finals = self._membership.roster_reports(), self._finals.report()
        for report in (*rosters, *finals, *self._store.report()):
            self._out.send(report)
        self._repeat()
        self._out.send(msg.Reported())

    def resumed(self, message: msg.Resumed, now_ns: int) -> None:
        """Record that a master continues the run with this peer, and repeat open requests to it."""
        own = self._own
        another = message.incumbent != own.incumbent
        if not own.is_registered or message.term < own.term + another:
            raise errors.RemoteProtocolError(func="control", reason="invalid or outdated Resumed")
        if (message.term, message.incumbent) != (own.term, own.incumbent):
            self._heartbeats.follows_another()
            self._finals.follows_another()
            if self.join is not None:
                self.join.has_returned = True
        own.term, own.incumbent = message.term, message.incumbent
        if message.certificate != NO_CERTIFICATE:
            own.certificate = message.certificate
        own.has_standby |= bool(message.standbys)
        self._links.forget_plans()  # the master sends them again
        self._contact.served(now_ns)
        if own.has_standby:
            self._heartbeats.send()
        self._repeat()
        self._announcer.repeat()

    def refused(self, message: msg.Refused, now_ns: int) -> errors.MembershipError:
        """Return the error for the caller after the master refused or evicted this peer."""
        ago_s, member = self._contact.ago_s(message, now_ns), self._own.standing is Standing.MEMBER
        return words.refused(message.reason, message.cause, ago_s, member=member)

    def _repeat(self) -> None:
        """Send everything that a master may have missed on a new connection."""
        self._links.repeat()
        if self._has_prefetched and self._own.standing is Standing.PENDING:
            self._out.send(msg.Prefetched())
        self._rounds.repeat()
        for message in self._operations.unanswered():
            self._out.send(message)
        newest = self._membership.newest
        for operation in self._operations.elsewhere(newest.open_views if newest else ()):
            self._out.send(msg.OutcomeQuery(operation))
        self._store.repeat()

    def closed(self, reason: str, now_ns: int) -> errors.PCCLError | None:
        """Record the end of a connection or of an attempt: dial again, or return why to give up."""
        self._contact.connected = False
        self.why_closed = reason
        if not self._own.takes_part:
            return None
        if self.join is not None and not self._own.is_registered:
            loss, delay_ns = self.join.failed(reason), self._timing.ns(self._timing.connect_retry_s)
        else:
            loss = self._give_up(reason, now_ns)
            delay_ns = self._contact.redial_delay_ns() if loss is None else 0
        if loss is None:
            self._out.add(ev.DialControl(delay_ns))
        return loss

    def watch(self, now_ns: int, busy_ns: int, *, waits: bool) -> errors.PCCLError | None:
        """Judge the master's silence on a tick; ``waits``: whether a call waits for the master."""
        contact = self._contact
        if not contact.tick(now_ns, busy_ns):
            return None
        registered = self._own.is_registered
        if registered and not (contact.connected and contact.resumed):
            reason = self.why_closed
            if contact.connected:
                reason = "the master that answered waits for more members"
            loss = self._give_up(reason, now_ns)
            if loss is not None:
                return loss
        waits = waits or self.join is not None
        if contact.connected and waits and contact.is_silent(now_ns, known=registered):
            self._out.add(ev.CloseControl("the master is silent"))
            reason = "the connection is open, but the master sends nothing"
            return self.closed(reason, now_ns)
        return None

    def _give_up(self, reason: str, now_ns: int) -> errors.MasterLost | None:
        if not self._contact.is_lost(now_ns):
            return None
        return words.master_lost(self._contact.unserved_ns(now_ns) / 1e9, reason)
