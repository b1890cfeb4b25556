"""``pccl stress``: real processes under faults. The work is done by ``python -m pccl.stress``.

The harness is no part of the library and may use all of it, so it is a program of its own, which
takes this one's place: signals and the exit code are its own.
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
"""Nothing is understood here, ``--help`` neither."""


@click.command(context_settings=AS_GIVEN)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def stress(arguments: tuple[str, ...]) -> None:
    """Run real processes under faults (``pccl stress run``), or simulated ones."""
    command = [sys.executable, "-m", "pccl.stress", *(arguments or ("--help",))]
    become(sys.executable, command, dict(os.environ))
