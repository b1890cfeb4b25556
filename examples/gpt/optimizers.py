"""The inner optimizers of ``train_gpt.py``: AdamW, or Muon for the matrices inside the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpt.model import GPT

BETAS, DECAY = (0.9, 0.95), 0.1


def make_inner(model: GPT, kind: str, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of every step.

    Args:
        model: the model.
        kind: ``"adamw"``, or ``"muon"`` for Muon (Jordan et al. 2024) with steps as long as those
            of AdamW (Liu et al., arXiv:2502.16982, section 2.2).
        lr: learning rate, for both.

    Raises:
        ValueError: this torch has no Muon.
    """
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY)
    muon: Any = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise ValueError(f"torch {torch.__version__} has no Muon; install 2.9 or newer")
    matrices = [one for one in model.blocks.parameters() if one.ndim == 2]
    inside = {id(one) for one in matrices}
    others = [one for one in model.parameters() if id(one) not in inside]
    return Joined(
        muon(matrices, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=BETAS, weight_decay=DECAY),
    )


class Joined(torch.optim.Optimizer):
    """Several optimizers as one, because ``DiLoCo`` wraps one.

    Args:
        optimizers: of different parameters; this object takes over their groups and states.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for one in self._optimizers:
            one.param_groups = [next(groups) for _ in one.param_groups]
            one.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with each optimizer; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self._optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``."""
        super().load_state_dict(state_dict)
        self._share()
