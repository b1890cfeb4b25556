"""Members that keep other values for late members than those of the result."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from pccl.stress.sim.planted_quorums import late_values_unverified
from pccl.stress.sim.planting import PLANTED
from pccl.stress.sim.runner import run_scenario
from pccl.stress.sim.scenarios.mixes import MIXES

SEEDS = range(8)


def test_late_calls_return_no_falsified_values() -> None:
    """The planted bug of that name also believes them, and is found."""
    falsified, _ = PLANTED[late_values_unverified.__name__]
    done: Counter[str] = Counter()
    with patch.object(*falsified):
        for seed in SEEDS:
            verdict = run_scenario(MIXES["quorum"].draw(seed))
            assert verdict.violation is None, (seed, verdict.violation)
            done.update(verdict.done)
    assert done["late result is gone"] > 0
    assert done["late result"] == 0
