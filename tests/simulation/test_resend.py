"""What a loss costs, as ``python -m pccl.stress resend`` measures it."""

from __future__ import annotations

import pytest

from pccl.stress.studies.resend import COUNT, PERCENTS, Loss, losses


@pytest.fixture(scope="module")
def found() -> list[Loss]:
    """Four members; results are checked where they are measured."""
    return list(losses(4))


def test_a_late_death_is_repaired_and_costs_what_was_missing(found: list[Loss]) -> None:
    """All partial sums have left a member of four after four of six steps."""
    assert [loss.percent for loss in found if loss.repaired] == [70, 90]
    left = {loss.percent: loss.ratio for loss in found}
    assert 0.1 < left[70] < 0.4
    assert left[90] < 0.15
    assert all(loss.seconds_after < 0.5 * loss.seconds_repeat for loss in found[-2:])


def test_an_early_death_costs_a_repeat(found: list[Loss]) -> None:
    """All that survivors sent before counts for nothing; what was still on its way costs a bit."""
    repeat = 2 * (3 - 1) * COUNT * 4
    assert [loss.percent for loss in found] == list(PERCENTS)
    assert all(repeat < loss.bytes_repeat < 1.01 * repeat for loss in found)
    assert all(1 < loss.ratio < 1.05 for loss in found if not loss.repaired)
