"""How far a fetch of shared state is, for people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.types import NS_PER_S
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.state.fetch.download import Download

_log = logging.getLogger("pccl.peer")

_SMOOTH_NS = NS_PER_S
"""The rate that is reported is that of about the last so many nanoseconds."""


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """How far a synchronization is, or what a newcomer fetches before it is admitted.

    Attributes:
        phase: ``hashing``; ``prefetching`` (before the admission); ``waiting`` (for other members);
            ``fetching``; ``placing`` (what was fetched is put into the tensors); ``done``.
        done_bytes: fetched and verified so far, also by attempts before this one.
        total_bytes: to be fetched in all; 0 as long as that is not known.
        bytes_per_s: fetched lately.
        sources: how many members send.
        wrong_pieces: that came with wrong bytes, and were fetched from others.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    sources: int
    wrong_pieces: int

    @property
    def remaining_s(self) -> float | None:
        """Time left at this rate, in seconds; None: it is not known."""
        if not self.total_bytes or not self.bytes_per_s:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


class ProgressMeter:
    """Tells a listener how far a fetch is.

    Args:
        listener: told; None: nobody wants to know.
        fetched: what has been fetched.
        now_ns: the present.
    """

    def __init__(
        self,
        listener: Callable[[SyncProgress], None] | None,
        fetched: FetchedPieces,
        now_ns: Callable[[], int],
    ) -> None:
        self._listener = listener
        self._fetched = fetched
        self._now_ns = now_ns
        self._seen = now_ns(), fetched.verified_bytes
        self._bytes_per_s = 0.0

    def report(
        self, phase: str, download: Download | None, wanted_bytes: int = 0, wrong_pieces: int = 0
    ) -> None:
        """Tell how far it is now.

        Args:
            phase: see ``SyncProgress``.
            download: that is under way; None: none is.
            wanted_bytes: of the download before, if none is.
            wrong_pieces: of downloads before.
        """
        if self._listener is None:
            return
        now_ns, done_bytes = self._now_ns(), self._fetched.verified_bytes
        since_ns, before_bytes = self._seen
        if now_ns > since_ns:
            share = min(1.0, (now_ns - since_ns) / _SMOOTH_NS)
            lately = max(0, done_bytes - before_bytes) * NS_PER_S / (now_ns - since_ns)
            self._bytes_per_s += share * (lately - self._bytes_per_s)
            self._seen = now_ns, done_bytes
        sources = 0
        if download is not None:
            sources, wanted_bytes = download.source_count, download.wanted_bytes
            wrong_pieces += download.wrong_pieces
        progress = SyncProgress(
            phase, done_bytes, wanted_bytes, self._bytes_per_s, sources, wrong_pieces
        )
        try:
            self._listener(progress)
        except Exception:  # noqa: BLE001 - the caller's bug is no reason to fail
            _log.exception("on_progress has failed, and is not called any more")
            self._listener = None
