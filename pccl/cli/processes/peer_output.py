"""Prints the output of peers line by line, with the peer's name before each line.

The module never decodes the output, so any bytes pass. On a terminal each peer has a colour.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import BinaryIO, TextIO

from pccl.cli.processes.children import STDERR, STDOUT, OutputLine

STYLES = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
"""Colours of the peers, in turn; red is reserved for failures."""

RESET = b"\x1b[0m"


class PeerOutput:
    """The stdout and stderr of ``pccl launch``, which all peers share."""

    def __init__(self, names: Sequence[str]) -> None:
        streams = {STDOUT: sys.stdout, STDERR: sys.stderr}
        self._outs: dict[int, BinaryIO] = {
            number: stream.buffer for number, stream in streams.items()
        }
        self._prefixes = {number: prefixes(stream, names) for number, stream in streams.items()}

    def write(self, peer: int, line: OutputLine) -> None:
        """Write a line of a peer; ``flush`` makes it visible."""
        prefix = self._prefixes[line.stream][peer]
        leaks_colour = b"\x1b" in line.text and b"\x1b" in prefix
        end = RESET + b"\n" if leaks_colour else b"\n"
        self._write(line.stream, prefix + line.text + end)

    def complain(self, text: str) -> None:
        """Print a message of ``pccl launch`` on stderr."""
        self._write(STDERR, f"pccl launch: {text}\n".encode(errors="replace"))

    def _write(self, number: int, data: bytes) -> None:
        """Write all of ``data``: with PYTHONUNBUFFERED, a signal can cut one write short."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._outs[number].write(rest) :]

    def flush(self) -> None:
        """Flush both streams.

        Raises:
            BrokenPipeError: the reader closed the pipe; call ``mute``.
        """
        for out in self._outs.values():
            out.flush()

    def mute(self) -> None:
        """Discard all further output, also the flush at exit, because no process reads it."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._outs:
            os.dup2(nothing, descriptor)
        os.close(nothing)


def prefixes(stream: TextIO, names: Sequence[str]) -> list[bytes]:
    """Return the text before the lines of each peer: ``[p0] `` etc., coloured on a terminal."""
    plain = [f"[{name}] " for name in names]
    if not stream.isatty():
        return [prefix.encode(errors="replace") for prefix in plain]
    # Imported here, so that a piped launch does not load rich.
    from rich.console import Console
    from rich.text import Text

    found: list[bytes] = []
    for peer, prefix in enumerate(plain):
        console = Console(file=stream)  # respects NO_COLOR and the abilities of the terminal
        with console.capture() as captured:
            console.print(Text(prefix, STYLES[peer % len(STYLES)]), end="")
        found.append(captured.get().encode())
    return found
