"""``Compression``: what values are reduced with, and what that has left out of them so far."""

from __future__ import annotations

from dataclasses import replace

import pccl


class Compression:
    """A format with error feedback, which is kept apart by name.

    Args:
        options: a format; None: nothing is compressed. Their ``name`` doesn't count.
        feedback: what is owed; None: nothing is remembered.

    Attributes:
        feedback: what is owed, by name.
        remembers: whether anything is.
    """

    def __init__(
        self, options: pccl.QuantizationOptions | None, feedback: pccl.ErrorFeedback | None
    ) -> None:
        self.feedback = feedback or pccl.ErrorFeedback()
        self._options = options
        self.remembers = feedback is not None

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

    def options(self, name: str | None) -> pccl.QuantizationOptions | None:
        """What values are reduced with; those without a name neither owe nor pay."""
        if self._options is None:
            return None
        if not self.remembers or name is None:
            return replace(self._options, error_feedback=None, name=None)
        return replace(self._options, error_feedback=self.feedback, name=name)
