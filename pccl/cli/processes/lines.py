"""Lines out of whatever a process writes, as it comes."""

from __future__ import annotations

import re

LINE_BYTES_MAX = 1 << 16
"""A longer line comes out in pieces of this size, so that none needs unbounded memory."""

LINE_END = re.compile(rb"\r*\n|\r+(?![\r\n]|\Z)")
r"""A line feed with any returns before it, or returns alone, as progress bars write them. What is
behind a return decides which, so one that came last has to wait."""


class LineSplitter:
    """Cuts a stream of bytes into lines without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read; returns the lines that it completes."""
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
        """What was left without an end, when no more will come."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


def pieces(line: bytes) -> list[bytes]:
    """Cut a line where it is too long; at least one piece, the last one perhaps shorter."""
    begins = range(0, len(line), LINE_BYTES_MAX)
    return [line[begin : begin + LINE_BYTES_MAX] for begin in begins] or [b""]
