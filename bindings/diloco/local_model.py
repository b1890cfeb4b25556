"""``LocalModel``: the local model, and how far it has moved away from what the members hold.

For each fragment it keeps a base, on the host: where the parameters were when their work was last
accounted for. The difference to where they are is the work since then, which is the next
pseudo-gradient. So each inner step is in exactly one of them, but for what ``merge`` gives up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from pccl.bindings.diloco.outer import OuterFactory, OuterFragment

SPARES_MAX = 2
"""Buffers of a fragment that are kept for the next use."""


def named_parameters(
    params: Iterable[Any], inner: torch.optim.Optimizer
) -> list[tuple[str, torch.Tensor]]:
    """The parameters to be averaged, each once, with names.

    Args:
        params: tensors, pairs of name and tensor, or param groups.
        inner: the optimizer that trains them.

    Raises:
        TypeError: something else; or a parameter that is no float.
        ValueError: none, or others than ``inner`` trains.
    """
    if not isinstance(cast("object", inner), torch.optim.Optimizer):
        raise TypeError(
            "inner must be a torch.optim.Optimizer, such as torch.optim.AdamW(model.parameters()), "
            f"not {inner!r}"
        )
    named: dict[int, tuple[str, torch.Tensor]] = {}
    if isinstance(params, torch.nn.Module):
        raise TypeError("params must be the parameters of the model: pass model.parameters()")
    for name, tensor in _flattened(params):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "params must be tensors, as model.parameters(), or pairs of name and tensor, as "
                f"model.named_parameters(); not {type(tensor).__name__}"
            )
        if tensor.requires_grad and id(tensor) not in named:
            named[id(tensor)] = name or str(len(named)), tensor
    for name, tensor in named.values():
        if not tensor.is_floating_point():
            raise TypeError(f"parameter {name} is of {tensor.dtype}; only floats can be averaged")
    trained = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    if not named:
        raise ValueError("params has no tensor that requires a gradient; pass model.parameters()")
    if missing := sum(id(p) not in named for p in trained):
        raise ValueError(
            f"inner trains {missing} tensors that are not in params, and would drift apart from "
            "the other peers; pass all parameters that inner was made with"
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of a parameter is here: all of it, or the shard of a DTensor."""
    detached: Any = tensor.detach()
    shard: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return shard


def shards_of(tensor: torch.Tensor) -> int:
    """Over how many processes a parameter is spread; 1: it is no DTensor."""
    mesh = mesh_of(tensor)
    return 1 if mesh is None else int(mesh.size())


def mesh_of(tensor: torch.Tensor) -> Any:
    """The processes over which a parameter is spread; None: it is no DTensor."""
    return getattr(tensor, "device_mesh", None)


class LocalFragment:
    """One fragment of the local model.

    Args:
        named: its parameters.
        factory: makes the outer optimizer.

    Attributes:
        outer: its outer parameters; at the beginning they are what the model is.
        base: where the parameters were when their work was last accounted for, shape (n,).
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], factory: OuterFactory) -> None:
        self.names = tuple(name for name, _ in named)
        self.tensors = tuple(tensor for _, tensor in named)
        self.outer = OuterFragment(self.names, self.locals(), factory)
        self.base = self.outer.empty().copy_(self.outer.flat)
        self._spares: list[torch.Tensor] = []
        self._is_exact = all(one.dtype == self.base.dtype for one in self.locals())
        """Whether the model's dtype holds what the outer parameters are."""

    def locals(self) -> list[torch.Tensor]:
        """The parameters' own memory; of sharded ones what is here."""
        return [local(tensor) for tensor in self.tensors]

    def take(self) -> torch.Tensor:
        """The work since the base, which moves to where the model is.

        Returns:
            Base minus parameters, shape (n,).
        """
        here = self._spare()
        self._read(here)
        work, self.base = self.base.sub_(here), here
        return work

    def put_back(self, work: torch.Tensor) -> None:
        """A pseudo-gradient was not applied; it is part of the next one.

        Args:
            work: what ``take`` gave; not yours any more.
        """
        self.base.add_(work)
        self._recycle(work)

    def merge(self, common: torch.Tensor, mixing: float) -> None:
        """Take over outer parameters. Work since the base is given up, but for its share.

        Args:
            common: they, shape (n,); not yours any more.
            mixing: how much of the local ones remains.
        """
        old = self.base
        if mixing:
            self._read(old)
            old.lerp_(common, 1 - mixing)
            self._write(old, common)
        else:
            self._write(common, common)
        self.base = common
        self._recycle(old)

    def anchor(self, common: torch.Tensor, lost: Iterable[torch.Tensor]) -> bool:
        """Take over outer parameters, and keep the work since the base.

        Args:
            common: the outer parameters, shape (n,); not yours any more.
            lost: pseudo-gradients that were taken and not applied, to be counted again.

        Returns:
            Whether the model was changed.
        """
        here, work = self._spare(), self.base
        self._read(here)
        work.sub_(here)
        for one in lost:
            work.add_(one)
        torch.sub(common, work, out=work)
        changed = not torch.equal(work, here)
        self._write(work, common)
        self.base = common
        self._recycle(here)
        return changed

    def _write(self, wanted: torch.Tensor, base: torch.Tensor) -> None:
        """Set the parameters; what their dtype cannot hold is taken into the base."""
        for target, value in zip(self.locals(), self.outer.views(wanted), strict=True):
            target.copy_(value)
        if not self._is_exact:
            here = self._spare()
            self._read(here)
            rounded = here.sub_(wanted)
            base.add_(rounded)
            self._recycle(here)

    def _read(self, target: torch.Tensor) -> None:
        for view, tensor in zip(self.outer.views(target), self.locals(), strict=True):
            view.copy_(tensor)

    def _recycle(self, buffer: torch.Tensor) -> None:
        if len(self._spares) < SPARES_MAX:
            self._spares.append(buffer)

    def _spare(self) -> torch.Tensor:
        return self._spares.pop() if self._spares else self.outer.empty()


class LocalModel:
    """All fragments of the local model.

    Args:
        parts: the parameters of each, named.
        factory: makes the outer optimizer of each.

    Attributes:
        parts: the fragments.
        shards: over how many processes its parameters are spread; 1: all of them are here.
    """

    def __init__(
        self, parts: Sequence[Sequence[tuple[str, torch.Tensor]]], factory: OuterFactory
    ) -> None:
        self.parts = tuple(LocalFragment(named, factory) for named in parts)
        self.shards = max(shards_of(tensor) for named in parts for _, tensor in named)

    def any_shard(self, flag: bool) -> bool:
        """Whether it holds in any process of this replica. Joint call of all of them."""
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

    def take_over(self) -> None:
        """The model becomes what the outer parameters are; work since then is left out."""
        for part in self.parts:
            part.merge(part.outer.flat.clone(), 0.0)
