"""``pccl stress`` passes its arguments to ``python -m pccl.stress``.

The stress harness is not part of the library and may import all of it, so it is a separate program.
The program replaces this process, so it gets the signals and sets the exit code.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from pccl.cli.processes.guard import become

AS_GIVEN: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Settings with which click passes on all arguments, ``--help`` too."""


@click.command(context_settings=AS_GIVEN)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def stress(arguments: tuple[str, ...]) -> None:
    """Run real processes under faults (``pccl stress run``), or simulated ones."""
    command = [sys.executable, "-m", "pccl.stress", *(arguments or ("--help",))]
    become(sys.executable, command, dict(os.environ))
