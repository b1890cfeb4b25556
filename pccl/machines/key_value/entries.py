"""The keys of the run's store, with their values. State only.

The entry of a deleted key stays while a write of this key is unacknowledged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pccl.machines.history import History, InvariantViolation
from pccl.protocol.limits import (
    STORE_BYTES_MAX,
    STORE_ENTRY_BYTES,
    STORE_MEMBER_BYTES_MAX,
    STORE_RECEIPTS_MAX,
)
from pccl.protocol.messages import (
    NUMBER_BYTES_MAX,
    KnownEntry,
    StoreChange,
    StoreReceipt,
    StoreRefusal,
)
from pccl.protocol.types import PeerId


def entry_bytes(key: bytes, value: bytes | None) -> int:
    """Return how many bytes a key counts; a deleted key counts without a value."""
    return STORE_ENTRY_BYTES + len(key) + len(value or b"")


def number_of(value: bytes) -> int | None:
    """Return the 64-bit number that a value is the text of; None if it is no such text."""
    if len(value) > NUMBER_BYTES_MAX or not value.removeprefix(b"-").isdigit():
        return None
    number = int(value)
    return number if -(1 << 63) <= number < 1 << 63 else None


@dataclass(slots=True)
class StoreEntry:
    """One key of the store."""

    value: bytes | None
    """None: the key was deleted."""
    sequence: int
    """Place of its last change among all changes."""
    writer: PeerId
    receipts: dict[tuple[PeerId, int], StoreReceipt] = field(
        default_factory=dict[tuple[PeerId, int], StoreReceipt]
    )
    """(member, number of its request) -> a write that the member may have no answer to."""

    def change(self, write: StoreReceipt | None = None) -> StoreChange:
        """Return the last change, or that of a write, with the receipts of the writes before it."""
        if write is None:
            receipts = list(self.receipts.values())
            return StoreChange(self.sequence, self.writer, tuple(receipts[-STORE_RECEIPTS_MAX:]))
        receipts = [one for one in self.receipts.values() if one.sequence < write.sequence]
        return StoreChange(write.sequence, write.peer, tuple(receipts[-STORE_RECEIPTS_MAX:]))


class StoreEntries:
    """All keys of the store."""

    def __init__(self) -> None:
        self._entries: dict[bytes, StoreEntry] = {}
        self._nbytes = 0
        """Bytes that all keys count."""
        self._written: Counter[PeerId] = Counter()
        """Bytes that the keys count which a peer has written last; peers may have left."""
        self.count = 0
        """How many keys exist."""

    def get(self, key: bytes) -> StoreEntry | None:
        """Return the entry of a key that exists or was deleted lately."""
        return self._entries.get(key)

    def value_of(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the key does not exist."""
        entry = self._entries.get(key)
        return entry.value if entry is not None else None

    def missing(self, keys: Iterable[bytes]) -> bytes | None:
        """Return the first of these keys that does not exist; None if all exist."""
        return next((key for key in keys if self.value_of(key) is None), None)

    def refusal(self, key: bytes, value: bytes, writer: PeerId) -> StoreRefusal | None:
        """Return why a member may not write a key now; None if it may."""
        entry, nbytes = self._entries.get(key), entry_bytes(key, value)
        exists = entry is not None and entry.value is not None
        before = entry_bytes(key, entry.value) if entry is not None and exists else 0
        if self._nbytes - before + nbytes > STORE_BYTES_MAX:
            return StoreRefusal.FULL
        own = before if entry is not None and entry.writer == writer else 0
        if self._written[writer] - own + nbytes > STORE_MEMBER_BYTES_MAX:
            return StoreRefusal.MEMBER_FULL
        return None

    def write(self, key: bytes, value: bytes | None, sequence: int, writer: PeerId) -> StoreEntry:
        """Set a key, or delete it if ``value`` is None; return its entry."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = StoreEntry(None, 0, writer)
        self._count(key, entry, -1)
        entry.value, entry.sequence, entry.writer = value, sequence, writer
        self._count(key, entry, 1)
        return entry

    def _count(self, key: bytes, entry: StoreEntry, sign: int) -> None:
        if entry.value is not None:
            nbytes = entry_bytes(key, entry.value)
            self.count += sign
            self._nbytes += sign * nbytes
            self._written[entry.writer] += sign * nbytes
            if not self._written[entry.writer]:
                del self._written[entry.writer]

    def acknowledge(self, key: bytes, peer: PeerId, number: int) -> None:
        """Drop the receipt of a write, because the member has the answer, or has left."""
        entry = self._entries[key]
        del entry.receipts[peer, number]
        if entry.value is None and not entry.receipts:
            del self._entries[key]

    def take_up(self, known: Iterable[KnownEntry]) -> Iterator[tuple[bytes, StoreReceipt]]:
        """Take the newest entries of reports into the empty store; yield their receipts.

        If the reports have more than the store may hold, the oldest keys are lost.
        """
        newest: dict[bytes, KnownEntry] = {}
        receipts: dict[bytes, dict[tuple[PeerId, int], StoreReceipt]] = {}
        for one in known:
            before = newest.get(one.key)
            if before is None or one.change.sequence > before.change.sequence:
                newest[one.key], receipts[one.key] = one, {}
            if one.change.sequence == newest[one.key].change.sequence:
                told = {(receipt.peer, receipt.number): receipt for receipt in one.change.receipts}
                receipts[one.key].update(told)
        for one in sorted(newest.values(), key=lambda one: (-one.change.sequence, one.key)):
            told = receipts[one.key]
            fits = self._nbytes + entry_bytes(one.key, one.value) <= STORE_BYTES_MAX
            if not fits or (one.value is None and not told):
                continue
            entry = self.write(one.key, one.value, one.change.sequence, one.change.writer)
            entry.receipts = dict(sorted(told.items(), key=lambda item: item[1].sequence))
            for receipt in entry.receipts.values():
                yield one.key, receipt

    @property
    def last(self) -> int:
        """The highest place of a change that an entry names."""
        return max((entry.sequence for entry in self._entries.values()), default=0)

    def check(self, history: History) -> None:
        """Assert that the sums are those of the entries.

        Raises:
            InvariantViolation: a sum is wrong, or the entry of a deleted key has no receipt.
        """
        present = {k: e for k, e in self._entries.items() if e.value is not None}
        nbytes = {k: entry_bytes(k, e.value) for k, e in present.items()}
        written = Counter[PeerId]()
        for key, entry in present.items():
            written[entry.writer] += nbytes[key]
        sums = (self.count, self._nbytes, self._written)
        dead = any(e.value is None and not e.receipts for e in self._entries.values())
        if sums != (len(present), sum(nbytes.values()), written) or dead:
            raise InvariantViolation("the sums of the store are wrong", history)
