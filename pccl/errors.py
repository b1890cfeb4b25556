"""The errors of the library (see the tree in :mod:`pccl.protocol.errors`, which defines them).

Most errors have one status code, their ``default_result``. The errors in ``TOLD_PER_CALL`` have the
code of the call that raises them (``RESULT_OF_CALL``), as scripts for PCCL expect.
``RemovalCause`` is the type of ``Evicted.cause``. ``warn_deprecated`` is for the library itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from pccl.protocol.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    DescriptorMismatch,
    Evicted,
    LinkError,
    LocalProtocolError,
    LockstepError,
    MasterLost,
    MembershipError,
    NotAdmitted,
    NotConnected,
    OutcomeUnknown,
    PCCLError,
    PeerSilent,
    PendingOperations,
    RemoteProtocolError,
    Result,
    ResyncRequired,
    StateMismatch,
    StateUnavailable,
    TooFewPeers,
)
from pccl.protocol.types import RemovalCause

__all__ = [
    "CollectiveAborted",
    "DeadlineExceeded",
    "DescriptorMismatch",
    "Evicted",
    "LinkError",
    "LocalProtocolError",
    "LockstepError",
    "MasterLost",
    "MembershipError",
    "NotAdmitted",
    "NotConnected",
    "OutcomeUnknown",
    "PCCLError",
    "PeerSilent",
    "PendingOperations",
    "RemoteProtocolError",
    "RemovalCause",
    "Result",
    "ResyncRequired",
    "StateMismatch",
    "StateUnavailable",
    "TooFewPeers",
]

for _kind in (globals()[name] for name in __all__):
    _kind.__module__ = __name__  # tracebacks and pickles name this public module


TOLD_PER_CALL = (DeadlineExceeded, Evicted, MasterLost, OutcomeUnknown)
"""Errors whose ``result`` depends on the call that raises them."""

RESULT_OF_CALL = {
    "connect": Result.MASTER_CONNECTION_FAILED,
    "update_topology": Result.UPDATE_TOPOLOGY_FAILED,
    "are_peers_pending": Result.INVALID_USAGE,
    "optimize_topology": Result.TOPOLOGY_OPTIMIZATION_FAILED,
    "all_reduce": Result.RANK_CONNECTION_LOST,
    "all_reduce_many": Result.RANK_CONNECTION_LOST,
    "all_reduce_multiple_with_retry": Result.RANK_CONNECTION_LOST,
    "broadcast": Result.RANK_CONNECTION_LOST,
    "barrier": Result.RANK_CONNECTION_LOST,
    "all_gather": Result.RANK_CONNECTION_LOST,
    "gather": Result.RANK_CONNECTION_LOST,
    "scatter": Result.RANK_CONNECTION_LOST,
    "all_to_all": Result.RANK_CONNECTION_LOST,
    "reduce": Result.RANK_CONNECTION_LOST,
    "reduce_scatter": Result.RANK_CONNECTION_LOST,
    "send": Result.RANK_CONNECTION_LOST,
    "recv": Result.RANK_CONNECTION_LOST,
    "sync_shared_state": Result.INVALID_USAGE,
    "verify": Result.INVALID_USAGE,
}
"""Status code of the errors in ``TOLD_PER_CALL``, by the name of the call; the same for that name
with ``_async`` or ``_object``."""


_SET_ANEW = ("result", "func")


def named(error: PCCLError, func: str) -> PCCLError:
    """Return a copy of ``error`` that names the call ``func`` and has its status code."""
    call = func.removesuffix("_async").removesuffix("_object")
    told = RESULT_OF_CALL.get(call) if isinstance(error, TOLD_PER_CALL) else None
    copy = type(error)(error.result if told is None else told, func, error.reason)
    said = {name: value for name, value in vars(error).items() if name not in _SET_ANEW}
    vars(copy).update(said)  # other attributes, such as completed_tags and cause
    copy.__cause__ = error.__cause__
    return copy


_P = ParamSpec("_P")
_T = TypeVar("_T")


def raised_here(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a public method raise errors of the run itself, without frames of the library below."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except PCCLError as error:
            failure = error.with_traceback(None)
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # its traceback keeps this frame, and so the arguments

    return call


def warn_deprecated(name: str, instead: str, removed_in: str) -> None:
    """Warn the program that it uses a deprecated name, at its own line that does.

    docs/compatibility.md says how long deprecated names stay.

    Args:
        name: what is deprecated: ``"Communicator.connect(n_tries=)"``.
        instead: what replaces it.
        removed_in: the version without the name.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and _is_ours(frame.f_globals):
        level, frame = level + 1, frame.f_back
    words = f"{name} is deprecated, and pccl {removed_in} removes it; use {instead}"
    warnings.warn(words, DeprecationWarning, stacklevel=level)


def _is_ours(names: dict[str, object]) -> bool:
    return str(names.get("__name__", "")).partition(".")[0] == "pccl"
