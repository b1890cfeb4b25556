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
    """

    algorithm: str = "auto"
    quantize: str = NO_FORMAT
    tensors: int = 1
    block: int | None = None
    stochastic: bool = False

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
        return " ".join([*parts, *([f"{self.tensors} tensors"] if self.tensors > 1 else [])])


PLAIN = Variant()
"""What a program gets that asks for nothing."""


def variants_of(
    algorithms: Iterable[str],
    formats: Iterable[str],
    tensors: Iterable[int],
    *,
    block: int | None,
    stochastic: bool,
) -> tuple[Variant, ...]:
    """Each combination; block and rounding are of the quantized ones."""
    return tuple(
        Variant(algorithm, wire, count)
        if wire == NO_FORMAT
        else Variant(algorithm, wire, count, block, stochastic)
        for algorithm, wire, count in itertools.product(algorithms, formats, tensors)
    )
