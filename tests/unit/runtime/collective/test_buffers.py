"""Memory that is used again: never twice at the same time, and not more of it than allowed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pccl.runtime.collective.buffers import BACKUP_BYTES_MIN, Backups, Buffers

FLOAT = np.dtype(np.float32)
COUNT = BACKUP_BYTES_MIN // 4


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_backup_is_used_again_once_nothing_refers_to_it() -> None:
    backups = Backups()
    first = backups.take(COUNT + 8, FLOAT)
    at = address(first)
    assert (first.shape, first.dtype) == ((COUNT + 8,), FLOAT)
    del first
    again = backups.take(COUNT, FLOAT)
    assert address(again) == at
    assert again.shape == (COUNT,)


def test_a_view_a_slice_or_a_memoryview_keeps_the_memory() -> None:
    backups = Backups()
    first = backups.take(COUNT, FLOAT)
    at = address(first)
    kept = first[10:20].view(np.uint8).data[3:]
    del first
    assert address(backups.take(COUNT, FLOAT)) != at
    del kept
    found = [backups.take(COUNT, FLOAT), backups.take(COUNT, FLOAT)]
    assert at in map(address, found)


def test_only_so_much_is_kept() -> None:
    backups = Backups(bytes_max=4 * BACKUP_BYTES_MIN)
    used = [backups.take(COUNT, FLOAT) for _ in range(6)]
    assert len(set(map(address, used))) == 6
    ats = list(map(address, used))
    del used
    again = [backups.take(COUNT, FLOAT) for _ in range(4)]
    assert sorted(map(address, again)) == sorted(ats[2:])


def test_what_is_small_or_too_large_is_not_kept() -> None:
    backups = Backups(bytes_max=2 * BACKUP_BYTES_MIN)
    for count in (COUNT - 1, 2 * COUNT + 1):
        assert backups.take(count, FLOAT).base is None


def test_threads_never_share_a_backup() -> None:
    backups = Backups()

    def work(number: int) -> bool:
        for _ in range(200):
            array = backups.take(COUNT, FLOAT)
            array[:] = number
            if not (array == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_buffers_have_the_length_that_was_asked_for() -> None:
    buffers = Buffers()
    first = buffers.take(100)
    buffers.give(first)
    assert buffers.take(60).obj is first.obj
    assert len(buffers.take(200)) == 200
