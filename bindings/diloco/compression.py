"""``Compression``: what fragments are reduced with, and what that has left out of them so far."""

from __future__ import annotations

from dataclasses import replace

import pccl
from pccl.bindings.diloco.rounds import Contribution


class Compression:
    """A format with error feedback, which is kept apart for each fragment.

    Args:
        options: a format; None: nothing is compressed. Their ``error_feedback`` and ``name`` don't
            count.

    Attributes:
        feedback: what is owed, by fragment.
    """

    def __init__(self, options: pccl.QuantizationOptions | None) -> None:
        self._options = options
        self.feedback = pccl.ErrorFeedback()

    def __str__(self) -> str:
        options = self._options
        if options is None:
            return "compression=none"
        wire = options.format
        if wire is None:
            name = f"{options.quantized_datatype.name} {options.algorithm.name}".lower()
        else:
            name = wire if isinstance(wire, str) else wire.name.lower()
        block = "" if options.block is None else f" block={options.block}"
        return f"compression={name}{block}{' stochastic' * options.stochastic}"

    def options(self, contribution: Contribution) -> pccl.QuantizationOptions | None:
        """What a contribution is reduced with. One without work neither owes nor pays."""
        if self._options is None:
            return None
        feedback = self.feedback if contribution.weight else None
        name = self._name(contribution.fragment) if contribution.weight else None
        return replace(self._options, error_feedback=feedback, name=name)

    def forget(self, fragment: int) -> None:
        """It is not known any more what is owed: what was may have been paid already."""
        self.feedback.forget(self._name(fragment))

    @staticmethod
    def _name(fragment: int) -> str:
        return f"fragment {fragment}"
