"""What the callbacks share: finds the ``DiLoCo`` of a trainer, and brings its scheduler along."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from pccl.bindings.consumers import scalars
from pccl.bindings.diloco.optimizer import DiLoCo
from pccl.bindings.events import Event, InnerStep
from pccl.checks import shown


def wrapper_of(optimizer: Any) -> DiLoCo:
    """Return the ``DiLoCo`` that a trainer steps, which ``accelerate`` may have wrapped.

    Raises:
        TypeError: the trainer steps another optimizer.
    """
    found = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(found, DiLoCo):
        raise TypeError(f"the optimizer of the trainer must be a DiLoCo, not {shown(found)}")
    return found


def follow(opt: DiLoCo, scheduler: Any) -> None:
    """Let a scheduler that counts steps follow the run; leave one that follows a metric alone."""
    found = getattr(scheduler, "scheduler", scheduler)
    if isinstance(found, lr_scheduler.LRScheduler) and not isinstance(
        found, lr_scheduler.ReduceLROnPlateau
    ):
        opt.follow(found)


def points(event: Event) -> dict[str, float]:
    """Return what an event adds to the curves of a trainer, which draws its inner steps itself."""
    return {} if isinstance(event, InnerStep) else scalars(event)
