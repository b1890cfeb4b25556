"""Two small programs that keep a command's children from outliving it.

``guard.py watch`` reads on stdin which children start and end, until this pipe closes. The pipe
closes when the command ends, even by SIGKILL. Then the guard kills the process groups of the
remaining children.

``guard.py enter FD PROGRAM ARGUMENT...`` is the first program of a child. It sends its
process id to the guard, then becomes the program. It keeps the pipe open until it has sent the id,
so the guard cannot miss the child.

Both run as files with ``-I -S`` and import few modules, so they start in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from typing import IO, NoReturn

STATUS_NOT_FOUND = 127
STATUS_NOT_EXECUTABLE = 126
"""The exit statuses that shells give to a command that cannot be run."""

IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores. A program that replaces this process expects the default action."""


def watch(told: IO[str]) -> None:
    """Read ``told`` to its end, then kill the groups that are still running.

    Args:
        told: lines ``+GROUP`` and ``-GROUP``. The group of a child has its process id.
    """
    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, signal.SIG_IGN)  # only the end of the pipe ends the guard
    groups: set[int] = set()
    for line in told:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def enter(guard: int, program: str, arguments: list[str]) -> NoReturn:
    """Report this process to the guard, then become the program.

    Args:
        guard: descriptor of the pipe to the guard.
        program: path of the program.
        arguments: its argv, beginning with its name.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on an early Ctrl-C
    os.set_inheritable(guard, False)
    with contextlib.suppress(BrokenPipeError):  # the guard is dead, but the program can still run
        os.write(guard, f"+{os.getpid()}\n".encode())
    become(program, arguments, dict(os.environ))


def become(program: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a program; if that fails, print why, and exit as shells do."""
    for wanted in IGNORED_BY_PYTHON:
        signal.signal(wanted, signal.SIG_DFL)
    try:
        os.execve(program, arguments, environment)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOEXEC:
            reason = "not a program; a script needs a first line such as #!/usr/bin/env python3"
        if error.errno == errno.ENOENT and os.path.exists(program):
            reason = "the interpreter that its first line names does not exist"
        print(f"cannot run {program}: {reason}", file=sys.stderr, flush=True)
        found = error.errno != errno.ENOENT
        os._exit(STATUS_NOT_EXECUTABLE if found else STATUS_NOT_FOUND)


def main() -> None:
    """Run as the guard or as a child, as the arguments say."""
    match sys.argv[1:]:
        case ["watch"]:
            watch(sys.stdin)
        case ["enter", guard, program, *arguments]:
            enter(int(guard), program, arguments)
        case _:
            sys.exit(2)


if __name__ == "__main__":
    main()
