"""Ways to reduce the same bytes, which a benchmark compares round by round in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pccl

ALGORITHMS = ("auto", "ring", "star", "mesh")
"""As ``all_reduce`` calls them."""

NO_FORMAT = pccl.WireFormat.NONE.label

FORMATS = {
    NO_FORMAT: pccl.WireFormat.NONE,
    **{wire.label: wire for wire in pccl.WireFormat},
}
"""Wire formats by name; the first one is none."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way.

    Attributes:
        algorithm: how the values travel; ``auto``: left to the library.
        quantize: the wire format; ``none``: values travel as they are, and results are exact.
        tensors: the bytes are so many tensors, reduced at the same time.
        block: values that share a step; None: what is good for the format.
        stochastic: how values are rounded.
        many: they are reduced as one list (``all_reduce_many``), in one operation.
    """

    algorithm: str = "auto"
    quantize: str = NO_FORMAT
    tensors: int = 1
    block: int | None = None
    stochastic: bool = False
    many: bool = False

    @property
    def joint(self) -> int:
        """Tensors that one operation reduces."""
        return self.tensors if self.many else 1

    @property
    def exact(self) -> bool:
        """Whether results are the exact sums of whole numbers."""
        return self.quantize == NO_FORMAT

    @property
    def wire_block(self) -> int:
        """Values that share a step; 0 if nothing is quantized."""
        return self.block or FORMATS[self.quantize].default_block

    def options(self) -> pccl.QuantizationOptions | None:
        """What ``all_reduce`` is asked for."""
        if self.exact:
            return None
        return pccl.QuantizationOptions(
            format=self.quantize, block=self.block, stochastic=self.stochastic
        )

    def __str__(self) -> str:
        parts = [self.algorithm, *([] if self.exact else [self.quantize])]
        if self.many:
            parts.append(f"{self.tensors} in one")
        elif self.tensors > 1:
            parts.append(f"{self.tensors} tensors")
        return " ".join(parts)


PLAIN = Variant()
"""What a program gets that asks for nothing."""


def variants_of(
    algorithms: Iterable[str],
    formats: Iterable[str],
    tensors: Iterable[int],
    many: Iterable[int],
    *,
    block: int | None,
    stochastic: bool,
) -> tuple[Variant, ...]:
    """Each combination; block and rounding are of the quantized ones.

    Args:
        algorithms: by name.
        formats: by name.
        tensors: so many at the same time.
        many: so many in one operation.
        block: values that share a step; None: what is good for the format.
        stochastic: how values are rounded.
    """
    splits = [*((count, False) for count in tensors), *((count, True) for count in many)]
    return tuple(
        Variant(algorithm, wire, count, many=joint)
        if wire == NO_FORMAT
        else Variant(algorithm, wire, count, block, stochastic, joint)
        for algorithm, wire, (count, joint) in itertools.product(algorithms, formats, splits)
    )
