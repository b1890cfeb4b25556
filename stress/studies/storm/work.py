"""What the replicas of a storm compute: a small GPT on real text, and its loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable

import torch

import pccl
from gpt.model import GPT, Shape, digest
from gpt.optimizers import make_inner
from gpt.text import Text, load
from pccl.stress.studies.storm.storm import HEADS, StormTraining

CONTEXT = 64
HELD_OUT = 128
"""Number of excerpts on which a loss is measured."""
AT_ONCE = 64


class StormWork:
    """The text of a storm, and the settings of its models.

    Args:
        training: the settings.
        seed: seed of the weights and batches.
        judged_every: number of rounds between two losses on held-out text; 0: none.
        first_life: number of the first life, if other processes draw batches, too.
    """

    def __init__(
        self, training: StormTraining, seed: int, judged_every: int = 0, *, first_life: int = 0
    ) -> None:
        torch.set_num_threads(1)
        self.shape = Shape(training.width, training.layers, HEADS, CONTEXT)
        self._training, self._seed, self._every = training, seed, judged_every
        self._text: Text = load(None, CONTEXT + 1)
        self._held_out = self._text.held_out_excerpts(HELD_OUT, CONTEXT + 1)
        self._judged: set[int] = set()
        self._scratch = GPT(self.shape, seed) if judged_every else None
        self._lives = first_life

    def model(self) -> tuple[GPT, torch.optim.Optimizer]:
        """Return a new model and its inner optimizer; all replicas begin with equal weights."""
        model = GPT(self.shape, self._seed)
        return model, make_inner(model, "adamw", self._training.lr)

    def next_life(self) -> int:
        """Return the number of a life; each draws batches of its own."""
        self._lives += 1
        return self._lives

    def step(self, life: int, number: int, model: GPT, inner: torch.optim.Optimizer) -> None:
        """Make an inner step. ``number``: that of the step in this life."""
        inner.zero_grad()
        self.gradients(life, number, model)
        if self._training.computes:
            inner.step()

    def gradients(self, life: int, number: int, model: GPT) -> None:
        """Compute the gradients of an inner step."""
        if not self._training.computes:
            with torch.no_grad():
                model.norm.bias.add_(1e-6 * (1 + life % 7))
            return
        length, count = CONTEXT + 1, self._training.excerpts
        batch = self._text.batch(count, length, seed=self._seed, peer=life, step=number)
        torch.autograd.backward(model.loss(batch))

    def turn(self, number: int) -> int:
        """Return how many losses come before that of round ``number``."""
        return number // self._every

    def judges(self, number: int) -> bool:
        """Whether the loss after round ``number`` is wanted, and not known yet."""
        return bool(self._every) and number % self._every == 0 and number not in self._judged

    @torch.no_grad()
    def judge(self, number: int, load_into: Callable[[GPT], None]) -> float:
        """Return the loss after round ``number``, in nats per byte.

        Args:
            number: the round.
            load_into: loads the outer parameters into a model.
        """
        self._judged.add(number)
        assert self._scratch is not None
        load_into(self._scratch)
        return evaluate(self._scratch, self._held_out)


def state_digest(state: pccl.SharedState) -> str:
    """Return a digest of all tensors that are equal on all members."""
    shared = [one for one in state.tensor_infos if not one.allow_content_inequality]
    return digest(torch.as_tensor(one.tensor) for one in shared)


@torch.no_grad()
def evaluate(model: GPT, held_out: torch.Tensor) -> float:
    """Return the mean loss over excerpts, in nats per byte."""
    parts = torch.split(held_out, AT_ONCE)
    total = sum(float(model.loss(part)) * len(part) for part in parts)
    return total / len(held_out)
