"""``Turns``: checks that a process takes part in rounds again after it was late.

* If it was there when the members began a round, its work is in the round.
* It is late for three rounds in a row only if it could not be earlier: after two, it begins the
  next one at the end of an inner step.

A nap excuses rounds until the process takes part again, and a fault of its links or of the master
excuses all. Without grace, or with too little of it for the network, the members wait for nobody.

``Departures`` checks that members hear of the rounds in which a leaving process waits: without a
fault, a member that ends an inner step and has no round open begins that round at once.
"""

from __future__ import annotations

from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.outcomes import Checkers, Violation
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess

_LATENCIES = 16
"""A grace of so many latencies is enough for members that call at once."""
_MISSES_MAX = 2
_NEWS_LATENCIES = 8
"""So many latencies after a request, all members have heard of it."""


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


class Departures:
    """The processes of one run that leave soon.

    Args:
        checkers: tells which processes a fault may delay.
        latency_ns: latency of the network.
    """

    def __init__(self, checkers: Checkers, latency_ns: int) -> None:
        self._checkers = checkers
        self._patience_ns = _NEWS_LATENCIES * latency_ns
        self._waiting: dict[tuple[bytes, PeerId], tuple[str, int]] = {}
        """Run and id of a leaving process -> its name, and since when it waits in a round."""

    def waits(self, process: PeerProcess, now_ns: int) -> None:
        """Record that a leaving process has requested a round."""
        self._waiting[process.run, process.peer] = process.name, now_ns

    def goes_on(self, process: PeerProcess) -> None:
        """Record that it waits no longer."""
        self._waiting.pop((process.run, process.peer), None)

    def stepped(self, process: PeerProcess, now_ns: int, *, is_awaited: bool) -> None:
        """Check a member that has ended an inner step, and has no round open.

        Args:
            process: the member.
            now_ns: current time, in ns.
            is_awaited: whether it knows that others wait for it.
        """
        self._checkers.done["round for a leaving process"] += is_awaited
        for (run, _), (name, since_ns) in self._waiting.items():
            excused = any(map(self._checkers.may_be_late, (name, process.name)))
            is_late = run == process.run and now_ns - since_ns > self._patience_ns
            if is_late and not is_awaited and not excused:
                raise Violation(f"{process.name}: it does not know that {name} leaves, and waits")
