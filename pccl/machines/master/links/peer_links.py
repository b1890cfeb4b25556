"""Which peer dials which, the links that result, and which peers can be dialled."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from pccl.machines.master.ballots.ballot import Expel
from pccl.machines.master.connections import Outbox
from pccl.machines.master.links.dial_plans import DialPlans
from pccl.machines.master.links.meetings import Meetings
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.reachability import AddressTried, Reachability
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import PeerId, RemovalCause
from pccl.topology.ring_order import Pair


class PeerLinks:
    """Asks peers to dial each other, and finds out which peers can be dialled.

    Args:
        timing: deadlines.
        membership: the peers of the run.
        outbox: collects the effects.
        tests_addresses: whether the master tests if newcomers can be dialled.
        relays: whether the master itself is a relay.
    """

    def __init__(
        self,
        timing: Timing,
        membership: Membership,
        outbox: Outbox,
        *,
        tests_addresses: bool,
        relays: bool,
    ) -> None:
        self._timing = timing
        self._membership = membership
        self._outbox = outbox
        self._relays = relays
        self._moved: dict[PeerId, RegisteredPeer] = {}
        """Peers whose new addresses were not tested yet."""
        self._plans = DialPlans(membership, self._was_reached)
        self._meetings = self._no_meetings()
        self._reachability = Reachability(outbox.now_ns) if tests_addresses else None

    def _no_meetings(self) -> Meetings:
        return Meetings(
            self._timing, self._membership, self._is_dialable, master_relays=self._relays
        )

    def begin_anew(self) -> None:
        """Forget all plans and tests, because the ids of the next run name other peers."""
        self._moved.clear()
        self._plans = DialPlans(self._membership, self._was_reached)
        self._meetings = self._no_meetings()
        if self._reachability is not None:
            self._reachability = Reachability(self._outbox.now_ns)

    # -- which peer dials which ----------------------------------------------------------------

    def tell_plan(self, peer: RegisteredPeer) -> None:
        """Send a newcomer or a resumed peer the peers that it shall dial; elders come last."""
        if asked := self._plans.asked(peer.id):
            self._outbox.send(peer, msg.DialNewcomers(asked))
        self._outbox.send(peer, msg.LinkPlan(self._plans.elders(peer)))

    def beat(self) -> None:
        """Send each peer the changes of its plan since the last heartbeat."""
        self._test_anew()
        for peer, plan in self._plans.beat():
            self._outbox.send(peer, plan)
        for peer, meeting in self._meetings.beat(self._outbox.now_ns):
            self._outbox.send(peer, meeting)

    def comes(self, peer: RegisteredPeer) -> None:
        """Make all younger peers of the group dial ``peer``, which has returned."""
        self._plans.comes(peer)

    def moved(self, peer: RegisteredPeer) -> None:
        """Make others dial ``peer`` at its new address, and test that.

        Not all of a crowd of newcomers are dialled before a test has reached them.
        """
        self._plans.moves(peer)
        if peer.admitted or not self._plans.leaves_out:
            self._plans.comes(peer)
        self._moved[peer.id] = peer

    def _test_anew(self) -> None:
        """Test the new addresses of peers that have moved, once no old address is being tested."""
        known = self._reachability
        for peer in list(self._moved.values()):
            if known is None or not known.awaits(peer.id):
                del self._moved[peer.id]
                if known is not None:
                    known.forget((peer.id,))
                self.test_addresses(peer)

    def forget(self, peers: list[RegisteredPeer]) -> None:
        """Forget peers before they are removed from the membership."""
        self._plans.remove(peers)
        self._meetings.forget({peer.id for peer in peers})
        for peer in peers:
            self._moved.pop(peer.id, None)
        if self._reachability is not None:
            self._reachability.forget(peer.id for peer in peers)

    def ask(self, elder: RegisteredPeer, newcomer: RegisteredPeer) -> bool:
        """Ask an elder to dial a newcomer that cannot reach it; False if the limits forbid this."""
        if elder.group != newcomer.group or self._plans.is_asked(elder.id, newcomer.id):
            return True
        known, proven = self._reachability, self._was_reached(newcomer.id)
        if not self._plans.has_room(elder.id, proven=proven):
            return False
        if known is not None and not proven and not known.may_dial(self._outbox.now_ns):
            return False
        if self._plans.ask(elder.id, newcomer.id, proven=proven):
            self._outbox.send(elder, msg.DialNewcomers(self._plans.asked(elder.id)))
        return True

    # -- which peers can be dialled ------------------------------------------------------------

    def test_addresses(self, newcomer: RegisteredPeer) -> None:
        """Start tests of whether a newcomer can be dialled: by the master, and by a member."""
        if self._reachability is None:
            return
        tester = self._membership.tester_of(newcomer)
        now_ns = self._outbox.now_ns
        test = self._reachability.begin(newcomer.member, newcomer.seen, tester, now_ns)
        if test is None:
            return
        newcomer.untested = True
        self._outbox.add(test)
        if tester is not None:
            probe = msg.ProbeAddress(newcomer.member, newcomer.seen)
            self._outbox.send(self._membership.peers[tester], probe)

    def tried(self, event: AddressTried) -> bool:
        """Record the result of the master's own test, like ``tested``.

        Ignore the result of a test in a run that this master has given up for another one.
        """
        peer = self._membership.peers.get(event.peer)
        if peer is None or peer.member.key != event.key:
            return False
        return self.tested(peer.id, None, event.host, event.reason)

    def probed(self, by: PeerId, message: msg.AddressProbed) -> bool:
        """Record the test of a member; return whether the newcomer may be admitted from now on."""
        newcomer = self._membership.peers.get(message.peer)
        host = "" if message.reason or newcomer is None else newcomer.member.host
        return self.tested(message.peer, by, host, message.reason)

    def tested(self, tested: PeerId, by: PeerId | None, host: str, reason: str) -> bool:
        """Record the result of a test; return whether the newcomer may be admitted from now on.

        Args:
            tested: the peer whose address was tested.
            by: the member that tested the address; None: the master.
            host: the host at which the peer answered; empty: none.
            reason: why the peer did not answer at the declared host.
        """
        if self._reachability is None:
            return False
        if not self._reachability.tested(tested, by, host, reason):
            return False
        peer = self._membership.peers[tested]
        why = "" if tested in self._moved else self._reachability.news_of(tested)
        if why:
            reason = f"at {peer.member.host}:{peer.member.port} ({why})"
            self._outbox.send(peer, msg.Undialable(reason))
            self._outbox.announce("undialable", peer, reason)
        if self._reachability.was_reached(tested) and self._plans.leaves_out:
            self._plans.comes(peer)
        self._turn_dials(peer, self._reachability)
        return self.end_tests(peer)

    def _turn_dials(self, tested: RegisteredPeer, known: Reachability) -> None:
        """Ask elders that nobody can dial to dial younger peers that everybody can dial.

        The younger ones find out by themselves, but a silent firewall costs them ``dial_s``.
        """
        for other in self._membership.peers.values():
            if other is tested or other.group != tested.group:
                continue
            elder, younger = sorted((tested, other), key=attrgetter("id"))
            if elder.admitted and younger.admitted:
                continue  # both dial already
            if known.was_reached(younger.id) and known.why_undialable(elder.id):
                self.ask(elder, younger)

    def end_tests(self, newcomer: RegisteredPeer) -> bool:
        """End the wait for a newcomer's tests, if they are over or ``dial_s`` has passed.

        Returns whether the newcomer may be admitted from now on.
        """
        if not newcomer.untested or self._reachability is None:
            return False
        waited_ns = self._outbox.now_ns - newcomer.registered_ns
        in_time = waited_ns < self._timing.ns(self._timing.dial_s)
        newcomer.untested = in_time and self._reachability.awaits(newcomer.id)
        return not newcomer.untested

    def _was_reached(self, peer: PeerId) -> bool:
        return self._reachability is None or self._reachability.was_reached(peer)

    def _is_dialable(self, peer: PeerId) -> bool | None:
        """Whether peers can dial ``peer``; None: no test has shown it."""
        known = self._reachability
        if known is not None and known.why_undialable(peer):
            return False
        return self._was_reached(peer) or None

    def dialable(self, peer: PeerId) -> bool | None:
        """Return whether tests say that others can dial ``peer``; None: no test has ended."""
        return None if self._reachability is None else self._is_dialable(peer)

    # -- links ---------------------------------------------------------------------------------

    def demand(self, pairs: Iterable[Pair]) -> None:
        """Give these members a link, because an operation has to move data between them."""
        self._meetings.demand(pairs)

    def may_meet(self, pair: Pair) -> bool:
        """Whether a relay may soon give a link to two members whose link was demanded."""
        return self._meetings.is_open(pair, self._outbox.now_ns)

    def note_link(self, peer: RegisteredPeer, link: msg.LinkReport) -> None:
        """Record that a link is up or down.

        If a newcomer cannot dial an elder, the elder shall dial.
        """
        other, why = link.peer, None if link.up else link.reason
        now_ns = self._outbox.now_ns
        self._membership.report_link(peer.id, other, why, now_ns, link.relay, link.path)
        there = self._membership.peers.get(other)
        if why is None:
            self._plans.linked(peer.id, other)
        elif there is not None and other < peer.id and not (peer.admitted and there.admitted):
            self.ask(there, peer)  # of two members, both dial already

    def report(self, peer: RegisteredPeer, link: msg.LinkReport) -> Expel | None:
        """Record a link like ``note_link``; return the removal of its other end if that is gone."""
        self.note_link(peer, link)
        other, why = link.peer, None if link.up else link.reason
        accused = self._membership.peers.get(other)
        if why is None or accused is None or accused.connection is not None:
            return None
        if accused.control_damaged:
            return None  # the peer lost its connection to damaged bytes, so it may be alive
        trouble = self.trouble(accused)
        if trouble is None:
            return None
        return Expel((other,), RemovalCause.CONNECTIONS_LOST, trouble)

    def trouble(self, peer: RegisteredPeer) -> str | None:
        """Return a broken link that shows, with a lost control connection, that a peer is gone.

        None if there is no such link. If a peer cannot be dialled, its broken links show nothing.
        """
        if self._reachability is not None and self._reachability.why_undialable(peer.id):
            return None
        since_ns = self._outbox.now_ns - self._timing.ns(self._timing.resume_s)
        return self._membership.link_trouble(peer.id, since_ns)

    @property
    def leaves_out(self) -> bool:
        """Whether so many newcomers are pending that some do not dial all their elders."""
        return self._plans.leaves_out

    def bring_up(self, newcomer: RegisteredPeer, neighbour: PeerId, *, leaves_out: bool) -> None:
        """Bring up a newcomer's missing link; extend the deadline while limits forbid a dial."""
        elder, links = self._membership.peers.get(neighbour), self._membership.links
        if elder is None:
            return
        for peer, meeting in self._meetings.newcomer(newcomer, neighbour, self._outbox.now_ns):
            self._outbox.send(peer, meeting)
        if elder.id > newcomer.id:
            return
        if links.why_down(newcomer.id, neighbour) is not None:
            if not self.ask(elder, newcomer):
                newcomer.pending_ns = self._outbox.now_ns
        elif leaves_out and not (elder.admitted or self._was_reached(neighbour)):
            self._outbox.send(newcomer, msg.LinkPlan((elder.member,)))

    def overdue(self, peer: RegisteredPeer, missing: PeerId | None) -> Expel | None:
        """Return the removal of a newcomer that has lacked a link for too long, else None.

        A peer that was admitted in this tick lacks no link, although ``missing`` may name one.
        """
        now_ns = self._outbox.now_ns
        if peer.admitted or peer.control_lost_ns is not None:
            return None
        heard_lately = now_ns - peer.heard_ns <= self._timing.ns(2 * self._timing.heartbeat_s)
        if missing is None or not heard_lately:  # who is cut off may not know its plan
            peer.pending_ns = now_ns
            return None
        since_ns = max(peer.pending_ns, peer.held_until_ns)
        if now_ns - since_ns < self._timing.ns(self._timing.link_s):
            return None
        if missing not in self._membership.peers:
            return None  # it was removed just now
        why = self._membership.why_apart(peer, missing)
        return Expel((peer.id,), RemovalCause.UNREACHABLE, why)
