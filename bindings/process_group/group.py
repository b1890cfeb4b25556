"""``RunGroup``: torch's collectives in terms of ours."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import Work

from pccl.bindings.process_group.arguments import Staged, giving_back, op_of, parts, staged
from pccl.bindings.process_group.flight import Flight, Several
from pccl.bindings.process_group.gradients import Gradients, in_backward
from pccl.bindings.process_group.identity import GroupIdentity
from pccl.bindings.process_group.promise import BRANCHES, TAGS, Branch, Promise, done
from pccl.bindings.process_group.team import LiveRanks, Team
from pccl.bindings.process_group.untyped import dist

Tensors = Sequence[Tensor]

LOST_MEMBERS = ("repeat", "rescale")


@dataclass(frozen=True, slots=True)
class Options:
    """``pg_options`` of ``init_process_group`` and ``new_group``.

    Attributes:
        lost_members: what becomes of the gradients of a DDP step when a rank is lost in it.
            "repeat": all buckets are summed over the ranks that are left. "rescale": so, and those
            that go through ``pccl.torch.ddp_hook`` become means over these ranks.
    """

    lost_members: str = "repeat"

    def __post_init__(self) -> None:
        if self.lost_members not in LOST_MEMBERS:
            raise ValueError(f"lost_members must be one of {', '.join(LOST_MEMBERS)}")


if TYPE_CHECKING:

    class _TorchGroup:
        """torch's ``ProcessGroup``, whose methods have overloads that no override fits."""

        def __init__(self, rank: int, size: int) -> None: ...
else:
    _TorchGroup = dist.ProcessGroup


class RunGroup(GroupIdentity, _TorchGroup):
    """A process group whose members are members of a run.

    Its ranks and its size stay when a rank is lost. All-reduces, reduces, barriers and broadcasts
    go on among the live ranks. DDP broadcasts its buffers from rank 0 without waiting in Python: if
    that rank was lost, such a broadcast comes from the lowest live one. A broadcast that the
    program waits for, and other collectives, need the ranks that give values, and raise RankLost
    until ``pccl.torch.reconfigure``.

    Args:
        team: its members.
        name: its name, the same on all of them.
        timeout: longest time of a collective.
        options: what becomes of gradients when a rank is lost.
        on_shutdown: called once, when it is destroyed.

    Attributes:
        is_apart: whether this process, or a newcomer among the others, still lacks the state of the
            run. Until then a group answers the collectives of DDP's constructor by itself, as if
            all ranks had the same values, and refuses all other ones.
    """

    def __init__(
        self,
        team: Team,
        name: str,
        timeout: timedelta,
        options: Options,
        on_shutdown: Callable[[], object],
    ) -> None:
        _TorchGroup.__init__(self, team.rank, team.size)
        GroupIdentity.__init__(self, team, name, timeout)
        self.options, self.is_apart = options, False
        self._on_shutdown: Callable[[], object] | None = on_shutdown
        self._gradients = Gradients(team, rescales=options.lost_members == "rescale")
        self._numbers = count()
        self._first_tag = zlib.crc32(name.encode()) % (1 << 28) * TAGS * (BRANCHES + 1)
        self._latest: WeakValueDictionary[int, Promise] = WeakValueDictionary()
        """Tag -> the last collective that used it; one that nobody has any more has ended."""
        self._coalesced: list[Work] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it was destroyed."""
        return self._on_shutdown is None

    def shutdown(self) -> None:
        """Leave the run, if this is the default group."""
        ends, self._on_shutdown = self._on_shutdown, None
        if ends is not None:
            ends()

    abort = shutdown

    # -- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        if isinstance(opts, dist.ReduceOp | dist.ReduceOp.RedOpType):
            op, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = op
        (tensor,) = tensors
        is_sum = opts.reduceOp == dist.ReduceOp.SUM
        if is_sum and tensor.is_floating_point() and in_backward():
            return self._gradient(tensor, opts, is_mean=False)
        if not tensor.numel():
            return done([tensor])
        op, buffer = op_of(opts.reduceOp), Staged(tensor, computes=True)
        tag = self._tag()
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.all_reduce_async(
                buffer.values, op=op, tag=tag, timeout_s=timeout_s
            ),
            opts,
            [tensor],
            finish=buffer.give_back,
            repeats=True,
        )

    def sum_gradients(self, tensor: Tensor) -> Work:
        """Sum gradients that each rank has divided by the group's size. In a backward pass."""
        return self._gradient(tensor, dist.AllreduceOptions(), is_mean=True)

    def _gradient(self, tensor: Tensor, opts: Any, *, is_mean: bool) -> Promise:
        tag, limit_s = self._tag(), self._limit_s(opts)
        work = self._gradients.start(tensor, tag, limit_s, is_mean=is_mean)
        self._latest[tag] = work
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Work:
        return self._all_of([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,), op = tensors, op_of(opts.reduceOp)
        if not tensor.numel():
            return done([tensor])
        root = opts.rootRank
        is_root = self.team.rank == root
        buffer, tag = Staged(tensor, computes=True, is_read=not is_root), self._tag()
        result = buffer.values if is_root else None
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.reduce_async(
                buffer.values,
                result,
                op=op,
                root=live.place(root),
                tag=tag,
                timeout_s=timeout_s,
            ),
            opts,
            [tensor],
            finish=buffer.give_back,
            repeats=True,
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        (output,), (own,) = outputs, inputs
        return self._reduce_scatter(output, torch.cat([one.reshape(-1) for one in own]), opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        return self._reduce_scatter(output, source, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self._reduce_scatter(a, b, opts) for a, b in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        if source.numel() != output.numel() * self.team.size:
            raise ValueError(
                f"reduce_scatter: {source.numel()} elements are not {self.team.size} times "
                f"{output.numel()}"
            )
        if not output.numel():
            return done([output])
        op, tag = op_of(opts.reduceOp), self._tag()
        given, taken = Staged(source, computes=True, is_read=True), Staged(output, computes=True)
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.reduce_scatter_async(
                given.values, taken.values, op=op, tag=tag, timeout_s=timeout_s
            ),
            opts,
            [output],
            alone=lambda: taken.values.copy_(given.values),
            finish=taken.give_back,
        )

    # -- exchanges -------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,), root = tensors, opts.rootRank
        if not tensor.numel() or self._answers(opts):
            return done([tensor])
        tag = self._tag()
        buffer = Staged(tensor, computes=False)
        place = LiveRanks.successor if in_background(opts) else LiveRanks.place
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.broadcast_async(
                buffer.values, root=place(live, root), tag=tag, timeout_s=timeout_s
            ),
            opts,
            [tensor],
            finish=buffer.give_back,
            repeats=True,
        )

    def barrier(self, opts: Any = None) -> Work:
        tag, opts = self._tag(), opts or dist.BarrierOptions()
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.barrier_async(tag=tag, timeout_s=timeout_s),
            opts,
            [],
            repeats=True,
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        (output,), (own,) = outputs, inputs
        return self._all_gather(output, own, opts, list(output))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any) -> Work:
        if output.numel() != own.numel() * self.team.size:
            raise ValueError(
                f"all_gather: {output.numel()} elements are not {self.team.size} times "
                f"{own.numel()}"
            )
        return self._all_gather(_flat(output, self.team.size), own, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._all_of([self.all_gather_single(a, b, opts) for a, b in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        by_tensor = zip(*outputs, strict=True)  # torch gives them by rank
        pairs = zip(by_tensor, inputs, strict=True)
        works = [self.allgather([list(takes)], [own], opts) for takes, own in pairs]
        return self._all_of(works, [tensor for output in outputs for tensor in output])

    def _all_gather(self, takes: Tensors, own: Tensor, opts: Any, results: list[Tensor]) -> Work:
        if self._answers(opts):
            for each in takes:
                each.copy_(own.view(each.shape))
            return done(results)
        given = Staged(own, computes=False, is_read=True)
        taken, tag = staged(takes), self._tag()
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.all_gather_async(
                given.values, [one.values for one in taken], tag=tag, timeout_s=timeout_s
            ),
            opts,
            results,
            alone=lambda: taken[0].values.copy_(given.values),
            finish=giving_back(taken),
        )

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        (own,), root, tag = inputs, opts.rootRank, self._tag()
        given = Staged(own, computes=False, is_read=True)
        taken = staged(outputs[0]) if self.team.rank == root else []
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.gather_async(
                given.values,
                [one.values for one in taken] or None,
                root=root,
                tag=tag,
                timeout_s=timeout_s,
            ),
            opts,
            list(outputs[0]) if taken else [],
            alone=lambda: taken[0].values.copy_(given.values),
            finish=giving_back(taken),
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        (output,), root, tag = outputs, opts.rootRank, self._tag()
        given = staged(inputs[0], is_read=True) if self.team.rank == root else []
        taken = Staged(output, computes=False)
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.scatter_async(
                [one.values for one in given] or None,
                taken.values,
                root=root,
                tag=tag,
                timeout_s=timeout_s,
            ),
            opts,
            [output],
            alone=lambda: taken.values.copy_(given[0].values),
            finish=taken.give_back,
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        given, taken, tag = staged(inputs, is_read=True), staged(outputs), self._tag()
        return self._fly(
            tag,
            lambda live, timeout_s: live.calls.all_to_all_async(
                [one.values for one in given],
                [one.values for one in taken],
                tag=tag,
                timeout_s=timeout_s,
            ),
            opts,
            list(outputs),
            alone=lambda: taken[0].values.copy_(given[0].values),
            finish=giving_back(taken),
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        size = self.team.size
        takes, gives = parts(output, output_sizes, size), parts(source, input_sizes, size)
        return self.alltoall(takes, gives, opts)

    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, target: int, tag: int) -> Work:
        (tensor,) = tensors
        given = Staged(tensor, computes=False, is_read=True)
        return self._fly(
            None,
            lambda live, timeout_s: live.calls.send_async(
                given.values,
                live.place(target),
                tag=self._pair_tag(tag),
                timeout_s=timeout_s,
            ),
            dist.BarrierOptions(),
            [tensor],
            repeats=True,
        )

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        (tensor,) = tensors
        taken = Staged(tensor, computes=False)
        return self._fly(
            None,
            lambda live, timeout_s: live.calls.recv_async(
                taken.values,
                live.place(source),
                tag=self._pair_tag(tag),
                timeout_s=timeout_s,
            ),
            dist.BarrierOptions(),
            [tensor],
            finish=taken.give_back,
            repeats=True,
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        raise NotImplementedError("pccl's recv needs the rank that sends: pass src=")

    # -- several at once -------------------------------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return self._all_of(works, [])

    def _all_of(self, works: Sequence[Work], tensors: Tensors) -> Work:
        return Several(works, list(tensors))

    # -- one collective --------------------------------------------------------------------------

    def _tag(self) -> int:
        """Return the next tag. All ranks make the same calls, so they have the same numbers."""
        self._require_state()
        branch = Branch.current.get()
        number = next(self._numbers) % TAGS if branch is None else branch.number()
        tag = self._first_tag + number
        before = self._latest.pop(tag, None)
        if before is not None and not before.is_completed():
            with suppress(Exception):  # the program gets its error from its work
                before.wait()
        return tag

    def _pair_tag(self, tag: int) -> int:
        self._require_state()
        return self._first_tag + tag % TAGS

    def _answers(self, opts: Any) -> bool:
        """Whether a collective ends at once, because DDP's constructor makes it apart."""
        return self.is_apart and in_background(opts)

    def _require_state(self) -> None:
        if self.is_apart:
            raise RuntimeError(
                "this process is a newcomer, and the other ranks make no collective with it yet; "
                "call pccl.torch.reconfigure() first, directly after DistributedDataParallel(model)"
            )

    def _limit_s(self, opts: Any) -> float:
        """Return the longest time of a collective."""
        limit_s: float = opts.timeout.total_seconds()
        return limit_s if limit_s > 0 else self.timeout.total_seconds()

    def _fly(
        self,
        tag: int | None,
        launch: Callable[[LiveRanks, float | None], Any],
        opts: Any,
        tensors: list[Tensor],
        *,
        alone: Callable[[], object] = lambda: None,
        finish: Callable[[], object] = lambda: None,
        repeats: bool = False,
    ) -> Work:
        timeout_s = self._limit_s(opts)
        flight = Flight(
            self.team,
            lambda live: launch(live, timeout_s),
            tensors,
            tag,
            alone=alone,
            finish=finish,
            repeats=repeats,
            in_background=in_background(opts),
        )
        if tag is not None:
            self._latest[tag] = flight
        if self._coalesced is not None:
            self._coalesced.append(flight)
        return flight


def in_background(opts: Any) -> bool:
    """Whether torch does not wait for a collective, as DDP, whose own ones are in C++."""
    return bool(getattr(opts, "asyncOp", True))


def _flat(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut the memory of a tensor in equal parts."""
    return list(tensor.detach().view(count, -1).unbind()) if tensor.numel() else [tensor] * count


def run_group(group: Any = None) -> RunGroup:
    """Return a process group, by default the default one.

    Raises:
        TypeError: it has another backend.
    """
    which = group or dist.distributed_c10d._get_default_group()
    if not isinstance(which, RunGroup):
        raise TypeError(f'this needs init_process_group("pccl"), not a {type(which).__name__}')
    return which


def lost_ranks(group: Any = None) -> tuple[int, ...]:
    """Return the ranks of a process group that were lost since it was made, ascending. Local.

    Args:
        group: process group; None: the default one.

    Raises:
        TypeError: it has another backend.
    """
    return run_group(group).team.lost
