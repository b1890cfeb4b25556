"""What values are reduced with, and whose feedback that is."""

from __future__ import annotations

from typing import Any

import pytest

import pccl
from pccl.bindings.compression import Compression, of_pseudo_gradients


def test_each_name_has_its_own_feedback_and_none_has_none() -> None:
    feedback = pccl.ErrorFeedback()
    theirs = pccl.ErrorFeedback()
    given = pccl.QuantizationOptions(format="int8", error_feedback=theirs, name="theirs")
    compression = Compression(given, feedback)
    named, nameless = compression.options("bucket.3"), compression.options(None)
    assert named is not None
    assert nameless is not None
    assert (named.format, named.error_feedback, named.name) == ("int8", feedback, "bucket.3")
    assert (nameless.format, nameless.error_feedback) == ("int8", None)


def test_without_a_feedback_nothing_is_remembered() -> None:
    options = Compression(pccl.QuantizationOptions(format="int4"), None).options("bucket.0")
    assert options is not None
    assert (options.format, options.error_feedback) == ("int4", None)


def test_nothing_is_compressed_without_a_format() -> None:
    compression = Compression(None, pccl.ErrorFeedback())
    assert compression.options("fragment 0") is None
    assert str(compression) == "compression=none"


@pytest.mark.parametrize(
    ("asked", "decay"),
    [
        (None, 1.0),
        ("int4", 1.0),
        ("sparse", 0.95),
        (pccl.QuantizationOptions(format="sparse", block=200), 0.95),
        (pccl.QuantizationOptions(format="sparse", error_feedback=pccl.ErrorFeedback()), 1.0),
        (
            pccl.QuantizationOptions(format="int2", error_feedback=pccl.ErrorFeedback(decay=0.5)),
            0.5,
        ),
        (pccl.QuantizationOptions(quantized_datatype=pccl.DataType.INT8), 1.0),
    ],
)
def test_the_memory_of_sparse_pseudo_gradients_decays(asked: object, decay: float) -> None:
    compression = of_pseudo_gradients(asked)
    assert compression.remembers
    assert compression.feedback.decay == decay


def test_an_error_feedback_that_is_none() -> None:
    wrong: Any = True
    options = pccl.QuantizationOptions(format="sparse", error_feedback=wrong)
    with pytest.raises(TypeError, match="error_feedback must be a"):
        of_pseudo_gradients(options)
