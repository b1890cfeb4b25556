"""Many open tags: two peers start them in opposite order, and one log line counts what waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from pccl import AsyncReduceHandle, Result
from tests.integration.conftest import QUICK, Run
from tests.support.patience import LONG_LIMIT_S

TAGS = 2_000


def test_tags_in_opposite_order(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """A cost that grows with the square of the open tags would take minutes here."""
    run = new_run(2, replace(QUICK, waiting_report_s=1.0))
    arrays = [[np.full(4, rank + 1.0) for _ in range(TAGS)] for rank in range(2)]

    def launch(rank: int, tags: Iterable[int]) -> list[AsyncReduceHandle]:
        return [run.members[rank].all_reduce_async(arrays[rank][tag], tag=tag) for tag in tags]

    def wait_lines() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if " have waited " in line]

    all_wait = f"tag 0 (SUM of 4 x float64) and {TAGS - 1} others have waited "
    with caplog.at_level(logging.DEBUG, "pccl"):
        handles = launch(0, range(TAGS))
        run.until(lambda: any(line.startswith(all_wait) for line in wait_lines()))
        handles += run.start(launch, 1, reversed(range(TAGS))).result(LONG_LIMIT_S)
        assert {handle.wait()[:2] for handle in handles} == {(True, Result.SUCCESS)}
    assert all(array.tolist() == [3.0] * 4 for mine in arrays for array in mine)
    assert len(wait_lines()) < 20  # each report comes after twice the time of the one before
