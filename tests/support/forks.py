"""Programs as forks of a process that has imported pccl and torch already.

In each process that imports it, pccl takes a processor for 0.3 seconds, and torch with its first
optimizer for two. One process a test session does so, and each program is a fork, ready at once.

* :class:`ForkedProgram`: a module of ``tests`` as a program.
* :func:`ready_python`: a command line that runs a script, for what starts processes by itself.
  With ``-m MODULE`` for a script it runs a module, whose ``sys.executable`` does the same. So all
  processes of a command of pccl are forks. With ``-c TEXT`` it runs the text. Behind ``ip netns
  exec`` the fork is in that namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing as mp
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from tests.support import ready_python as client
from tests.support.forked_children import use_forks
from tests.support.patience import LIMIT_S

_PYTHON = """#!/bin/sh
[ "$1" = -m ] && exec {} "$@"
exec {} "$@"
"""
"""A Python whose modules are forks."""

_CONTEXT = mp.get_context("forkserver")


def preload(*modules: str) -> None:
    """Say what that process imports, before the first fork."""
    _CONTEXT.set_forkserver_preload(list(modules))


preload("tests.support.torch_ready")


class ForkedProgram:
    """A module of ``tests`` that runs as a program: the part of ``Popen`` that tests use.

    Args:
        module: its name.
        arguments: of the program.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        stdin, to_stdin = _CONTEXT.Pipe(duplex=False)
        from_stdout, stdout = _CONTEXT.Pipe(duplex=False)
        given = module, arguments, stdin, stdout, dict(os.environ)
        self._process = _CONTEXT.Process(target=_run, args=given)
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
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
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


def _run(
    module: str,
    arguments: tuple[str, ...],
    stdin: Connection,
    stdout: Connection,
    environment: dict[str, str],
) -> None:
    _use_environment(environment)
    for end, number in ((stdin, 0), (stdout, 1)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
    sys.argv = [module, *arguments]
    with contextlib.suppress(BrokenPipeError):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.stdout.flush()


@contextlib.contextmanager
def ready_python() -> Generator[tuple[str, ...]]:
    """What to write before a script and its arguments instead of ``python -W error``."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        command = (sys.executable, "-I", "-S", client.__file__, address)
        python = Path(folder) / "python"
        python.write_text(_PYTHON.format(shlex.join(command), shlex.quote(sys.executable)))
        python.chmod(0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            given = listener, str(python)
            server = _CONTEXT.Process(target=serve, args=given, daemon=True)
            server.start()
        yield command
        server.kill()
        server.join()


def serve(listener: socket.socket, python: str) -> None:
    """Fork for each script that ``ready_python.py`` asks for, until the tests end.

    Args:
        listener: where they ask.
        python: ``sys.executable`` of modules.
    """
    parent = mp.parent_process()
    assert parent is not None
    while parent.sentinel not in wait([listener, parent.sentinel]):
        asker, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _attend(asker, python)
            return
        asker.close()


def _use_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # an earlier import may have looked it up


def _attend(asker: socket.socket, python: str) -> None:
    """Run a script in one more fork; tell how it ended, and end it if nobody waits any longer."""
    _, received, _, _ = socket.recv_fds(asker, 1, 3 + len(client.NAMESPACES))
    streams, namespaces = received[:3], received[3:]
    with asker.makefile() as lines:
        command, folder, environment = json.loads(lines.readline())
    pid = os.fork()
    if pid == 0:
        asker.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _enter(namespaces)
        os.chdir(folder)
        _use_environment(environment)
        try:
            _run_script(command, python)
        finally:
            logging.shutdown()  # the fork ends without it, and lines may still be queued
        return
    asker.sendall(b"%d\n" % pid)
    for each in received:
        os.close(each)

    def watch() -> None:
        asker.recv(1)  # until it closes
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(BrokenPipeError):
        asker.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _enter(namespaces: list[int]) -> None:
    """Go where the asker is, if it is elsewhere, and close the files; for root only."""
    for theirs, ours in zip(namespaces, client.namespaces(), strict=True):
        if not os.path.sameopenfile(theirs, ours):
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(theirs, 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.close(theirs)
        os.close(ours)


def _run_script(command: list[str], python: str) -> None:
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("error")
    if command[0] == "-m":
        use_forks((sys.executable, python))
        sys.executable = python
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
