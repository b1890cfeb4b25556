"""``Compression``: the wire format of the reduces, with its error feedback."""

from __future__ import annotations

from dataclasses import replace

import pccl


class Compression:
    """A wire format, and the error feedback of each named tensor.

    Args:
        options: the wire format; None: no compression. Its feedback and name are ignored.
        feedback: the error feedback; None: no error feedback.

    Attributes:
        feedback: residuals, by name; empty without error feedback.
        remembers: whether error feedback is in use.
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
        """Return the options for a reduce; without a name, the reduce skips error feedback."""
        if self._options is None:
            return None
        if not self.remembers or name is None:
            return replace(self._options, error_feedback=None, name=None)
        return replace(self._options, error_feedback=self.feedback, name=name)
