"""The smallest model in which every inner step can be found again.

Every process has places of its own in the parameters. Its inner step k takes ``4 ** (k % 8)``
away from the place number ``k // 8`` of them, in all fragments. Members add up what they have done,
and the outer step takes that away from the outer parameters. So these tell, digit by digit in base
4, how often each inner step of each process is in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.bindings.diloco.ledger import Ledger
from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import Lineage
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.stress.sim.workloads.syncs import HeldState

Whole = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

PLACES = 32
"""Of each process in each fragment; more inner steps than fit into them do nothing."""

_DEVIATION_MAX = 0.05
"""From a whole number, after an average was multiplied by its weight again."""

DIGITS = 8
"""In one place."""

CODED_DIGITS = 4
"""Likewise, where rounds are compressed: what is lost is much less than 1."""

_CODED_DEVIATION_MAX = 0.45


def digit(step: int, digits: int) -> tuple[int, int]:
    """Place and value of an inner step; the value is 0 if there is no place left."""
    place = step // digits
    return (place, 4 ** (step % digits)) if place < PLACES else (0, 0)


def places_of(axis: int) -> slice:
    """Where the work of a process is in a fragment."""
    return slice(axis * PLACES, (axis + 1) * PLACES)


def whole(values: npt.NDArray[Any], *, coded: bool = False) -> Whole:
    """Numbers that must be whole but for roundings.

    Args:
        values: they.
        coded: whether they were compressed.

    Raises:
        AssertionError: one is not.
    """
    found: npt.NDArray[np.float64] = np.rint(values)
    deviation = _CODED_DEVIATION_MAX if coded else _DEVIATION_MAX
    assert np.all(np.abs(values - found) < deviation), "an average of other work"
    return found.astype(np.int64)


class ToyOuter:
    """The outer parameters of one process, and the ledger: its shared state.

    Args:
        fragments: how many.
        axes: as many processes may there be.
        piece_bytes: of the shared state.

    Attributes:
        revision: as of ``State``.
        lineage: as of ``State``.
        record: the ledger's memory.
        ledger: see ``rounds.Outer``.
        values: by fragment, shape (axes * PLACES,).
    """

    def __init__(self, fragments: int, axes: int, piece_bytes: int) -> None:
        self.revision = 0
        self.lineage: Lineage | None = None
        self.record = np.zeros(Ledger.SIZE, np.int64)
        self.ledger = Ledger(self.record)
        self.values = [np.zeros(axes * PLACES, np.int64) for _ in range(fragments)]
        arrays = [*self.values, self.record]
        self.memory = StateMemory(
            [HeldState(f"t{i}", a.size, DataType.INT64, False, a) for i, a in enumerate(arrays)],
            track_touched=True,
            piece_bytes=piece_bytes,
        )

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        """Note the revision and the synchronization."""
        self.revision, self.lineage = revision, lineage

    def contents(self) -> tuple[bytes, ...]:
        """A copy of everything."""
        return tuple(array.tobytes() for array in (*self.values, self.record))

    def nothing(self, fragment: int) -> Floats:
        """A contribution of zeros."""
        return np.zeros(self.values[fragment].shape, np.float32)

    def apply(self, fragment: int, average: Floats) -> float:
        """Subtract the average, which is a sum here, from the outer parameters."""
        self.values[fragment] -= whole(average)
        return 0.0

    def copy(self, fragment: int, target: Floats) -> None:
        """Copy the outer parameters of the fragment into ``target``."""
        target[:] = self.values[fragment]

    def touch(self, fragment: int | None) -> None:
        """Mark the ledger, and the fragment if one is named, as changed."""
        self.memory.touch(len(self.values))
        if fragment is not None:
            self.memory.touch(fragment)


class ToyPart:
    """One fragment of the local parameters; see ``local_trainer.ModelPart``.

    Args:
        axis: which places are the process's own.
        axes: as many processes may there be.

    Attributes:
        params: shape (axes * PLACES,).
        base: the difference to ``params`` is the work that nobody else has.
        given_up: the work that the last merge has left out.
    """

    def __init__(self, axis: int, axes: int) -> None:
        self._axis = axis
        self.params = np.zeros(axes * PLACES, np.int64)
        self.base = self.params.copy()
        self.given_up = self.params.copy()

    def step(self, place: int, value: int) -> None:
        """Make an inner step."""
        self.params[self._axis * PLACES + place] -= value

    def work(self) -> Whole:
        """What was done since the base."""
        return self.base - self.params

    def take(self) -> Whole:
        """The work since the base; the present parameters become the base."""
        work = self.work()
        self.base = self.params.copy()
        return work

    def put_back(self, work: Whole) -> None:
        """Count the work as not taken."""
        self.base += work

    def merge(self, common: Floats, mixing: float) -> None:
        """Take over outer parameters and give up the work; nothing is mixed."""
        assert not mixing
        self.given_up = self.work()
        self.params, self.base = whole(common), whole(common)

    def anchor(self, common: Any, lost: Iterable[Whole]) -> bool:
        """Take over outer parameters; keep the work, and what was taken and is lost."""
        work = sum(lost, start=self.work())
        self.base = whole(common)
        self.params = self.base - work
        return True


class ToyReplica:
    """The local parameters of one process, and where its work was last accounted for.

    Args:
        fragments: how many.
        axis: which places are its own.
        axes: as many processes may there be.
        digits: inner steps in one place.

    Attributes:
        parts: by fragment.
        taken: pseudo-gradients in flight, by number of the round.
    """

    def __init__(self, fragments: int, axis: int, axes: int, digits: int = DIGITS) -> None:
        self.axis = axis
        self._digits = digits
        self.parts = [ToyPart(axis, axes) for _ in range(fragments)]
        self.taken: dict[int, Whole] = {}

    def step(self, number: int) -> None:
        """Make an inner step."""
        place, value = digit(number, self._digits)
        for part in self.parts:
            part.step(place, value)
