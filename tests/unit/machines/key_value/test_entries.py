"""The keys of the store: bounds, and what follows from reports."""

from __future__ import annotations

import pytest

from pccl.machines.key_value.entries import StoreEntries, entry_bytes, number_of
from pccl.protocol.limits import (
    STORE_BYTES_MAX,
    STORE_MEMBER_BYTES_MAX,
    STORE_RECEIPTS_MAX,
    STORE_VALUE_BYTES_MAX,
)
from pccl.protocol.messages import KnownEntry, StoreChange, StoreReceipt, StoreRefusal
from pccl.protocol.types import PeerId

A, B, C = map(PeerId, (1, 2, 3))
LARGE = b"x" * STORE_VALUE_BYTES_MAX


def known(key: bytes, value: bytes | None, sequence: int, *receipts: StoreReceipt) -> KnownEntry:
    return KnownEntry(key, value, StoreChange(sequence, A, receipts))


def taken(*reports: KnownEntry) -> StoreEntries:
    entries = StoreEntries()
    list(entries.take_up(reports))
    return entries


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b"0", 0),
        (b"-12", -12),
        (b"9223372036854775807", (1 << 63) - 1),
        (b"-9223372036854775808", -(1 << 63)),
        (b"9223372036854775808", None),
        (b"", None),
        (b"-", None),
        (b"--1", None),
        (b"+1", None),
        (b" 1", None),
        (b"1_0", None),
        (b"1" * 30, None),
        (b"\xd9\xa1", None),
    ],
)
def test_numbers_are_the_plain_text_of_64_bits(value: bytes, number: int | None) -> None:
    assert number_of(value) == number


def test_the_store_is_bounded_in_all_and_for_each_member() -> None:
    entries, each = StoreEntries(), entry_bytes(b"key 0000", LARGE)
    count, refusal = 0, None
    for peer in range(1, 100):
        writer = PeerId(peer)
        own = 0
        while (refusal := entries.refusal(b"key %04d" % count, LARGE, writer)) is None:
            entries.write(b"key %04d" % count, LARGE, count + 1, writer)
            count, own = count + 1, own + 1
        if refusal is StoreRefusal.FULL:
            break
        assert own == STORE_MEMBER_BYTES_MAX // each
    assert refusal is StoreRefusal.FULL
    assert count == entries.count == STORE_BYTES_MAX // each


def test_a_member_may_replace_what_it_wrote_though_it_has_no_room_for_more() -> None:
    entries = StoreEntries()
    count = STORE_MEMBER_BYTES_MAX // entry_bytes(b"00", LARGE)
    for n in range(count):
        entries.write(b"%02d" % n, LARGE, n + 1, A)
    assert entries.refusal(b"new", LARGE, A) is StoreRefusal.MEMBER_FULL
    assert entries.refusal(b"00", LARGE, A) is None
    entries.write(b"00", LARGE, 99, B)  # now it is that of another member
    assert entries.refusal(b"new", LARGE, A) is None
    entries.write(b"new", LARGE, 100, A)
    assert entries.refusal(b"00", LARGE, A) is StoreRefusal.MEMBER_FULL
    entries.write(b"01", None, 101, B)
    assert entries.refusal(b"00", LARGE, A) is None


def test_a_deleted_key_stays_until_its_writes_are_acknowledged() -> None:
    entries = StoreEntries()
    entry = entries.write(b"key", b"1", 1, A)
    entry.receipts[A, 7] = StoreReceipt(A, 7, 1)
    entries.write(b"key", None, 2, B)
    assert entries.count == 0
    assert entries.missing([b"key"]) == b"key"
    assert entries.get(b"key") is entry
    entries.acknowledge(b"key", A, 7)
    assert entries.get(b"key") is None


def test_a_change_names_the_newest_receipts_up_to_it() -> None:
    entry = StoreEntries().write(b"key", b"1", 90, B)
    for number in range(STORE_RECEIPTS_MAX + 2):
        entry.receipts[A, number] = StoreReceipt(A, number, number)
    told = entry.change().receipts
    assert [one.number for one in told] == list(range(2, STORE_RECEIPTS_MAX + 2))
    assert entry.change(entry.receipts[A, 2]) == StoreChange(
        2, A, (StoreReceipt(A, 0, 0), StoreReceipt(A, 1, 1))
    )


def test_the_newest_of_each_key_counts() -> None:
    entries = taken(known(b"x", b"old", 3), known(b"x", b"new", 5), known(b"y", b"other", 4))
    assert (entries.value_of(b"x"), entries.value_of(b"y"), entries.last) == (b"new", b"other", 5)
    assert taken(known(b"x", b"old", 3), known(b"x", None, 5)).get(b"x") is None


def test_receipts_of_equally_new_reports_are_united() -> None:
    one, two, old = StoreReceipt(B, 1, 4), StoreReceipt(C, 1, 5), StoreReceipt(C, 9, 1)
    entries = taken(
        known(b"x", b"old", 2, old), known(b"x", b"new", 5, two), known(b"x", b"new", 5, one)
    )
    entry = entries.get(b"x")
    assert entry is not None
    assert list(entry.receipts.values()) == [one, two]


def test_too_large_reports_lose_the_oldest_keys() -> None:
    count = STORE_BYTES_MAX // entry_bytes(b"0000", LARGE)
    entries = taken(*(known(b"%04d" % n, LARGE, n + 1) for n in range(count + 3)))
    assert entries.count == count
    assert entries.value_of(b"0002") is None
    assert entries.value_of(b"0003") == LARGE
