"""Children of a command that is itself a fork: forks of it, instead of new interpreters.

They are its own children, with sessions, process ids and pipes of their own. So a command can stop,
continue and kill them, and its guard knows them, as if they were processes of their own programs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any, NoReturn

ALREADY = r".* found in sys\.modules after import of package"
"""Python's warning about a module that runs as a program and was imported before."""

FROM_PARENT = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals for which the command may have handlers."""


def use_forks(pythons: Collection[str]) -> None:
    """From now on this process, a command of pccl, forks for each module that it starts.

    Args:
        pythons: the interpreters that it may want to run them.
    """

    def start(command: Sequence[str], **options: Any) -> Any:
        match command:
            case [_, "-I", "-S", _, "enter", guard, program, _, "-m", module, *arguments] if (
                program in pythons
            ):
                return ForkedChild(int(guard), [module, *arguments], options["env"])
            case _:
                return subprocess.Popen(command, **options)

    children: Any = importlib.import_module("pccl.cli.processes.children")
    children.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})


class ForkedChild:
    """A module that runs in a fork of this process: the part of ``Popen`` that ``Children`` uses.

    Args:
        guard: descriptor of the pipe to the guard.
        command: the module and its arguments.
        environment: of the child.
    """

    def __init__(self, guard: int, command: list[str], environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as undo:
            pipes = [os.pipe(), os.pipe()]
            for pipe in pipes:
                undo.callback(os.close, pipe[1])
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            with warnings.catch_warnings(action="ignore"):  # that other threads do not survive
                self.pid = os.fork()
            if not self.pid:
                _run(lambda: _become(guard, [pipe[1] for pipe in pipes], command, environment))
        self.returncode: int | None = None
        self.stdout: IO[bytes] = os.fdopen(pipes[0][0], "rb", buffering=0)
        self.stderr: IO[bytes] = os.fdopen(pipes[1][0], "rb", buffering=0)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end."""
        return self._reap(0)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _become(
    guard: int, outputs: list[int], command: list[str], environment: Mapping[str, str]
) -> None:
    """Be a process of its own, as far as a program can tell, and run the module."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for wanted in FROM_PARENT:
        signal.signal(wanted, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(BrokenPipeError):
        os.write(guard, f"+{os.getpid()}\n".encode())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, end in enumerate([nowhere, *outputs]):
        os.dup2(end, number)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2:  # its number stays taken: what owns it may close it later
            with contextlib.suppress(OSError):  # the one that listed them
                os.fstat(number)
                os.dup2(nowhere, number)
    gc.freeze()
    atexit._clear()  # pyright: ignore[reportPrivateUsage]
    os.environ.clear()
    os.environ.update(environment)
    warnings.filterwarnings("ignore", ALREADY, RuntimeWarning)
    sys.argv = command
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _run(program: Callable[[], None]) -> NoReturn:
    """Run a program and end this process, as the interpreter would."""
    code = 1
    try:
        program()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - the interpreter shows all of them
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
            logging.shutdown()
            sys.stdout.flush()
        os._exit(code)
