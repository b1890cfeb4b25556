"""Radial-directional averages, in which directions and lengths are averaged apart.

The mean of long vectors in different directions is short: of M independent ones, by a factor of
the root of M. So with more replicas, outer steps become smaller. Radial-directional averaging keeps
the mean length. Source: RDA in Decoupled DiLoCo (arXiv:2604.21428).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pccl.bindings.diloco.model.local_model import LocalFragment
from pccl.bindings.diloco.model.outer_optimizers import exact_norm
from pccl.checks import shown

MEAN, RADIAL = "mean", "radial-directional"

SHORT = 1e-30
"""A vector that is not longer has no direction: dividing by its length might overflow."""


@dataclass(frozen=True, slots=True)
class RadialFragment:
    """Radial-directional averages of one fragment, tensor by tensor.

    The average of pseudo-gradients Δ with weights w has the length Σ w‖Δ‖ / Σ w, and the direction
    φ(Σ w φ(Δ)), where φ(x) = x / ‖x‖ and φ(0) = 0. Members reduce the lengths, then the directions.
    All results are on the host, and have the same bits on every machine.

    If the directions of a parameter cancel out exactly, the average is 0. The paper takes the mean
    then. Members do not know it, and a third reduce for it is not worth its cost.

    Attributes:
        views: returns views of a flat tensor, one for each parameter.
        are_plain: for each parameter, whether members take the mean instead.
    """

    views: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    are_plain: Sequence[bool]

    def no_lengths(self) -> torch.Tensor:
        """Return the lengths of a contribution of zeros: float64, shape (parameters,)."""
        return torch.zeros(len(self.are_plain), dtype=torch.float64)

    def lengths(self, work: torch.Tensor) -> torch.Tensor:
        """Return the L2 norm of each parameter's pseudo-gradient: float64, shape (parameters,).

        The norm of the result is that of ``work``, so a guard judges them alike.
        """
        norms = [exact_norm([view]) for view in self.views(work)]
        return torch.tensor(norms, dtype=torch.float64)

    def directions(
        self, work: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Return the directions of pseudo-gradients, as something to average.

        Their length does not matter. It is the root of the number of values, so that wire formats
        see values of equal size in all parameters.

        Args:
            work: the pseudo-gradients, shape (n,).
            lengths: the result of ``lengths``.
            out: memory for the result, shape (n,).
        """
        for view, target, length, is_plain in zip(
            self.views(work), self.views(out), _floats(lengths), self.are_plain, strict=True
        ):
            factor = 1.0 if is_plain else _ratio(view.numel() ** 0.5, length)
            torch.mul(view, factor, out=target)
        return out

    def combine(self, average: torch.Tensor, lengths: torch.Tensor) -> None:
        """Make the average of pseudo-gradients from that of their directions, in place.

        Args:
            average: weighted mean of ``directions``, shape (n,).
            lengths: weighted mean of ``lengths``.
        """
        for view, length, is_plain in zip(
            self.views(average), _floats(lengths), self.are_plain, strict=True
        ):
            if not is_plain:
                view.mul_(_ratio(length, exact_norm([view])))


def _floats(values: torch.Tensor) -> list[float]:
    return [float(value) for value in values]


def _ratio(length: float, current: float) -> float:
    return 0.0 if current <= SHORT else length / current  # NaN stays NaN


def radial_averages(
    averaging: object, params: object, parts: Sequence[LocalFragment], shards: int
) -> tuple[list[RadialFragment], str]:
    """Return the radial-directional averages of each fragment, and a text that members compare.

    Both are empty if members take the mean. They always take the mean of embeddings, as the paper
    does.

    Args:
        averaging: ``"mean"`` or ``"radial-directional"``.
        params: the model.
        parts: the fragments of the model.
        shards: number of processes that hold a part of the model; 1: it is not sharded.

    Raises:
        TypeError, ValueError: ``averaging`` is not known, or impossible with this model.
    """
    if averaging == MEAN:
        return [], ""
    if averaging != RADIAL:
        raise ValueError(f"averaging must be {MEAN!r} or {RADIAL!r}, not {shown(averaging)}")
    if not isinstance(params, torch.nn.Module):
        raise TypeError(
            f"averaging={RADIAL!r} needs the model itself as params, because it takes the mean of "
            f"embeddings; not {shown(params)}"
        )
    if shards > 1:
        raise ValueError(
            f"averaging={RADIAL!r} needs whole parameters, but this model is sharded; use "
            f"averaging={MEAN!r}"
        )
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    plain = {id(module.weight) for module in params.modules() if isinstance(module, kinds)}
    radial = [
        RadialFragment(part.outer.views, [id(tensor) in plain for tensor in part.tensors])
        for part in parts
    ]
    means = sum(sum(one.are_plain) for one in radial)
    return radial, f", averaging={RADIAL} except {means} embeddings"
