"""Finds schedulers that begin at step 0 of a later run, or brings them to the run's step."""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from pccl.checks import shown

_log = logging.getLogger("pccl.schedulers")


_SCHEDULED = ("lr", "momentum", "betas")
"""Settings of a parameter group that schedulers change."""


class FollowedScheduler:
    """A scheduler that can be brought to any step after the one at which this object was made.

    Args:
        scheduler: a learning-rate scheduler.
        optimizers: the optimizers to which it may be attached.

    Raises:
        TypeError: ``scheduler`` is no ``LRScheduler``, or follows a metric.
        ValueError: it belongs to another optimizer.
    """

    def __init__(self, scheduler: object, *optimizers: Optimizer) -> None:
        if not isinstance(scheduler, lr_scheduler.LRScheduler) or isinstance(
            scheduler, lr_scheduler.ReduceLROnPlateau
        ):
            raise TypeError(
                "scheduler must be an LRScheduler that counts steps, such as "
                f"torch.optim.lr_scheduler.StepLR(opt, 100), not {shown(scheduler)}"
            )
        self._scheduler: Any = scheduler
        if not _is_attached(self._scheduler, optimizers):
            raise ValueError("the scheduler belongs to another optimizer; make it with this one")
        self._state = copy.deepcopy(self._scheduler.state_dict())
        self._settings = [
            {key: copy.deepcopy(group[key]) for key in _SCHEDULED if key in group}
            for group in self._scheduler.optimizer.param_groups
        ]

    def bring(self, step: int) -> None:
        """Bring the scheduler, and the learning rates, to a step. It counts forward only.

        For an earlier step it begins again where this object was made. It does nothing if that
        was later than ``step``.
        """
        scheduler = self._scheduler
        if step < scheduler.last_epoch:
            if step < self._state["last_epoch"]:
                return
            scheduler.load_state_dict(copy.deepcopy(self._state))
            for group, settings in zip(
                scheduler.optimizer.param_groups, self._settings, strict=True
            ):
                group.update(copy.deepcopy(settings))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer may have made no step yet
            while scheduler.last_epoch < step:
                scheduler.step()


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
    found = [one for one in _schedulers() if _is_attached(one, optimizers)]
    # A scheduler that consists of others counts for them.
    if found and not any(getattr(one, "last_epoch", 0) for one in found):
        _log.warning(
            "%s begins at step 0, and the run has made %d steps, so the learning rates of this "
            "peer are those of the first steps; %s",
            *(type(found[-1]).__name__, steps, remedy),
        )


def _is_attached(scheduler: Any, optimizers: Iterable[Optimizer]) -> bool:
    """Whether the scheduler sets the rates of an optimizer, perhaps through a wrapper of it."""
    return any(scheduler.optimizer.param_groups is one.param_groups for one in optimizers)


def _schedulers() -> list[Any]:
    plateau = lr_scheduler.ReduceLROnPlateau  # it follows a metric, and counts no steps
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), lr_scheduler.LRScheduler) and not issubclass(type(one), plateau)
    ]
