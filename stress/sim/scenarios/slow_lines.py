"""Scenarios in which peers are behind routers with slow lines and long queues."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pccl.stress.sim.scenarios.scenario import TIMINGS, Scenario, draw
from pccl.transports.sim.ports import PortRates

_PEERS_MAX = 6
"""With more peers, virtual time would pass too slowly."""

_MBIT = 125_000
_RATES = ((1, 1), (1, 1), (1, 10), (2, 1), (10, 10))
"""Up and down, in Mbit/s."""

_LARGE_BYTES = 1_000_000
"""A tensor of this size is the only one of its run: virtual time is limited."""

_QUEUES_BYTES = (16 << 10, 256 << 10, 1 << 20, 1 << 20)


def draw_on_slow_lines(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which all peers, or every second one, have slow lines.

    Tensors are larger than elsewhere, so that data fill the lines. Everything else is drawn as in
    ``draw``, but the deadlines are not shorter than the defaults.
    """
    plain = draw(seed)
    if plain.peers > _PEERS_MAX:
        return plain
    rng = Random(f"{seed}/slow lines")
    up, down = rng.choice(_RATES)
    port = PortRates(up * _MBIT, down * _MBIT, rng.choice(_QUEUES_BYTES))
    nbytes = rng.choice((100_000, 400_000, 2_000_000))
    slots = tuple(
        replace(slot, count=max(slot.count, nbytes // slot.data_type.itemsize))
        for slot in (plain.slots if nbytes < _LARGE_BYTES else plain.slots[:1])
    )
    timing = plain.timing if plain.timing != TIMINGS["quick"] else TIMINGS["default"]
    return replace(
        plain,
        port=port,
        port_every=rng.choice((1, 1, 2)),
        slots=slots,
        broadcasts=plain.broadcasts and nbytes < _LARGE_BYTES,
        timing=timing,
        segment_bytes=max(plain.segment_bytes, rng.choice((4, 16, 128)) << 10),
        window_bytes=256 << 10,
    )
