"""``Compression``: the wire format of the reduces, with its error feedback."""

from __future__ import annotations

from dataclasses import replace

import pccl
from pccl.bindings.arguments import check_compression
from pccl.checks import check_member, check_type

SPARSE_DECAY = 0.95
"""Decay of the error feedback of sparse pseudo-gradients (SparseLoCo, arXiv:2508.15706)."""


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
        if options.format is None:
            data_type = check_member(
                "quantized_datatype", options.quantized_datatype, pccl.DataType
            )
            algorithm = check_member("algorithm", options.algorithm, pccl.QuantizationAlgorithm)
            name = f"{data_type.name} {algorithm.name}".lower()
        else:
            name = check_member("format", options.format, pccl.WireFormat).name.lower()
        block = "" if options.block is None else f" block={options.block}"
        return f"compression={name}{block}{' stochastic' * options.stochastic}"

    def options(self, name: str | None) -> pccl.QuantizationOptions | None:
        """Return the options for a reduce; without a name, the reduce skips error feedback."""
        if self._options is None:
            return None
        if not self.remembers or name is None:
            return replace(self._options, error_feedback=None, name=None)
        return replace(self._options, error_feedback=self.feedback, name=name)


def of_pseudo_gradients(asked: object) -> Compression:
    """Return the compression that a program asks ``DiLoCo`` for, with an error feedback.

    Args:
        asked: None, the name of a format, or options, whose error feedback gives the decay only.

    Raises:
        TypeError, ValueError: it is no known format, or the error feedback is none.
    """
    options = check_compression(asked)
    decay = 1.0
    if options is not None and options.error_feedback is not None:
        decay = check_type("error_feedback", options.error_feedback, pccl.ErrorFeedback).decay
    elif options is not None and options.format is not None:
        wire = check_member("format", options.format, pccl.WireFormat)
        decay = SPARSE_DECAY if wire is pccl.WireFormat.SPARSE else 1.0
    return Compression(options, pccl.ErrorFeedback(decay=decay))
