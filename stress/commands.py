"""The harness's command line: ``python -m pccl.stress``, one command per part."""

from __future__ import annotations

import click

from pccl.cli.streams import open_missing
from pccl.stress.chaos.command_line import run
from pccl.stress.chaos.recovery import recovery
from pccl.stress.churn import churn
from pccl.stress.emulator.command_line import relay, verify_link
from pccl.stress.lane_trace import lanes
from pccl.stress.patience import patience
from pccl.stress.quality import quality
from pccl.stress.resend import resend
from pccl.stress.sim.command_line import sim
from pccl.stress.training_cost import training


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prove the library: simulated runs under seeded faults, emulated links."""
    open_missing()


main.add_command(relay)
main.add_command(verify_link)
main.add_command(lanes)
main.add_command(patience)
main.add_command(resend)
main.add_command(sim)
main.add_command(run)
main.add_command(recovery)
main.add_command(training)
main.add_command(churn)
main.add_command(quality)
