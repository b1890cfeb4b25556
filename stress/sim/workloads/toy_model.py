"""A minimal model whose parameters show every inner step.

Every process owns places in the parameters. Its inner step k subtracts ``4 ** (k % 8)`` from its
place number ``k // 8``, in all fragments. Members add up their work, and the outer step subtracts
the sum from the outer parameters. So the digits of the outer parameters, in base 4, show how often
they contain each inner step of each process.

If merges mix, they keep half of the work that they discard otherwise. Then a step subtracts twice
as much, so that half of it is a whole number, too.

With extras, each process also has two buffers: a number, which members average, and its count of
inner steps, which they take from one member. That count is its inner optimizer's state, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.bindings.diloco.ledger import Ledger
from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import Lineage
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.stress.sim.workloads.syncs import HeldState

Whole = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

PLACES = 32
"""Number of places of each process in each fragment; steps beyond their capacity do nothing."""

_DEVIATION_MAX = 0.05
"""Maximum deviation from a whole number of an average times its weight."""

DIGITS = 8
"""Number of digits in one place."""

CODED_DIGITS = 4
"""Number of digits if rounds are compressed: then rounding errors are much less than 1."""

_CODED_DEVIATION_MAX = 0.45

_BUFFERS = 2
_HEAD = 2


def digit(step: int, digits: int, unit: int = 1) -> tuple[int, int]:
    """Return place and value of an inner step; the value is 0 if no place is left.

    Args:
        step: number of the step.
        digits: number of inner steps in one place.
        unit: digit of a whole step.
    """
    place = step // digits
    return (place, unit * 4 ** (step % digits)) if place < PLACES else (0, 0)


def steps_in(work: Whole, unit: int = 1) -> float:
    """Return the number of inner steps in some work; half a step counts as a half."""
    halves = sum(int(value) >> shift & 3 for value in work if value for shift in range(0, 62, 2))
    return halves / unit


def places_of(axis: int) -> slice:
    """Return the places of a process in a fragment."""
    return slice(axis * PLACES, (axis + 1) * PLACES)


def whole(values: npt.NDArray[Any], *, coded: bool = False) -> Whole:
    """Round values that are whole numbers, except for rounding errors.

    Args:
        values: the values, of any shape.
        coded: whether they were compressed.

    Raises:
        AssertionError: a value is too far from a whole number.
    """
    found: npt.NDArray[np.float64] = np.rint(values)
    deviation = _CODED_DEVIATION_MAX if coded else _DEVIATION_MAX
    assert np.all(np.abs(values - found) < deviation), "the values are not whole numbers"
    return found.astype(np.int64)


class ToyOuter:
    """The outer parameters and the ledger of one process: its shared state.

    Args:
        fragments: number of fragments.
        axes: maximum number of processes.
        piece_bytes: size of a piece of the shared state.
        extras: whether there are buffers, and a state of the inner optimizer.
        samples: ledger of the samples; None: processes do not count samples.

    Attributes:
        revision: as in ``State``.
        lineage: as in ``State``.
        record: memory of the ledger and of the buffers.
        ledger: see ``rounds.Outer``.
        buffers: shape (2,): an average, and a count of inner steps.
        values: by fragment, shape (axes * PLACES,).
        inner_steps: inner steps of the process.
        offered: shape (2,): whether a member has offered its inner steps to this process or this
            one has offered its own, and the number.
    """

    def __init__(
        self,
        fragments: int,
        axes: int,
        piece_bytes: int,
        *,
        extras: bool = False,
        samples: SampleLedger | None = None,
    ) -> None:
        self.samples = samples
        self.revision = 0
        self.lineage: Lineage | None = None
        self._extras = extras
        self.inner_steps = 0
        self.offered = np.zeros(2, np.int64)
        self.record = np.zeros(Ledger.SIZE + _BUFFERS * extras, np.int64)
        self.ledger = Ledger(self.record[: Ledger.SIZE])
        self.buffers: Doubles = self.record[Ledger.SIZE :].view(np.float64)
        self.values = [np.zeros(axes * PLACES, np.int64) for _ in range(fragments)]
        arrays = [*self.values, self.record, *[self.offered] * extras]
        self._samples_index = len(arrays)
        if samples is not None:
            arrays.append(samples.record)
        self.memory = StateMemory(
            [
                HeldState(f"t{i}", a.size, DataType.INT64, a is self.offered, a)
                for i, a in enumerate(arrays)
            ],
            track_touched=True,
            piece_bytes=piece_bytes,
        )

    def load(self, contents: tuple[bytes, ...], revision: int) -> None:
        """Load what ``contents`` returned in another process."""
        self.revision = revision
        for index, content in enumerate(contents):
            array = self.record if index == len(self.values) else self.values[index]
            array[:] = np.frombuffer(content, np.int64)
            self.memory.touch(index)

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        """Record the revision and the synchronization."""
        self.revision, self.lineage = revision, lineage

    def contents(self) -> tuple[bytes, ...]:
        """Return a copy of all outer parameters and the ledger."""
        return tuple(array.tobytes() for array in (*self.values, self.record))

    def nothing(self, fragment: int) -> Floats:
        """Return a contribution of zeros."""
        return np.zeros(self.values[fragment].shape, np.float32)

    def offer(self) -> None:
        """Offer the inner steps to late processes."""
        self.offered[:] = 1, self.inner_steps
        if self._extras:
            self.memory.touch(len(self.values) + 1)

    def no_buffers(self, fragment: int) -> Doubles | None:
        """Return zeros for the last fragment, which the buffers go with."""
        return np.zeros(_HEAD + _BUFFERS) if self._has_buffers(fragment) else None

    def apply(self, fragment: int, average: Floats, buffers: Doubles | None) -> tuple[float, float]:
        """Subtract the average, which is a sum here, from the outer parameters."""
        self.values[fragment] -= whole(average)
        if buffers is not None:
            weight, givers, weighted, count = buffers.tolist()
            if weight:
                self.buffers[0] = weighted / weight
            if givers:
                assert givers == 1.0, "two members gave their counts"
                self.buffers[1] = count
        return 0.0, 0.0

    def common_buffers(self) -> Doubles:
        """Return a copy of the buffers."""
        return self.buffers.copy()

    def copy(self, fragment: int, target: Floats) -> None:
        """Copy the outer parameters of the fragment into ``target``."""
        target[:] = self.values[fragment]

    def _has_buffers(self, fragment: int) -> bool:
        return self._extras and fragment == len(self.values) - 1

    def touch(self, fragment: int | None) -> None:
        """Mark the ledger, and the fragment if one is named, as changed."""
        self.memory.touch(len(self.values))
        if self.samples is not None:
            self.memory.touch(self._samples_index)
        if fragment is not None:
            self.memory.touch(fragment)


class ToyPart:
    """One fragment of the local parameters; see ``local_trainer.ModelPart``.

    Args:
        axis: chooses the places of the process.
        axes: maximum number of processes.

    Attributes:
        params: shape (axes * PLACES,).
        base: the difference to ``params`` is the work since the last exchange.
        given_up: the work that the last merge dropped.
    """

    def __init__(self, axis: int, axes: int) -> None:
        self._axis = axis
        self.params = np.zeros(axes * PLACES, np.int64)
        self.base = self.params.copy()
        self.given_up = self.params.copy()

    def step(self, place: int, value: int) -> None:
        """Make an inner step: subtract ``value`` at ``place``."""
        self.params[self._axis * PLACES + place] -= value

    def work(self) -> Whole:
        """Return the work since the base."""
        return self.base - self.params

    def take(self) -> Whole:
        """Return the work since the base; the present parameters become the base."""
        work = self.work()
        self.base = self.params.copy()
        return work

    def put_back(self, work: Whole) -> None:
        """Move the base back, so that ``work`` counts as work since the base again."""
        self.base += work

    def preview(self, common: Floats, state: None, work: Whole, share: float) -> Floats:
        """Subtract own work from outer parameters: all of it, because the average is a sum here."""
        return common - work.astype(np.float32)

    def merge(self, common: Floats, mixing: float) -> None:
        """Replace the parameters by outer parameters; drop the work, except for its share."""
        work = self.work()
        kept = (work * mixing).astype(np.int64)
        assert np.array_equal(kept, work * mixing), "a step was halved twice"
        self.given_up, self.base = work - kept, whole(common)
        self.params = self.base - kept

    def anchor(self, common: Any, lost: Iterable[Whole]) -> bool:
        """Take outer parameters as the base, and add the work since the old base and lost work."""
        work = sum(lost, start=self.work())
        self.base = whole(common)
        self.params = self.base - work
        return True


class ToyBuffers:
    """The buffers of one process; see ``local_trainer.ModelBuffers``.

    Attributes:
        values: shape (2,): a number that each inner step changes, and the number of inner steps.
    """

    def __init__(self, axis: int) -> None:
        self.values: Doubles = np.array([float(axis), 0.0])

    def step(self) -> None:
        """Make an inner step."""
        self.values += (0.5, 1.0)

    def take(self, weight: float) -> Doubles:
        """Return the weight, 1, the first number times the weight, and the second one."""
        taken = np.array([weight, 1.0, self.values[0] * weight, self.values[1]])
        return taken if weight else np.zeros(_HEAD + _BUFFERS)

    def anchor(self, common: Doubles) -> None:
        """Replace both numbers."""
        self.merge(common, 0.0)

    def merge(self, common: Doubles, mixing: float) -> None:
        """Replace both numbers; keep a share of the one that is averaged."""
        mixed = mixing * self.values[0] + (1 - mixing) * common[0]
        self.values[:] = mixed, common[1]


class ToyReplica:
    """The local parameters of one process, and its work in flight.

    Args:
        fragments: number of fragments.
        axis: chooses the places of the process.
        axes: maximum number of processes.
        digits: number of inner steps in one place.
        unit: digit of a whole step.

    Attributes:
        parts: by fragment.
        buffers: the buffers.
        taken: pseudo-gradients in flight, by number of the round.
        returned: fragments with work of a round that went on without the process, not taken since.
        taken_at: number of inner steps before each of them was taken.
        flown: those of them whose outcomes come from a checkpoint.
    """

    def __init__(
        self, fragments: int, axis: int, axes: int, digits: int = DIGITS, unit: int = 1
    ) -> None:
        self.axis = axis
        self._digits, self._unit = digits, unit
        self.parts = [ToyPart(axis, axes) for _ in range(fragments)]
        self.buffers = ToyBuffers(axis)
        self.taken: dict[int, Whole] = {}
        self.returned: set[int] = set()
        self.taken_at: dict[int, int] = {}
        self.flown: dict[int, Whole] = {}

    def step(self, number: int) -> None:
        """Make an inner step in all fragments."""
        place, value = digit(number, self._digits, self._unit)
        for part in self.parts:
            part.step(place, value)
        self.buffers.step()
