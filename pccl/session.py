"""What the blocking and the asyncio communicator share: an engine on the I/O thread.

A session owns the engine but not the other way round, and ``weakref.finalize`` closes it when the
communicator is collected or the interpreter ends, so nobody has to call ``close``.
"""

from __future__ import annotations

import asyncio
import operator
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, SupportsIndex, TypeVar, cast

from pccl.addresses import parse_address
from pccl.errors import Evicted, MasterLost, NotConnected, PCCLError, Result
from pccl.protocol.limits import Timing
from pccl.protocol.types import Attribute, PeerId, ReduceOp, Roster
from pccl.runtime.clock import LoopClock
from pccl.runtime.engine import PeerEngine, PeerOptions, ReduceReport
from pccl.runtime.io_thread import IOThread, Submission
from pccl.runtime.operand import borrow
from pccl.transports.base import Address

_T = TypeVar("_T")

PEER_GROUP_MAX = 2**32 - 1
TAG_MAX = 2**64 - 1
ATTEMPTS_MAX = 2**31 - 1
POOL_SIZE_MAX = 1024
CLOSE_TIMEOUT_S = 5.0
"""A finalizer never blocks the interpreter for longer; closing takes milliseconds."""


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What a reduce did.

    Attributes:
        local_world_size: members of the own group whose values are in the result.
        tx_bytes: payload bytes this peer sent.
        rx_bytes: payload bytes this peer received.
        contributors: ids of the members whose values are in the result, in ring order.
        view: number of the view that the operation belonged to.
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    contributors: tuple[int, ...]
    view: int


class Session:
    """An engine on the I/O thread, and the checks at the edge of the API."""

    def __init__(self, owner: object, address: str, peer_group: int, timing: Timing | None) -> None:
        master = parse_address(address)
        peer_group = check_range("peer_group", peer_group, 0, PEER_GROUP_MAX)
        if not isinstance(timing, Timing | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"timing must be a pccl.Timing, not {timing!r}")
        options = PeerOptions(timing=timing or Timing(), listen=_listen_address(master))
        self._io = IOThread.acquire()
        loop = self._io.loop

        def make_engine() -> PeerEngine:
            return PeerEngine(
                loop, LoopClock(loop), self._io.transport, master, peer_group, options
            )

        try:
            self.engine = self._io.call(make_engine)
        except BaseException:
            self._io.release()
            raise
        self._finalizer = weakref.finalize(owner, _close, self._io, self.engine)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or this is a copy that fork made."""
        return not self._finalizer.alive or self._io.abandoned

    def submit(self, work: Coroutine[Any, Any, _T], func: str) -> Submission[_T]:
        """Start ``work`` on the I/O thread.

        Raises:
            NotConnected: the communicator is closed.
        """
        if self.closed:
            work.close()
            raise self._closed_error(func)
        return self._io.submit(work)

    def settle_left(self, submission: Submission[Any]) -> None:
        """The caller left; if his call had succeeded all the same, the engine must know."""
        finished = submission.finished
        if finished.done() and not finished.cancelled() and finished.exception() is None:
            self._io.loop.call_soon_threadsafe(self.engine.left_unnoticed, finished.result())

    def reduce(
        self, send: object, recv: object | None, op: ReduceOp, tag: int
    ) -> Coroutine[Any, Any, ReduceReport]:
        """Check the arguments of a reduce and prepare it."""
        tag = check_range("tag", tag, 0, TAG_MAX)
        return self.engine.all_reduce(borrow(send, recv), _check_op(op), tag)

    def attribute(self, attribute: Attribute) -> int:
        """A size, as of the caller's last joint call."""
        roster = self._roster("get_attribute")
        match Attribute(attribute):
            case Attribute.GLOBAL_WORLD_SIZE:
                return roster.global_world_size
            case Attribute.LOCAL_WORLD_SIZE:
                return len(roster.members)
            case Attribute.NUM_DISTINCT_PEER_GROUPS:
                return roster.peer_groups
            case Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
                return roster.largest_group_size

    def peer_id(self) -> PeerId:
        """The own id."""
        self._roster("peer_id")
        return self.engine.machine.peer

    def close(self) -> None:
        """Leave the run and free everything; idempotent."""
        self._finalizer()

    def _roster(self, func: str) -> Roster:
        if self.closed:
            raise self._closed_error(func)
        roster = self.engine.roster
        if roster is None:
            raise NotConnected(func=func, reason="not a member of a run yet; call connect() first")
        return roster

    def _closed_error(self, func: str) -> NotConnected:
        why = "belongs to the parent process" if self._io.abandoned else "is closed"
        return NotConnected(func=func, reason=f"the communicator {why}; make a new one")


def _listen_address(master: Address) -> Address:
    """Where the own port listens: a run on this machine alone is not open to others."""
    try:
        literal = ip_address(master.host)
    except ValueError:  # a name, which may stand for an address of either family
        return Address("::", 0)
    if literal.is_loopback:
        return Address(master.host, 0)
    return Address("::" if literal.version == 6 else "0.0.0.0", 0)


def info_of(report: ReduceReport) -> ReduceInfo:
    """The user's view of a report."""
    return ReduceInfo(
        local_world_size=len(report.contributors),
        tx_bytes=report.tx_bytes,
        rx_bytes=report.rx_bytes,
        contributors=report.contributors,
        view=report.operation.view,
    )


_RESULTS_OF_LOSS = {
    "update_topology": Result.UPDATE_TOPOLOGY_FAILED,
    "are_peers_pending": Result.INVALID_USAGE,
    "all_reduce": Result.RANK_CONNECTION_LOST,
}
"""The status code with which each call says that this process is no longer a member."""


def named(error: PCCLError, func: str) -> PCCLError:
    """A fresh copy of ``error`` that names the call that raises it."""
    lost = isinstance(error, Evicted | MasterLost)
    result = _RESULTS_OF_LOSS.get(func, error.result) if lost else error.result
    copy = type(error)(result, func, error.reason)
    copy.__cause__ = error.__cause__
    return copy


def _close(io: IOThread, engine: PeerEngine) -> None:
    if io.abandoned:
        return
    submission = io.submit(engine.close()).start()
    if io.owns_current_thread():  # collected by chance on the I/O thread, which must not wait
        submission.finished.add_done_callback(lambda _: io.release())
        return
    try:
        submission.finished.result(CLOSE_TIMEOUT_S)
    except (TimeoutError, asyncio.CancelledError):
        pass
    finally:
        io.release()


def _check_op(op: ReduceOp) -> ReduceOp:
    try:
        return ReduceOp(op)
    except ValueError:
        known = ", ".join(f"ReduceOp.{known.name}" for known in ReduceOp)
        raise ValueError(f"op must be one of {known}, not {op!r}") from None


def check_range(name: str, value: object, lowest: int, highest: int) -> int:
    """Check an integer argument and return it.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(cast("SupportsIndex", value))  # NumPy's integers too
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{name} must be from {lowest} to {highest}, not {value}")
    return number
