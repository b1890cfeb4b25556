"""The worker processes of one command: Python programs that have names and write lines."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import NoReturn, Self

import click

from pccl import config
from pccl.cli.processes.children import STDOUT, Children, Ended
from pccl.cli.processes.reports import Failed, WorkerReport, decode

SAID_LINES_MAX = 20
"""Number of last stderr lines that are kept for each process."""

CAUSE_S = 0.5
"""Seconds to wait for the cause of a worker's failure, which may be the death of another worker."""


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the stack unwinds and workers end."""
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


class ProcessDied(Exception):
    """A worker process ended with an error, or too early.

    Attributes:
        name: name of the process.
        ended: its end, with the exit code.
        said: the last lines that it wrote to stderr.
    """

    def __init__(self, name: str, ended: Ended, said: Sequence[str]) -> None:
        super().__init__(f"{name} ended unexpectedly: {ended}")
        self.name = name
        self.ended = ended
        self.said = tuple(said)

    def to_error(self) -> click.ClickException:
        """Return the error for the user: which process ended, and its last stderr lines."""
        return click.ClickException("\n".join([str(self), *(f"  {line}" for line in self.said)]))


class Crew:
    """Starts, reads and ends worker processes. All of them are dead after the ``with`` block."""

    def __init__(self) -> None:
        self._children = Children[str]()
        self._pids: dict[str, int] = {}
        self._said: dict[str, list[str]] = {}
        self._dismissed: set[str] = set()
        self._deaths: list[ProcessDied] = []

    def __enter__(self) -> Self:
        self._children.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._children.close()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start Python with one thread for its numeric libraries.

        Args:
            name: name of the process; no running process may have it.
            module: the program, as a module.
            arguments: arguments of the program.
            environment: variables to add to this process's environment.

        Returns:
            The id of the new process.

        Raises:
            OSError: the system has no more processes.
        """
        inherited = {key: value for key, value in os.environ.items() if key not in config.OF_A_PEER}
        command = [sys.executable, sys.executable, "-m", module, *arguments]
        variables = {**inherited, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._dismissed.discard(name)
        self._said[name] = []
        self._pids[name] = self._children.start(name, command, variables)
        return self._pids[name]

    def running(self, names: Collection[str]) -> bool:
        """Whether a process of ``names`` is running, or has failed and ``hear`` will raise this."""
        return any(name in self._pids for name in names) or any(
            death.name in names for death in self._deaths
        )

    def hear(self, timeout_s: float | None = None) -> list[tuple[str, str]]:
        """Wait for lines on stdout; return pairs of a process's name and a line.

        The last stderr lines of a process are part of its error, or printed if it ends with 0.

        Args:
            timeout_s: longest wait in seconds; None: no limit. The end of a process ends the wait.

        Raises:
            ProcessDied: a process failed. Earlier calls have returned all its lines.
        """
        lines: list[tuple[str, str]] = []
        for name, what in self._children.hear(timeout_s) if not self._deaths else []:
            if isinstance(what, Ended):
                self._on_end(name, what)
                continue
            text = what.text.decode(errors="replace")
            if what.stream == STDOUT:
                lines.append((name, text))
            else:
                self._said[name] = [*self._said[name], text][-SAID_LINES_MAX:]
        if self._deaths and not lines:
            raise self._deaths.pop(0)
        return lines

    def first_lines(self, names: Collection[str]) -> dict[str, str]:
        """Wait until each process of ``names`` has written a line, and return each first line.

        Raises:
            ProcessDied: a process ended before it wrote a line.
        """
        found: dict[str, str] = {}
        while set(names) - set(found):
            for name, text in self.hear():
                found.setdefault(name, text)
            for name in set(names) - set(found) - set(self._pids):
                raise ProcessDied(name, Ended(0), ())
        return found

    def dismiss(self, names: Collection[str]) -> None:
        """Send SIGTERM to processes, and wait for their ends."""
        self._dismissed |= set(names)
        for name in names:
            if name in self._pids:
                self._children.send(signal.SIGTERM, self._pids[name])
        while self.running(names):
            self.hear()

    def kill(self, name: str) -> None:
        """Kill a process (SIGKILL), and do not count its end as a failure."""
        self._dismissed.add(name)
        self.send(signal.SIGKILL, name)

    def send(self, signum: int, name: str) -> None:
        """Send a signal to a process, unless it has ended."""
        if name in self._pids:
            self._children.send(signum, self._pids[name])

    def listen(
        self,
        names: Collection[str],
        kinds: Collection[type[WorkerReport]],
        add: Callable[..., None],
        silence_s: float | None = None,
    ) -> None:
        """Read reports until all processes of ``names`` have ended; other lines go to stderr.

        Args:
            names: names of the processes; ``add`` may start more and add their names.
            kinds: dataclasses of their reports.
            add: called with the name of the process and the report.
            silence_s: give up after this time without a line; None: never.

        Raises:
            click.ClickException: a process failed (the message says why), or ``silence_s`` passed.
        """
        try:
            while self.running(names):
                began_s = time.monotonic()
                heard = self.hear(silence_s)
                if silence_s is not None and time.monotonic() - began_s >= silence_s and not heard:
                    raise click.ClickException(f"no process wrote a line for {silence_s:.0f} s")
                for name, text in heard:
                    report = decode(text, (*kinds, Failed))
                    if report is None:
                        print(f"{name}: {text}", file=sys.stderr)
                    elif isinstance(report, Failed):
                        raise self._cause(name, report)
                    else:
                        add(name, report)
        except ProcessDied as death:
            raise death.to_error() from death

    def _cause(self, name: str, report: Failed) -> click.ClickException:
        """Return why a worker failed: the death of another worker, or else its own report."""
        gave_up = {name}
        deadline_s = time.monotonic() + CAUSE_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                heard = self.hear(left_s)
            except ProcessDied as death:
                if death.name not in gave_up:
                    return death.to_error()
            else:
                gave_up |= {who for who, text in heard if decode(text, (Failed,)) is not None}
        return click.ClickException(f"{name}: {report.reason}")

    def _on_end(self, name: str, ended: Ended) -> None:
        del self._pids[name]
        said = self._said.pop(name)
        if name in self._dismissed:
            return
        if ended.exit_code == 0:
            for line in said:
                print(f"{name}: {line}", file=sys.stderr)
        else:
            self._deaths.append(ProcessDied(name, ended, said))
            # Killed workers first, because their deaths may be the cause of other failures.
            self._deaths.sort(key=lambda death: death.ended.exit_code >= 0)
