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
from pccl.machines.peer.contact import MasterContact
from pccl.machines.peer.join import JoinAttempt
from pccl.machines.peer.membership import KnownMembership, Standing
from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake import RUN_BYTES
from pccl.protocol.limits import LINKS_BATCH_MAX, Timing
from pccl.protocol.shared_state import NOTHING_EXPECTED
from pccl.protocol.types import MeasuredLink, PeerId, Roster


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
        self.standing = Standing.OUTSIDE
        self.peer = PeerId(0)
        """Own id, once registered."""
        self.term = 0
        self.run = b""
        self.group = 0
        self._join: JoinAttempt | None = None
        self._token = b""
        self._registration: msg.Register | None = None
        self._has_standby = False
        """Whether the run has more than one master."""
        self._incumbent = b""
        """Id of the master that is followed."""
        self._has_prefetched = False
        self._contact = MasterContact(timing, now_ns)
        self._membership = KnownMembership()
        self._why_closed = ""
        """How the last connection to the master, or the last attempt to make one, ended."""
        self._expected = NOTHING_EXPECTED
        """Of the group's shared state, as far as this peer knows."""
        self._refusals = Refusals(former_loss)

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
        return self.standing is Standing.LOST and loss is not None and loss.is_reported

    @property
    def loss(self) -> errors.PCCLError | None:
        """Why this peer is not a part of the run any more; None while it is."""
        loss = self._refusals.loss
        return loss.error if loss is not None else None

    @property
    def _roster_version(self) -> int:
        """Of the newest roster; 0 before the first."""
        newest = self.newest
        return newest.version if newest is not None else 0

    @property
    def _takes_part(self) -> bool:
        return self.standing in (Standing.JOINING, Standing.PENDING, Standing.MEMBER)

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
    def _report_finals(self) -> None:
        """Send the outcomes and answers that may not have reached everybody."""

    @abstractmethod
    def _fail_calls(self, loss: OneTimeError) -> None:
        """End everything that is open with ``loss``."""

    # -- joining ---------------------------------------------------------------------------------

    def _on_join_call(self, event: ev.JoinCall) -> None:
        if self.standing is not Standing.OUTSIDE:
            self._raise(event.call, words.connected_already())
            return
        self.standing = Standing.JOINING
        self._join = JoinAttempt(event)
        self.group = event.group
        self._contact.begins(self._now_ns)
        self._effects.append(ev.DialControl(0))

    def _on_join_failed(self, join: JoinAttempt, reason: str) -> None:
        error = join.failed(reason)
        if error is not None:
            self._lose(error, goodbye=False)
        else:
            self._effects.append(ev.DialControl(self.timing.ns(self.timing.connect_retry_s)))

    def _on_registered(self, message: msg.Registered) -> None:
        if self.standing is not Standing.JOINING or len(message.run) != RUN_BYTES:
            raise errors.RemoteProtocolError(func="control", reason="a registration out of place")
        self.standing = Standing.PENDING
        self.peer, self.term, self.run = message.peer, message.term, message.run
        self._token, self._incumbent = message.token, message.incumbent
        assert self._join is not None
        self._has_standby = bool(message.standbys) or self._join.masters > 1
        self._contact.served(self._now_ns)
        self.history.owner = f"peer {message.peer}"

    def _on_admitted(self, message: msg.Admitted) -> None:
        if self.standing is not Standing.PENDING or self._join is None:
            return  # told twice
        self._on_roster(message.roster)
        self._membership.ratify(message.ratified)
        self.standing = Standing.MEMBER
        self._membership.see(message.roster.version)
        self._begin_membership(message.rounds, rejoins=self._join.rejoins)
        call, self._join = self._join.call, None
        self._effects.append(ev.Return(call, None))

    def _on_prefetched(self) -> None:
        if self.standing is Standing.PENDING:
            self._has_prefetched = True
            self._send(msg.Prefetched())

    # -- the control connection ------------------------------------------------------------------

    def _on_control_opened(self, run: bytes, term: int) -> None:
        if not self._takes_part:
            self._effects.append(ev.CloseControl("not needed any more"))
            return
        self._contact.opened(self._now_ns)
        if not self._token:
            assert self._join is not None
            self._registration = self._join.register()
            self._send(self._registration)
        elif (run, term) == (self.run, self.term):
            version = self._roster_version
            self._send(msg.Resume(self.peer, self._token, version, self._incumbent))
        else:
            self._return()

    def _return(self) -> None:
        """Tell a master of another incarnation everything that it may have to know."""
        assert self._registration is not None
        self._send(
            msg.Return(
                self.peer,
                self._token,
                self.run,
                self.term,
                self._registration,
                self._roster_version,
                self._round_counts(),
                self._incumbent,
                self._membership.ratified,
                self._expected,
            )
        )
        for known in self._membership.roster_reports():
            self._send(known)
        self._report_finals()
        self._on_known_again()
        self._send(msg.Reported())

    def _on_control_closed(self, reason: str) -> None:
        self._contact.connected = False
        self._why_closed = reason
        if not self._takes_part:
            return
        if self._join is not None and not self._token:
            self._on_join_failed(self._join, reason)
        elif not self._give_up_on_master(reason):
            self._effects.append(ev.DialControl(self._contact.redial_delay_ns()))

    def _give_up_on_master(self, reason: str) -> bool:
        if not self._contact.is_lost(self._now_ns):
            return False
        silence_s = self._contact.unserved_ns(self._now_ns) / 1e9
        self._lose(words.master_lost(silence_s, reason), goodbye=False)
        return True

    def _on_resumed(self, message: msg.Resumed) -> None:
        another = message.incumbent != self._incumbent
        if not self._token or message.term < self.term + another:
            raise errors.RemoteProtocolError(func="control", reason="a master of the past")
        if (message.term, message.incumbent) != (self.term, self._incumbent):
            self._contact.follows_another()
        self.term, self._incumbent = message.term, message.incumbent
        self._has_standby |= bool(message.standbys)
        self._membership.forget_plans()  # the master sends them again
        self._contact.served(self._now_ns)
        if self._has_standby:
            self._acknowledge_roster()
        self._on_known_again()

    def _on_known_again(self) -> None:
        """Repeat what a master has to know that has not seen this connection before."""
        self._tell_measured(self._membership.all_measured())
        for report in self._membership.link_reports():
            self._send(report)
        if self._has_prefetched and self.standing is Standing.PENDING:
            self._send(msg.Prefetched())
        self._repeat_requests()

    def _watch_master(
        self, progress: tuple[msg.Progress, ...], busy_ns: int, *, blocked: bool, waits: bool
    ) -> None:
        """A tick: send a sign of life; judge the master's silence if something ``waits`` for it."""
        due = self._contact.is_beat_due(self._now_ns, blocked=blocked)
        if due and self._contact.connected and self._token:
            version = self._roster_version
            now_ns, term = self._now_ns, self.term
            for beat in self._contact.beat(progress, now_ns, version, term, blocked=blocked):
                self._send(beat)
        if not self._contact.may_judge(self._now_ns, busy_ns):
            return
        if self._token and not (self._contact.connected and self._contact.resumed):
            reason = self._why_closed
            if self._contact.connected:
                reason = "the one that answers lacks too many members to go on"
            if self._give_up_on_master(reason):
                return
        if not self._contact.connected:
            return
        waits = waits or self._join is not None
        if waits and self._contact.is_silent(self._now_ns, known=bool(self._token)):
            self._effects.append(ev.CloseControl("the master is silent"))
            self._on_control_closed("it takes connections but does not answer as a master does")

    # -- membership ------------------------------------------------------------------------------

    def _on_roster(self, roster: Roster) -> None:
        if self.peer not in roster.ring or roster.view not in roster.open_views:
            raise errors.RemoteProtocolError(func="control", reason="a roster of others")
        if not roster.algorithms.is_sound:
            raise errors.RemoteProtocolError(func="control", reason="a table that no master makes")
        if self._membership.learn(roster, self._incumbent):
            self._forget_closed(roster.open_views)
            self._effects.append(ev.ForgetEarly())
            self._want_links()
            if self._has_standby:
                self._acknowledge_roster()

    def _acknowledge_roster(self) -> None:
        """Say at once which master is followed, and what has come: a majority has to."""
        if self._contact.connected:
            for batch in self._contact.batch(self._roster_version, self.term):
                self._send(batch)

    def _on_whom_to_dial(
        self, message: msg.LinkPlan | msg.DialNewcomers | msg.ProbeAddress | msg.Undialable
    ) -> None:
        match message:
            case msg.LinkPlan(elders, gone):
                self._membership.learn_elders(elders, gone)
                self._want_links()
            case msg.DialNewcomers(newcomers):
                self._membership.learn_newcomers(newcomers)
                self._want_links()
            case msg.ProbeAddress(member, seen):
                self._effects.append(TryAddress(member, (member.host,), seen))
            case msg.Undialable():
                self._effects.append(ev.ReportUndialable(words.undialable(message.reason)))

    def _want_links(self) -> None:
        peers = self._membership.want_links(self.peer)
        if peers is not None:
            self._effects.append(ev.SetLinks(peers))

    def _on_link_changed(self, peer: PeerId, why: str | None) -> None:
        registered = self.standing in (Standing.PENDING, Standing.MEMBER)
        if registered and self._membership.link_changed(peer, why):
            self._send(msg.LinkReport(peer, why is None, why or ""))

    def _on_measured(self, event: ev.LinksMeasured | AddressTried) -> None:
        if self.standing not in (Standing.PENDING, Standing.MEMBER):
            return
        if not isinstance(event, AddressTried):
            self._tell_measured(self._membership.measured(event.links))
        elif self.standing is Standing.MEMBER:  # the master asks only members
            self._send(msg.AddressProbed(event.peer, event.reason))

    def _tell_measured(self, links: tuple[MeasuredLink, ...]) -> None:
        for start in range(0, len(links), LINKS_BATCH_MAX):
            self._send(msg.LinksMeasured(links[start : start + LINKS_BATCH_MAX]))

    # -- the end ---------------------------------------------------------------------------------

    def _on_refused(self, message: msg.Refused) -> None:
        ago_s = self._contact.ago_s(message, self._now_ns)
        member = self.standing is Standing.MEMBER
        self._lose(
            words.refused(message.reason, message.cause, ago_s, member=member), goodbye=False
        )

    def _on_close(self) -> None:
        if self.standing is not Standing.CLOSED:
            self._lose(words.closed(), goodbye=True)
            self.standing = Standing.CLOSED

    def _lose(self, error: errors.PCCLError, *, goodbye: bool) -> None:
        """Stop being a part of the run: restore every buffer, fail every call."""
        if goodbye and self._contact.connected and self._token:
            self._send(msg.Goodbye())
        self._effects.append(ev.CloseControl(error.reason))
        self._contact.connected = False
        loss = self._refusals.loss = self._refusals.loss or OneTimeError(error)
        self._fail_calls(loss)
        if self._join is not None:
            loss.ends(self._join.call, detached=False)
            self._raise(self._join.call, error)
            self._join = None
        self._membership.leave()
        self._effects.append(ev.SetLinks(()))
        self.standing = Standing.LOST

    # -- helpers ---------------------------------------------------------------------------------

    def _send(self, message: msg.PeerMessage) -> None:
        """Send, or leave it to the repetition after the reconnect."""
        if self._contact.connected:
            self._effects.append(ev.Send(message))

    def _raise(self, call: int, error: errors.PCCLError) -> None:
        self._effects.append(ev.Raise(call, error))
