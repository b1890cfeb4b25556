"""The requests of one member to the run's store, and what it keeps for another master.

A request is repeated on each new connection until its answer has arrived. If its caller leaves, a
read ends. A write stays open without a caller, so that the master carries it out at most once.

The member keeps what it wrote last itself, and the newest part of what it has read. It reports both
to another master. So after the loss of a master, the keys of members that returned are there, and
what they have read; a key that only lost members wrote may be lost, or have an older value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pccl.machines.key_value.entries import entry_bytes
from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import PeerIdentity, Standing
from pccl.protocol import errors
from pccl.protocol.limits import STORE_KEPT_BYTES_MAX, STORE_OPEN_MAX, STORE_READ_BYTES_MAX
from pccl.protocol.messages import KnownEntry, StoreAnswer, StoreOp, StoreRequest

_WRITES = (StoreOp.SET, StoreOp.ADD, StoreOp.COMPARE_SET, StoreOp.DELETE, StoreOp.APPEND)
_FORGET = StoreRequest(0, StoreOp.FORGET)


class KeptEntries:
    """Entries of the store that one member keeps, up to a number of bytes; the newest ones."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: dict[bytes, KnownEntry] = {}
        """By key, in the order in which the member learned of them."""
        self._nbytes = 0

    def __iter__(self) -> Iterator[KnownEntry]:
        return iter(self._entries.values())

    def is_newer(self, entry: KnownEntry) -> bool:
        """Whether an entry is at least as new as the kept one of its key."""
        known = self._entries.get(entry.key)
        return known is None or known.change.sequence <= entry.change.sequence

    def keep(self, entry: KnownEntry) -> None:
        """Keep an entry; forget the oldest ones if there are too many bytes."""
        self.drop(entry.key)
        self._entries[entry.key] = entry
        self._nbytes += entry_bytes(entry.key, entry.value)
        while self._nbytes > self._bytes_max:
            self.drop(next(iter(self._entries)))

    def drop(self, key: bytes) -> None:
        """Forget the entry of a key, if there is one."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry_bytes(key, entry.value)


@dataclass(slots=True)
class _AskedStore:
    request: StoreRequest
    call: int | None
    """None once the caller has left."""


class StoreClient:
    """The part of one member in the run's store.

    Args:
        out: for effects.
        own: this peer.
    """

    def __init__(self, out: PeerOutbox, own: PeerIdentity) -> None:
        self._out, self._own = out, own
        self._open: dict[int, _AskedStore] = {}
        """By the number of the request, in the order of the calls."""
        self._last = 0
        self._written = KeptEntries(STORE_KEPT_BYTES_MAX)
        self._read = KeptEntries(STORE_READ_BYTES_MAX)

    def __len__(self) -> int:
        """How many requests have no answer yet."""
        return len(self._open)

    def call(self, event: ev.StoreCall, loss: errors.PCCLError | None) -> None:
        """Ask the store; ``loss``: why this peer is no longer a member, if it is not."""
        if self._own.standing is Standing.CLOSED:
            self._out.raise_(event.call, words.closed())
        elif self._own.standing is not Standing.MEMBER:
            self._out.raise_(event.call, loss or words.not_a_member(None))
        elif len(self._open) >= STORE_OPEN_MAX:
            self._out.raise_(event.call, words.store_calls_open())
        else:
            self._last += 1
            request = StoreRequest(self._last, event.op, event.keys, event.value, event.expected)
            self._open[self._last] = _AskedStore(request, event.call)
            self._send(request)

    def leave(self, call: int, reason: str) -> bool:
        """Raise in a caller that stops waiting; return False if it does not wait for the store."""
        for number, asked in self._open.items():
            if asked.call == call:
                asked.call = None
                if asked.request.op not in _WRITES:
                    del self._open[number]
                    self._send(_FORGET)
                self._out.raise_(call, words.left_store(reason, asked.request))
                return True
        return False

    def answered(self, answer: StoreAnswer) -> None:
        """End the call that an answer is for; ignore a repeated answer."""
        asked = self._open.pop(answer.number, None)
        if asked is None:
            return
        request, value = asked.request, answer.value
        if request.op in (StoreOp.SET, StoreOp.COMPARE_SET) and answer.done:
            value = request.value
        elif request.op is StoreOp.DELETE:
            value = None
        if answer.change is not None and request.keys and answer.refusal is None:
            self._keep(KnownEntry(request.keys[0], value, answer.change))
        if asked.call is None:
            return
        if answer.refusal is None:
            self._out.return_(asked.call, ev.StoreResult(answer.done, value))
        else:
            self._out.raise_(asked.call, words.store_refused(answer.refusal, request.keys[0]))

    def _keep(self, entry: KnownEntry) -> None:
        if self._written.is_newer(entry) and self._read.is_newer(entry):
            wrote = entry.change.writer == self._own.peer
            kept, other = (self._written, self._read) if wrote else (self._read, self._written)
            kept.keep(entry)
            other.drop(entry.key)

    def repeat(self) -> None:
        """Send all open requests again on a new connection."""
        if self._last and self._own.standing is Standing.MEMBER:
            self._send(_FORGET)
            for asked in self._open.values():
                self._send(asked.request)

    def report(self) -> Iterator[KnownEntry]:
        """Yield what this member keeps, for another master."""
        yield from self._written
        yield from self._read

    def fail(self, error: errors.PCCLError) -> None:
        """End all open calls, because this peer leaves the run."""
        for asked in self._open.values():
            if asked.call is not None:
                self._out.raise_(asked.call, error)
        self._open.clear()

    def _send(self, request: StoreRequest) -> None:
        self._out.send(replace(request, open=tuple(self._open)))
