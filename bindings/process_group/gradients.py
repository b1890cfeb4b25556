"""The all-reduces of one backward pass, over the same contributors.

DDP starts an all-reduce for each bucket of gradients during the backward pass, and reads them at
its end. The first of them asks autograd for a callback at the end of the pass, which comes before
DDP's own. There all buckets are settled: after a loss, those that were complete are repeated
without the lost rank. So the gradients of a step are sums over the same ranks, on all ranks alike.

A pass inside another one, as of a reentrant checkpoint, settles at its own end what was started
before, because DDP may wait there. So does a wait for one of them, in a hook or in another thread.
A pass that has failed, or that Ctrl-C has ended, is settled by the next one, or by a wait.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pccl import ReduceOp
from pccl.bindings.gradient_averager.reductions import Reductions
from pccl.bindings.process_group.arguments import Staged
from pccl.bindings.process_group.promise import Promise
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

    def __init__(self, tensors: list[Tensor], tag: int, gradients: Gradients) -> None:
        super().__init__(tensors, tag)
        self._gradients = gradients

    def settle(self) -> None:
        """Settle all that the pass has started."""
        self._gradients.settle()

    def wait(self, timeout: object = None) -> bool:
        """Settle it, and return True."""
        self.settle()
        return super().wait()

    def get_future(self) -> Any:
        """Return a future of the tensors. DDP gets it in C++, and waits after the pass."""
        here = inspect.currentframe()
        caller = here and here.f_back
        if caller is not None and "_run_allreduce_hook" in caller.f_code.co_names:
            self.settle()  # two hooks of torch have C++ call this, and wait there for the future
        return super().get_future()


class Gradients:
    """The open all-reduces of one backward pass. Any thread may wait for them.

    Args:
        team: the process group's.
        rescales: whether gradients that are means of all ranks become means of the live ones.
    """

    def __init__(self, team: Team, *, rescales: bool) -> None:
        self._team, self._rescales = team, rescales
        self._lock = threading.RLock()
        self._open: list[_Gradient] = []
        self._reductions = Reductions(team, ReduceOp.SUM)
        self._rooms: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        """Memory of the results of the last pass, by dtype and length."""
        self._pass = -1
        """The pass that calls ``settle`` at its end."""

    def start(self, tensor: Tensor, tag: int, timeout_s: float, *, is_mean: bool) -> Promise:
        """Start to sum a tensor over all live ranks.

        Args:
            tensor: the gradients; the result goes there.
            tag: tag of the all-reduce.
            timeout_s: longest time of the all-reduce, and of each repetition.
            is_mean: whether each rank has divided its values by the size of the group.
        """
        work = GradientWork([tensor], tag, self)
        source = Staged(tensor, computes=True)
        waits = not in_backward()
        with self._lock:
            if not waits:
                self._settle_after_this_pass()
            kept = self._rooms.get((source.values.dtype, source.values.numel()))
            result = kept.pop() if kept else torch.empty_like(source.values)
            if tensor.numel():  # hooks such as PowerSGD's chain the next one to an empty one
                self._reductions.launch(source.values, tag, into=result, timeout_s=timeout_s)
            self._open.append(_Gradient(source, result, work, is_mean))
        if waits:
            self.settle()
        return work

    def _settle_after_this_pass(self) -> None:
        this_pass: int = torch._C._current_graph_task_id()  # pyright: ignore
        if not self._open or this_pass != self._pass:
            self._pass = this_pass
            torch.autograd.Variable._execution_engine.queue_callback(self.settle)  # pyright: ignore

    def settle(self) -> None:
        """Wait for all results. May be called again after Ctrl-C.

        Raises:
            PCCLError: this peer is no longer in step with the others, or they run other programs.
        """
        with self._lock:
            if not self._open:
                return
            error, members = self._outcome()
            done, self._open = self._open, []
            self._rooms = {}
        works = iter([one.work for one in done])
        try:
            if error is None:
                for one in done:
                    self._give(one, members)
            for work in works:
                work.end(error)
        except BaseException as failure:
            for work in works:
                work.end(failure)
            raise
        if error is not None:
            raise error

    def _outcome(self) -> tuple[Exception | None, int]:
        """Return why the reductions have failed, or how many members they cover."""
        try:
            outcome = self._reductions.wait()
        except Exception as failure:  # noqa: BLE001 - the callers get it
            return failure, 0
        if isinstance(outcome, PCCLError):
            return outcome, 0
        return None, len(outcome.contributors)

    def _give(self, one: _Gradient, members: int) -> None:
        values = one.tensor.values
        values.copy_(one.result)
        if self._rescales and one.is_mean and members < self._team.size:
            values.mul_(self._team.size / members)
        one.tensor.give_back()
        self._rooms.setdefault((values.dtype, values.numel()), []).append(one.result)
