"""What a peer tells people who ask: whatever it sends is bounded, or refused."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import EVIDENCE_BYTES_MAX
from pccl.telemetry.evidence import DEPTH_MAX, UNPACKED_BYTES_MAX, pack_evidence, unpack_evidence

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.text() | st.floats(-1e9, 1e9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(_JSON)
def test_evidence_arrives_as_it_was_given(evidence: Any) -> None:
    assert unpack_evidence(pack_evidence(evidence)) == evidence


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_error(data: bytes) -> None:
    for sent in (data, zlib.compress(data)):
        with suppress(RemoteProtocolError):
            unpack_evidence(sent)


def noise(size: int) -> bytes:
    """JSON that cannot be compressed to less than this size."""
    return json.dumps(Random(1).randbytes(size).hex()).encode()


def nested(depth: int) -> Any:
    """Lists inside each other."""
    return [nested(depth - 1)] if depth > 1 else []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "incomplete, or more than"),
        (zlib.compress(b"[1, 2]")[:-1], "incomplete, or more than"),
        (zlib.compress(b"[1, 2]") + b"more", "4 bytes too many"),
        (zlib.compress(b"[1, 2"), "Expecting"),
        (zlib.compress(b"\xff\xff"), "decode"),
        (zlib.compress(b"[" * 100_000 + b"]" * 100_000), "recursion"),
        (zlib.compress(b" " * UNPACKED_BYTES_MAX + b"1"), "incomplete, or more than"),
        (zlib.compress(noise(EVIDENCE_BYTES_MAX)), "bytes, at most 262144 are allowed"),
        (zlib.compress(b"1" * 5000), "digits"),
        (pack_evidence({"unknown": nested(DEPTH_MAX)}), "lists or objects inside each other"),
    ],
)
def test_what_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says) as raised:
        unpack_evidence(data)
    assert raised.value.func == "peer_evidence"


def test_the_largest_answer_is_accepted() -> None:
    text = b" " * (UNPACKED_BYTES_MAX - 1) + b"1"
    assert unpack_evidence(zlib.compress(text)) == 1
    assert unpack_evidence(pack_evidence(nested(DEPTH_MAX))) == nested(DEPTH_MAX)
