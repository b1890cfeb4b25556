"""Checks of the arguments of calls to the run's store, and the questions that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from pccl.checks import check_range, check_timeout, shown
from pccl.machines.peer.events import StoreCall
from pccl.protocol.limits import STORE_KEY_BYTES_MAX, STORE_VALUE_BYTES_MAX
from pccl.protocol.messages import StoreOp
from pccl.runtime.requests import StoreQuestion


def set_question(key: str, value: bytes) -> StoreQuestion:
    """Return the question that sets a key."""
    return _question(StoreOp.SET, [key], _value("value", value))


def get_question(key: str, timeout_s: float | None = None) -> StoreQuestion:
    """Return the question for the value of a key."""
    return _question(StoreOp.GET, [key], timeout_s=timeout_s)


def add_question(key: str, amount: int = 1) -> StoreQuestion:
    """Return the question that adds to a number."""
    amount = check_range("amount", amount, -(1 << 63), (1 << 63) - 1)
    return _question(StoreOp.ADD, [key], b"%d" % amount)


def append_question(key: str, value: bytes) -> StoreQuestion:
    """Return the question that appends to a value."""
    return _question(StoreOp.APPEND, [key], _value("value", value))


def compare_set_question(key: str, expected: bytes, desired: bytes) -> StoreQuestion:
    """Return the question that replaces the expected value of a key."""
    desired, expected = _value("desired", desired), _value("expected", expected)
    return _question(StoreOp.COMPARE_SET, [key], desired, expected)


def delete_question(key: str) -> StoreQuestion:
    """Return the question that deletes a key."""
    return _question(StoreOp.DELETE, [key])


def check_question(keys: Iterable[str]) -> StoreQuestion:
    """Return the question whether keys exist."""
    return _question(StoreOp.CHECK, keys)


def wait_question(keys: Iterable[str], timeout_s: float | None = None) -> StoreQuestion:
    """Return the question that is answered once keys exist."""
    return _question(StoreOp.WAIT, keys, timeout_s=timeout_s)


def count_question() -> StoreQuestion:
    """Return the question how many keys there are."""
    return _question(StoreOp.COUNT, [])


def _question(
    op: StoreOp,
    keys: Iterable[str],
    value: bytes = b"",
    expected: bytes = b"",
    timeout_s: float | None = None,
) -> StoreQuestion:
    if isinstance(keys, str):
        raise TypeError("keys must be a list of str, not one str")
    named = tuple(map(_key, keys))
    return StoreQuestion(StoreCall(0, op, named, value, expected), check_timeout(timeout_s))


def _key(key: object) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a str, not {shown(key)}")
    encoded = key.encode()
    if len(encoded) > STORE_KEY_BYTES_MAX:
        raise ValueError(f"a key must have at most {STORE_KEY_BYTES_MAX} bytes, not {len(encoded)}")
    return encoded


def _value(name: str, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes, not {shown(value)}")
    copied = bytes(cast("bytes | bytearray | memoryview[int]", value))
    if len(copied) > STORE_VALUE_BYTES_MAX:
        raise ValueError(
            f"{name} must have at most {STORE_VALUE_BYTES_MAX} bytes, not {len(copied)}"
        )
    return copied
