"""Handles standard streams that are closed, broken or full."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Generator
from pathlib import Path

import click


def open_missing() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise the next pipe or socket gets the descriptor of that stream, and child processes use it
    as their standard stream.
    """
    # In this order, because a newly opened file gets the lowest free descriptor.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for good


@contextlib.contextmanager
def writing() -> Generator[None, None, None]:
    """Report write errors of stdout, in a block whose only possible OSError is one.

    Raises:
        click.ClickException: a write to stdout failed, for example because the disk is full. Later
            output is discarded.
        BrokenPipeError: the reader closed the pipe, as in ``pccl bench ... | head``. Click then
            ends the command silently.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        reason = error.strerror or str(error)
        raise click.ClickException(f"cannot write to stdout: {reason}") from error


def _drop_stdout() -> None:
    """Discard the buffered output, so that the interpreter reports no error when it exits."""
    with (
        contextlib.suppress(io.UnsupportedOperation),  # no file, as in a test
        Path(os.devnull).open("w") as nowhere,
    ):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
