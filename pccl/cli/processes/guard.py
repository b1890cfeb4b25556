"""Two small programs that keep a command's children from outliving it, however it ends.

``guard.py watch`` is told on stdin of every child that starts and of every one that has ended, and
waits for the end of that pipe. A command that is killed, by SIGKILL too, closes it; then the guard
kills the process groups of the children that were left.

``guard.py enter FD PROGRAM ARGUMENT...`` is what a child runs first. It tells the guard its process
id, then becomes the program. Nothing can come between: as long as it has not told, it holds the
pipe open, so the guard waits for it.

Both run as files with ``-I -S`` and import next to nothing: they start in a few milliseconds.
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
"""A program that takes this interpreter's place would inherit that, and expects the default."""


def watch(told: IO[str]) -> None:
    """Kill the groups that are left when nobody can tell any more.

    Args:
        told: lines ``+GROUP`` and ``-GROUP``; the group of a child bears its process id.
    """
    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(wanted, signal.SIG_IGN)  # the end of the pipe is the one thing that counts
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
    """Tell the guard, then become the program.

    Args:
        guard: descriptor of the pipe to the guard.
        program: path of the program.
        arguments: its argv, beginning with its name.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of ours on an early Ctrl-C
    os.set_inheritable(guard, False)
    with contextlib.suppress(BrokenPipeError):  # no guard is left, and no reason to stop
        os.write(guard, f"+{os.getpid()}\n".encode())
    become(program, arguments, dict(os.environ))


def become(program: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Replace this process by a program; if that fails, say why and exit as shells do."""
    for wanted in IGNORED_BY_PYTHON:
        signal.signal(wanted, signal.SIG_DFL)
    try:
        os.execve(program, arguments, environment)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOEXEC:
            reason = "it is no program; a script needs a first line such as #!/usr/bin/env python3"
        if error.errno == errno.ENOENT and os.path.exists(program):
            reason = "the interpreter that its first line names does not exist"
        print(f"cannot run {program}: {reason}", file=sys.stderr, flush=True)
        found = error.errno != errno.ENOENT
        os._exit(STATUS_NOT_EXECUTABLE if found else STATUS_NOT_FOUND)


def main() -> None:
    """Play the part that the arguments name."""
    match sys.argv[1:]:
        case ["watch"]:
            watch(sys.stdin)
        case ["enter", guard, program, *arguments]:
            enter(int(guard), program, arguments)
        case _:
            sys.exit(2)


if __name__ == "__main__":
    main()
