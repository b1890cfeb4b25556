"""Pieces that were fetched and not yet committed: where they are, and where they end up."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.runtime.state.memory.staging import Staging
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.shared_state import TensorInfo
from pccl.state.layout import Entry, StateLayout
from tests.support.patience import LIMIT_S

SMALL = StateLayout(
    Entry(f"t{count}", DataType.UINT8, count) for count in (5, 0, PIECE_BYTES + 3, 2)
)
"""Pieces of 5, 1 MiB, 3 and 2 bytes."""


def arrays_of(layout: StateLayout, value: int) -> list[Any]:
    return [np.full(entry.nbytes, value, np.uint8) for entry in layout.entries]


def memory_of(arrays: list[Any]) -> StateMemory:
    return StateMemory([TensorInfo.from_numpy(one, f"t{n}") for n, one in enumerate(arrays)])


@pytest.mark.parametrize("memory_max_bytes", [10, 9])
def test_slots_are_compact_and_in_order(memory_max_bytes: int, tmp_path: Path) -> None:
    staging = Staging(SMALL, [3, 0, 2], memory_max_bytes, str(tmp_path))
    assert (staging.nbytes, staging.spooled) == (10, memory_max_bytes < 10)
    assert [number in staging for number in (-1, 0, 1, 2, 3, 4)] == [
        *(False, True, False, True, True, False)
    ]
    assert list(tmp_path.iterdir()) == []  # the file has no name
    for number, content in ((0, b"abcde"), (2, b"fgh"), (3, b"ij")):
        slot = staging.slot(number)
        assert (slot.readonly, slot.format) == (False, "B")
        slot[:] = content
        slot.release()
    with pytest.raises(KeyError):
        staging.slot(1)
    arrays = arrays_of(SMALL, 255)
    staging.apply(memory_of(arrays), [3, 2])
    assert arrays[0].tobytes() == b"\xff" * 5  # not asked for
    assert arrays[2].tobytes() == b"\xff" * PIECE_BYTES + b"fgh"
    assert arrays[3].tobytes() == b"ij"
    staging.close()
    staging.close()
    with pytest.raises(ValueError, match="released"):
        staging.slot(0)


@given(st.sets(st.integers(0, 6)), st.booleans(), st.randoms(use_true_random=True))
def test_what_is_staged_arrives_and_nothing_else(chosen: set[int], disk: bool, chance: Any) -> None:
    lengths = (3, PIECE_BYTES, 0, 2 * PIECE_BYTES + 1, 8, 1)
    layout = StateLayout(Entry(f"t{n}", DataType.INT8, length) for n, length in enumerate(lengths))
    assert layout.piece_count == 7
    numbers = sorted(chosen)
    chance.shuffle(numbers)
    staging = Staging(layout, numbers, 0 if disk else 1 << 30)
    for number in numbers:
        staging.slot(number)[:] = bytes([number + 1]) * layout.piece(number).length
    arrays = arrays_of(layout, 255)
    staging.apply(memory_of(arrays), numbers)
    staging.close()
    for number in range(7):
        piece = layout.piece(number)
        found = arrays[piece.entry][piece.offset : piece.offset + piece.length]
        assert np.all(found == (number + 1 if number in chosen else 255))


@pytest.mark.parametrize("memory_max_bytes", [0, 1 << 30])
def test_a_slot_that_somebody_holds_outlives_the_close(memory_max_bytes: int) -> None:
    staging = Staging(SMALL, [0, 1], memory_max_bytes)
    slot = staging.slot(1)
    staging.close()
    slot[:] = bytes(PIECE_BYTES)  # no error, no crash
    del staging
    gc.collect()
    slot[0] = 7
    assert slot[0] == 7


def test_closing_gives_the_descriptor_and_the_room_back(tmp_path: Path) -> None:
    free = sorted(os.listdir("/dev/fd"))
    for _ in range(3):
        staging = Staging(SMALL, [1], 0, str(tmp_path))
        assert staging.spooled
        staging.slot(1)[:] = bytes(PIECE_BYTES)
        staging.close()
    assert sorted(os.listdir("/dev/fd")) == free


def test_pages_that_nobody_touches_cost_nothing() -> None:
    huge = StateLayout([Entry("t", DataType.DOUBLE, 1 << 30)])  # 8 GiB
    staging = Staging(huge, range(huge.piece_count), 1 << 40)
    assert (staging.nbytes, staging.spooled) == (8 << 30, False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    staging.slot(8191)[-1] = 1  # beyond what 32 bits count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    staging.close()


def test_a_full_disk_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(descriptor: int, start: int, length: int) -> None:
        assert (start, length) == (0, 10)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="10 bytes") as caught:
        Staging(SMALL, [0, 2, 3], 0, str(tmp_path))
    assert caught.value.errno == errno.ENOSPC
    said = str(caught.value)
    for words in (str(tmp_path), "No space left", "free space there", "raise staging_bytes_max"):
        assert words in said
    Staging(SMALL, [0, 2, 3], 10, str(tmp_path)).close()  # memory needs no disk


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, None])
def test_where_nothing_reserves_room_zeros_do(
    number: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, "not here")

    if number is None:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    written: list[tuple[int, int]] = []
    pwrite = os.pwrite

    def write(descriptor: int, data: memoryview, start: int) -> int:
        written.append((start, len(data)))
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", write)
    staging = Staging(SMALL, [1, 2], 0, str(tmp_path))
    assert written == [(0, PIECE_BYTES), (PIECE_BYTES, 3)]
    staging.slot(2)[:] = b"xyz"
    assert bytes(staging.slot(1)) == bytes(PIECE_BYTES)
    staging.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="nothing reserves room here")
def test_the_room_is_reserved(tmp_path: Path) -> None:
    limited = (
        "import errno, resource, signal, sys\n"
        "from pccl.protocol.data_type import DataType\n"
        "from pccl.runtime.state.memory.staging import Staging\n"
        "from pccl.state.layout import Entry, StateLayout\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    layout = StateLayout([Entry('t', DataType.UINT8, 1 << 22)])\n"
        "    Staging(layout, range(4), 0, sys.argv[1])\n"
        "except OSError as error:\n"
        "    assert error.errno == errno.EFBIG, error\n"
        "    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", limited, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert f"4194304 bytes in {tmp_path}" in ended.stdout


def test_a_directory_that_is_not_there() -> None:
    missing = str(Path(tempfile.gettempdir()) / "no" / "such" / "place")
    with pytest.raises(FileNotFoundError, match="to a writable directory") as found:
        Staging(SMALL, [0], 0, missing)
    assert missing in str(found.value)


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("pccl.runtime.state.memory.staging.mmap.mmap", refuse)
    with pytest.raises(MemoryError, match=r"5 bytes of fetched shared.*lower staging"):
        Staging(SMALL, [0], 100)
