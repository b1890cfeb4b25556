"""``ProgressBar``: shows the progress of a fetch of shared state, on a terminal or as lines.

Pass it as a listener: ``comm.connect(shared_state=state, on_progress=ProgressBar())``.
``pccl launch`` and ``pccl join`` set ``PCCL_PROGRESS=1``. Then ``connect`` and
``sync_shared_state`` show a bar for a fetch that takes longer than a second and has no listener.

The library's thread only records the progress. The bar writes in a thread of its own, so a paused
terminal or a full pipe delays nothing.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TextIO, TypeAlias

from pccl.checks import check_listener
from pccl.config import resolve_progress
from pccl.runtime.state.progress import SyncProgress

__all__ = ["ProgressBar", "SyncProgress"]

Listener: TypeAlias = Callable[[SyncProgress], None]

UNASKED_AFTER_S = 1.0
"""With ``PCCL_PROGRESS``, the bar appears when a fetch has taken this long."""

DRAW_S = 0.1
"""Time between two draws; the library reports progress a few times a second."""

LINE_S = 10.0
"""Without a terminal, a line appears at each quarter, and when the last line is this old."""

RATED_AFTER_S = 0.5
"""Shorter fetches show no rate, because some pieces arrived before the first report."""

CLOSE_S_MAX = 1.0
"""How long the end of a call waits for the last line to be written."""


class ProgressBar:
    """Shows the progress of a fetch on stderr: bytes, rate, time left, sources.

    On a terminal it is a bar; otherwise a line at 25, 50 and 75 %, at the end, and every 10 s.
    It shows nothing until a fetch begins. Several calls may use it, one after the other; the bar
    ends with each call. It ignores errors of its stream.

    Args:
        label: name of the fetch, for people.
        after_s: hide fetches that end within this time, in seconds.
        stream: stream to write to; None: stderr.
    """

    def __init__(
        self, label: str = "fetching", *, after_s: float = 0.0, stream: TextIO | None = None
    ) -> None:
        self._label = label
        self._after_s = after_s
        self._stream = stream
        self._began: tuple[SyncProgress, float] | None = None
        """The first report of the call, and its time."""
        self._drawer: Drawer | None = None

    def __call__(self, progress: SyncProgress) -> None:
        """Record the progress. Returns at once, and raises nothing."""
        with contextlib.suppress(Exception):  # if no thread can be started, show nothing
            self._note(progress)

    def _note(self, progress: SyncProgress) -> None:
        if not progress.total_bytes:
            return
        now_s = time.monotonic()
        if self._drawer is not None and self._drawer.ending.is_set():  # of the previous call
            self._began = self._drawer = None
        if self._began is None:
            self._began = progress, now_s
        first, began_s = self._began
        if self._drawer is None and self._is_worth_it(progress, now_s - began_s):
            self._drawer = Drawer(self._label, self._stream or sys.stderr, first, began_s)
        if self._drawer is not None:
            self._drawer.latest = progress
            if progress.phase == "done":
                self._drawer.ending.set()

    def _is_worth_it(self, progress: SyncProgress, seconds: float) -> bool:
        fetching = progress.done_bytes < progress.total_bytes
        return not self._after_s or (fetching and seconds >= self._after_s)

    def close(self) -> None:
        """Show the outcome, if the bar was shown. The call that uses the bar calls this."""
        drawer = self._drawer
        self._began = self._drawer = None
        if drawer is not None:
            drawer.ending.set()
            drawer.join(CLOSE_S_MAX)


def listener_of(on_progress: Listener | None, label: str) -> Listener | None:
    """Return the listener of one call: the program's, or a bar if ``PCCL_PROGRESS`` is 1.

    Raises:
        TypeError: the program's listener is not callable.
        ValueError: ``PCCL_PROGRESS`` is neither 0 nor 1.
    """
    check_listener("on_progress", on_progress)
    if on_progress is None and resolve_progress():
        return ProgressBar(label, after_s=UNASKED_AFTER_S)
    return on_progress


@contextlib.contextmanager
def showing(listener: Listener | None) -> Generator[None, None, None]:
    """Return a context that closes the bar, if ``listener`` is one, when the call ends."""
    try:
        yield
    finally:
        if isinstance(listener, ProgressBar):
            listener.close()


class Drawer(threading.Thread):
    """A thread that draws the latest report until ``ending`` is set.

    Args:
        label: name of the fetch.
        stream: stream to write to.
        first: the first report.
        began_s: time of the first report, as :func:`time.monotonic` counts.
    """

    def __init__(self, label: str, stream: TextIO, first: SyncProgress, began_s: float) -> None:
        super().__init__(name="pccl-progress", daemon=True)
        self.latest = first
        self.ending = threading.Event()
        self._label = label
        self._stream = stream
        self._first = first
        self._began_s = began_s
        self.start()

    def run(self) -> None:
        """Draw until the end; stop silently if the stream cannot be written to."""
        with contextlib.suppress(Exception):
            kind = LiveBar if self._stream.isatty() else Lines
            display = kind(self._label, self._stream)
            while not self.ending.wait(DRAW_S):
                display.draw(self.latest, time.monotonic() - self._began_s)
            last, seconds = self.latest, time.monotonic() - self._began_s
            fetched_bytes = last.done_bytes - self._first.done_bytes
            display.finish(last, conclude(last, fetched_bytes, seconds))


class Lines:
    """Writes lines to a stream that is no terminal."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._quarter = -1
        self._said_s = 0.0

    def draw(self, progress: SyncProgress, seconds: float) -> None:
        """Write a line, if the next quarter is reached or the last line is old."""
        quarter = 4 * progress.done_bytes // progress.total_bytes
        if quarter > self._quarter or seconds - self._said_s >= LINE_S:
            self._quarter, self._said_s = quarter, seconds
            self._say(describe(progress))

    def finish(self, progress: SyncProgress, words: str) -> None:
        """Write the last line."""
        self._say(words)

    def _say(self, text: str) -> None:
        self._stream.write(f"pccl: {self._label}: {text}\n")
        self._stream.flush()


class LiveBar:
    """A bar that is redrawn in place on a terminal, and stays there at the end."""

    def __init__(self, label: str, stream: TextIO) -> None:
        # Imported here, because most programs show no bar.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(file=stream),
            auto_refresh=False,
            redirect_stdout=False,  # the program uses these streams
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(label, words="")
        self._progress.start()

    def draw(self, progress: SyncProgress, seconds: float) -> None:
        """Redraw the bar."""
        self._draw(progress, describe(progress))

    def finish(self, progress: SyncProgress, words: str) -> None:
        """Redraw the bar for the last time, and leave it on the terminal."""
        self._draw(progress, words)
        self._progress.stop()

    def _draw(self, progress: SyncProgress, words: str) -> None:
        self._progress.update(
            self._task,
            completed=progress.done_bytes,
            total=progress.total_bytes,
            words=words,
            refresh=True,
        )


def describe(progress: SyncProgress) -> str:
    """Describe the progress of a fetch; ``total_bytes`` must not be 0."""
    done, total = progress.done_bytes, progress.total_bytes
    parts = [f"{100 * done // total} %, {size(done)} of {size(total)}"]
    if done >= total:
        parts.append("waiting for members" if progress.phase == "prefetching" else "all received")
    else:
        parts.append(f"{size(progress.bytes_per_s)}/s")
        if progress.remaining_s is not None:
            parts.append(f"{duration(progress.remaining_s)} left")
        parts.append(counted(progress.sources, "source"))
    if progress.wrong_pieces:
        parts.append(f"{counted(progress.wrong_pieces, 'piece')} came with wrong bytes")
    return ", ".join(parts)


def conclude(progress: SyncProgress, fetched_bytes: int, seconds: float) -> str:
    """Describe the outcome of a fetch, with a rate if it took at least 0.5 s."""
    done, total = progress.done_bytes, progress.total_bytes
    text = size(done) if done >= total else f"{size(done)} of {size(total)}"
    if seconds >= RATED_AFTER_S:
        text += f" in {seconds:.1f} s ({size(fetched_bytes / seconds)}/s)"
    if progress.wrong_pieces:
        text += f", {counted(progress.wrong_pieces, 'piece')} came with wrong bytes"
    return text


def size(count: float) -> str:
    """Format a number of bytes: ``474 kB``, ``12.3 MB``, ``1.50 GB``."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Format a time: ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: ``1 source``, ``3 sources``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
