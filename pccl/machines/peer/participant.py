"""``Participant``: one process's part in a run, apart from its calls.

Joining, the control connection, membership as it arrives, links to other peers, and the end of it.
``PeerMachine`` builds the calls on it.
"""

from __future__ import annotations

from abc import abstractmethod

from pccl.machines.machine import Machine
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.calls import OneTimeError, Refusals
from pccl.machines.peer.contact import MasterLiveness, PeerOutbox
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.join import JoinAttempt
from pccl.machines.peer.membership import KnownMembership, OwnLinks, PeerIdentity, Standing
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake import RUN_BYTES
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import NOTHING_EXPECTED
from pccl.protocol.types import PeerId, Roster


class Participant(Machine[ev.PeerEvent, ev.PeerEffect]):
    """What a peer is to its run.

    Args:
        timing: deadlines.
        now_ns: the present.
        former_loss: how the incarnation before this one ended; None: there was none.
    """

    def __init__(
        self, timing: Timing, now_ns: int, former_loss: errors.PCCLError | None = None
    ) -> None:
        super().__init__("peer", now_ns)
        self.timing = timing
        self.own = PeerIdentity()
        self._contact = MasterLiveness(timing, now_ns)
        self._out = PeerOutbox(self._contact)
        self._membership = KnownMembership()
        self._links = OwnLinks(self._out, self.own, self._membership)
        self._heartbeats = Heartbeats(timing, now_ns, self._out, self.own, self._membership)
        self._finals = SeenFinals(self._membership)
        self._refusals = Refusals(former_loss)
        self._join: JoinAttempt | None = None
        self._registration: msg.Register | None = None
        self._has_prefetched = False
        self._why_closed = ""
        """How the last connection to the master, or the last attempt to make one, ended."""
        self._expected = NOTHING_EXPECTED
        """Of the group's shared state, as far as this peer knows."""

    @property
    def standing(self) -> Standing:
        """What this process is to the run."""
        return self.own.standing

    @property
    def peer(self) -> PeerId:
        """Own id, once registered."""
        return self.own.peer

    @property
    def run(self) -> bytes:
        """Id of the run."""
        return self.own.run

    @property
    def term(self) -> int:
        """Of the master that is followed."""
        return self.own.term

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return self._membership.newest

    @property
    def seen(self) -> Roster | None:
        """Membership as the caller may know it."""
        return self._membership.seen

    @property
    def hears_master(self) -> bool:
        """Whether there is a connection to the master."""
        return self._contact.connected

    @property
    def master_heard_ns(self) -> int:
        """When the master was last heard; a clock that stood still has moved it along."""
        return self._contact.heard_ns

    @property
    def knows_its_loss(self) -> bool:
        """Whether this peer is no longer a member, and a caller has been told."""
        loss = self._refusals.loss
        return self.own.standing is Standing.LOST and loss is not None and loss.is_reported

    @property
    def loss(self) -> errors.PCCLError | None:
        """Why this peer is not a part of the run any more; None while it is."""
        loss = self._refusals.loss
        return loss.error if loss is not None else None

    # -- what the calls have to do with it -------------------------------------------------------

    @abstractmethod
    def _begin_membership(self, rounds: tuple[msg.RoundCount, ...], *, rejoins: bool) -> None:
        """This peer is a member from now on; ``rejoins``: an ``update_topology`` has done it."""

    @abstractmethod
    def _forget_closed(self, open_views: tuple[int, ...]) -> None:
        """These views of the own group are open, and no others."""

    @abstractmethod
    def _repeat_requests(self) -> None:
        """Send again what the master has not answered."""

    @abstractmethod
    def _round_counts(self) -> tuple[msg.RoundCount, ...]:
        """How many rounds of each kind there were, as far as this peer knows."""

    @abstractmethod
    def _fail_calls(self, loss: OneTimeError) -> None:
        """End everything that is open with ``loss``."""

    # -- joining ---------------------------------------------------------------------------------

    def _on_join_call(self, event: ev.JoinCall) -> None:
        if self.own.standing is not Standing.OUTSIDE:
            self._out.raise_(event.call, words.connected_already())
            return
        self.own.standing = Standing.JOINING
        self._join = JoinAttempt(event)
        self.own.group = event.group
        self._contact.begins(self._now_ns)
        self._out.add(ev.DialControl(0))

    def _on_join_failed(self, join: JoinAttempt, reason: str) -> None:
        error = join.failed(reason)
        if error is not None:
            self._lose(error, goodbye=False)
        else:
            self._out.add(ev.DialControl(self.timing.ns(self.timing.connect_retry_s)))

    def _on_registered(self, message: msg.Registered) -> None:
        if self.own.standing is not Standing.JOINING or len(message.run) != RUN_BYTES:
            raise errors.RemoteProtocolError(func="control", reason="a registration out of place")
        self.own.standing = Standing.PENDING
        self.own.peer, self.own.term, self.own.run = message.peer, message.term, message.run
        self.own.token, self.own.incumbent = message.token, message.incumbent
        assert self._join is not None
        self.own.has_standby = bool(message.standbys) or self._join.masters > 1
        self._contact.served(self._now_ns)
        self.history.owner = f"peer {message.peer}"

    def _on_admitted(self, message: msg.Admitted) -> None:
        if self.own.standing is not Standing.PENDING or self._join is None:
            return  # told twice
        self._on_roster(message.roster)
        self._membership.ratify(message.ratified)
        self.own.standing = Standing.MEMBER
        self._membership.see(message.roster.version)
        self._begin_membership(message.rounds, rejoins=self._join.rejoins)
        call, self._join = self._join.call, None
        self._out.return_(call, None)

    def _on_prefetched(self) -> None:
        if self.own.standing is Standing.PENDING:
            self._has_prefetched = True
            self._out.send(msg.Prefetched())

    # -- the control connection ------------------------------------------------------------------

    def _on_control_opened(self, run: bytes, term: int) -> None:
        if not self.own.takes_part:
            self._out.add(ev.CloseControl("not needed any more"))
            return
        self._contact.opened(self._now_ns)
        if not self.own.token:
            assert self._join is not None
            self._registration = self._join.register()
            self._out.send(self._registration)
        elif (run, term) == (self.own.run, self.own.term):
            version = self._membership.version
            self._out.send(msg.Resume(self.own.peer, self.own.token, version, self.own.incumbent))
        else:
            self._return()

    def _return(self) -> None:
        """Tell a master of another incarnation everything that it may have to know."""
        assert self._registration is not None
        self._out.send(
            msg.Return(
                self.own.peer,
                self.own.token,
                self.own.run,
                self.own.term,
                self._registration,
                self._membership.version,
                self._round_counts(),
                self.own.incumbent,
                self._membership.ratified,
                self._expected,
            )
        )
        for known in self._membership.roster_reports():
            self._out.send(known)
        for final in self._finals.report():
            self._out.send(final)
        self._on_known_again()
        self._out.send(msg.Reported())

    def _on_control_closed(self, reason: str) -> None:
        self._contact.connected = False
        self._why_closed = reason
        if not self.own.takes_part:
            return
        if self._join is not None and not self.own.token:
            self._on_join_failed(self._join, reason)
        elif not self._give_up_on_master(reason):
            self._out.add(ev.DialControl(self._contact.redial_delay_ns()))

    def _give_up_on_master(self, reason: str) -> bool:
        if not self._contact.is_lost(self._now_ns):
            return False
        silence_s = self._contact.unserved_ns(self._now_ns) / 1e9
        self._lose(words.master_lost(silence_s, reason), goodbye=False)
        return True

    def _on_resumed(self, message: msg.Resumed) -> None:
        another = message.incumbent != self.own.incumbent
        if not self.own.token or message.term < self.own.term + another:
            raise errors.RemoteProtocolError(func="control", reason="a master of the past")
        if (message.term, message.incumbent) != (self.own.term, self.own.incumbent):
            self._heartbeats.follows_another()
        self.own.term, self.own.incumbent = message.term, message.incumbent
        self.own.has_standby |= bool(message.standbys)
        self._links.forget_plans()  # the master sends them again
        self._contact.served(self._now_ns)
        if self.own.has_standby:
            self._heartbeats.send()
        self._on_known_again()

    def _on_known_again(self) -> None:
        """Repeat what a master has to know that has not seen this connection before."""
        self._links.repeat()
        if self._has_prefetched and self.own.standing is Standing.PENDING:
            self._out.send(msg.Prefetched())
        self._repeat_requests()

    def _watch_master(
        self, progress: tuple[msg.Progress, ...], busy_ns: int, *, blocked: bool, waits: bool
    ) -> None:
        """A tick: send a sign of life; judge the master's silence if something ``waits`` for it."""
        self._heartbeats.tick(progress, self._now_ns, blocked=blocked)
        if not self._contact.may_judge(self._now_ns, busy_ns):
            return
        if self.own.token and not (self._contact.connected and self._contact.resumed):
            reason = self._why_closed
            if self._contact.connected:
                reason = "the one that answers lacks too many members to go on"
            if self._give_up_on_master(reason):
                return
        if not self._contact.connected:
            return
        waits = waits or self._join is not None
        if waits and self._contact.is_silent(self._now_ns, known=bool(self.own.token)):
            self._out.add(ev.CloseControl("the master is silent"))
            self._on_control_closed("it takes connections but does not answer as a master does")

    # -- membership ------------------------------------------------------------------------------

    def _on_roster(self, roster: Roster) -> None:
        if self.own.peer not in roster.ring or roster.view not in roster.open_views:
            raise errors.RemoteProtocolError(func="control", reason="a roster of others")
        if not roster.algorithms.is_sound:
            raise errors.RemoteProtocolError(func="control", reason="a table that no master makes")
        before = self._membership.newest
        if self._membership.learn(roster, self.own.incumbent):
            self._forget_closed(roster.open_views)
            self._out.add(ev.ForgetEarly())
            self._links.members_changed(before, roster)
            if self.own.has_standby:
                self._heartbeats.send()

    # -- the end ---------------------------------------------------------------------------------

    def _on_refused(self, message: msg.Refused) -> None:
        ago_s = self._contact.ago_s(message, self._now_ns)
        member = self.own.standing is Standing.MEMBER
        self._lose(
            words.refused(message.reason, message.cause, ago_s, member=member), goodbye=False
        )

    def _on_close(self) -> None:
        if self.own.standing is not Standing.CLOSED:
            self._lose(words.closed(), goodbye=True)
            self.own.standing = Standing.CLOSED

    def _lose(self, error: errors.PCCLError, *, goodbye: bool) -> None:
        """Stop being a part of the run: restore every buffer, fail every call."""
        if goodbye and self._contact.connected and self.own.token:
            self._out.send(msg.Goodbye())
        self._out.add(ev.CloseControl(error.reason))
        self._contact.connected = False
        loss = self._refusals.loss = self._refusals.loss or OneTimeError(error)
        self._fail_calls(loss)
        if self._join is not None:
            loss.ends(self._join.call, detached=False)
            self._out.raise_(self._join.call, error)
            self._join = None
        self._membership.leave()
        self._links.leave()
        self.own.standing = Standing.LOST
