"""The errors of the library (see the tree in :mod:`pccl.protocol.errors`, which defines them)."""

from __future__ import annotations

from pccl.protocol.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    DescriptorMismatch,
    Evicted,
    LinkError,
    LocalProtocolError,
    MasterLost,
    MembershipError,
    NotAdmitted,
    NotConnected,
    OutcomeUnknown,
    PCCLError,
    PendingOperations,
    RemoteProtocolError,
    Result,
    ResyncRequired,
    TooFewPeers,
)

__all__ = [
    "CollectiveAborted",
    "DeadlineExceeded",
    "DescriptorMismatch",
    "Evicted",
    "LinkError",
    "LocalProtocolError",
    "MasterLost",
    "MembershipError",
    "NotAdmitted",
    "NotConnected",
    "OutcomeUnknown",
    "PCCLError",
    "PendingOperations",
    "RemoteProtocolError",
    "Result",
    "ResyncRequired",
    "TooFewPeers",
]

for _kind in (globals()[name] for name in __all__):
    _kind.__module__ = __name__  # users know them by this name, also in tracebacks and pickles
