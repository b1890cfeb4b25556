"""Worker processes of one command, by name: Python programs that write lines."""

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

OURS = (
    config.MASTER,
    config.TOKEN,
    config.TOKEN_FILE,
    config.GROUP,
    config.LANES,
    config.MIN_PEERS,
    config.ADVERTISE,
    config.LISTEN,
)
"""Variables about a run that is not this one."""

SAID_LINES_MAX = 20
"""Last lines of a process's complaints that are kept."""

CAUSE_S = 0.5
"""How long the cause of a worker's failure is waited for: what it names may be another's death."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that the workers are ended."""
    for wanted in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, _end)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


class ProcessDied(Exception):
    """A process ended that should not have, or not so.

    Attributes:
        name: which one.
        ended: how.
        said: the last lines that it wrote to stderr.
    """

    def __init__(self, name: str, ended: Ended, said: Sequence[str]) -> None:
        super().__init__(f"{name} ended unexpectedly: {ended}")
        self.name = name
        self.ended = ended
        self.said = tuple(said)

    def to_error(self) -> click.ClickException:
        """For people: which process ended, and its own last words."""
        return click.ClickException("\n".join([str(self), *(f"  {line}" for line in self.said)]))


class Crew:
    """Starts, hears and ends them. Left behind by nobody, however the block ends."""

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
            name: one that is not running.
            module: the program.
            arguments: its own.
            environment: what it finds in its environment beside ours.

        Returns:
            Its process id.

        Raises:
            OSError: the system gives no more processes.
        """
        inherited = {key: value for key, value in os.environ.items() if key not in OURS}
        command = [sys.executable, sys.executable, "-m", module, *arguments]
        variables = {**inherited, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._dismissed.discard(name)
        self._said[name] = []
        self._pids[name] = self._children.start(name, command, variables)
        return self._pids[name]

    def running(self, names: Collection[str]) -> bool:
        """Whether any of them has not ended, or has failed and ``hear`` has not said so yet."""
        return any(name in self._pids for name in names) or any(
            death.name in names for death in self._deaths
        )

    def hear(self, timeout_s: float | None = None) -> list[tuple[str, str]]:
        """Wait for something on stdout: who wrote which line.

        What a process says on stderr is kept for the day it dies; if it ends well, it is passed on.

        Args:
            timeout_s: how long; None: for ever. An end of a process ends the wait as well.

        Raises:
            ProcessDied: one failed; all lines that came before were heard.
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
        """Wait until each of them has written a line.

        Raises:
            ProcessDied: one ended before.
        """
        found: dict[str, str] = {}
        while set(names) - set(found):
            for name, text in self.hear():
                found.setdefault(name, text)
            for name in set(names) - set(found) - set(self._pids):
                raise ProcessDied(name, Ended(0), ())
        return found

    def dismiss(self, names: Collection[str]) -> None:
        """Ask processes to end and wait until they have."""
        self._dismissed |= set(names)
        for name in names:
            if name in self._pids:
                self._children.send(signal.SIGTERM, self._pids[name])
        while self.running(names):
            self.hear()

    def kill(self, name: str) -> None:
        """End a process without a word (SIGKILL), and don't take it for a failure."""
        self._dismissed.add(name)
        self.send(signal.SIGKILL, name)

    def send(self, signum: int, name: str) -> None:
        """Send a signal to a process that has not ended."""
        if name in self._pids:
            self._children.send(signum, self._pids[name])

    def listen(
        self,
        names: Collection[str],
        kinds: Collection[type[WorkerReport]],
        add: Callable[..., None],
        silence_s: float | None = None,
    ) -> None:
        """Hear processes until all have ended; other lines than reports go to stderr.

        Args:
            names: of the processes; ``add`` may start more and add their names.
            kinds: what they report.
            add: is given the name and the report.
            silence_s: give up when nothing is heard for so long; None: never.

        Raises:
            click.ClickException: one failed; this says which one did first, and why.
        """
        try:
            while self.running(names):
                began_s = time.monotonic()
                heard = self.hear(silence_s)
                if silence_s is not None and time.monotonic() - began_s >= silence_s and not heard:
                    raise click.ClickException(f"nothing was heard for {silence_s:.0f} s")
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
        """Of a worker that gave up: if another has just died without a word, that is why."""
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
            # Whoever was killed first: others may have failed for that.
            self._deaths.sort(key=lambda death: death.ended.exit_code >= 0)
