"""Decides how many bytes each connection may send now, so that all together keep to a limit. Pure.

A token bucket grows at the limit's rate, and holds ``burst_bytes`` at most. A connection that finds
too little waits. Waiting connections take turns, first come, first served: a turn begins when the
bucket holds ``turn_bytes``, and is worth at most as much. While a connection waits, no other one
takes from the bucket out of turn, so a busy connection cannot keep another one waiting.

A heartbeat must not wait behind a tensor. So a short message may go ahead of the queue. The bytes
come from the same bucket, which is overdrawn if necessary; the queue pays for it later. Three
things bound this:

* A message goes whole, so it must fit into the credit of its connection: ``CREDIT_BYTES`` after a
  pause. Every byte that a connection sends, in its turn or not, uses up the credit, and the credit
  grows slowly. So a connection with much to send waits for its turns, even if it sends in small
  portions.
* All such messages together draw on one reserve of ``reserve_bytes``, which grows at half the rate.
  So however many connections send short messages, the queue gets the other half.
* Without credit or reserve, a short message waits for its turn like any other.

A remote process that makes this one send, through a relay or by questions, gains no more than that
from small portions or from many connections. Over any time, all connections together send at most
the limit's rate times that time, and ``burst_bytes`` and ``reserve_bytes`` once.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pccl.protocol.types import NS_PER_S

_Owner = TypeVar("_Owner")

BURST_NS = 50_000_000
"""The bucket fills up in this time. An application that holds the interpreter lock for longer costs
some of the rate."""

TURN_NS = 10_000_000
"""What accumulates in this time is worth a turn. A shorter turn would cost more timers."""

TURN_BYTES_MIN = 1400
"""The smallest turn: about one packet."""

RESERVE_BYTES_MIN = 16 << 10
"""The smallest reserve: a hundred messages of a master that starts an operation."""

CREDIT_BYTES = 4 << 10
"""The most that one connection sends ahead of the queue, after a pause. A handshake, a heartbeat
and the messages around an operation fit."""

_RESERVE_PART, _CREDIT_PART = 2, 32
"""Reserve and credits grow at these parts of the rate."""


class _TokenBucket:
    """Grows at a rate up to its size. It may be overdrawn.

    The count is in bytes times ``NS_PER_S``, so that nothing is ever rounded.
    """

    __slots__ = ("_at_ns", "_full", "_level", "_rate")

    def __init__(self, bytes_per_s: int, size_bytes: int, now_ns: int) -> None:
        self._rate = bytes_per_s
        self._level = self._full = size_bytes * NS_PER_S
        self._at_ns = now_ns

    def fill(self, now_ns: int) -> int:
        """Add what has grown since the last call; return the whole bytes that it holds."""
        if now_ns > self._at_ns:
            self._level = min(self._full, self._level + (now_ns - self._at_ns) * self._rate)
            self._at_ns = now_ns
        return self._level // NS_PER_S

    def take(self, nbytes: int) -> None:
        """Remove so many bytes, although it may hold fewer."""
        self._level -= nbytes * NS_PER_S

    def use_up(self, nbytes: int) -> None:
        """Remove so many bytes, or all that it holds."""
        self._level = max(0, self._level - nbytes * NS_PER_S)

    def full_at_ns(self, nbytes: int) -> int:
        """Return when it will hold so many bytes, if nothing is taken from it."""
        missing = max(0, nbytes * NS_PER_S - self._level)
        return self._at_ns - -missing // self._rate


class Account(Generic[_Owner]):
    """What the pacer knows of one connection. For :class:`Pacer` only.

    Attributes:
        owner: the connection.
        credit: bytes that it may send ahead of the queue.
    """

    __slots__ = ("credit", "owner")

    def __init__(self, owner: _Owner, credit: _TokenBucket) -> None:
        self.owner = owner
        self.credit = credit


class Pacer(Generic[_Owner]):
    """Shares a rate among connections.

    Args:
        bytes_per_s: what all connections together may send.
        now_ns: the current time in nanoseconds.

    Attributes:
        turn_bytes: what one turn is worth.
        burst_bytes: what may be sent at once after a pause.
        reserve_bytes: what short messages may send beyond that.
    """

    def __init__(self, bytes_per_s: int, now_ns: int) -> None:
        self._rate = bytes_per_s
        self.turn_bytes = max(TURN_BYTES_MIN, bytes_per_s * TURN_NS // NS_PER_S)
        self.burst_bytes = max(self.turn_bytes, bytes_per_s * BURST_NS // NS_PER_S)
        self.reserve_bytes = max(RESERVE_BYTES_MIN, self.burst_bytes)
        self._bucket = _TokenBucket(bytes_per_s, self.burst_bytes, now_ns)
        self._reserve = _TokenBucket(bytes_per_s // _RESERVE_PART, self.reserve_bytes, now_ns)
        self._queue: dict[Account[_Owner], None] = {}
        self._in_turn: Account[_Owner] | None = None
        self._turn_left = 0
        self._goes_ahead = False
        """Whether the last answer of ``room`` was about a message that goes ahead of the queue."""

    def open(self, owner: _Owner, now_ns: int) -> Account[_Owner]:
        """Return an account for a new connection."""
        credit_rate = max(1, self._rate // _CREDIT_PART)
        return Account(owner, _TokenBucket(credit_rate, CREDIT_BYTES, now_ns))

    # -- sending -------------------------------------------------------------------------------

    def is_free(self, now_ns: int) -> bool:
        """Whether a connection may send without waiting for a turn."""
        return not self._queue and self._bucket.fill(now_ns) >= self.turn_bytes

    def room(self, account: Account[_Owner], wanted_bytes: int, now_ns: int) -> int:
        """Return how many of these bytes a connection may send now."""
        held, reserve = self._bucket.fill(now_ns), self._reserve.fill(now_ns)
        credit = account.credit.fill(now_ns)
        self._goes_ahead = False
        if account is self._in_turn and (left := min(self._turn_left, held)) > 0:
            return min(wanted_bytes, left)
        if not self._queue and held >= min(wanted_bytes, self.turn_bytes):
            return min(wanted_bytes, held)
        self._goes_ahead = wanted_bytes <= min(credit, reserve)
        return wanted_bytes if self._goes_ahead else 0

    def spend(self, account: Account[_Owner], sent_bytes: int) -> None:
        """Charge what the network has accepted, at most the last answer of ``room``."""
        self._bucket.take(sent_bytes)
        account.credit.use_up(sent_bytes)
        if self._goes_ahead:
            self._reserve.take(sent_bytes)
        elif account is self._in_turn:
            self._turn_left -= sent_bytes

    # -- turns -----------------------------------------------------------------------------------

    @property
    def due_ns(self) -> int | None:
        """When to call ``begin_turn``; None: no connection waits."""
        return self._bucket.full_at_ns(self.turn_bytes) if self._queue else None

    def wait(self, account: Account[_Owner]) -> None:
        """Let a connection wait for its turn; it keeps its place if it waits already."""
        self._queue[account] = None

    def leave(self, account: Account[_Owner]) -> None:
        """Forget that a connection waits, because it has ended."""
        self._queue.pop(account, None)

    def begin_turn(self, now_ns: int) -> _Owner | None:
        """Return the connection whose turn it is, until ``end_turn``; None: it is too early."""
        if not self._queue or self._bucket.fill(now_ns) < self.turn_bytes:
            return None
        account = self._in_turn = next(iter(self._queue))
        del self._queue[account]
        self._turn_left = self.turn_bytes
        return account.owner

    def end_turn(self) -> None:
        """End the turn, even if it was not used up."""
        self._in_turn = None
