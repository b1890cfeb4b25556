from __future__ import annotations

import math
from typing import Any

import pytest

from pccl.stress.studies.quality.results import FinishedRun
from pccl.stress.studies.quality.statistics import (
    STUDENT_95,
    best,
    by_settings,
    excess,
    is_at_edge,
)


def finished(lr: float, seed: int, loss: float, name: str = "sync") -> FinishedRun:
    settings: dict[str, Any] = {"lr": lr, "outer_lr": 1.0, "outer_momentum": 0.0}
    return FinishedRun(name=name, seed=seed, loss=loss, digest="", cpu_s=0.0, settings=settings)


def test_an_interval_is_that_of_the_paired_t_test() -> None:
    # Differences +1, +2 and +3 %: mean 2, standard error 1 / sqrt(3), t = 4.303 for 2 degrees.
    found = excess({0: 1.01, 1: 2.04, 2: 4.12}, {0: 1.0, 1: 2.0, 2: 4.0})
    assert found is not None
    assert found.mean == pytest.approx(2.0)
    assert found.high == pytest.approx(2 + 4.303 / math.sqrt(3))
    assert found.low == pytest.approx(2 - 4.303 / math.sqrt(3))
    assert (found.above, found.pairs) == (3, 3)
    assert str(found) == "+2.00 % (-0.48 to +4.48)"


def test_only_seeds_of_both_variants_are_compared() -> None:
    found = excess({0: 1.0, 1: 1.1, 7: 9.0}, {1: 1.0, 8: 1.0})
    assert found is not None
    assert (found.pairs, found.low, found.high) == (1, -math.inf, math.inf)
    assert str(found) == "+10.00 % (one pair)"
    assert excess({0: 1.0}, {1: 1.0}) is None


def test_more_pairs_than_quantiles_are_refused() -> None:
    losses = dict.fromkeys(range(len(STUDENT_95) + 2), 1.0)
    with pytest.raises(ValueError, match="at most 21 pairs"):
        excess(losses, losses)


def test_the_best_settings_have_the_lowest_mean_over_the_seeds_of_all() -> None:
    low, high, failed = (0.1, 1.0, 0.0), (0.2, 1.0, 0.0), (0.4, 1.0, 0.0)
    # Over all seeds, 0.2 would win; over those that both have, 0.1 does.
    tried = {low: {0: 1.0, 1: 1.2}, high: {0: 1.1, 1: 1.3, 2: 0.1}, failed: {0: math.nan, 1: 0.1}}
    assert best(tried) == low
    with pytest.raises(ValueError, match="finish the sweep"):
        best({low: {0: 1.0}, high: {1: 1.0}})


def test_runs_are_grouped_by_name_and_settings() -> None:
    runs = [finished(0.1, 0, 1.5), finished(0.1, 1, 1.6), finished(0.2, 0, 1.4)]
    assert by_settings([*runs, finished(0.1, 0, 2.0, "late")]) == {
        "sync": {(0.1, 1.0, 0.0): {0: 1.5, 1: 1.6}, (0.2, 1.0, 0.0): {0: 1.4}},
        "late": {(0.1, 1.0, 0.0): {0: 2.0}},
    }


def test_a_rate_is_at_the_edge_only_among_others() -> None:
    assert is_at_edge(0.1, [0.1, 0.2, 0.3])
    assert is_at_edge(0.3, [0.1, 0.2, 0.3])
    assert not is_at_edge(0.2, [0.1, 0.2, 0.3])
    assert not is_at_edge(0.1, [0.1, 0.1])
