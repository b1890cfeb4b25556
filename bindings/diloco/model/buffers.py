"""``SharedBuffers``: what a model keeps beside its parameters, such as running statistics.

Members average float buffers, and take all other buffers, such as counters, from one member. Rounds
of the last fragment do so with a separate sum in float64: a wire format would ruin small variances,
and an average in float32 would move constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pccl
from pccl.bindings.tensors import local, own_name
from pccl.checks import shown

AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Data types of the buffers that members average."""

_HEAD = 2
_WORD_BYTES = 4
_WORD_MAX = 2**31

Source = Callable[[], torch.Tensor]


def named_buffers(buffers: object, params: object) -> list[tuple[str, Source]]:
    """Return the buffers to synchronize, each once: its name, and a function that returns it.

    Args:
        buffers: pairs of name and tensor; None: the buffers in ``params.state_dict()``, if
            ``params`` is a module, otherwise none.
        params: the model or its parameters.

    Raises:
        TypeError: ``buffers`` has other items than pairs of name and tensor.
        ValueError: two buffers have the same name.
    """
    found: dict[int, tuple[str, Source]] = {}
    given: list[tuple[Any, Source]]
    if buffers is None:
        given = _persistent(params) if isinstance(params, torch.nn.Module) else []
    else:
        given = _pairs(buffers)
    for name, source in given:
        tensor: Any = source()
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(_expected((name, tensor)))
        if tensor.numel() and id(tensor) not in found:
            found[id(tensor)] = own_name(name), source
    named = list(found.values())
    if len({name for name, _ in named}) < len(named):
        raise ValueError("two buffers have the same name; pass model.named_buffers()")
    return named


def _pairs(buffers: Any) -> list[tuple[Any, Source]]:
    try:
        return [(name, partial(_same, tensor)) for name, tensor in buffers]
    except (TypeError, ValueError):
        raise TypeError(_expected(buffers)) from None


def _expected(given: object) -> str:
    return (
        "buffers must be pairs of name and tensor, as model.named_buffers(), or () for none; not "
        f"{shown(given)}"
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _persistent(module: Any) -> list[tuple[Any, Source]]:
    """Return the buffers of ``state_dict``: others are derived, such as masks and tables."""
    return [
        # A forward pass may replace the tensor, so it is looked up each time.
        (f"{prefix}.{key}" if prefix else key, partial(getattr, part, key))
        for prefix, part in module.named_modules()
        for key, _ in part.named_buffers(recurse=False)
        if key not in part._non_persistent_buffers_set
    ]


class SharedBuffers:
    """The buffers of one replica: those of the local model, and those that all members have.

    Args:
        named: names, and functions that return the tensors of the local model, of any dtype and
            shape, on any device.

    Attributes:
        common: the buffers as of the last round, equal on all members: copies on the host, with
            the shapes and dtypes of the model's. At first they equal the model's.
    """

    def __init__(self, named: Sequence[tuple[str, Source]]) -> None:
        self._named = tuple(named)
        self.common = [_on_host(local(source())) for _, source in named]
        self._loaded = self.copies()
        """The common buffers that the local model has loaded last."""
        sizes = [one.numel() for one in self.common if one.dtype in AVERAGED]
        self._sizes = [_HEAD, *sizes]
        self._bytes = sum(one.nbytes for one in self.common if one.dtype not in AVERAGED)
        self._words = -(-self._bytes // _WORD_BYTES)

    def __bool__(self) -> bool:
        return bool(self.common)

    # -- the shared state --------------------------------------------------------------------------

    def infos(self, prefix: str = "buffer/") -> list[pccl.TensorInfo]:
        """Return the entries for the shared state; those that are not averaged, as bytes."""
        return [
            pccl.TensorInfo.from_torch(
                one if one.dtype in AVERAGED else _bytes_of(one), f"{prefix}{name}"
            )
            for (name, _), one in zip(self._named, self.common, strict=True)
        ]

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the common buffers."""
        return [one.clone() for one in self.common]

    def nothing(self) -> torch.Tensor:
        """Return a contribution without buffers: zeros, float64, shape (n,)."""
        return torch.zeros(sum(self._sizes) + self._words, dtype=torch.float64)

    def follow(self, sums: torch.Tensor) -> None:
        """Keep the float buffers of a contribution only: another member gives the rest."""
        sums[1] = 0.0
        sums[sum(self._sizes) :] = 0.0

    def apply(self, sums: torch.Tensor) -> None:
        """Make the common buffers from the sum of all members' contributions.

        A sum without weight leaves the float buffers unchanged. The other buffers stay as they are
        unless exactly one member gave them: it may have died.
        """
        *parts, words = self._split(sums)
        weight, givers = float(parts[0][0]), float(parts[0][1])
        if weight > 0.0:
            averaged = (one for one in self.common if one.dtype in AVERAGED)
            for target, part in zip(averaged, parts[1:], strict=True):
                target.copy_((part / weight).view(target.shape))
        if givers == 1.0 and bool(((words == words.round()) & (words.abs() <= _WORD_MAX)).all()):
            given = words.to(torch.int32).view(torch.uint8)[: self._bytes]
            others = [_bytes_of(one) for one in self.common if one.dtype not in AVERAGED]
            parts = _split(given, [one.numel() for one in others])
            for target, part in zip(others, parts, strict=True):
                target.copy_(part)

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the common buffers, by name."""
        return {name: one for (name, _), one in zip(self._named, self.copies(), strict=True)}

    def load_state_dict(self, saved: dict[str, torch.Tensor] | None) -> None:
        """Load a result of ``state_dict``; None: the common buffers become those of the model.

        Raises:
            ValueError: ``saved`` has other names, shapes or dtypes.
        """
        here = {name: _on_host(local(source())) for name, source in self._named}
        self._loaded = list(here.values())
        saved = here if saved is None else saved
        mine = {name: one for (name, _), one in zip(self._named, self.common, strict=True)}
        if {name: (one.shape, one.dtype) for name, one in saved.items()} != {
            name: (one.shape, one.dtype) for name, one in mine.items()
        }:
            raise ValueError("the saved state has other buffers than this DiLoCo")
        for name, one in saved.items():
            mine[name].copy_(one)

    # -- the training thread -----------------------------------------------------------------------

    def take(self, weight: float) -> torch.Tensor:
        """Return a copy of the local buffers as a contribution to a sum.

        Args:
            weight: weight of the work; with 0.0 the result is ``nothing``, and also if a float
                buffer is not finite, which would ruin the sum for all members.

        Returns:
            The weight, 1.0, all averaged buffers times the weight, and the bytes of the other
            buffers as 32-bit integers; float64, shape (n,).
        """
        sums = self.nothing()
        if not weight:
            return sums
        *parts, words = self._split(sums)
        parts[0].copy_(torch.tensor([weight, 1.0]))
        tensors = self._locals()
        averaged = (one for one in tensors if one.dtype in AVERAGED)
        for target, one in zip(parts[1:], averaged, strict=True):
            target.copy_(one.reshape(-1)).mul_(weight)
        others = [_bytes_of(_on_host(one)) for one in tensors if one.dtype not in AVERAGED]
        padding = torch.zeros(self._words * _WORD_BYTES - self._bytes, dtype=torch.uint8)
        words.copy_(torch.cat([*others, padding]).view(torch.int32))
        return sums if bool(torch.isfinite(sums).all()) else self.nothing()

    def anchor(self, common: Sequence[torch.Tensor]) -> None:
        """Load common buffers, unless the local ones come from the same: then those are further."""
        if not all(map(_equal, common, self._loaded)):
            self.merge(common, 0.0)

    def merge(self, common: Sequence[torch.Tensor], mixing: float) -> None:
        """Load common buffers into the local model.

        Args:
            common: a result of ``copies``.
            mixing: share of the local float buffers that remains.
        """
        for target, one in zip(self._locals(), common, strict=True):
            if mixing and one.dtype in AVERAGED:
                target.lerp_(one.to(target.device), 1 - mixing)
            else:
                target.copy_(one)
        self._loaded = [one.clone() for one in common]

    def _split(self, sums: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a contribution: its head, each averaged buffer, and the rest."""
        return _split(sums, [*self._sizes, self._words])

    def _locals(self) -> list[torch.Tensor]:
        tensors = [local(source()) for _, source in self._named]
        for (name, _), tensor, one in zip(self._named, tensors, self.common, strict=True):
            if (tensor.shape, tensor.dtype) != (one.shape, one.dtype):
                raise ValueError(
                    f"buffer {name} has become {tensor.dtype} of shape {tuple(tensor.shape)}; it "
                    f"was {one.dtype} of shape {tuple(one.shape)}; name the buffers to synchronize "
                    "with buffers=..."
                )
        return tensors


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _split(values: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(values, sizes))


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(one), _bytes_of(two))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor, shape (nbytes,), uint8."""
    return tensor.reshape(-1).view(torch.uint8)
