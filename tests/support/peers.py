"""Peers as processes of their own, which do what a test says and report to it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from typing import Any

from tests.support.forks import ForkedProgram
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S


def report(answer: object) -> None:
    """In a peer's process: a line for the test."""
    print(json.dumps(answer), flush=True)  # noqa: T201


def obey(peer: object) -> None:
    """In a peer's process: call the method that each line names, and report what it returns."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        report(getattr(peer, name)(*arguments))


class PeerProcess:
    """A peer, as the test sees it.

    Args:
        module: whose program it runs.
        arguments: of the program.
        limit_s: for an answer.
        prefix: command that starts it; without one it is a fork, see :mod:`tests.support.forks`.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        limit_s: float = LIMIT_S,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.id = 0
        """Of the peer, when the test has learned it."""
        self.process: subprocess.Popen[str] | ForkedProgram
        if prefix:
            command = [*prefix, sys.executable, "-m", module, *arguments]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        else:
            self.process = ForkedProgram(module, *arguments)
        self._limit_s = limit_s
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, name: str, *arguments: object) -> None:
        """Say what it shall do."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def hear(self) -> tuple[float, Any]:
        """When its next report came, and what it is."""
        came_s, line = self._lines.get(timeout=self._limit_s)
        assert line, "it has ended"
        return came_s, json.loads(line)

    def answer(self) -> dict[str, Any]:
        """Its next report."""
        answer: dict[str, Any] = self.hear()[1]
        return answer

    def ask(self, name: str, *arguments: object) -> dict[str, Any]:
        """Say what it shall do, and wait for the report."""
        self.tell(name, *arguments)
        return self.answer()

    def end(self) -> None:
        """Kill it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line))
        self._lines.put((time.monotonic(), ""))
