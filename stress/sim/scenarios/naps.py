"""Scenarios in which members nap, and the others go on without them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.draws import OF_NAPS, draw_faults
from pccl.stress.sim.scenarios.scenario import Scenario, draw, with_quorum
from pccl.stress.sim.workloads.syncs import Recipe

_DRIFTS = 0.3
"""Share of the runs with shared state in which it may differ, so that all must synchronize."""

_WAITS = 0.2
"""Share of runs with calls that wait for all members."""


def draw_with_naps(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which members nap.

    Everything else is drawn as in ``draw``, but runs take longer, and most have no calls that wait
    for all members.
    """
    plain = draw(seed)
    rng = Random(f"{seed}/naps")
    peers = max(plain.peers, 3)
    longer = replace(
        plain,
        peers=peers,
        late_peers=min(plain.late_peers, peers - 2),
        stop_ns=rng.choice((1, 4, 16)) * plain.stop_ns,
    )
    if rng.random() >= _WAITS:
        longer = replace(
            longer,
            asks_pending=False,
            broadcasts=False,
            barriers=False,
            optimizes=False,
            drops=False,
            buckets=None,
        )
    if longer.syncs is not None and rng.random() >= _DRIFTS:
        kept = replace(longer.syncs, recipe=Recipe.POPULAR, drifts=0.0, lags=0.0, spoils=0.0)
        longer = replace(longer, syncs=replace(kept, verifies=0.0, expects=0.0))
    ground = Ground(peers, longer.stop_ns, longer.latency_ns, longer.timing)
    longer = replace(longer, faults=(*longer.faults, *draw_faults(OF_NAPS, seed, ground)))
    return with_quorum(longer, rng, (0.05, 0.1, 0.2))
