"""Which file a command's name stands for, found and complained about as shells do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from pccl.cli.processes.guard import STATUS_NOT_EXECUTABLE, STATUS_NOT_FOUND


class NotFound(click.ClickException):
    """There is no such command."""

    exit_code = STATUS_NOT_FOUND


class NotExecutable(click.ClickException):
    """There is such a file, but it is no program."""

    exit_code = STATUS_NOT_EXECUTABLE


def find_program(name: str) -> str:
    """The path of a program.

    Args:
        name: a path, or a name to look for along ``PATH``.

    Raises:
        NotFound: it does not exist (status 127).
        NotExecutable: what there is cannot be run (status 126).
    """
    found = shutil.which(name)
    if found is not None:
        return found
    path = _file_of(name)
    if path is None:
        raise NotFound(f"command not found: {name}")
    if path.is_dir():
        raise NotExecutable(f"{path} is a folder, not a program")
    hint = f"; write: python {name}" if path.suffix == ".py" else f"; chmod +x {path} makes it so"
    raise NotExecutable(f"{path} is not executable{hint}")


def _file_of(name: str) -> Path | None:
    """What there is of that name, executable or not: as a path, along ``PATH``, or just here."""
    if os.path.dirname(name):
        candidates: Sequence[Path] = [Path(name)]
    else:
        folders = [Path(folder) for folder in os.get_exec_path()]
        candidates = [folder / name for folder in folders if (folder / name).is_file()]
        if name.endswith(".py"):
            candidates = [*candidates, Path(name)]  # the usual slip: python was left out
    return next((path for path in candidates if path.exists()), None)
