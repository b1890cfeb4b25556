"""DiLoCo with all replicas in one process: delay, mixing, fragments and eager updates.

Written from the papers: Streaming DiLoCo (arXiv:2501.18512, algorithm 2), eager updates
(arXiv:2502.12996, algorithm 2, where the preview leaves the common parameters alone), SparseLoCo
(arXiv:2508.15706, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import plain_sparse

Tensors = list[torch.Tensor]

LR, MOMENTUM, DECAY = 0.7, 0.9, 0.95


@dataclass(frozen=True)
class Setting:
    """How replicas train.

    Attributes:
        every: inner steps between two rounds of a fragment.
        delay: inner steps from the beginning of a round to its merge.
        mixing: share of the local parameters that a merge keeps.
        eager: whether a merge previews the own latest pseudo-gradient.
        fragments: the numbers of the parameters in each.
        sparse_block: values of which the largest 64 are sent; 0: all are sent.
    """

    every: int
    delay: int
    mixing: float
    eager: bool
    fragments: tuple[tuple[int, ...], ...]
    sparse_block: int = 0


@dataclass
class Common:
    """The outer parameters, and the momentum of Nesterov's SGD."""

    values: Tensors
    momentum: Tensors = field(init=False)

    def __post_init__(self) -> None:
        self.momentum = [torch.zeros_like(one) for one in self.values]

    def stepped(self, index: int, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One parameter after an outer step, and its momentum."""
        momentum = (self.momentum[index] * MOMENTUM).add(mean)
        way = mean.add(momentum, alpha=MOMENTUM)
        return self.values[index].add(way, alpha=-LR), momentum


def train(
    models: Sequence[Tensors],
    setting: Setting,
    steps: int,
    inner_step: Callable[[int, int], None],
    before_the_end: Callable[[], None],
) -> Tensors:
    """Train, and return the outer parameters after the final rounds.

    Args:
        models: the parameters of each replica, which begin alike and are changed in place.
        setting: how they train.
        steps: inner steps of each replica.
        inner_step: makes an inner step, given the replica and the number of the step from 0.
        before_the_end: called before the final rounds.
    """
    count, fragments = len(models), setting.fragments
    common = Common([one.clone() for one in models[0]])
    anchors = [[one.clone() for one in model] for model in models]
    works: dict[int, list[dict[int, torch.Tensor]]] = {}
    due: dict[int, int] = {}
    memory: dict[tuple[int, int], torch.Tensor] = {}
    number = 0

    def begin() -> None:
        nonlocal number
        works[number] = [
            {index: anchor[index] - model[index] for index in fragments[number % len(fragments)]}
            for model, anchor in zip(models, anchors, strict=True)
        ]
        for model, anchor in zip(models, anchors, strict=True):
            for index in fragments[number % len(fragments)]:
                anchor[index] = model[index].clone()
        number += 1

    def sent(replica: int, fragment: int, work: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if not setting.sparse_block:
            return work
        whole: Any = torch.cat([one.flatten() for one in work.values()])
        whole = whole + memory.get((replica, fragment), torch.zeros_like(whole))
        given: Any = torch.tensor(plain_sparse.sent(whole.tolist(), setting.sparse_block))
        memory[replica, fragment] = (whole - given) * DECAY
        parts: Tensors = given.split([one.numel() for one in work.values()])
        return {i: part.view_as(one) for (i, one), part in zip(work.items(), parts, strict=True)}

    def merge(done: int) -> None:
        fragment = done % len(fragments)
        taken = [sent(replica, fragment, work) for replica, work in enumerate(works.pop(done))]
        for index in fragments[done % len(fragments)]:
            total = taken[0][index]
            for other in taken[1:]:
                total = total + other[index]
            common.values[index], common.momentum[index] = common.stepped(index, total / count)
            later = works.get(done + len(fragments))
            for replica, model in enumerate(models):
                if setting.eager and later is not None:
                    own = later[replica][index] * (1 / count)
                    ahead = common.stepped(index, own)[0]
                    model[index].copy_(ahead)
                    anchors[replica][index] = ahead
                else:
                    model[index].copy_(model[index].lerp(common.values[index], 1 - setting.mixing))
                    anchors[replica][index] = common.values[index].clone()

    for step in range(steps):
        for replica in range(count):
            inner_step(replica, step)
        turn, place = divmod(number, len(fragments))
        if step + 1 == turn * setting.every + (place + 1) * setting.every // len(fragments):
            due[number] = step + 1 + setting.delay
            begin()
        for one in [one for one, at in due.items() if at <= step + 1]:
            del due[one]
            merge(one)
    before_the_end()
    while number % len(fragments) != len(fragments) - 1 and len(fragments) > 1:
        begin()
    for one in sorted(works):
        merge(one)
    return common.values
