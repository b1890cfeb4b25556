"""Reports the progress of a download of shared state to the program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.types import NS_PER_S
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.state.fetch.download import Download

_log = logging.getLogger("pccl.peer")

_SMOOTH_NS = NS_PER_S
"""The reported rate is an average over about this time."""


@dataclass(frozen=True, slots=True)
class SyncProgress:
    """The progress of a synchronization, or of a newcomer's download before its admission.

    Attributes:
        phase: ``hashing``; ``prefetching`` (before the admission); ``waiting`` (for other members);
            ``fetching``; ``placing`` (writing fetched pieces into the tensors); ``done``.
        done_bytes: bytes fetched and verified so far, earlier attempts included.
        total_bytes: bytes to fetch in all; 0 until this is known.
        bytes_per_s: download rate of about the last second.
        sources: number of members that this peer can ask for pieces.
        wrong_pieces: number of pieces that came with wrong bytes; this peer fetches them again.
    """

    phase: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float
    sources: int
    wrong_pieces: int

    @property
    def remaining_s(self) -> float | None:
        """Time left at this rate, in seconds; None: unknown."""
        if not self.total_bytes or not self.bytes_per_s:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s


class ProgressMeter:
    """Reports the progress of a download to a callback.

    Args:
        listener: callback of the program; None: report nothing.
        fetched: the verified pieces.
        now_ns: returns the current time in nanoseconds.
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
        """Call the listener with the current progress.

        Args:
            phase: see ``SyncProgress``.
            download: the running download; None: none is running.
            wanted_bytes: bytes that the last download had to fetch, if none is running.
            wrong_pieces: wrong pieces of earlier downloads.
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
        except Exception:  # noqa: BLE001 - a bug of the caller must not end the download
            _log.exception("on_progress failed; this peer does not call it again")
            self._listener = None
