"""Finds a program by its name, and reports errors as shells do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import click

from pccl.cli.processes.guard import STATUS_NOT_EXECUTABLE, STATUS_NOT_FOUND


class NotFound(click.ClickException):
    """No command has this name."""

    exit_code = STATUS_NOT_FOUND


class NotExecutable(click.ClickException):
    """The file exists, but is not a program."""

    exit_code = STATUS_NOT_EXECUTABLE


def find_program(name: str) -> str:
    """Return the path of a program.

    Args:
        name: a path, or a name to search in ``PATH``.

    Raises:
        NotFound: no such file (status 127).
        NotExecutable: the file is not executable, or is a folder (status 126).
    """
    found = shutil.which(name)
    if found is not None:
        return found
    path = _file_of(name)
    if path is None:
        raise NotFound(f"command not found: {name}")
    if path.is_dir():
        raise NotExecutable(f"{path} is a folder, not a program")
    hint = f"; write: python {name}" if path.suffix == ".py" else f"; run: chmod +x {path}"
    raise NotExecutable(f"{path} is not executable{hint}")


def _file_of(name: str) -> Path | None:
    """Return a file of that name, executable or not: a path, in ``PATH``, or ``*.py`` here."""
    if os.path.dirname(name):
        candidates: Sequence[Path] = [Path(name)]
    else:
        folders = [Path(folder) for folder in os.get_exec_path()]
        candidates = [folder / name for folder in folders if (folder / name).is_file()]
        if name.endswith(".py"):
            candidates = [*candidates, Path(name)]  # the usual mistake: python was left out
    return next((path for path in candidates if path.exists()), None)
