"""How long the records of a connection are."""

from __future__ import annotations

import pytest

from pccl.protocol.handshake.records import (
    QUICK_RECORD_NS,
    QUICK_RECORDS,
    RECORD_BYTES_MAX,
    RECORD_BYTES_MIN,
    SLOW_RECORD_NS,
    RecordSize,
)
from pccl.protocol.types import NS_PER_S

SLOW_NS = SLOW_RECORD_NS + 1


def sizes_at(bytes_per_s: int, records: int, size: RecordSize | None = None) -> RecordSize:
    """Send full records on a line of this speed."""
    size = size or RecordSize(RECORD_BYTES_MAX)
    for _ in range(records):
        size.note(size.plain_bytes, size.plain_bytes * NS_PER_S // bytes_per_s)
    return size


def test_a_fast_line_soon_gets_the_longest_records() -> None:
    size = sizes_at(10**9, QUICK_RECORDS - 1)
    assert size.plain_bytes == RECORD_BYTES_MIN
    assert sizes_at(10**9, 1, size).plain_bytes == 2 * RECORD_BYTES_MIN
    assert sizes_at(10**9, 8 * QUICK_RECORDS, size).plain_bytes == RECORD_BYTES_MAX
    assert sizes_at(10**9, 100, size).plain_bytes == RECORD_BYTES_MAX


@pytest.mark.parametrize("bytes_per_s", [3_000, 20_000, 500_000])
def test_a_record_takes_no_longer_than_a_second(bytes_per_s: int) -> None:
    size = sizes_at(bytes_per_s, 1000)
    seconds = size.plain_bytes / bytes_per_s
    assert QUICK_RECORD_NS / NS_PER_S / 2 < seconds <= SLOW_RECORD_NS / NS_PER_S


def test_a_line_that_has_become_slow_gets_shorter_records() -> None:
    size = sizes_at(10**9, 1000)
    size.note(100, SLOW_NS)
    assert size.plain_bytes == RECORD_BYTES_MAX // 2
    for _ in range(20):
        size.note(100, SLOW_NS)
    assert size.plain_bytes == RECORD_BYTES_MIN


def test_short_messages_say_nothing_about_the_line() -> None:
    size = RecordSize(RECORD_BYTES_MAX)
    for _ in range(1000):
        size.note(RECORD_BYTES_MIN - 1, 0)
    assert size.plain_bytes == RECORD_BYTES_MIN


def test_the_other_side_sets_the_longest() -> None:
    size = RecordSize(100)
    size.note(100, SLOW_NS)
    assert size.plain_bytes == 100
    size = RecordSize(5000)
    assert sizes_at(10**9, 1000, size).plain_bytes == 5000
