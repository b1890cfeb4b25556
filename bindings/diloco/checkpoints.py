"""Checkpoints of a replica: all of its state except for the model's parameters and buffers."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pccl.bindings.compression import Compression
from pccl.bindings.data.reader import LeaseReader
from pccl.bindings.diloco.model.inner_state import InnerState
from pccl.bindings.diloco.model.local_model import LocalFragment
from pccl.bindings.diloco.model.outer import OuterParameters
from pccl.bindings.diloco.rounds import Average, Contribution, RoundCommitted
from pccl.bindings.diloco.training_driver import TrainingDriver
from pccl.bindings.tensors import own_name

VERSION = 1
"""Version of the format of checkpoints."""


@dataclass(frozen=True, slots=True)
class TrainingCheckpoints:
    """Saves and loads the state of one replica, whose parts it names.

    Attributes:
        inner: the inner optimizer.
        inner_state: what late peers receive of it.
        outer: the outer parameters.
        parts: the local model, by fragment.
        indices: by fragment the numbers of its parameters, which old checkpoints have for names.
        driver: has the position, and outcomes that are not merged.
        compression: has the residuals.
        samples: the samples of this replica, if it gets them from the run.
    """

    inner: torch.optim.Optimizer
    inner_state: InnerState
    outer: OuterParameters
    parts: Sequence[LocalFragment]
    indices: Sequence[Sequence[int]]
    driver: TrainingDriver
    compression: Compression
    samples: LeaseReader | None

    def save(self) -> dict[str, Any]:
        """Return the state, while no call is open."""
        trainer = self.driver.trainer
        position = trainer.pipeline.position()
        in_flight = [trainer.commits[number] for number, *_ in position["flights"]]
        return {
            "version": VERSION,
            "layout": self._layout,
            "inner": self.inner.state_dict(),
            "warm_up": [self.inner_state.warm_up_left, self.inner_state.warm_up_of],
            "outer": self.outer.state_dict(),
            "base": [part.base.clone() for part in self.parts],
            "position": position,
            "in_flight": [pack(committed) for committed in in_flight],
            "residuals": {
                name: torch.as_tensor(kept)
                for name, kept in self.compression.feedback.state_dict().items()
            },
            "samples": None if self.samples is None else self.samples.state_dict(),
        }

    def load(self, state_dict: dict[str, Any]) -> None:
        """Load what ``save`` returned, before this replica joins.

        Raises:
            ValueError: the checkpoint has other parameters or fragments.
        """
        saved = check_saved(state_dict, self._layout, self.indices)
        self.inner.load_state_dict(saved["inner"])
        if not (saved["position"]["steps"] or saved["position"]["number"]):
            return  # the state of a new object, which ``accelerate`` loads at once
        self.inner_state.resume(saved.get("warm_up", (0, 0)))
        self.outer.load_state_dict(saved["outer"])
        for part, base in zip(self.parts, saved["base"], strict=True):
            part.base.copy_(base)
        trainer = self.driver.trainer
        trainer.pipeline.resume(saved["position"], time.monotonic())
        for packed in saved["in_flight"]:
            fragment: int = packed["number"] % len(self.parts)
            room = self.parts[fragment].outer.empty()
            trainer.commit(unpack(packed, fragment, room))
        self.compression.feedback.load_state_dict(
            {name: kept.cpu().numpy() for name, kept in saved["residuals"].items()}
        )
        if self.samples is not None and saved.get("samples") is not None:
            self.samples.load_state_dict(saved["samples"])
        self.driver.known = self.outer.ledger.number
        self.driver.resumed = [values.cpu().clone() for values in saved["outer"]["values"]]

    @property
    def _layout(self) -> list[list[str]]:
        return [list(part.names) for part in self.parts]


def pack(committed: RoundCommitted) -> dict[str, Any]:
    """Return an outcome that is not merged yet as plain data, for ``unpack``."""
    return {
        "number": committed.contribution.number,
        "weight": committed.contribution.weight,
        "values": committed.contribution.values.clone(),
        "buffers": committed.contribution.buffers,
        "contributors": list(committed.average.contributors),
        "total_weight": committed.average.total_weight,
        "mean_norm": committed.norms[0],
        "step_norm": committed.norms[1],
        "product": committed.average.product,
        "replicas": committed.average.replicas,
        "outer_state": copy.deepcopy(committed.outer_state),
    }


def unpack(packed: dict[str, Any], fragment: int, room: torch.Tensor) -> RoundCommitted:
    """Return the outcome that ``pack`` made, for the fragment, with its values in ``room``."""
    number, weight, buffers = packed["number"], packed["weight"], packed.get("buffers")
    values = room.copy_(packed["values"])
    contribution = Contribution(number, fragment, weight, values, 0, buffers)
    average = Average(
        tuple(packed["contributors"]),
        packed["total_weight"],
        product=packed.get("product", math.nan),
        replicas=packed.get("replicas", 1.0),
    )
    norms = packed["mean_norm"], packed.get("step_norm", math.nan)
    return RoundCommitted(contribution, average, norms, packed.get("outer_state"))


def check_saved(
    saved: dict[str, Any], layout: list[list[str]], parts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Check that a checkpoint fits a ``DiLoCo``, and return it.

    Args:
        saved: the checkpoint.
        layout: for each fragment, the names of its parameters.
        parts: likewise their numbers, which old checkpoints of tensors without names have.

    Raises:
        ValueError: it has another version, or other parameters or fragments.
    """
    if saved.get("version") != VERSION:
        raise ValueError(
            "the argument is not the state of a DiLoCo of this version; state_dict() makes one"
        )
    names = [[own_name(name) for name in part] for part in saved["layout"]]
    if names not in (layout, [[str(index) for index in part] for part in parts]):
        raise ValueError(
            "the saved state has other parameters, fragments or fragment_order than this "
            "DiLoCo; make one with the same values"
        )
    return saved
