"""``LocalModel``: the local model, and its distance from the outer parameters.

For each fragment it keeps a base on the host: the parameters as they were at the last
pseudo-gradient or merge. The next pseudo-gradient is the base minus the current parameters. So each
inner step is in exactly one pseudo-gradient, except for the work that ``merge`` discards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from pccl.bindings.diloco.model.buffers import SharedBuffers, Source
from pccl.bindings.diloco.model.outer import OuterFragment
from pccl.bindings.diloco.model.outer_optimizers import OuterFactory
from pccl.bindings.tensors import local, mesh_of, own_name, shards_of
from pccl.checks import shown


def named_parameters(
    params: torch.nn.Module | Iterable[Any] | None, inner: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters to be averaged, each once, with their names.

    Args:
        params: a module, or tensors, pairs of name and tensor, or param groups; None: the tensors
            of ``inner``. Tensors without
            names get those that ``inner`` was made with (torch 2.6), otherwise numbers.
        inner: the optimizer that trains them.

    Raises:
        TypeError: an argument has the wrong type, or a parameter has no float dtype.
        ValueError: ``params`` is empty or lacks a parameter of ``inner``; or names are equal.
    """
    if not isinstance(cast("object", inner), torch.optim.Optimizer):
        raise TypeError(
            "inner must be a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), "
            f"not {shown(inner)}"
        )
    named: dict[int, tuple[str, torch.Tensor]] = {}
    known = {
        id(p): name
        for group in inner.param_groups
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    if params is None:
        params = inner.param_groups
    elif isinstance(params, torch.nn.Module):
        params = params.named_parameters()
    for name, tensor in _flattened(params):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "params must be a module, or pairs of name and tensor, as "
                "model.named_parameters(), or tensors, as model.parameters(); not "
                f"{type(tensor).__name__}"
            )
        if tensor.requires_grad and id(tensor) not in named:
            name = name or known.get(id(tensor), "") or str(len(named))
            named[id(tensor)] = own_name(name), tensor
    for name, tensor in named.values():
        if not tensor.is_floating_point():
            raise TypeError(f"parameter {name} is of {tensor.dtype}; only floats can be averaged")
    trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    if not named:
        raise ValueError("params has no tensor that requires a gradient; pass the model")
    if missing := sum(id(p) not in named for p in trained):
        raise ValueError(
            f"inner trains {missing} tensors that are not in params, so they would differ "
            "between peers; pass all parameters that inner was made with"
        )
    if len({name for name, _ in named.values()}) < len(named):
        raise ValueError("two parameters have the same name; pass model.named_parameters()")
    return list(named.values())


def _flattened(params: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    for entry in params:
        if isinstance(entry, dict):
            group = cast("dict[str, Any]", entry)
            yield from _flattened(group["params"])
        elif isinstance(entry, tuple):
            pair = cast("tuple[Any, Any]", entry)
            yield str(pair[0]), pair[1]
        else:
            yield "", entry


def forget_broken(inner: torch.optim.Optimizer) -> None:
    """Drop the gradients, which are those of a model that was replaced, and broken moments.

    The optimizer loses its state of each parameter for which it has a value that is not finite.
    """
    inner.zero_grad(set_to_none=True)
    for parameter, state in list(inner.state.items()):
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        if not all(bool(torch.isfinite(local(tensor)).all()) for tensor in tensors):
            del inner.state[parameter]


class LocalFragment:
    """One fragment of the local model.

    Args:
        named: names and parameters.
        factory: makes the outer optimizer.

    Attributes:
        outer: outer parameters of the fragment; at first they equal the model's.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], factory: OuterFactory) -> None:
        self.names = tuple(name for name, _ in named)
        self.tensors = tuple(tensor for _, tensor in named)
        self.outer = OuterFragment(self.names, self.locals(), factory)
        self._base: torch.Tensor | None = self.outer.copy()
        """None: the current parameters, since ``take`` has used its memory; see ``hold``."""
        self._spare: torch.Tensor | None = None
        """The memory of the last base, for the next one: new memory costs page faults."""
        self._is_exact = all(one.dtype == self.outer.flat.dtype for one in self.locals())
        """Whether all dtypes of the model can hold the outer parameters exactly."""

    def locals(self) -> list[torch.Tensor]:
        """Return the parameters, without a copy; for a sharded parameter, its local shard."""
        return [local(tensor) for tensor in self.tensors]

    @property
    def base(self) -> torch.Tensor:
        """Parameters as of the last pseudo-gradient or merge, on the host, shape (n,)."""
        base = self.hold()
        self.outer.copies.settle()
        return base

    def hold(self) -> torch.Tensor:
        """Copy the current parameters into the base, if ``take`` has used it up; return the base.

        A step that takes a pseudo-gradient and waits for a merge needs no copy in between.
        """
        if self._base is None:
            self._base, self._spare = self._spare, None
            if self._base is None:
                self._base = self.outer.empty()
            with self.outer.copies.reading(self.locals()) as tensors:
                for view, here in zip(self.outer.views(self._base), tensors, strict=True):
                    view.copy_(here, non_blocking=True)
        return self._base

    def take(self) -> torch.Tensor:
        """Return the work since the base, and make the current parameters the base.

        Before the parameters change, except by ``merge`` or ``anchor``, ``hold`` must be called.

        Returns:
            The pseudo-gradient: base minus parameters, shape (n,). On a CUDA device, it is complete
            after ``outer.copies.wait()``.
        """
        work, self._base = self.hold(), None
        with self.outer.copies.reading(self.locals()) as tensors:
            for view, here in zip(self.outer.views(work), tensors, strict=True):
                there = view.to(here.device, non_blocking=True)  # on the CPU, ``view`` itself
                view.copy_(there.sub_(here), non_blocking=True)
        return work

    def put_back(self, work: torch.Tensor) -> None:
        """Make a pseudo-gradient that was not applied part of the next one.

        Args:
            work: a result of ``take``.
        """
        self.base.add_(work)

    def preview(
        self,
        common: torch.Tensor,
        state: Sequence[dict[str, Any]] | None,
        work: torch.Tensor,
        share: float,
    ) -> torch.Tensor:
        """Return what an outer step with a share of own work alone makes of outer parameters.

        Args:
            common: a copy of the outer parameters, shape (n,); the result has its memory.
            state: the outer optimizer's state, which is used up; None: a checkpoint lacks it, so
                this merge has no preview.
            work: the pseudo-gradient, shape (n,).
            share: the weight of this work, relative to the weight of a round.
        """
        if state is not None:
            self.outer.copies.wait()
            self.outer.preview(common, state, torch.mul(work, share))
        return common

    def merge(self, common: torch.Tensor, mixing: float) -> None:
        """Load outer parameters, and discard the work since the base except for a share.

        Args:
            common: the outer parameters, shape (n,); the fragment keeps this tensor.
            mixing: share of the local parameters that remains.
        """
        self._base, self._spare = common, self._base
        self._write(common, mixing)

    def anchor(self, common: torch.Tensor, lost: Iterable[torch.Tensor]) -> bool:
        """Load outer parameters, and keep the work since the base.

        Args:
            common: the outer parameters, shape (n,); the fragment keeps this tensor.
            lost: taken pseudo-gradients that were not applied; their work is kept, too.

        Returns:
            Whether the model has changed.
        """
        work, self._base = self.take(), common
        self.outer.copies.settle()
        for one in lost:
            work.add_(one)
        wanted = torch.sub(common, work, out=work)
        changed = not all(
            torch.equal(view.to(here.device), here.to(view.dtype))
            for view, here in zip(self.outer.views(wanted), self.locals(), strict=True)
        )
        self._write(wanted)
        return changed

    def _write(self, values: torch.Tensor, mixing: float = 0.0) -> None:
        """Set the parameters to ``values``, and add their rounding errors to the base."""
        base = self.hold()
        for value, kept, target in zip(
            self.outer.views(values), self.outer.views(base), self.locals(), strict=True
        ):
            wanted = value.to(target.device, non_blocking=True)
            if mixing:
                wanted = target.to(value.dtype, copy=True).lerp_(wanted, 1 - mixing)
            target.copy_(wanted)
            if not self._is_exact:
                rounded = target.to(value.dtype, copy=True).sub_(wanted)
                there = kept.to(target.device, non_blocking=True)
                kept.copy_(there.add_(rounded), non_blocking=True)


class LocalModel:
    """The local model, as fragments.

    Args:
        parts: for each fragment, names and parameters.
        factory: makes the outer optimizer of a fragment.
        buffers: the buffers.

    Attributes:
        parts: the fragments.
        buffers: the buffers; empty if there are none.
        shards: number of processes that hold a part of the model; 1: it is not sharded.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[tuple[str, torch.Tensor]]],
        factory: OuterFactory,
        buffers: Sequence[tuple[str, Source]] = (),
    ) -> None:
        self.buffers = SharedBuffers(buffers)
        self.parts = tuple(LocalFragment(named, factory) for named in parts)
        self.shards = max(shards_of(tensor) for named in parts for _, tensor in named)

    def any_shard(self, flag: bool) -> bool:
        """Whether ``flag`` is True in any process of the replica; all of them must call this."""
        meshes = [mesh_of(tensor) for part in self.parts for tensor in part.tensors]
        mesh: Any = next((mesh for mesh in meshes if mesh is not None), None)
        if mesh is None:
            return flag
        voted = torch.tensor(int(flag), device=mesh.device_type)
        distributed: Any = torch.distributed
        for dimension in range(mesh.ndim):
            group = mesh.get_group(dimension)
            distributed.all_reduce(voted, op=distributed.ReduceOp.MAX, group=group)
        return bool(voted.item())

    def hold(self) -> None:
        """Prepare for the next inner step: keep the parameters that it changes, where needed."""
        for part in self.parts:
            part.hold()

    def take_over(self) -> None:
        """Set the model to the outer parameters and common buffers; discard the work since then."""
        for part in self.parts:
            part.merge(part.outer.copy(), 0.0)
        self.buffers.merge(self.buffers.common, 0.0)
