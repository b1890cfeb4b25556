"""Splits the output of a process into lines."""

from __future__ import annotations

import re

LINE_BYTES_MAX = 1 << 16
"""Longer lines are cut into pieces of this size, which bounds the memory."""

LINE_END = re.compile(rb"\r*\n|\r+(?![\r\n]|\Z)")
r"""A line feed with any carriage returns before it, or carriage returns alone, as progress bars
write them. The next byte decides which, so a carriage return at the end of the data has to wait."""


class LineSplitter:
    """Cuts a stream of bytes into lines without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data``, and return the lines that it completes."""
        data = self._rest + data
        lines: list[bytes] = []
        begin = 0
        for end in LINE_END.finditer(data):
            line = data[begin : end.start()]
            if line or end[0].endswith(b"\n"):  # a return at the beginning of a line ends nothing
                lines += pieces(line)
            begin = end.end()
        *whole, self._rest = pieces(data[begin:])
        return lines + whole

    def finish(self) -> list[bytes]:
        """Return the last line if it had no end. For use after the last ``feed``."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


def pieces(line: bytes) -> list[bytes]:
    """Cut ``line`` into pieces of at most ``LINE_BYTES_MAX``; an empty line is one piece."""
    begins = range(0, len(line), LINE_BYTES_MAX)
    return [line[begin : begin + LINE_BYTES_MAX] for begin in begins] or [b""]
