"""The same call again: on other memory, at an address that was used before, in another view."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.integration.conftest import Run

Array = npt.NDArray[Any]

COUNT = 150_000
"""Elements of a tensor of several segments."""


def summed(run: Run, sends: list[Any], recvs: list[Any], **options: Any) -> list[list[float]]:
    """What a reduce of each member's buffers leaves in its result."""
    run.reduce(sends, recvs, **options)
    return [np.asarray(recv).reshape(-1).tolist() for recv in recvs]


@pytest.mark.parametrize("algorithm", ["ring", "mesh"])
def test_other_arrays_at_an_address_that_was_used(
    run_of: Callable[..., Run], algorithm: str
) -> None:
    """Of another dtype, length or shape, as a torch tensor, in place, or with an offset."""
    torch = pytest.importorskip("torch")
    run = run_of(2)
    memory = [(bytearray(8 * COUNT), bytearray(8 * COUNT)) for _ in run.members]
    options = {"algorithm": algorithm, "tag": 3}

    def check(dtype: Any, count: int, offset: int = 0, *, wrap: Callable[[Array], Any]) -> None:
        pairs = [[np.frombuffer(part, dtype, count, offset) for part in both] for both in memory]
        for rank, (send, recv) in enumerate(pairs):
            send[:], recv[:] = np.arange(count) % 100 + rank, 7
        sends, recvs = zip(*[[wrap(part) for part in pair] for pair in pairs], strict=True)
        expected = (2 * (np.arange(count) % 100) + 1).tolist()
        assert summed(run, list(sends), list(recvs), **options) == [expected, expected]
        assert summed(run, list(sends), list(sends), **options) == [expected, expected]

    for _ in range(2):
        check(np.float32, COUNT, wrap=lambda array: array)
        check(np.int32, COUNT, wrap=lambda array: array)
        check(np.float64, COUNT, wrap=lambda array: array)
        check(np.float32, COUNT, wrap=lambda array: array.reshape(2, -1))
        check(np.float32, COUNT, wrap=torch.from_numpy)
        check(np.float32, COUNT - 1, 4, wrap=lambda array: array)
        check(np.float32, COUNT, wrap=lambda array: array)


def test_a_buffer_that_has_become_read_only_or_strided(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    sends = [np.ones(COUNT, np.float32) for _ in run.members]
    recvs = [np.zeros(2 * COUNT, np.float32) for _ in run.members]
    halves = [recv[:COUNT] for recv in recvs]
    assert summed(run, sends, halves)[0] == [2.0] * COUNT
    before = [recv.copy() for recv in recvs]
    for member, send, recv in zip(run.members, sends, recvs, strict=True):
        with pytest.raises(ValueError, match="contiguous"):
            member.all_reduce(send, recv[::2])
        recv.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            member.all_reduce(send, recv[:COUNT])
        recv.flags.writeable = True
    assert [recv.tolist() for recv in recvs] == [recv.tolist() for recv in before]
    assert summed(run, sends, halves)[1] == [2.0] * COUNT


def test_no_array_outlives_its_call(run_of: Callable[..., Run]) -> None:
    run = run_of(2)
    for _ in range(3):
        sends = [np.ones(COUNT, np.float32) for _ in run.members]
        recvs = [np.zeros(COUNT, np.float32) for _ in run.members]
        summed(run, sends, recvs)
        alive = [weakref.ref(array) for array in (*sends, *recvs)]
        del sends, recvs
        gc.collect()
        assert not any(reference() is not None for reference in alive)


def test_the_same_call_in_another_view(new_run: Callable[..., Run]) -> None:
    """The ring of the next view has other members, in other places."""
    run = new_run(2)
    arrays = [(np.full(COUNT, 1 << rank, np.int32), np.zeros(COUNT, np.int32)) for rank in range(3)]

    def check(expected: int) -> None:
        used = arrays[: len(run.members)]
        found = summed(run, [send for send, _ in used], [recv for _, recv in used])
        assert found == [[expected] * COUNT] * len(used)

    check(3)
    check(3)
    run.join()
    check(7)
    check(7)
    run.members.pop(0).close()
    run.each(lambda member: member.update_topology())
    check(3)
    run.join()
    check(7)
