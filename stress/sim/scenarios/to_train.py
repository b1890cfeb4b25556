"""Scenarios in which processes train."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.draws import OF_STATE, PLAIN, draw_faults
from pccl.stress.sim.faults.processes import Interrupt
from pccl.stress.sim.faults.state import FetchInterrupt, Lies
from pccl.stress.sim.scenarios.scenario import Scenario, Style, draw, one_shut, with_quorum
from pccl.stress.sim.workloads.training_plan import draw_training, slowed

_TRAINERS_MAX = 6
_WINDOW_MIN = 4096
"""Smallest window; smaller ones, where a map of pieces takes seconds, have their own test."""
_NOT_FOR_TRAINERS = (Interrupt, FetchInterrupt, Lies)
"""Excluded: no Ctrl-C reaches a trainer's calls, and lies of all sources end a training."""
_LONGER = 4
"""A training run is longer by this factor, because a round consists of several calls."""
_QUORUMS = 0.4
"""Share of runs of at least three processes whose rounds go on without late ones."""
_STEPS = 120
"""Inner steps of the fastest process in the busy part of such a run."""


def draw_to_train(seed: int, *, quorums: bool = True, drains: bool = True) -> Scenario:
    """Draw the scenario of ``seed`` in which processes train.

    Network, deadlines and faults are drawn as in ``draw``, but no process is impatient, interrupted
    or lied to. Runs with a quorum take longer, and some processes nap, or have a slow pace. Without
    ``quorums``, all rounds wait for all processes. Without ``drains``, no process gets notice to
    leave.
    """
    plain = draw(seed, quorums=False)
    peers = min(plain.peers, _TRAINERS_MAX)
    late_peers = min(plain.late_peers, peers - 2)
    training = draw_training(seed, plain.latency_ns)
    if not drains:
        training = replace(training, drains=0.0)
    if peers < 2 * training.shards:
        training = replace(training, shards=1)
    if training.shards > 1:
        training = replace(training, lease=0, samples=None)
    if training.shards > 1:  # replicas are complete, and the first one is early
        peers -= peers % training.shards
        late_peers -= late_peers % training.shards
    stop_ns = max(plain.stop_ns, 12 * plain.latency_ns) * _LONGER
    late = Random(f"{seed}/quorum of training")
    has_quorum = quorums and peers > 2 and late.random() < _QUORUMS
    if has_quorum:
        stop_ns = max(stop_ns, late.choice((0, 2, 20)) * NS_PER_S)
        training = slowed(training, stop_ns // _STEPS, late.choice((1.0, 1.0, 4.0)))
    ground = Ground(peers, stop_ns, plain.latency_ns, plain.timing)
    drawn_faults = (*draw_faults(PLAIN, seed, ground), *draw_faults(OF_STATE, seed, ground))
    faults = tuple(one for one in drawn_faults if not isinstance(one, _NOT_FOR_TRAINERS))
    # A sparse reduce needs a link between each pair of members, direct or relayed.
    relays = plain.relays or training.quantization.is_gathered
    # All must train together, but two undialable processes may never meet.
    faults = one_shut(replace(plain, faults=faults))
    drawn = replace(
        plain,
        peers=peers,
        late_peers=late_peers,
        slots=(),
        style=Style.SEQUENTIAL,
        window_bytes=max(plain.window_bytes, _WINDOW_MIN),
        stop_ns=stop_ns,
        faults=faults,
        asks_pending=False,
        groups=training.shards,
        retries=True,
        broadcasts=False,
        barriers=False,
        optimizes=False,
        min_peers=1,
        impatience=0.0,
        mistake=None,
        drops=False,
        standby=plain.standby or any(fault.needs_standby for fault in faults),
        syncs=None,
        quorum=None,
        naps=0.0,
        buckets=None,
        relays=relays,
        training=training,
    )
    return with_quorum(drawn, late, (0.0, 0.02, 0.05, 0.15)) if has_quorum else drawn
