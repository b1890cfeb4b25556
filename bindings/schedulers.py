"""Finds learning-rate schedulers that begin at step 0 in a run that is further."""

from __future__ import annotations

import gc
import logging
from typing import Any

from torch.optim import Optimizer, lr_scheduler

_log = logging.getLogger("pccl.schedulers")


def warn_of_late_scheduler(steps: int, remedy: str, *optimizers: Optimizer) -> None:
    """Log a warning if the run has made steps, and a scheduler of this process has made none.

    A scheduler counts its own calls, so on a late peer it begins at step 0 of a run at step N.
    Optimizers do not know their schedulers, so this looks at all objects of the process. It does
    so only if a scheduler has set the initial learning rate of a parameter group.

    Args:
        steps: steps that the run has made.
        remedy: what the program can do, for the end of the sentence.
        optimizers: the optimizers to which the scheduler may be attached.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not steps or not any("initial_lr" in group for group in groups):
        return
    found = [one for one in _schedulers() if any(one.optimizer is each for each in optimizers)]
    # A scheduler that consists of others counts for them.
    if found and not any(getattr(one, "last_epoch", 0) for one in found):
        _log.warning(
            "%s begins at step 0, and the run has made %d steps, so the learning rates of this "
            "peer are those of the first steps; %s",
            *(type(found[-1]).__name__, steps, remedy),
        )


def _schedulers() -> list[Any]:
    plateau = lr_scheduler.ReduceLROnPlateau  # it follows a metric, and counts no steps
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), lr_scheduler.LRScheduler) and not issubclass(type(one), plateau)
    ]
