"""Takes a terminal for a full-screen program, and gives it back on every way out."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

ENTER = "\x1b[?1049h\x1b[?25l"
"""Use the alternate screen, and hide the cursor."""

LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
"""Undo ``ENTER``."""

READ_BYTES_MAX = 1024

Handler: TypeAlias = Callable[[int, FrameType | None], Any] | int | None


class Terminal:
    """The terminal of this process, in the main thread.

    Ctrl-Z gives it back while the program is stopped. SIGTERM and SIGHUP raise ``SystemExit``.

    Args:
        stdin: descriptor of the terminal for keys.
        stdout: descriptor of the terminal for the screen.
    """

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._console = Console(highlight=False, markup=False)
        self._modes = termios.tcgetattr(stdin)
        self._handlers: dict[int, Handler] = {}
        self._woken, self._waker = os.pipe()  # for good: another thread may wake this one late
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        self._old_waker = -1

    def __enter__(self) -> Terminal:
        wanted: dict[int, Handler] = {
            signal.SIGTERM: _end,
            signal.SIGHUP: _end,
            signal.SIGTSTP: self._stop,
            signal.SIGWINCH: _nothing,  # only the wake-up counts
        }
        self._old_waker = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, wanted[number]) for number in wanted}
        self._take()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in self._handlers:  # nothing may interrupt what follows
            signal.signal(number, signal.SIG_IGN)
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_waker)

    def wake(self) -> None:
        """End the present or next ``wait``. Any thread may call this at any time."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"w")

    def wait(self, patience_s: float) -> bytes:
        """Wait for keys, a signal or ``wake``; return the bytes of the keys.

        Raises:
            EOFError: the terminal is gone.
        """
        ready, _, _ = select.select([self._stdin, self._woken], [], [], patience_s)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, READ_BYTES_MAX)
        if self._stdin not in ready:
            return b""
        try:
            data = os.read(self._stdin, READ_BYTES_MAX)
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return data

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in cells."""
        try:
            width, height = os.get_terminal_size(self._stdout)
        except OSError:
            width = height = 0
        return width or 80, height or 24

    def draw(self, lines: Sequence[Text]) -> None:
        """Show lines that fill the screen."""
        with self._console.capture() as captured:
            for place, line in enumerate(lines):
                if place:
                    self._console.out("\r\n", end="")
                self._console.print(line, end="", soft_wrap=True)
        self._write(f"\x1b[H{captured.get()}\x1b[J")

    def _take(self) -> None:
        tty.setcbreak(self._stdin)
        self._write(ENTER)

    def _give_back(self) -> None:
        """Restore the terminal; a terminal that is gone needs nothing."""
        with contextlib.suppress(OSError, termios.error):
            self._write(LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._modes)

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._stdout, data) :]

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Stop this process as Ctrl-Z does without a handler; go on when the shell continues it."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._take()
        self.wake()


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _nothing(signum: int, frame: FrameType | None) -> None:
    pass
