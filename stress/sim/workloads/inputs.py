"""Inputs of simulated peers to collectives; they depend on seed, peer, iteration and tag only."""

from __future__ import annotations

import enum
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.stress.sim.scenarios.scenario import Slot

Array = npt.NDArray[Any]


class Flaw(enum.Enum):
    """What is wrong with a contribution to a guarded average."""

    NONE = "none"
    NOT_FINITE = "not finite"
    """Some or all values are NaN or infinite, as its member declares."""
    LIE = "lie"
    """The same, but its member declares the norm of the other values."""
    LARGE = "large"
    """All values are 10 to 1000 times as large as usual."""
    WRONG_NORM = "wrong norm"
    """The declared norm is between 1/1000 and 1000 times the norm."""


_SOUND = 0.7
"""Share of the contributions to guarded averages without a flaw."""


def draw_flaw(*where: int) -> tuple[Flaw, float]:
    """Draw a flaw and its size, from 0 to 1, for a contribution to a guarded average.

    Args:
        where: the seed, and numbers that tell the contributions of a run apart.
    """
    rng = Random("/".join(map(str, (*where, "flaw"))))
    flaw = Flaw.NONE if rng.random() < _SOUND else rng.choice(tuple(Flaw)[1:])
    return flaw, rng.random()


def draw_input(slot: Slot, seed: int, peer: int, iteration: int) -> Array:
    """Draw values of very different magnitudes, so that a result shows the order of additions."""
    rng = np.random.default_rng([seed, int(peer), iteration, slot.tag])
    dtype = slot.data_type.to_numpy_dtype()
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min // 2, info.max // 2, slot.count, dtype=dtype)
    if slot.quantization.active:
        values = rng.standard_normal(slot.count)
    else:  # no sum of finite values may overflow in a guarded average: it would look like a lie
        low, high = (-6, 7) if slot.guard is None else (-3, 1)
        scale = 10.0 ** rng.integers(low, high, slot.count)
        values = rng.standard_normal(slot.count) * scale
    if slot.guard is not None:
        flaw, size = draw_flaw(seed, peer, iteration, slot.tag)
        if flaw is Flaw.LARGE:
            values *= 10 ** (1 + 2 * size)
        elif flaw in (Flaw.NOT_FINITE, Flaw.LIE):
            spoil(values, size, rng)
    with np.errstate(over="ignore"):  # values too large for float16 become infinite
        return values.astype(dtype)


def spoil(values: Array, size: float, rng: np.random.Generator) -> None:
    """Replace one value, or a share ``size`` of the values, by NaN or infinities."""
    where = rng.random(len(values)) < (size if size > 0.5 else 0)
    where[rng.integers(len(values))] = True
    values[where] = rng.choice((np.nan, np.inf, -np.inf))


def declared_norm(values: Array, flaw: Flaw, size: float) -> float | None:
    """Return the L2 norm that a member declares for its contribution; None: not finite."""
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    if len(finite) < len(wide) and flaw is not Flaw.LIE:
        return None
    factor = 10 ** (6 * size - 3) if flaw is Flaw.WRONG_NORM else 1.0
    return factor * float(np.sqrt(np.square(finite).sum()))


def draw_weight(slot: Slot, seed: int, peer: int, iteration: int) -> float:
    """Draw the weight of an input: often about 1, sometimes 0 or very large."""
    if not slot.weighted:
        return 0.0
    rng = Random("/".join(map(str, (seed, peer, iteration, slot.tag))))
    return rng.choice((0.0, 1.0, rng.uniform(0.5, 1), rng.uniform(0.5, 1), rng.uniform(0, 9e5)))
