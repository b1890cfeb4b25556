"""Programs with torch, as forks of a process that has imported it already.

Torch and its first optimizer take a processor for two seconds in each process that imports them.
Here one process a test session does so, and each program is a fork of it, ready at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import runpy
import signal
import sys
from multiprocessing.connection import Connection
from typing import IO, Any

from tests.support.patience import LIMIT_S

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.support.torch_ready"])


class ForkedProgram:
    """A module of ``tests`` that runs as a program: the part of ``Popen`` that tests use.

    Args:
        module: its name.
        arguments: of the program.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        stdin, to_stdin = _CONTEXT.Pipe(duplex=False)
        from_stdout, stdout = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(module, arguments, stdin, stdout))
        self._process.start()
        stdin.close()
        stdout.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdin = _opened(to_stdin, "w")
        self.stdout = _opened(from_stdout, "r")

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it has not ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to it, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = LIMIT_S) -> int:
        """Wait for its end; return its status, negative for a signal."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it runs on after {timeout} s"
        return self._process.exitcode


def _opened(end: Connection[Any, Any], mode: str) -> IO[str]:
    with end:
        return os.fdopen(os.dup(end.fileno()), mode, buffering=1)


def _run(module: str, arguments: tuple[str, ...], stdin: Connection, stdout: Connection) -> None:
    for end, number in ((stdin, 0), (stdout, 1)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
    sys.argv = [module, *arguments]
    with contextlib.suppress(BrokenPipeError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()
