"""The command line of ``python -m pccl.stress``, with one command per part."""

from __future__ import annotations

from importlib.util import find_spec

import click

from pccl.cli.streams import open_missing
from pccl.stress.chaos.command_line import run
from pccl.stress.chaos.recovery import recovery
from pccl.stress.emulator.command_line import proxy, verify_link
from pccl.stress.emulator.sites.command import sites
from pccl.stress.sim.command_line import sim


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Test the library under faults: simulated runs, real processes, emulated links."""
    open_missing()


for command in (proxy, verify_link, sites, sim, run, recovery):
    main.add_command(command)

if find_spec("pccl.stress.studies") is not None:  # a checkout, not an installed wheel
    from pccl.stress.studies.commands import COMMANDS

    for command in COMMANDS:
        main.add_command(command)
