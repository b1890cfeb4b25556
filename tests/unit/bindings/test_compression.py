"""What values are reduced with, and whose feedback that is."""

from __future__ import annotations

import pccl
from pccl.bindings.compression import Compression


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
