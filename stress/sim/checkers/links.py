"""``LinkCheckers``: checks that living members have links once all faults are over.

Each member checks its own links before it says goodbye, whatever algorithm its calls used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pccl.machines.master.links.meetings import SMALL_GROUP
from pccl.machines.peer.machine import Standing
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.checkers.outcomes import Sleep, Violation
from pccl.stress.sim.process import PeerProcess
from pccl.transports.relay import met_at, relay_of

_LOOK_NS = NS_PER_S // 4
"""Time between two checks of a missing link."""


class LinkCheckers:
    """Checks both ends of every link.

    Args:
        timing: deadlines of all processes.
        done: counts of the run.
        now_ns: returns the virtual time.
        quiet_since_ns: returns the end of the last fault, which may lie in the future.
        processes: returns all processes, also dead ones.
        are_apart: whether two hosts may never have a link.
        need_relay: whether neither of two hosts can dial the other.
        waits_for_kernel: whether only the kernel of the second host can find out that its link to
            the first one is dead.
    """

    def __init__(
        self,
        timing: Timing,
        done: Counter[str],
        now_ns: Callable[[], int],
        quiet_since_ns: Callable[[], int],
        processes: Callable[[], Iterable[PeerProcess]],
        are_apart: Callable[[str, str], bool],
        need_relay: Callable[[str, str], bool],
        waits_for_kernel: Callable[[str, str], bool],
    ) -> None:
        self._done = done
        self._now_ns = now_ns
        self._quiet_since_ns = quiet_since_ns
        self._processes = processes
        self._are_apart = are_apart
        self._need_relay = need_relay
        self._waits_for_kernel = waits_for_kernel
        self._bound_ns = timing.ns(2 * timing.dial_s + 4 * timing.redial_max_s)
        """Time for two dials that fail after the faults: one that began before their end, and one
        whose greeting is lost with another dead connection."""

    async def check(self, process: PeerProcess, sleep: Sleep) -> None:
        """Wait until all links of a member that is about to leave are up, for a bounded time.

        Raises:
            Violation: a link stays down.
        """
        began_ns = self._now_ns()
        waited = False
        while down := [other for other in self._partners(process) if self._lack(process, other)]:
            waited = True
            since_ns = max(began_ns, self._quiet_since_ns())
            relayed = any(self._need_relay(process.host.name, one.host.name) for one in down)
            # The master lets them try again after a pause of two dials, and each try has two.
            if self._now_ns() - since_ns > self._bound_ns * (3 if relayed else 1):
                names = ", ".join(f"{other.name} (peer {other.peer})" for other in down)
                raise Violation(
                    f"{process.name} (peer {process.peer}) has no link to {names}, although "
                    f"no fault has struck for {(self._now_ns() - since_ns) / NS_PER_S:.1f} s"
                )
            await sleep(_LOOK_NS)
        self._done["links that came back late"] += waited
        self._done["links at the end"] += len(self._partners(process))
        for link in process.engine.links.all():
            self._done["relayed"] += link.up and relay_of(link.lanes[0].connection) is not None
            self._done["punched"] += link.up and met_at(link.lanes[0].connection) is not None

    def _lack(self, one: PeerProcess, other: PeerProcess) -> bool:
        """Whether two members have no link, and a member that can dial must have noticed it."""
        ends = (one, other), (other, one)
        has = [end.engine.links.find(there.peer) is not None for end, there in ends]
        if all(has):
            return False
        lacking, there = ends[has[0]]
        return not any(has) or not self._waits_for_kernel(lacking.host.name, there.host.name)

    def _partners(self, process: PeerProcess) -> list[PeerProcess]:
        """Return the living members of the same group that can have a link to ``process``."""
        return [
            other
            for other in self._processes()
            if other is not process
            and _knows(process, other)
            and _knows(other, process)
            and not self._are_apart(process.host.name, other.host.name)
            and not self._needs_none(process, other)
        ]

    def _needs_none(self, one: PeerProcess, other: PeerProcess) -> bool:
        """Whether two members that need a relay have no place for it: no neighbours, many peers."""
        newest = one.engine.machine.newest
        if newest is None or len(newest.ring) <= SMALL_GROUP:
            return False
        places = (newest.ring.index(one.peer), newest.ring.index(other.peer))
        are_neighbours = abs(places[0] - places[1]) in (1, len(newest.ring) - 1)
        return self._need_relay(one.host.name, other.host.name) and not are_neighbours


def _knows(one: PeerProcess, other: PeerProcess) -> bool:
    machine = one.engine.machine
    if not one.alive or machine.standing is not Standing.MEMBER or one.run != other.run:
        return False
    return machine.newest is not None and other.peer in machine.newest.ring
