"""``StatusLine``: the status of a training run, in one line.

The training thread only records events. The line writes in a thread of its own, so a paused
terminal or a full pipe delays no step.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import sys
import threading
from collections import deque
from typing import Self, TextIO

from pccl.bindings.events import (
    Event,
    GradientsAveraged,
    InnerStep,
    MembersChanged,
    OuterStep,
    PeerReport,
    RoundsMissed,
    StateSynced,
    TrainsAlone,
)
from pccl.checks import shown
from pccl.progress import size

DRAW_S = 0.25
"""Time between two updates on a terminal."""

LINE_S = 10.0
"""Shortest time between two lines, if the stream is not a terminal."""

RATED_STEPS = 100
"""Number of latest inner steps over which the rate is averaged."""

CLOSE_S_MAX = 1.0
"""Longest time that ``close`` waits until the last line is written."""


class Tally:
    """Sums up the events of a run, and describes the sums in words."""

    def __init__(self) -> None:
        self._step = 0
        self._outer_step: int | None = None
        self._members: int | None = None
        self._tx_bytes = 0
        self._hidden_s = 0.0
        self._exposed_s = 0.0
        self._communicated = False
        self._seconds: deque[float] = deque(maxlen=RATED_STEPS)

    def add(self, event: Event) -> None:
        """Add one event to the sums; those of the peer, which have no step, do not count."""
        if isinstance(event, PeerReport):
            return
        self._step = max(self._step, event.step)
        match event:
            case InnerStep():
                if not math.isnan(event.seconds):
                    self._seconds.append(event.seconds)
            case MembersChanged():
                self._members = len(event.members)
            case TrainsAlone():
                self._members = 1
            case StateSynced():
                self._tx_bytes += event.tx_bytes
            case OuterStep():
                self._outer_step = event.number
                self._add_reduce(event)
            case GradientsAveraged():
                self._add_reduce(event)
            case RoundsMissed():
                pass

    def _add_reduce(self, event: OuterStep | GradientsAveraged) -> None:
        self._communicated = True
        self._tx_bytes += event.tx_bytes
        self._hidden_s += event.hidden_s
        self._exposed_s += event.exposed_s
        if self._members is None:  # until a MembersChanged event
            self._members = len(event.contributors)

    def words(self) -> str:
        """Return the sums as text: ``step 1200, 14.2 steps/s, outer step 12, 4 peers, ...``."""
        parts = [f"step {self._step}"]
        if total_s := math.fsum(self._seconds):
            parts.append(f"{len(self._seconds) / total_s:.3g} steps/s")
        if self._outer_step is not None:
            parts.append(f"outer step {self._outer_step}")
        if self._members is not None:
            parts.append("alone" if self._members == 1 else f"{self._members} peers")
        if self._communicated:
            parts.append(f"sent {size(self._tx_bytes)}")
            parts.append(f"hidden {self._hidden_s:.1f} s, exposed {self._exposed_s:.1f} s")
        return ", ".join(parts)


class StatusLine:
    """Shows the training: step, rate, outer step, peers, bytes, seconds hidden and exposed.

    On a terminal the line is rewritten in place, and output of the program appears above it: until
    :meth:`close`, ``sys.stdout`` and ``sys.stderr`` are routed through it. Elsewhere it writes a
    plain line at most every ten seconds, and one at the end. Bytes and seconds are sums since the
    first event; the rate is that of the last 100 inner steps. Errors of the stream are ignored.

    Args:
        stream: text stream to write to; None: stderr.

    Raises:
        TypeError: ``stream`` cannot be written to.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise TypeError(f"StatusLine writes to a text stream, not {shown(stream)}")
        self._stream = stream
        self._tally = Tally()
        self._writer: Writer | None = None
        self._closed = False

    def __call__(self, event: Event) -> None:
        """Add an event. Returns at once; after :meth:`close` it shows nothing."""
        self._tally.add(event)
        if self._closed:
            return
        if self._writer is None:
            self._writer = Writer(self._stream or sys.stderr)
            atexit.register(self.close)  # so that a program that fails shows its last step
        self._writer.latest = self._tally.words()

    def close(self) -> None:
        """Write the last line, and stop. Closing again does nothing."""
        self._closed = True
        writer, self._writer = self._writer, None
        if writer is not None:
            atexit.unregister(self.close)
            writer.ending.set()
            writer.join(CLOSE_S_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(threading.Thread):
    """A thread that shows the latest line until ``ending`` is set."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(name="pccl-status-line", daemon=True)
        self.latest = ""
        self.ending = threading.Event()
        self._stream = stream
        self.start()

    def run(self) -> None:
        """Show the latest line at each interval; stop silently if the stream fails."""
        with contextlib.suppress(Exception):
            display = (Rewritten if self._stream.isatty() else Plain)(self._stream)
            while not self.ending.wait(display.interval_s):
                display.draw(self.latest)
            display.finish(self.latest)


class Plain:
    """Writes plain lines to a pipe or file, but never repeats the previous line."""

    interval_s = LINE_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said = ""

    def draw(self, words: str) -> None:
        """Write the line, unless it equals the previous line."""
        if words != self._said:
            self._said = words
            self._stream.write(f"pccl: {words}\n")
            self._stream.flush()

    def finish(self, words: str) -> None:
        """Write the last line, unless it equals the previous line."""
        self.draw(words)


class Rewritten:
    """Shows a line that is rewritten in place on a terminal, and leaves it there at the end."""

    interval_s = DRAW_S

    def __init__(self, stream: TextIO) -> None:
        # Imported here, because a program without a terminal does not need it.
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        console = Console(file=stream)
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        console.show_cursor(True)  # otherwise a killed program would leave the cursor hidden

    def draw(self, words: str) -> None:
        """Rewrite the line."""
        self._live.update(self._text(words, overflow="ellipsis", no_wrap=True), refresh=True)

    def finish(self, words: str) -> None:
        """Rewrite the line for the last time, and leave it on the terminal."""
        self.draw(words)
        self._live.stop()
