"""The blocking API."""

from __future__ import annotations

from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from pccl.errors import PCCLError
from pccl.protocol.limits import Timing
from pccl.protocol.types import Attribute, ReduceOp
from pccl.session import (
    ATTEMPTS_MAX,
    POOL_SIZE_MAX,
    ReduceInfo,
    Session,
    check_range,
    info_of,
    named,
)

_T = TypeVar("_T")

__all__ = ["Communicator", "ReduceInfo"]


class Communicator:
    """One process's membership in a run.

    Any thread may call. Joint calls block until all members concerned have made them; Ctrl-C
    leaves them promptly, with the buffers as they were. Leaving the ``with`` block, ``close`` and
    garbage collection all say goodbye to the run.

    Args:
        address: the master, ``"host:port"``.
        peer_group: collectives stay inside a group; admission spans the run.
        p2p_connection_pool_size: connections per link; 0: chosen by the library. (Links have one
            connection for now, whatever is asked for.)
        timing: deadlines; None: the defaults.

    Raises:
        ValueError: not an address, or a number out of range.
        TypeError: an argument of the wrong type.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        timing: Timing | None = None,
    ) -> None:
        pool_size = check_range(
            "p2p_connection_pool_size", p2p_connection_pool_size, 0, POOL_SIZE_MAX
        )
        self._session = Session(self, address, peer_group, timing)
        self.p2p_connection_pool_size = pool_size

    def connect(self, n_attempts: int = 5) -> None:
        """Join the run. Returns when admitted, which takes a joint call of the members.

        Args:
            n_attempts: how often to try to reach the master, one second apart.

        Raises:
            MasterLost: no master was found. Start it, or correct the address, and call again.
            NotAdmitted: the master refused; the reason says what to change.
            LinkError: the own port could not be opened.
        """
        n_attempts = check_range("n_attempts", n_attempts, 1, ATTEMPTS_MAX)
        self._run(self._session.engine.connect(n_attempts), "connect")

    def update_topology(self) -> None:
        """Admit newcomers that are ready. Joint call of all members of all groups.

        World sizes change here, and when a collective returns or raises.

        Raises:
            PendingOperations: a collective of this peer is still open. Wait for it first.
            Evicted, MasterLost: no longer a member. Call ``connect`` to join again.
            NotConnected: ``connect`` was not called.
        """
        self._run(self._session.engine.update_topology(), "update_topology")

    def are_peers_pending(self) -> bool:
        """Whether newcomers are ready to be admitted; the same answer for all.

        Joint call of all members of all groups; may be made while collectives are in flight.

        Raises:
            Evicted, MasterLost: no longer a member. Call ``connect`` to join again.
            NotConnected: ``connect`` was not called.
        """
        return self._run(self._session.engine.are_peers_pending(), "are_peers_pending")

    def all_reduce(
        self,
        send: object,
        recv: object | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
    ) -> ReduceInfo:
        """Reduce ``send`` over all members of the group. Joint call of the group, per tag.

        The result is bit-identical for all members; it is there for all of them or for none.

        Args:
            send: NumPy array or torch CPU tensor, any shape, contiguous; int32, int64, float32 or
                float64. Not changed unless in place.
            recv: where the result goes: same dtype and number of elements, not overlapping; None
                (or ``send``): in place.
            op: SUM, or AVG (integers are truncated toward zero).
            tag: collectives with different tags may be in flight at the same time, from several
                threads; the members pair them by tag.

        Returns:
            Bytes moved and whose values are in the result.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. ``send`` is bit for bit what it
                was; re-read the world size and call again.
            DescriptorMismatch: the members asked for different dtypes, ops or counts.
            TooFewPeers: alone in the group. Wait for others with ``update_topology``.
            Evicted, MasterLost: no longer a member; ``send`` is what it was.
            NotConnected: ``connect`` was not called.
            ValueError, TypeError: a buffer that cannot be used; the message says how to mend it.
        """
        work = self._session.reduce(send, recv, op, tag)
        return info_of(self._run(work, "all_reduce"))

    def get_attribute(self, attribute: Attribute) -> int:
        """A world size, as of this peer's last joint call. Local; never blocks.

        Raises:
            NotConnected: ``connect`` was not called.
        """
        return self._session.attribute(attribute)

    @property
    def peer_id(self) -> int:
        """This incarnation's id; whoever joins later has a larger one.

        Raises:
            NotConnected: ``connect`` was not called.
        """
        return self._session.peer_id()

    def close(self) -> None:
        """Say goodbye and free everything. Idempotent; other calls raise NotConnected after it."""
        self._session.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T], func: str) -> _T:
        submission = self._session.submit(work, func)
        try:
            return submission.wait()
        except PCCLError as error:
            raise named(error, func) from None
        except BaseException:  # Ctrl-C
            self._session.settle_left(submission)
            raise
