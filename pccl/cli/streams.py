"""Standard streams that are not as one would wish: closed, or full."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Generator
from pathlib import Path

import click


def open_missing() -> None:
    """Give this process the null device for each standard stream that it was started without.

    Otherwise the next pipe or socket takes the number of that stream, and the processes that this
    one starts take it for theirs.
    """
    # In this order: a file that is opened gets the lowest number that is free.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for good


@contextlib.contextmanager
def writing() -> Generator[None, None, None]:
    """For a block or a function that does nothing that can fail but write to stdout.

    Raises:
        click.ClickException: stdout cannot be written to, say because the disk is full; what is
            written to it after that goes nowhere.
        BrokenPipeError: nobody reads it any more, as in ``pccl bench ... | head``; click ends the
            command for that without a word.
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
    """Send what is still in the buffer nowhere, or the interpreter complains when it ends."""
    with (
        contextlib.suppress(io.UnsupportedOperation),  # no file, as in a test
        Path(os.devnull).open("w") as nowhere,
    ):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
