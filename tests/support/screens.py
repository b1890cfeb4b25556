"""A command in a terminal of its own, and what is on its screen."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Generator, Sequence

from tests.support.patience import LIMIT_S

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """A process in a pseudo-terminal.

    Attributes:
        process: the process, alone in its process group.
        output: everything that it has written.
    """

    def __init__(self, process: subprocess.Popen[bytes], terminal: int, slave: int) -> None:
        self.process = process
        self.output = ""
        self._terminal, self._slave = terminal, slave
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def press(self, text: str) -> None:
        """Type on the keyboard."""
        os.write(self._terminal, text.encode())

    def resize(self, width: int, height: int) -> None:
        """Change the size. The process hears of it by a signal only if the test sends it."""
        _set_size(self._slave, width, height)

    @property
    def modes(self) -> list[object]:
        """The modes of the terminal."""
        return termios.tcgetattr(self._slave)

    @property
    def lines(self) -> list[str]:
        """The lines of the last complete picture, without colours; empty: there is none yet."""
        end = self.output.rfind("\x1b[J")
        begin = self.output.rfind("\x1b[H", 0, max(end, 0))
        return _ESCAPE.sub("", self.output[begin:end]).split("\r\n") if begin >= 0 else []

    def until(self, text: str, *, absent: bool = False) -> list[str]:
        """Read until a picture has ``text``, or lacks it; return its lines."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self.lines or (text in "\n".join(self.lines)) == absent:
            assert time.monotonic() < deadline_s, "\n".join(self.lines) or self.output
            self.read(deadline_s - time.monotonic())
        return self.lines

    def read(self, patience_s: float) -> bool:
        """Read a part of what the process has written; wait for it, if there is nothing yet.

        Returns whether there was something.
        """
        ready, _, _ = select.select([self._terminal], [], [], max(patience_s, 0.0))
        if ready:
            self.output += self._decoder.decode(os.read(self._terminal, 1 << 16))
        return bool(ready)

    def end(self) -> int:
        """Read until the process has ended; return its exit status."""
        deadline_s = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, self.output
            self.read(0.05)
        while self.read(0.0):
            pass
        return self.process.returncode


@contextlib.contextmanager
def on_screen(
    command: Sequence[str], env: dict[str, str], width: int = 80, height: int = 24
) -> Generator[Screen]:
    """Run a command in a terminal of this size; kill it if it has not ended with the block."""
    terminal, slave = os.openpty()
    try:
        _set_size(slave, width, height)
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, process_group=0
        )
        try:
            yield Screen(process, terminal, slave)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    finally:
        os.close(terminal)
        os.close(slave)


def everything_from(terminal: int) -> str:
    """What was written to a terminal whose other end is closed. Closes it.

    One read is not enough: the kernel hands over what was written in parts.
    """
    read = bytearray()
    with contextlib.suppress(OSError):  # EIO is the end on Linux
        while piece := os.read(terminal, 65536):
            read += piece
    os.close(terminal)
    return read.decode()


def _set_size(slave: int, width: int, height: int) -> None:
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
