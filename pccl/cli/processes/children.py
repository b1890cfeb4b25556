"""The child processes of a command: starts them, reads their output, ends all of them.

Each child has its own session, so Ctrl-C on a terminal reaches the command alone, and the command
decides which signals to send. A signal goes to the child's process group: to a shell and the
programs it runs. When a child ends, the command kills the rest of its group. If the command itself
is killed, its guard (:mod:`pccl.cli.processes.guard`) kills the groups of all children.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from pccl.cli.processes import guard
from pccl.cli.processes.lines import LineSplitter

K = TypeVar("K")

READ_BYTES = 1 << 16

LAST_READ_COUNT_MAX = 64
"""Largest number of reads from the pipe of an ended child: enough for any pipe, but bounded if a
process that left the group continues to write."""

STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line, without its end, that a child wrote to ``STDOUT`` or ``STDERR``."""

    stream: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child. ``hear`` has returned all its output before this.

    Attributes:
        exit_code: exit code of the process; if a signal killed it: minus the signal's number.
    """

    exit_code: int

    @property
    def status(self) -> int:
        """The exit code as shells report it; for a signal: 128 plus its number."""
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code

    def __str__(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"signal {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"signal {-self.exit_code}"


Heard: TypeAlias = tuple[K, OutputLine | Ended]


@dataclass(slots=True)
class _Child(Generic[K]):
    key: K
    process: subprocess.Popen[bytes]
    streams: dict[int, int]
    """Descriptor to read -> ``STDOUT`` or ``STDERR`` of the child."""
    splitters: dict[int, LineSplitter] = field(
        default_factory=lambda: {STDOUT: LineSplitter(), STDERR: LineSplitter()}
    )


class Children(Generic[K]):
    """The children of a command, each under a key. For the main thread, because of SIGCHLD."""

    def __init__(self) -> None:
        self._running: dict[int, _Child[K]] = {}
        self._selector = selectors.DefaultSelector()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Children[K]:
        with contextlib.ExitStack() as undo:
            undo.callback(self._selector.close)
            self._wakeup = _listen_to_signals(undo)
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._guard = _start_guard(undo)
            self._exit = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Return the number of children whose end ``hear`` has not returned yet."""
        return len(self._running)

    def start(self, key: K, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a child; its stdin is empty.

        Args:
            key: ``hear`` returns it with each line and the end of this child.
            command: path of a program, then its argv.
            environment: the complete environment of the child.

        Returns:
            The id of the child's process, group and session.

        Raises:
            OSError: the system has no more processes or descriptors.
        """
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, "enter", str(self._guard), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,
            pass_fds=[self._guard],
        )
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {process.stdout.fileno(): STDOUT, process.stderr.fileno(): STDERR}
        child = self._running[process.pid] = _Child(key, process, streams)
        for descriptor in streams:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, child)
        return process.pid

    def hear(self, timeout_s: float | None = None) -> list[Heard[K]]:
        """Wait for output or the end of a child.

        Args:
            timeout_s: longest wait in seconds; None: no limit.

        Returns:
            Keys with lines and ends, in order for each child; empty after the timeout.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        heard: list[Heard[K]] = []
        while not heard:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = self._selector.select(left_s)
            if not ready and left_s == 0.0:
                break
            for selected, _ in ready:
                if selected.data is not None:
                    heard += self._read(selected.data, selected.fd)
            if any(selected.fd == self._wakeup for selected, _ in ready):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup, READ_BYTES)
                for child in list(self._running.values()):
                    if child.process.poll() is not None:
                        heard += self._end(child)
        return heard

    def send(self, signum: int, pid: int | None = None) -> None:
        """Send a signal to the groups of all children, or of one. Signal handlers may call this."""
        for group in list(self._running) if pid is None else [pid]:
            # PermissionError: a program runs as another user, or, on macOS, has just ended.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signum)

    def close(self) -> None:
        """Kill the remaining children, and wait for their ends."""
        self.send(signal.SIGKILL)
        for child in list(self._running.values()):
            child.process.wait()
            self._end(child)
        self._exit.close()

    def _read(self, child: _Child[K], descriptor: int) -> list[Heard[K]]:
        """Read once from a pipe that has data, or has reached its end."""
        stream = child.streams.get(descriptor)
        if stream is None:
            return []
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return self._close_stream(child, descriptor)
        return [
            (child.key, OutputLine(stream, text)) for text in child.splitters[stream].feed(data)
        ]

    def _close_stream(self, child: _Child[K], descriptor: int) -> list[Heard[K]]:
        stream = child.streams.pop(descriptor)
        self._selector.unregister(descriptor)
        pipe = child.process.stdout if stream == STDOUT else child.process.stderr
        assert pipe is not None
        pipe.close()
        return [(child.key, OutputLine(stream, text)) for text in child.splitters[stream].finish()]

    def _end(self, child: _Child[K]) -> list[Heard[K]]:
        """Kill the rest of the group of an ended child, and read the rest of its output."""
        pid = child.process.pid
        self.send(signal.SIGKILL, pid)
        del self._running[pid]
        with contextlib.suppress(BrokenPipeError):
            os.write(self._guard, f"-{pid}\n".encode())
        heard: list[Heard[K]] = []
        for descriptor, stream in list(child.streams.items()):
            texts = child.splitters[stream].feed(_read_rest(descriptor))
            heard += [(child.key, OutputLine(stream, text)) for text in texts]
            heard += self._close_stream(child, descriptor)
        heard.append((child.key, Ended(child.process.returncode)))
        return heard


def _read_rest(descriptor: int) -> bytes:
    """Return the data that a pipe holds now."""
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(parts) < LAST_READ_COUNT_MAX and (part := os.read(descriptor, READ_BYTES)):
            parts.append(part)
    return b"".join(parts)


def _listen_to_signals(undo: contextlib.ExitStack) -> int:
    """Make each handled signal, SIGCHLD too, write to a pipe; return the pipe's reading end."""
    reader, writer = os.pipe()
    undo.callback(os.close, reader)
    undo.callback(os.close, writer)
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    undo.callback(signal.set_wakeup_fd, before)
    handler: Any = signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    undo.callback(signal.signal, signal.SIGCHLD, handler)
    return reader


def _start_guard(undo: contextlib.ExitStack) -> int:
    """Start the guard; return the descriptor on which it learns which children run."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, "watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    pipe = process.stdin
    assert pipe is not None
    undo.callback(process.wait)
    undo.callback(pipe.close)
    return pipe.fileno()
