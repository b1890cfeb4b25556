"""Borrowing the buffers of an exchange: lists of tensors of any length, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl.machines.blocks import BufferLengths
from pccl.runtime.collective.block_operand import borrow_blocks

X = np.arange(12, dtype=np.int16)


def test_tensors_are_one_memory_and_empty_ones_only_a_length() -> None:
    values, nothing, result = X.copy(), np.empty(0, np.int16), np.zeros((2, 6), np.int16)
    operand, lengths = borrow_blocks([values[:3], nothing, values[3:]], result)
    assert lengths == BufferLengths((3, 0, 9), (12,))
    assert operand.source.read(0, 24).tobytes() == values.tobytes()
    operand.target.write(0, values)
    assert result.reshape(-1).tolist() == values.tolist()
    assert not operand.in_place


def test_a_member_may_give_or_get_nothing() -> None:
    assert borrow_blocks(X, None)[1] == BufferLengths((12,), ())
    assert borrow_blocks(None, X.copy())[1] == BufferLengths((), (12,))
    assert borrow_blocks(np.empty(0, np.int8), [np.empty(0, np.int8)])[1] == BufferLengths(
        (0,), (0,)
    )


def test_one_tensor_may_be_given_twice_but_not_received_twice() -> None:
    borrow_blocks([X, X], X.copy())
    result = X.copy()
    with pytest.raises(ValueError, match=r"recv\[0\] and recv\[1\] overlap"):
        borrow_blocks(X, [result, result])
    with pytest.raises(ValueError, match=r"send\[1\] and recv overlap|recv and send\[1\] overlap"):
        borrow_blocks([X, result[:2]], result)


@pytest.mark.parametrize("begins", [0, 3, 9])
def test_the_input_may_lie_in_the_result(begins: int) -> None:
    result = X.copy()
    operand, lengths = borrow_blocks(result[begins : begins + 3], result)
    assert lengths.inside == begins
    assert len(operand.ranges) == 1
    operand, lengths = borrow_blocks(result[begins : begins + 3], [result[:3], result[3:]])
    assert lengths.inside == begins


@pytest.mark.parametrize(
    ("send", "recv", "kind", "words"),
    [
        (None, None, ValueError, "neither send nor recv"),
        ([], None, ValueError, "neither send nor recv"),
        ([X, X.astype(np.int8)], X.copy(), ValueError, r"send\[1\] has dtype int8, send\[0\] has"),
        (X, [X.copy(), 7], TypeError, r"recv\[1\]"),
        (X, np.frombuffer(bytes(8), np.int16), ValueError, "recv is read-only"),
        (X[::2], X.copy(), ValueError, "send"),
    ],
)
def test_refused(send: Any, recv: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        borrow_blocks(send, recv)
