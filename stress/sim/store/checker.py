"""``StoreChecker``: checks what callers of the run's store get.

As long as one master coordinates a run, each addition counts once, and a call sees the effects of
all calls that had ended before it began. Other masters know what the present members wrote. So a
read may miss a write after that only if its writer was lost.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.outcomes import Violation

Caller = tuple[bytes, PeerId]
"""A run, and a member of it."""


@dataclass(slots=True)
class _Written:
    """The key that one member alone writes, always with the next number."""

    begun: int = 0
    ended: int = 0
    """The highest number whose write has ended."""
    suspect: str = ""
    """A read that missed a write; wrong if the writer was a member all the time."""


@dataclass(slots=True)
class _Sums:
    """The key to which all members of a run add 1."""

    begun: int = 0
    highest: int = 0
    """Highest sum of an addition that has ended."""
    seen: set[int] = field(default_factory=set[int])


class StoreChecker:
    """Checks all calls to the stores of all runs.

    Args:
        done: counts by name.
        may_lose: whether another master may coordinate the run at any time.
    """

    def __init__(self, done: Counter[str], *, may_lose: bool) -> None:
        self._done = done
        self.may_lose = may_lose
        """Set once the first master is lost."""
        self._written: defaultdict[Caller, _Written] = defaultdict(_Written)
        self._sums: defaultdict[bytes, _Sums] = defaultdict(_Sums)

    # -- sums ----------------------------------------------------------------------------------

    def adds(self, run: bytes) -> int:
        """Record that a member begins to add; return the sum that its result has to exceed."""
        self._sums[run].begun += 1
        return self._sums[run].highest

    def added(self, who: Caller, total: int, floor: int) -> None:
        """Check the result of an addition."""
        self._answered(who, "add")
        sums = self._sums[who[0]]
        if not self.may_lose and (total in sums.seen or not floor < total <= sums.begun):
            raise Violation(f"peer {who[1]} added, and got {total}, after {floor} of {sums.begun}")
        sums.seen.add(total)
        sums.highest = max(sums.highest, total)

    # -- values --------------------------------------------------------------------------------

    def sets(self, who: Caller) -> int:
        """Record that a member begins to write its key; return the number to write."""
        self._written[who].begun += 1
        return self._written[who].begun

    def has_set(self, who: Caller, number: int) -> None:
        """Record that a write has ended."""
        self._answered(who, "set")
        known = self._written[who]
        known.ended = max(known.ended, number)

    def reads(self, writer: Caller) -> int:
        """Return the number that a read, which begins now, has to get at least."""
        return self._written[writer].ended

    def read(self, who: Caller, writer: Caller, number: int, floor: int) -> None:
        """Check what a member has read of a writer's key."""
        known = self._written[writer]
        if floor <= number <= known.begun:
            self._answered(who, "get")
            return
        text = f"peer {who[1]} read {number} of peer {writer[1]}, not {floor} to {known.begun}"
        if who == writer or number > known.begun or not self.may_lose:
            raise Violation(text)
        self._done["stale read, perhaps of a lost member"] += 1
        known.suspect = known.suspect or text

    def writers(self, run: bytes) -> list[PeerId]:
        """Return the peers that have written in a run."""
        return [
            peer for (where, peer), known in self._written.items() if where == run and known.ended
        ]

    def waited(self, who: Caller) -> None:
        """Record that a wait has ended."""
        self._answered(who, "wait")

    def _answered(self, who: Caller, what: str) -> None:
        """Count an answer; it shows that the caller has been a member all the time."""
        self._done[f"store.{what}"] += 1
        if who in self._written and self._written[who].suspect:
            raise Violation(f"{self._written[who].suspect}, which is still a member")
