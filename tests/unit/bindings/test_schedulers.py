"""The log warns of a scheduler that begins at step 0 in a later run, and of no other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.schedulers import warn_of_late_scheduler  # noqa: E402

schedulers: Any = torch.optim.lr_scheduler


def late(optimizer: Any) -> Any:
    return schedulers.StepLR(optimizer, 100)


def on_time(optimizer: Any) -> Any:
    scheduler = late(optimizer)
    optimizer.step()
    scheduler.step()
    return scheduler


def composite(optimizer: Any) -> Any:
    """Its second part is at step 0 until its turn comes."""
    parts = [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    scheduler = schedulers.SequentialLR(optimizer, parts, milestones=[50])
    optimizer.step()
    scheduler.step()
    return scheduler, parts


def of_another(optimizer: Any) -> Any:
    optimizer.param_groups[0]["initial_lr"] = 1.0  # as from a checkpoint
    return late(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))


def by_metric(optimizer: Any) -> Any:
    optimizer.param_groups[0]["initial_lr"] = 1.0
    return schedulers.ReduceLROnPlateau(optimizer)


def none(optimizer: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "steps", "kind"),
    [
        (late, 300, "StepLR"),
        (late, 0, ""),
        (on_time, 300, ""),
        (composite, 300, ""),
        (of_another, 300, ""),
        (by_metric, 300, ""),
        (none, 300, ""),
    ],
    ids=["late", "a new run", "on time", "composite", "of another", "by metric", "none"],
)
def test_a_scheduler_that_begins_too_late_is_told(
    make: Callable[[Any], Any], steps: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kept = make(optimizer)
    warn_of_late_scheduler(steps, "do this", optimizer)
    begins = f"{kind} begins at step 0, and the run has made 300 steps, so "
    told = [record.message for record in caplog.records]
    assert len(told) == bool(kind)
    assert all(line.startswith(begins) and line.endswith("; do this") for line in told)
    del kept
