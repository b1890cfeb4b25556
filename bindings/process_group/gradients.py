"""The all-reduces of one backward pass, over the same contributors.

DDP starts an all-reduce for each bucket of gradients during the backward pass, and reads them at
its end. The first of them asks autograd for a callback at the end of the pass, which comes before
DDP's own. There all buckets are settled: after a loss, those that were complete are repeated
without the lost rank. So the gradients of a step are sums over the same ranks, on all ranks alike.

A pass inside another one, as of a reentrant checkpoint, settles at its own end what was started
before, because DDP may wait there. The same is true if an earlier pass has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pccl import ReduceOp
from pccl.bindings.gradient_averager.reductions import Reductions
from pccl.bindings.process_group.arguments import Staged
from pccl.bindings.process_group.flight import Promise
from pccl.bindings.process_group.team import Team
from pccl.errors import PCCLError


def in_backward() -> bool:
    """Whether autograd accumulates a parameter's gradient in this thread.

    There DDP starts the all-reduces of its buckets, and hooks of programs those of single
    gradients. It is False in the backward function of a module, such as SyncBatchNorm, which waits
    for its result at once. It is also False in callbacks at the end of a pass: there DDP starts the
    all-reduces of the first step of a static graph, and waits for them.
    """
    node: Any = torch._C._current_autograd_node()  # pyright: ignore
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


@dataclass(slots=True)
class _Gradient:
    tensor: Staged
    result: Tensor
    work: GradientWork
    is_mean: bool


class GradientWork(Promise):
    """One all-reduce of a backward pass; a wait for it settles all of the pass so far."""

    def __init__(self, tensors: list[Tensor], gradients: Gradients) -> None:
        super().__init__(tensors)
        self._gradients = gradients

    def wait(self, timeout: object = None) -> bool:
        """Settle all that the pass has started."""
        self._gradients.settle()
        return super().wait()


class Gradients:
    """The open all-reduces of one backward pass.

    Args:
        team: the process group's.
        rescales: whether gradients that are means of all ranks become means of the live ones.
    """

    def __init__(self, team: Team, *, rescales: bool) -> None:
        self._team, self._rescales = team, rescales
        self._open: list[_Gradient] = []
        self._reductions = Reductions(team, ReduceOp.SUM)
        self._rooms: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        """Memory of the results of the last pass, by dtype and length."""
        self._pass = -1
        """The pass that calls ``settle`` at its end."""

    def start(self, tensor: Tensor, tag: int, *, is_mean: bool) -> Promise:
        """Start to sum a tensor over all live ranks.

        Args:
            tensor: the gradients; the result goes there.
            tag: tag of the all-reduce.
            is_mean: whether each rank has divided its values by the size of the group.
        """
        this_pass: int = torch._C._current_graph_task_id()  # pyright: ignore
        waits = not in_backward()
        if not waits and (not self._open or this_pass != self._pass):
            self._pass = this_pass
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)  # pyright: ignore
        work = GradientWork([tensor], self)
        source = Staged(tensor, computes=True)
        kept = self._rooms.get((source.values.dtype, source.values.numel()))
        result = kept.pop() if kept else torch.empty_like(source.values)
        self._open.append(_Gradient(source, result, work, is_mean))
        if tensor.numel():  # hooks such as PowerSGD's chain the next all-reduce to an empty one
            self._reductions.launch(source.values, tag, into=result)
        if waits:
            self.settle()
        return work

    def settle(self) -> None:
        """Wait for all results.

        Raises:
            PCCLError: this peer is no longer in step with the others, or they run other programs.
        """
        if not self._open:
            return
        error: PCCLError | None = None
        members = self._team.size
        try:
            outcome = self._reductions.wait()
        except PCCLError as failure:
            error = failure
        else:
            if isinstance(outcome, PCCLError):
                error = outcome
            else:
                members = len(outcome.contributors)
        done, self._open = self._open, []
        self._rooms = {}
        for one in done:
            if error is None:
                self._give(one, members)
            one.work.end(error)
        if error is not None:
            raise error

    def _give(self, one: _Gradient, members: int) -> None:
        values = one.tensor.values
        values.copy_(one.result)
        if self._rescales and one.is_mean and members < self._team.size:
            values.mul_(self._team.size / members)
        one.tensor.give_back()
        self._rooms.setdefault((values.dtype, values.numel()), []).append(one.result)
