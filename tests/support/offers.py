"""What members offer when they synchronize."""

from __future__ import annotations

from typing import Any

from pccl.protocol.shared_state import Offer, ResumePolicy, SharedStateSyncStrategy, SyncPurpose


def offer(content: bytes = b"content", **changes: Any) -> Offer:
    """An offer of who has synchronized nothing yet, but for what is said."""
    usual: dict[str, Any] = {
        "purpose": SyncPurpose.SYNC,
        "strategy": SharedStateSyncStrategy.ENFORCE_POPULAR,
        "resume": ResumePolicy.NEVER,
        "revision": 0,
        "lineage": None,
        "stale": False,
        "unchanged": False,
        "layout": b"layout",
        "extra": b"extra",
    }
    return Offer(**{**usual, **changes}, content=content)
