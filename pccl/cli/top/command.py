"""``pccl top`` shows a run live in the terminal."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import click

from pccl.cli.command_line import interval_option, master_options
from pccl.cli.runs.target import find_target
from pccl.cli.status import ask
from pccl.cli.top.keys import keys
from pccl.cli.top.model import Model
from pccl.cli.top.terminal import Terminal
from pccl.cli.top.view import lines
from pccl.inquiry import MasterStatus

TIMEOUT_S = 5.0
REDRAW_S = 1.0
"""Longest time between two pictures; the age of an old status grows."""


class StatusAsker:
    """Asks a master again and again, in a thread of its own.

    Args:
        question: returns a status, or raises ``click.ClickException``.
        interval_s: pause between two questions.
        wake: called after each answer.
    """

    def __init__(
        self, question: Callable[[], MasterStatus], interval_s: float, wake: Callable[[], None]
    ) -> None:
        self._question, self._interval_s, self._wake = question, interval_s, wake
        self._answers: deque[MasterStatus | str] = deque(maxlen=1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pccl-top", daemon=True)
        self._thread.start()

    def take(self, model: Model, now_s: float) -> Model:
        """Return ``model`` with the newest answer, if there is one."""
        with suppress(IndexError):
            answer = self._answers.pop()
            if isinstance(answer, str):
                return model.unanswered(answer)
            return model.answered(answer, now_s)
        return model

    def end(self) -> None:
        """Ask no more. Does not wait for the present answer."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._answers.append(self._question())
            except click.ClickException as error:
                self._answers.append(error.message)
            self._wake()
            self._ended.wait(self._interval_s)


@click.command()
@master_options
@interval_option("Time between two questions to the master.")
def top(master: str | None, token: str | None, interval_s: float) -> None:
    """Watch the run of the master at HOST:PORT in the terminal.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.

    Shows members with steps and states, waits, the last calls and the slowest links. Keys: s and S
    choose the column to sort by, r reverses; up and down choose a member; Enter, or the number of a
    member, shows its details; Esc goes back; q quits. If the run has a token, it is needed.

    While no master answers, the last state stays on the screen, and the reason is above it.
    """
    target = find_target(master, token)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise click.ClickException("pccl top needs a terminal; pccl status does not")
    logging.getLogger("pccl").addHandler(logging.NullHandler())  # no lines on the screen
    try:
        with Terminal(sys.stdin.fileno(), sys.stdout.fileno()) as terminal:
            asker = StatusAsker(lambda: ask(target, TIMEOUT_S), interval_s, terminal.wake)
            try:
                _show(terminal, asker, Model(target.masters))
            finally:
                asker.end()
    except KeyboardInterrupt:
        raise click.Abort from None


def _show(terminal: Terminal, asker: StatusAsker, model: Model) -> None:
    """Draw, and react to keys and answers, until the user quits or the terminal is gone."""
    while not model.ended:
        now_s = time.monotonic()
        model = asker.take(model, now_s)
        terminal.draw(lines(model, *terminal.size, now_s))
        try:
            data = terminal.wait(REDRAW_S)
        except EOFError:
            return
        for key in keys(data):
            model = model.press(key)
