"""Finds operations that cannot continue: members lack a link, or their data does not move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pccl.machines.master.ballots.ballot import Ballot, Expel
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import Outbox
from pccl.machines.master.links.peer_links import PeerLinks
from pccl.machines.master.membership import Membership
from pccl.protocol.limits import Timing
from pccl.protocol.operation import Phase
from pccl.protocol.types import PeerId, RemovalCause
from pccl.topology.ring_order import apart, arrange, broken_neighbours, lacking


class StallWatch:
    """Examines all open operations at each tick.

    Args:
        timing: deadlines.
        membership: the peers of the run.
        ballots: the open operations.
        finals: sends rosters.
        outbox: collects the effects.
        links: brings up links.
    """

    def __init__(
        self,
        timing: Timing,
        membership: Membership,
        ballots: OpenBallots,
        finals: Finals,
        outbox: Outbox,
        links: PeerLinks,
    ) -> None:
        self._timing = timing
        self._membership = membership
        self._ballots = ballots
        self._finals = finals
        self._outbox = outbox
        self._links = links

    def look(self) -> Iterator[Expel]:
        """Yield removals, at a tick. The caller carries out each removal before the next one."""
        ballots = self._ballots
        for group in sorted({ballot.operation.group for ballot in ballots.open.values()}):
            yield from self._mend_ring(group)
        for ballot in list(ballots.open.values()):
            if ballot.phase is Phase.REQUESTED and isinstance(ballot, CollectiveBallot):
                continue  # many may wait for calls, and each would take time at every tick
            if ballot.operation in ballots.open:
                expel = ballots.decide(ballot, ballot.look(self._timing, self._outbox.now_ns))
                if expel is not None:
                    yield expel
            expel = self._judge_progress(ballot)
            if expel is not None:
                yield expel
            if isinstance(ballot, CollectiveBallot):
                for peer in ballot.take_untold():
                    ballots.repeat_start(self._membership.peers[peer], ballot)

    def _mend_ring(self, group: int) -> Iterator[Expel]:
        """If an operation needs a link that is down, open a view that does not need this link.

        In that view, the members have other neighbours, and the algorithm table avoids a mesh.
        Peers keep redialling a lost lane. So a link counts as down only after ``resume_s``, the
        time in which a peer may reconnect to the master.

        No other view helps an operation whose request allows one algorithm only: it ends. But
        first the master waits until it hears a silent end of the link again, or removes it. If no
        algorithm can do without the link, as in a sparse reduce, the master waits for ``link_s``:
        within that time both ends have dialled again, and a relay may have joined them.
        """
        ballots, membership = self._ballots, self._membership
        patience_ns = self._timing.ns(self._timing.resume_s)
        broken = membership.broken_links(group, self._outbox.now_ns - patience_ns)
        since_ns = self._outbox.now_ns - self._timing.ns(self._timing.link_s)
        lasting = membership.broken_links(group, since_ns) if broken else {}
        silent = set(self._silent(group)) if broken else set[PeerId]()
        waiting: list[Ballot] = []
        started = [
            ballot
            for ballot in ballots.open.values()
            if ballot.operation.group == group and ballot.phase is Phase.STARTED
        ]
        for ballot in started:
            pairs = ballot.separated(broken) if broken else []
            self._links.demand(pairs)
            if any(map(self._links.may_meet, pairs)):
                return
            is_bound = ballot.needs_each_link or not ballot.follows_ring
            if not pairs or not is_bound or not ballot.way_out:
                continue
            # Another view would not help, because the request allows one algorithm only.
            awaits = not silent.isdisjoint(chain.from_iterable(pairs))
            if awaits or (ballot.needs_each_link and not ballot.separated(lasting)):
                waiting.append(ballot)
                continue
            reason = f"{apart(pairs[0], broken)}; {ballot.way_out}"
            ballots.decide(ballot, ballot.cannot_talk(reason))
        started = [
            ballot
            for ballot in started
            if ballot.operation in ballots.open and ballot not in waiting
        ]
        pairs = [pair for ballot in started for pair in ballot.separated(broken)] if broken else []
        if not pairs:
            return
        why = apart(pairs[0], broken)
        order, left_out = arrange(membership.order(group), broken, self._silent(group))
        if left_out:
            reason = (
                f"{lacking(left_out, broken)}, and no order of the ring avoids that; a member that "
                "both can dial can forward, or the master (pccl master --relay)"
            )
            yield Expel(tuple(left_out), RemovalCause.LINK_BROKEN, reason)
        closed: list[int] = []
        across = any(
            ballot.separated(broken)
            for ballot in started
            if not ballot.follows_ring and ballot.operation in ballots.open
        )
        if across or broken_neighbours(membership.order(group), broken):
            closed = membership.reorder(group, order)
            self._finals.tell_rosters(membership.members())
            ballots.forget_numbers()
        for operation, ballot in list(ballots.open.items()):
            still_stuck = ballot in started and ballot.separated(broken)
            if still_stuck or (operation.group == group and operation.view in closed):
                mended = (
                    "the master opened another view" if across else "the master reordered the ring"
                )
                ballots.decide(ballot, ballot.close_view(f"{why}; {mended}"))

    def _silent(self, group: int) -> list[PeerId]:
        """Return members whose heartbeat is overdue, though the master reads what they send."""
        since_ns = self._outbox.now_ns - self._timing.ns(1.5 * self._timing.heartbeat_s)
        peers = self._membership.peers
        return [
            peer
            for peer in self._membership.order(group)
            if max(peers[peer].heard_ns, peers[peer].held_until_ns) < since_ns
        ]

    def _judge_progress(self, ballot: Ballot) -> Expel | None:
        if ballot.phase is not Phase.STARTED:
            return None
        stalled_ns = self._outbox.now_ns - ballot.progress_ns
        if stalled_ns < self._timing.ns(self._timing.progress_s):
            return None
        window_ns = max(stalled_ns // 2, 2 * self._timing.ns(self._timing.heartbeat_s))
        stall = ballot.stall(self._outbox.now_ns - window_ns)
        if stall is None or ballot.operation not in self._ballots.open:
            return None
        seconds = stalled_ns / 1e9
        reason = f"{ballot.operation} made no progress for {seconds:.1f} s, and {stall}"
        charged = self._membership.worse_linked(stall.upstream, stall.downstream)
        return Expel((charged.id,), RemovalCause.NO_PROGRESS, reason)
