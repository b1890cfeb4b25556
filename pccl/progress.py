"""``ProgressBar``: how far a fetch of shared state is, on a terminal or as lines.

It is a listener like any other: ``comm.connect(shared_state=state, on_progress=ProgressBar())``.
``pccl launch`` and ``pccl join`` ask for one by ``PCCL_PROGRESS=1``: then ``connect`` and
``sync_shared_state`` show what they fetch, if that takes longer than a second and nobody else
listens.

The library's thread only leaves word how far it is. A thread of the bar's own writes, so a terminal
that is paused, or a pipe that nobody reads, holds up nothing.
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
"""A bar that the program has not asked for appears when a fetch has taken so long."""

DRAW_S = 0.1
"""How often it is drawn anew; the library tells how far it is a few times a second."""

LINE_S = 10.0
"""Where there is no terminal, a line comes at each quarter, and after so long without one."""

RATED_AFTER_S = 0.5
"""Of what took less, no rate is told: some of it was there before the first word of it."""

CLOSE_S_MAX = 1.0
"""How long the end of a call waits for the last line to be written."""


class ProgressBar:
    """Shows on stderr how far a fetch is: bytes, rate, time left, sources.

    On a terminal it is a bar; otherwise a line at 25, 50 and 75 %, at the end, and now and then.
    Nothing is shown as long as nothing is fetched. It may be given to several calls, one after the
    other, each of which it ends with; errors of the stream that it writes to are dropped.

    Args:
        label: what is done, for people.
        after_s: a fetch that is over so soon is not shown, in seconds.
        stream: where to write; None: stderr.
    """

    def __init__(
        self, label: str = "fetching", *, after_s: float = 0.0, stream: TextIO | None = None
    ) -> None:
        self._label = label
        self._after_s = after_s
        self._stream = stream
        self._began: tuple[SyncProgress, float] | None = None
        """The first that was heard of the call, and when."""
        self._drawer: Drawer | None = None

    def __call__(self, progress: SyncProgress) -> None:
        """Take note of how far it is. Returns at once, and raises nothing."""
        with contextlib.suppress(Exception):  # no thread can be started: then nothing is shown
            self._note(progress)

    def _note(self, progress: SyncProgress) -> None:
        if not progress.total_bytes:
            return
        now_s = time.monotonic()
        if self._drawer is not None and self._drawer.ending.is_set():  # of the call before
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
        """Say how it ended, if anything was shown. A call that it was given to does this."""
        drawer = self._drawer
        self._began = self._drawer = None
        if drawer is not None:
            drawer.ending.set()
            drawer.join(CLOSE_S_MAX)


def listener_of(on_progress: Listener | None, label: str) -> Listener | None:
    """Who listens to one call: whom the program names, or a bar if ``PCCL_PROGRESS`` says so.

    Raises:
        TypeError: the program names something that can't be called.
        ValueError: what ``PCCL_PROGRESS`` says is neither 0 nor 1.
    """
    check_listener("on_progress", on_progress)
    if on_progress is None and resolve_progress():
        return ProgressBar(label, after_s=UNASKED_AFTER_S)
    return on_progress


@contextlib.contextmanager
def showing(listener: Listener | None) -> Generator[None, None, None]:
    """While a call is open: a bar is closed when it ends, however it does."""
    try:
        yield
    finally:
        if isinstance(listener, ProgressBar):
            listener.close()


class Drawer(threading.Thread):
    """Draws what was noted last, until it is told to end.

    Args:
        label: what is done.
        stream: where to write.
        first: the first that was heard of it.
        began_s: when, as :func:`time.monotonic` counts.
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
        """Draw; if the stream cannot be written to, be silent."""
        with contextlib.suppress(Exception):
            kind = LiveBar if self._stream.isatty() else Lines
            display = kind(self._label, self._stream)
            while not self.ending.wait(DRAW_S):
                display.draw(self.latest, time.monotonic() - self._began_s)
            last, seconds = self.latest, time.monotonic() - self._began_s
            fetched_bytes = last.done_bytes - self._first.done_bytes
            display.finish(last, conclude(last, fetched_bytes, seconds))


class Lines:
    """A few lines."""

    def __init__(self, label: str, stream: TextIO) -> None:
        self._label = label
        self._stream = stream
        self._quarter = -1
        self._said_s = 0.0

    def draw(self, progress: SyncProgress, seconds: float) -> None:
        """A line, if there is something new to say."""
        quarter = 4 * progress.done_bytes // progress.total_bytes
        if quarter > self._quarter or seconds - self._said_s >= LINE_S:
            self._quarter, self._said_s = quarter, seconds
            self._say(describe(progress))

    def finish(self, progress: SyncProgress, words: str) -> None:
        """The last line."""
        self._say(words)

    def _say(self, text: str) -> None:
        self._stream.write(f"pccl: {self._label}: {text}\n")
        self._stream.flush()


class LiveBar:
    """A bar that is drawn over itself, and stays when it ends."""

    def __init__(self, label: str, stream: TextIO) -> None:
        # Imported here: a program that fetches nothing for long does without it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(file=stream),
            auto_refresh=False,
            redirect_stdout=False,  # they are the program's
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(label, words="")
        self._progress.start()

    def draw(self, progress: SyncProgress, seconds: float) -> None:
        """Draw it anew."""
        self._draw(progress, describe(progress))

    def finish(self, progress: SyncProgress, words: str) -> None:
        """Draw it for the last time."""
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
    """How far a fetch is, for people; something is to be fetched."""
    done, total = progress.done_bytes, progress.total_bytes
    parts = [f"{100 * done // total} %, {size(done)} of {size(total)}"]
    if done >= total:
        parts.append("waiting for the others" if progress.phase == "prefetching" else "all here")
    else:
        parts.append(f"{size(progress.bytes_per_s)}/s")
        if progress.remaining_s is not None:
            parts.append(f"{duration(progress.remaining_s)} left")
        parts.append(counted(progress.sources, "source"))
    if progress.wrong_pieces:
        parts.append(f"{counted(progress.wrong_pieces, 'piece')} came with wrong bytes")
    return ", ".join(parts)


def conclude(progress: SyncProgress, fetched_bytes: int, seconds: float) -> str:
    """What has come of it, for people; with a rate, if it was watched for long enough."""
    done, total = progress.done_bytes, progress.total_bytes
    text = size(done) if done >= total else f"{size(done)} of {size(total)}"
    if seconds >= RATED_AFTER_S:
        text += f" in {seconds:.1f} s ({size(fetched_bytes / seconds)}/s)"
    if progress.wrong_pieces:
        text += f", {counted(progress.wrong_pieces, 'piece')} came with wrong bytes"
    return text


def size(count: float) -> str:
    """A number of bytes: ``474 kB``, ``12.3 MB``, ``1.50 GB``."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """A time: ``12 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counted(count: int, noun: str) -> str:
    """``1 source``, ``3 sources``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
