"""``Turns``: checks that a process takes part in rounds again after it was late.

* If it was there when the members began a round, its work is in the round.
* It is late for three rounds in a row only if it could not be earlier: after two, it begins the
  next one at the end of an inner step.

A nap excuses rounds until the process takes part again, and a fault of its links or of the master
excuses all. Without grace, or with too little of it for the network, the members wait for nobody.
"""

from __future__ import annotations

from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess

_LATENCIES = 16
"""A grace of so many latencies is enough for members that call at once."""
_MISSES_MAX = 2


class Turns:
    """The rounds of one life of a process, with and without its work.

    Args:
        parts: shared objects of the run.
        process: the process.
    """

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        quorum, latency_ns = parts.scenario.quorum, parts.scenario.latency_ns
        grace_ms = None if quorum is None else quorum.grace_ms
        self._is_patient = grace_ms is None or grace_ms * MS >= _LATENCIES * latency_ns
        self._checkers = parts.checkers
        self._process = process
        self._loop = parts.loop
        self._is_excused = True
        self._misses = 0
        """Consecutive rounds that went on without the process."""
        self._called_ns = 0
        """When it made its last ``update_topology``."""
        self._was_in_time = False
        """Whether the members waited for that call, or it for them."""
        self._could_ns: int | None = None
        """End of the first inner step since its last round, if no member waited for it then."""

    def naps(self) -> None:
        """Record that the process begins to nap."""
        self._checkers.done["nap"] += 1
        self._is_excused = True

    def enters(self) -> None:
        """Record that the process takes the outer parameters of the run."""
        self._misses, self._is_excused, self._was_in_time = 0, True, False

    def stepped(self, *, is_awaited: bool, is_idle: bool) -> None:
        """Record the end of an inner step.

        Args:
            is_awaited: whether members wait for it, or went on without it.
            is_idle: whether it waits for no round.
        """
        if is_idle and not is_awaited and self._could_ns is None:
            self._could_ns = self._loop.now_ns()

    def updated(self, called_ns: int) -> None:
        """Record that the ``update_topology`` that it made at ``called_ns`` has returned."""
        self._called_ns = called_ns
        self._was_in_time = self._loop.now_ns() > called_ns  # a late call returns at once

    def saw(self, number: int, *, took_part: bool) -> None:
        """Check a round whose outer step the process has taken."""
        done, name = self._checkers.done, self._process.name
        done["round without this replica"] += not took_part
        is_calm = self._is_patient and not self._checkers.may_be_late(name)
        if self._was_in_time and not took_part and is_calm:
            raise Violation(f"{name}: round {number} went on without it, although it was there")
        if took_part:
            self._misses, self._is_excused = 0, False
        else:
            self._misses += 1
            done["twice without this replica"] += self._misses == _MISSES_MAX
            done["more often without this replica"] += self._misses > _MISSES_MAX
            could, called = self._could_ns, self._called_ns
            hesitated = could is not None and called > could
            if self._misses > _MISSES_MAX and hesitated and not self._is_excused:
                raise Violation(f"{name}: it was late for round {number} for no reason, again")
        self._could_ns, self._was_in_time = None, False
