"""The tree of errors, which users know as :mod:`pccl.errors`.

It is in this package so that every package can use it without importing the API.

    PCCLError                  every failure of a run
    ├── TooFewPeers            the group of a reduce has no other member
    ├── CollectiveAborted      the collective ended without a result; inputs are intact, retry
    │   └── DescriptorMismatch members made different requests; inputs are intact, fix the call
    ├── LockstepError          members waited in different calls forever; fix the program
    ├── DeadlineExceeded       the caller's own time limit ran out (also a TimeoutError)
    ├── OutcomeUnknown         this peer left the call, and other members may have committed it
    ├── ResyncRequired         this peer left the call, and other members committed it
    ├── StateMismatch          shared states that must be equal differ; none was changed
    ├── StateUnavailable       no member offers a shared state that counts; none was changed
    ├── PendingOperations      a joint call while operations of this peer are open
    ├── NotConnected           a call before connect(), or after close()
    ├── MembershipError        this process is not (or no longer) a member
    │   ├── NotAdmitted        the master refused this process
    │   ├── Evicted            the run continued without this process
    │   └── MasterLost         no master answered within the deadline
    ├── PeerSilent             a peer did not answer a question about itself in time
    ├── LinkError              a connection could not be made, or broke
    ├── LocalProtocolError     this process broke the protocol: a bug of the library
    └── RemoteProtocolError    another process sent bytes that the protocol forbids
"""

from __future__ import annotations

import enum

from pccl.protocol.types import RemovalCause


class Result(enum.IntEnum):
    """Status codes, with the names and numbers of PCCL."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


class PCCLError(Exception):
    """Base of all errors about a run.

    Attributes:
        result: status code, which PCCL programs check.
        func: name of the failed call; PCCL programs pass it as ``func_name``.
        reason: what happened, to which peer or tensor, and what to do.
        completed_tags: after a call that reduces several tensors: tags of the reduced tensors.
            The other tensors are unchanged.
    """

    default_result = Result.INTERNAL_ERROR
    completed_tags: tuple[int, ...] = ()

    def __init__(
        self,
        result: Result | int | None = None,
        func: str = "",
        reason: str = "",
        *,
        func_name: str = "",
    ) -> None:
        func = func or func_name
        self.result = self.default_result if result is None else Result(result)
        self.func = func
        self.reason = reason
        super().__init__(result, func, reason)

    @staticmethod
    def check(result: int, func_name: str) -> None:
        """Raise unless ``result`` is SUCCESS."""
        if result != Result.SUCCESS:
            raise PCCLError(result, func_name)

    def __str__(self) -> str:
        where = f"{self.func}: " if self.func else ""
        return f"{where}{self.reason or self.result.name} [{self.result.name} {int(self.result)}]"

    def __repr__(self) -> str:  # OSError, a base of DeadlineExceeded, would show two arguments
        return f"{type(self).__name__}({self.result!r}, {self.func!r}, {self.reason!r})"

    def __reduce__(self) -> tuple[type[PCCLError], tuple[Result, str, str], dict[str, object]]:
        return (type(self), (self.result, self.func, self.reason), self.__dict__.copy())


class TooFewPeers(PCCLError):
    """A reduce needs at least two members in the group. Wait with ``update_topology``."""

    default_result = Result.TOO_FEW_PEERS


class CollectiveAborted(PCCLError):
    """The collective ended without a result on all members. Inputs are intact: retry."""

    default_result = Result.RANK_CONNECTION_LOST


class DescriptorMismatch(CollectiveAborted):
    """Members made different requests for one collective. Make the calls agree."""

    default_result = Result.INVALID_ARGUMENT


class LockstepError(PCCLError):
    """Members waited in different calls forever. Make all members call in the same order."""

    default_result = Result.INVALID_USAGE


class DeadlineExceeded(PCCLError, TimeoutError):
    """The caller's time limit ran out, and the operation ended without a result on all members."""

    default_result = Result.RANK_CONNECTION_LOST


class OutcomeUnknown(PCCLError):
    """This peer left the call, and the other members may have committed it.

    Either this peer had finished its part, or the call has a quorum, which the others may have
    without it, or the run has a standby master. A standby may decide an outcome before a majority
    has received the withdrawal.
    """

    default_result = Result.RANK_CONNECTION_LOST


class ResyncRequired(PCCLError):
    """The members committed a collective that this peer left, or was too late for.

    Reconnect, then synchronize.
    """

    default_result = Result.INVALID_USAGE


class StateMismatch(PCCLError):
    """Shared states that must be equal differ. None was changed; the reason names the members.

    Attributes:
        tensor: name of the first tensor that differs; empty if unknown.
        piece: number of the tensor's first piece (of 1 MiB) that differs; None if the tensor
            differs in more than its values.
    """

    default_result = Result.INVALID_USAGE
    tensor: str = ""
    piece: int | None = None


class StateUnavailable(PCCLError):
    """No member offers a shared state that counts, or none sends it. No state was changed.

    Attributes:
        is_for_all: whether all members get this error, because none offers contents that count;
            False: only this peer could not fetch the contents of the other members.
    """

    default_result = Result.INVALID_USAGE
    is_for_all: bool = False


class PendingOperations(PCCLError):
    """The program made a joint call while operations of this peer were open. Wait for them."""

    default_result = Result.PENDING_ASYNC_OPS


class NotConnected(PCCLError):
    """The call needs a connected communicator: call ``connect()`` first."""

    default_result = Result.INVALID_USAGE


class MembershipError(PCCLError):
    """This process is not a member of the run."""

    default_result = Result.INVALID_USAGE


class PeerSilent(PCCLError):
    """The master passed a question on to a peer, and the peer did not answer in time."""

    default_result = Result.RANK_CONNECTION_LOST


class NotAdmitted(MembershipError):
    """The master refused this process; the reason says why."""

    default_result = Result.MASTER_CONNECTION_FAILED


class Evicted(MembershipError):
    """The run continued without this process. Connect again to join as a newcomer.

    Attributes:
        cause: why the master removed this process; None if no master has stated a cause.
        ago_s: seconds from the removal until this process learned of it.
    """

    default_result = Result.RANK_CONNECTION_LOST
    cause: RemovalCause | None = None
    ago_s: float = 0.0


class MasterLost(MembershipError):
    """No master answered within the deadline. Local buffers are intact.

    Attributes:
        is_gone: whether no master has answered for ``master_lost_s``. Otherwise one has answered
            that does not know this peer; joining again then helps.
    """

    default_result = Result.RANK_CONNECTION_LOST
    is_gone = False


class LinkError(PCCLError):
    """A connection could not be made, or broke."""

    default_result = Result.RANK_CONNECTION_FAILED


class LocalProtocolError(PCCLError):
    """This process was about to break the protocol. Please report it: it is a bug."""

    default_result = Result.INTERNAL_ERROR


class RemoteProtocolError(PCCLError):
    """Another process sent bytes that the protocol forbids. Its connection is closed."""

    default_result = Result.RANK_CONNECTION_LOST
