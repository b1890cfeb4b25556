"""The tree of errors, which users know as :mod:`pccl.errors`.

It lives here so that every room may speak of it without depending on the API.

    PCCLError                  everything the library raises about a run
    ├── TooFewPeers            a reduce with nobody to reduce with
    ├── CollectiveAborted      the collective ended without a result; inputs are intact, retry
    │   └── DescriptorMismatch members asked for different things; inputs are intact, fix the call
    ├── LockstepError          members waited for different things, for ever; mend the program
    ├── DeadlineExceeded       the caller's own time budget ran out (also a TimeoutError)
    ├── OutcomeUnknown         the call was left, and the others may have committed it
    ├── ResyncRequired         ... and it was committed without this peer taking the result
    ├── StateMismatch          shared states differ that must not; nothing was changed
    ├── StateUnavailable       nobody has a shared state to go on with; nothing was changed
    ├── PendingOperations      a joint call while own operations are still open
    ├── NotConnected           a call that needs connect() first, or came after close()
    ├── MembershipError        this process is not (or no longer) a member
    │   ├── NotAdmitted        the master refused it
    │   ├── Evicted            the run went on without it
    │   └── MasterLost         no master answered within its deadline
    ├── LinkError              a connection could not be made or broke
    ├── LocalProtocolError     this process broke the protocol: a bug of ours
    └── RemoteProtocolError    the other side sent what the protocol forbids
"""

from __future__ import annotations

import enum

from pccl.protocol.types import RemovalCause


class Result(enum.IntEnum):
    """Status codes, with the names and values that users of PCCL know."""

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
        result: the status code, as scripts written for PCCL check it.
        func: name of the call that failed; scripts written for PCCL make it as ``func_name``.
        reason: what happened, to whom, and what to do.
        completed_tags: of a call that reduces several tensors, the tags whose tensors are reduced;
            those of the others are what they were.
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

    def __repr__(self) -> str:  # also of those that are an OSError, which shows two arguments
        return f"{type(self).__name__}({self.result!r}, {self.func!r}, {self.reason!r})"

    def __reduce__(self) -> tuple[type[PCCLError], tuple[Result, str, str], dict[str, object]]:
        return (type(self), (self.result, self.func, self.reason), self.__dict__.copy())


class TooFewPeers(PCCLError):
    """A reduce needs at least two members in the group. Wait with ``update_topology``."""

    default_result = Result.TOO_FEW_PEERS


class CollectiveAborted(PCCLError):
    """The collective ended without a result for every member alike. Inputs are intact: retry."""

    default_result = Result.RANK_CONNECTION_LOST


class DescriptorMismatch(CollectiveAborted):
    """Members asked for different things in one collective. Make the calls agree."""

    default_result = Result.INVALID_ARGUMENT


class LockstepError(PCCLError):
    """Members waited for different things and could not go on. Make them call in the same order."""

    default_result = Result.INVALID_USAGE


class DeadlineExceeded(PCCLError, TimeoutError):
    """The caller's time budget ran out; the operation was withdrawn for everybody."""

    default_result = Result.RANK_CONNECTION_LOST


class OutcomeUnknown(PCCLError):
    """The call was left, and the others may have committed it.

    This peer had finished its part, or the run has a standby master, which may come to an outcome
    before a majority has heard of the withdrawal.
    """

    default_result = Result.RANK_CONNECTION_LOST


class ResyncRequired(PCCLError):
    """A collective that this peer had left was committed: its state differs from the others'."""

    default_result = Result.INVALID_USAGE


class StateMismatch(PCCLError):
    """Shared states differ that must not. Nothing was changed; the reason names what and who.

    Attributes:
        tensor: name of the first tensor that differs; empty if that could not be found out.
        piece: number of its first piece that differs, of 1 MiB each; None if it differs in more
            than its values.
    """

    default_result = Result.INVALID_USAGE
    tensor: str = ""
    piece: int | None = None


class StateUnavailable(PCCLError):
    """Nobody has a shared state that the group could go on with. Nothing was changed.

    Attributes:
        is_for_all: whether all members are told so, because none offers contents to go on with;
            False: only this peer did not get what the others have.
    """

    default_result = Result.INVALID_USAGE
    is_for_all: bool = False


class PendingOperations(PCCLError):
    """A joint call was made while operations of this peer were still open. Await them first."""

    default_result = Result.PENDING_ASYNC_OPS


class NotConnected(PCCLError):
    """The call needs a connected communicator: call ``connect()`` first."""

    default_result = Result.INVALID_USAGE


class MembershipError(PCCLError):
    """This process is not a member of the run."""

    default_result = Result.INVALID_USAGE


class NotAdmitted(MembershipError):
    """The master refused this process; the reason says why."""

    default_result = Result.MASTER_CONNECTION_FAILED


class Evicted(MembershipError):
    """The run went on without this process. Connect again to join as a newcomer.

    Attributes:
        cause: why it was removed; None in an error that was not made by a master's word.
        ago_s: how long ago that was when this process heard of it, in seconds.
    """

    default_result = Result.RANK_CONNECTION_LOST
    cause: RemovalCause | None = None
    ago_s: float = 0.0


class MasterLost(MembershipError):
    """No master answered within the deadline. Local buffers are intact."""

    default_result = Result.RANK_CONNECTION_LOST


class LinkError(PCCLError):
    """A connection could not be made, or broke."""

    default_result = Result.RANK_CONNECTION_FAILED


class LocalProtocolError(PCCLError):
    """This process was about to break the protocol. Please report it: it is a bug."""

    default_result = Result.INTERNAL_ERROR


class RemoteProtocolError(PCCLError):
    """The other side sent bytes that the protocol forbids; its connection is closed."""

    default_result = Result.RANK_CONNECTION_LOST
