"""The log warns of a scheduler that begins at step 0 in a later run, and of no other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.schedulers import FollowedScheduler, warn_of_late_scheduler  # noqa: E402

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


def falling(step: int) -> float:
    return 1 / (1 + step)


KINDS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedulers.StepLR(o, 3, 0.5),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 20),
    "lambda": lambda o: schedulers.LambdaLR(o, falling),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=30),
    "composite": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.9)], milestones=[4]
    ),
}


def momentum() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)


def settings(optimizer: Any) -> tuple[float, float]:
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR of torch 2.8
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("kind", KINDS)
def test_a_followed_scheduler_is_where_one_is_that_made_each_step(kind: str) -> None:
    """The reference is a scheduler that was never brought anywhere."""
    reference = momentum()
    stepped, wanted = KINDS[kind](reference), [settings(reference)]
    for _ in range(12):
        stepped.step()
        wanted.append(settings(reference))
    optimizer = momentum()
    scheduler = KINDS[kind](optimizer)
    followed = FollowedScheduler(scheduler, optimizer)
    for step in (7, 7, 3, 10, 0, 5):
        followed.bring(step)
        assert scheduler.last_epoch == step
        assert settings(optimizer) == wanted[step]
        scheduler.step()
        assert settings(optimizer) == wanted[step + 1]


def test_a_followed_scheduler_does_not_go_back_beyond_its_beginning() -> None:
    optimizer = momentum()
    scheduler = on_time(optimizer)
    followed = FollowedScheduler(scheduler, optimizer)
    scheduler.step()
    followed.bring(0)
    assert scheduler.last_epoch == 2


def test_schedulers_that_cannot_be_followed() -> None:
    optimizer = momentum()
    for wrong in (3, schedulers.ReduceLROnPlateau(optimizer)):
        with pytest.raises(TypeError, match="must be an LRScheduler that counts steps"):
            FollowedScheduler(wrong, optimizer)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        FollowedScheduler(late(optimizer), momentum())


def test_a_scheduler_of_a_wrapper_follows() -> None:
    """``accelerate`` makes an optimizer of its own, which has the same parameter groups."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    wrapper = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = schedulers.ExponentialLR(wrapper, 0.5)
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        FollowedScheduler(scheduler, optimizer)
    wrapper.param_groups = optimizer.param_groups
    FollowedScheduler(schedulers.ExponentialLR(wrapper, 0.5), optimizer).bring(2)
    assert optimizer.param_groups[0]["lr"] == 0.25
