"""What simulated peers put into collectives: it depends on seed, peer, iteration and tag only."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.stress.sim.scenarios.scenario import Slot


def draw_input(slot: Slot, seed: int, peer: int, iteration: int) -> npt.NDArray[Any]:
    """Values of very different magnitude, so that the order of additions shows."""
    rng = np.random.default_rng([seed, int(peer), iteration, slot.tag])
    dtype = slot.data_type.to_numpy_dtype()
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min // 2, info.max // 2, slot.count, dtype=dtype)
    if slot.quantization.active:
        return rng.standard_normal(slot.count).astype(dtype)
    scale = 10.0 ** rng.integers(-6, 7, slot.count)
    with np.errstate(over="ignore"):  # some do not fit into float16: then they are infinite
        return (rng.standard_normal(slot.count) * scale).astype(dtype)


def draw_weight(slot: Slot, seed: int, peer: int, iteration: int) -> float:
    """Of such an input: often of one size, sometimes nothing or very much."""
    if not slot.weighted:
        return 0.0
    rng = Random("/".join(map(str, (seed, peer, iteration, slot.tag))))
    return rng.choice((0.0, 1.0, rng.uniform(0.5, 1), rng.uniform(0.5, 1), rng.uniform(0, 9e5)))
