"""``LaneChecks``: looks at all lanes at each tick, and replaces those that make no progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from pccl.machines.ticks import Ticks
from pccl.protocol.limits import Timing
from pccl.runtime.clock import Clock
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.meter import facts_of
from pccl.topology.lane_watch import LaneStep, LaneWatch, needs_facts
from pccl.topology.link_steps import LinkStep
from pccl.topology.link_upkeep import LinkUpkeep
from pccl.topology.segment_limit import Proof, StuckLane
from pccl.transports.link import Lane, Link, Links

_log = logging.getLogger("pccl.link")


class LaneChecks:
    """Checks the lanes of one peer.

    Args:
        clock: gives the time.
        timing: deadlines.
        links: the links with these lanes.
        frames: knows which links are needed.
        upkeep: decides about the links.
        carry_out: carries out what it decides.
        explain: puts the names of peers into a text for people.
    """

    def __init__(
        self,
        clock: Clock,
        timing: Timing,
        links: Links,
        frames: FrameRouter,
        upkeep: LinkUpkeep,
        carry_out: Callable[[Iterable[LinkStep]], None],
        explain: Callable[[str], str],
    ) -> None:
        self._clock = clock
        self._links = links
        self._frames = frames
        self._upkeep = upkeep
        self._carry_out = carry_out
        self._explain = explain
        self._stall_ns = timing.ns(timing.lane_stall_s)
        self._stall = f"nothing moved for {timing.lane_stall_s:g} s"
        self._watches: dict[Lane, LaneWatch] = {}
        self._why_ended: dict[Lane, str] = {}
        """Lanes that this side has ended, until their loss is handled."""
        self._ticks = Ticks(timing.ns(timing.tick_s), clock.now_ns())

    def opened(self, lane: Lane, now_ns: int) -> None:
        """Begin to check a lane."""
        self._watches[lane] = LaneWatch(self._stall_ns, now_ns, now_ns, opened_ns=now_ns)

    def ended(self, lane: Lane) -> StuckLane | None:
        """Forget a lane of a link; return it as a stuck one if large packets vanished on it."""
        return self._watches.pop(lane).stuck

    def why_ended(self, lane: Lane) -> str:
        """Return why :meth:`end` has ended a lane; empty: it has not."""
        return self._why_ended.pop(lane, "")

    def end(self, lane: Lane, why: str) -> None:
        """Abort a lane, so that its loss has this reason."""
        self._why_ended[lane] = why
        lane.abort()

    def look(self, busy_ns: int) -> None:
        """Check all lanes at a tick, and replace lanes that owe progress but make none.

        Args:
            busy_ns: processor time of this thread since the previous call.
        """
        now_ns = self._clock.now_ns()
        tick = self._ticks.note(now_ns, busy_ns)
        for link in self._links.all():
            used = self._frames.uses(link.peer)
            working, busy, intact_bytes = set[int](), set[int](), 0
            for lane in link.lanes:
                if lane.receiving or lane.backlog_bytes:
                    working.add(lane.number)
                if lane.carried or lane.number in working:
                    busy.add(lane.number)
                intact_bytes = max(intact_bytes, lane.intact_bytes)
            self._carry_out(self._upkeep.look(link.peer, busy, intact_bytes, now_ns))
            suspects = self._upkeep.suspects(link.peer, now_ns)
            dials = self._upkeep.redials(link.peer)
            steps = list[tuple[Lane, LaneStep]]()
            for lane in link.lanes:
                owes = not tick.slept_ns and (used or lane.number in working)
                found = self._watches[lane].look(
                    lane.moved_bytes, lane.payload_bytes, now_ns,
                    owes=owes, may_judge=tick.may_judge, asks=lane.asks, suspects=suspects,
                    dials=dials,
                )  # fmt: skip
                if found:
                    steps += [(lane, step) for step in found]
            self._look_at_path(link, now_ns, suspects=suspects)
            for lane, step in steps:
                self._do(lane, step)

    def _do(self, lane: Lane, step: LaneStep) -> None:
        match step:
            case LaneStep.REPLACE:
                text = f"connection {lane.number} to peer {lane.link.peer} makes no progress"
                text = f"{text}: {self._stall}; replacing it"
                _log.warning("%s", self._explain(text))
                self.end(lane, self._stall)
            case LaneStep.PING:
                lane.ping()
            case LaneStep.PONG:
                lane.pong()

    def _look_at_path(self, link: Link, now_ns: int, *, suspects: Proof | None) -> None:
        """Find out whether only large packets vanish on the way to a peer."""
        if not self._upkeep.may_narrow(link.peer):
            return
        if not needs_facts([self._watches[lane] for lane in link.lanes], suspects=suspects):
            return  # as at nearly every tick
        watches = {lane.number: self._watches[lane] for lane in link.lanes}
        known = {lane.number: facts_of(lane.connection) for lane in link.lanes}
        facts = {number: found for number, found in known.items() if found is not None}
        for number, watch in watches.items():
            watch.judge(number, facts, now_ns)
        for number, found in facts.items():
            self._carry_out(self._upkeep.carried(link.peer, found, watches[number].opened_ns))
