"""``SampleCheckers``: checks that each sample is in the model once, and that the ledger says so.

The outer parameters show which inner steps they contain. So the positions that the ledger has as
done must be those of these steps, none twice, and none missing. Only steps that a merge has
replaced may be done without being in the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.workloads.toy_model import Whole, digit, places_of


class SampleCheckers:
    """Checks the samples of all processes of one run.

    Args:
        digits: number of inner steps in one place of the model.
    """

    def __init__(self, digits: int) -> None:
        self._digits = digits
        self._positions: dict[int, list[list[int]]] = {}
        """Axis -> positions of each of its inner steps."""
        self._replaced: dict[int, Whole] = {}
        """Axis -> digits of the inner steps that merges have replaced."""
        self._checked: set[tuple[bytes, bytes]] = set()

    def trained(self, axis: int, step: int, positions: Sequence[int]) -> None:
        """Record the positions in an inner step of a process."""
        steps = self._positions.setdefault(axis, [])
        assert len(steps) == step
        steps.append(list(positions))

    def replaced(self, axis: int, fragment: int, work: Whole) -> None:
        """Record the work that a merge has replaced."""
        if not fragment:
            self._replaced[axis] = self._replaced.get(axis, 0) | work[places_of(axis)]

    def check(self, who: str, ledger: SampleLedger, values: Whole) -> None:
        """Check a ledger and the first fragment of the outer parameters beside it."""
        key = ledger.record.tobytes(), values.tobytes()
        if key in self._checked:
            return
        self._checked.add(key)
        there: list[int] = []
        excused: set[int] = set()
        for axis, steps in self._positions.items():
            applied = -values[places_of(axis)]
            replaced = self._replaced.get(axis)
            for step, positions in enumerate(steps):
                place, value = digit(step, self._digits, 3)
                if not value or (replaced is not None and replaced[place] & value):
                    excused.update(positions)
                if int(applied[place]) & value:
                    there += positions
        if len(set(there)) < len(there):
            twice = sorted({one for one in there if there.count(one) > 1})
            raise Violation(f"{who}: samples {twice} are in the model twice")
        rest = {one for start, end in ledger.rest for one in range(start, end)}
        done = set(range(ledger.next)) - rest
        if undone := set(there) - done:
            raise Violation(f"{who}: samples {sorted(undone)} are in the model, but not done")
        if lost := done - set(there) - excused:
            raise Violation(f"{who}: samples {sorted(lost)} are done, but not in the model")
