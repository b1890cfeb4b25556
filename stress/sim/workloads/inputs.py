"""Inputs of simulated peers to collectives; they depend on seed, peer, iteration and tag only."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.stress.sim.scenarios.scenario import Slot


def draw_input(slot: Slot, seed: int, peer: int, iteration: int) -> npt.NDArray[Any]:
    """Draw values of very different magnitudes, so that a result shows the order of additions."""
    rng = np.random.default_rng([seed, int(peer), iteration, slot.tag])
    dtype = slot.data_type.to_numpy_dtype()
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min // 2, info.max // 2, slot.count, dtype=dtype)
    if slot.quantization.active:
        return rng.standard_normal(slot.count).astype(dtype)
    scale = 10.0 ** rng.integers(-6, 7, slot.count)
    with np.errstate(over="ignore"):  # values too large for float16 become infinite
        return (rng.standard_normal(slot.count) * scale).astype(dtype)


def draw_weight(slot: Slot, seed: int, peer: int, iteration: int) -> float:
    """Draw the weight of an input: often about 1, sometimes 0 or very large."""
    if not slot.weighted:
        return 0.0
    rng = Random("/".join(map(str, (seed, peer, iteration, slot.tag))))
    return rng.choice((0.0, 1.0, rng.uniform(0.5, 1), rng.uniform(0.5, 1), rng.uniform(0, 9e5)))
