"""The shared state of a simulated application: what a seed draws, what a process holds.

Between two synchronizations, members change the state as a function of the last one only. So all
members of that synchronization hold the same contents again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import OperationId
from pccl.runtime.state.memory.state_memory import StateMemory

Bytes = npt.NDArray[np.uint8]

Contents = tuple[bytes, ...]
"""Bytes of all tensors, in order."""

_SHARE = 0.4
"""Share of seeds whose members synchronize shared state."""

_CHECKPOINTS = (0, 0, 0, 2, 7)
"""Revisions with which processes start."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of the shared state."""

    data_type: DataType
    count: int
    may_differ: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.data_type.itemsize


class Recipe(enum.Enum):
    """Which contents win an election."""

    POPULAR = "popular"
    SENDERS = "senders"
    """Members that have synchronized send, and newcomers receive. A member that finds no sender
    loads a checkpoint, and sends."""


@dataclass(frozen=True, slots=True)
class Syncs:
    """What members synchronize in every iteration, and how. Floats are probabilities."""

    tensors: tuple[StateTensor, ...]
    piece_bytes: int
    recipe: Recipe = Recipe.POPULAR
    tracks: bool = False
    """Whether the application tells the library which tensors it changed."""
    in_place: float = 0.0
    """A first synchronization writes straight into the tensors."""
    drifts: float = 0.0
    """A process changes a byte that it should not."""
    lags: float = 0.0
    """A process does not change its state after a synchronization, unlike the other members."""
    expects: float = 0.0
    """A member expects to receive nothing."""
    verifies: float = 0.0
    """All members compare their states after a synchronization."""
    spoils: float = 0.0
    """One member changes a byte before the members compare their states."""
    prefetches: float = 0.0
    """A newcomer fetches the state before its admission."""

    @property
    def keeps_step(self) -> bool:
        """Whether members may synchronize without others.

        Each has the contents of all others, unless it missed a call. And none compares its state
        with those of all others, which may be in another call.
        """
        differ = self.drifts or self.lags or self.spoils or self.verifies or self.expects
        return self.recipe is Recipe.POPULAR and not differ

    @property
    def has_drift(self) -> bool:
        """Whether members may offer different contents of the same revision."""
        return self.drifts > 0 or (self.spoils > 0 and self.verifies > 0)


def draw_syncs(seed: int) -> Syncs | None:
    """Draw the shared state of ``seed``; None: the seed has none."""
    rng = Random(f"{seed}/state")
    if rng.random() >= _SHARE:
        return None
    sizes = (1, 3, 40, 160, rng.randint(1, 400))
    types = tuple(DataType)
    tensors = [StateTensor(rng.choice(types), rng.choice(sizes)) for _ in range(rng.randint(1, 4))]
    tensors += [
        StateTensor(DataType.BFLOAT16, rng.choice(sizes)),
        StateTensor(DataType.FLOAT, 0),
        StateTensor(DataType.INT64, 1),
        StateTensor(DataType.FLOAT16, rng.choice(sizes), may_differ=True),
    ]
    rng.shuffle(tensors)
    recipe = rng.choice((Recipe.POPULAR, Recipe.POPULAR, Recipe.POPULAR, Recipe.SENDERS))
    popular = recipe is Recipe.POPULAR
    drifts = rng.choice((0.0, 0.0, 0.1, 0.5))
    lags = rng.choice((0.0, 0.0, 0.1, 0.5))
    spoils = rng.choice((0.0, 0.3))
    return Syncs(
        tensors=tuple(tensors),
        piece_bytes=rng.choice((32, 64, 256)),
        recipe=recipe,
        tracks=rng.random() < 0.5,
        in_place=rng.choice((0.0, 0.0, 0.5)),
        drifts=drifts if popular else 0.0,
        lags=lags if popular else 0.0,
        expects=rng.choice((0.0, 0.3)),
        verifies=rng.choice((0.0, 0.0, 0.3)),
        spoils=spoils if popular else 0.0,
        prefetches=Random(f"{seed}/prefetch").choice((0.0, 0.0, 0.5, 1.0)),
    )


@dataclass(frozen=True, slots=True)
class HeldState:
    """A tensor as the library sees it; ``dtype`` says how to read its bytes."""

    name: str
    numel: int
    dtype: DataType
    allow_content_inequality: bool
    tensor: Any
    is_cuda: bool = False

    @property
    def data_ptr(self) -> int:
        """Address of the tensor's memory."""
        address: int = self.tensor.ctypes.data
        return address


class SimState:
    """The shared state of one process.

    Args:
        syncs: its tensors and options.
        seed: seed of the scenario.
        rng: random generator of the process.
        is_common: whether the process starts with contents that all such processes share.

    Attributes:
        revision: revision of the contents.
        lineage: the synchronization that the contents come from.
        memory: the tensors, as the library sees them.
        holder: name of its process.
        is_lent_in_place: whether an open call may write into the tensors before the outcome.
        has_prefetched: whether the next synchronization may find prefetched pieces here.
    """

    def __init__(
        self, syncs: Syncs, seed: int, rng: Random, holder: str, *, is_common: bool
    ) -> None:
        self.revision = rng.choice(_CHECKPOINTS)
        self.lineage: Lineage | None = None
        self.holder = holder
        self.is_lent_in_place = False
        self.has_prefetched = False
        self._seed = seed
        self._rng = rng
        self._syncs = syncs
        # One byte after the start of an allocation: no tensor is aligned.
        self._arrays: list[Bytes] = [
            np.zeros(one.nbytes + 1, np.uint8)[1:] for one in syncs.tensors
        ]
        self.memory = StateMemory(
            [
                HeldState(f"t{index}", one.count, one.data_type, one.may_differ, array)
                for index, (one, array) in enumerate(zip(syncs.tensors, self._arrays, strict=True))
            ],
            track_touched=syncs.tracks,
            piece_bytes=syncs.piece_bytes,
        )
        self._settled: Contents = self.contents()
        self.load(Random(f"{seed}/contents") if is_common else rng)

    def contents(self) -> Contents:
        """Return a copy of all tensors."""
        return tuple(array.tobytes() for array in self._arrays)

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        """Record the revision and the synchronization."""
        self.revision, self.lineage = revision, lineage

    # -- ownership of the memory ----------------------------------------------------------------

    def returned(self) -> Contents:
        """Record that a call returned: from now on only the process may write."""
        self._settled = self.contents()
        return self._settled

    @property
    def is_intact(self) -> bool:
        """Whether only the process has written since the last call returned."""
        return self._settled == self.contents()

    # -- what the application does ---------------------------------------------------------------

    def load(self, rng: Random) -> None:
        """Replace the contents by random bytes."""
        for array in self._arrays:
            array[:] = np.frombuffer(rng.randbytes(array.size), np.uint8)
        self._changed(range(len(self._arrays)))

    def advance(self, operation: OperationId) -> None:
        """Change the state as all members of this synchronization do."""
        rng = Random(f"{self._seed}/{operation}/{self.revision}")
        changed: list[int] = []
        for index, (one, array) in enumerate(zip(self._syncs.tensors, self._arrays, strict=True)):
            first, last = sorted((rng.random(), rng.random()))
            if one.may_differ:
                rng_here = self._rng
            elif rng.random() < 0.4:
                continue
            else:
                rng_here = rng
            part = array[int(first * array.size) : int(last * array.size) + 1]
            part ^= np.frombuffer(rng_here.randbytes(part.size), np.uint8)
            changed.append(index)
        self.revision += 1
        self._changed(changed)

    def drift(self) -> None:
        """Change a byte that should be equal on all members."""
        candidates = [
            index
            for index, one in enumerate(self._syncs.tensors)
            if one.count and not one.may_differ
        ]
        index = self._rng.choice(candidates)
        array = self._arrays[index]
        array[self._rng.randrange(array.size)] ^= self._rng.randint(1, 255)
        self._changed((index,))

    def _changed(self, tensors: Sequence[int]) -> None:
        for index in tensors:
            self.memory.touch(index)
        self._settled = self.contents()


def shared(contents: Contents, tensors: tuple[StateTensor, ...]) -> Contents:
    """Return the tensors that must be equal on all members."""
    return tuple(c for c, one in zip(contents, tensors, strict=True) if not one.may_differ)


def free(contents: Contents, tensors: tuple[StateTensor, ...]) -> Contents:
    """Return the tensors that may differ between members."""
    return tuple(c for c, one in zip(contents, tensors, strict=True) if one.may_differ)
