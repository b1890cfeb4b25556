"""``pccl``: the group of commands. Each is imported only when it is used.

To add a command, give it a module with a click command and a line in ``COMMANDS``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

import click

import pccl
from pccl.cli import streams

STATUS_INTERRUPTED = 130
"""What shells give to what Ctrl-C has ended."""


class Command(NamedTuple):
    """Where a command lives and what ``pccl --help`` says about it without importing it."""

    place: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "bench": Command(
        "pccl.cli.bench.command:bench",
        "Measure how fast the library is here, with every value checked.",
    ),
    "checkpoint": Command(
        "pccl.cli.checkpoint:checkpoint",
        "Verify a checkpoint of shared state, and show what it holds.",
    ),
    "demo": Command(
        "pccl.cli.demo.command:demo",
        "Train with several processes; half-way kill one, let another join.",
    ),
    "join": Command(
        "pccl.cli.processes.join:join",
        "Run a command as one peer of a run whose master is elsewhere.",
    ),
    "launch": Command(
        "pccl.cli.processes.launch:launch",
        "Run a command as several peers of this machine, with a master.",
    ),
    "master": Command("pccl.cli.master:master", "Run a master until Ctrl-C or SIGTERM."),
    "status": Command(
        "pccl.cli.status:status", "Show a run: its members, what they wait for, who was removed."
    ),
    "stress": Command(
        "pccl.cli.stress:stress", "Kill, freeze and cut off real processes, and check every bit."
    ),
}


class LazyGroup(click.Group):
    """A group whose commands are named in ``COMMANDS`` and imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order in which help shows them."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{COMMANDS[cmd_name].place} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the summaries above; nothing is imported for it."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in sorted(COMMANDS)])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: pccl launch -n 4 -- python train.py",
)
@click.version_option(pccl.__version__, message="%(prog)s %(version)s")
def group() -> None:
    """Average tensors across the internet, stay bit-identical, carry on when a peer dies."""


def run(arguments: Sequence[str]) -> NoReturn:
    """Do what the arguments say and exit; a mistake in them is one line and status 2."""
    streams.open_missing()
    try:
        status: object = group.main(
            args=list(arguments) or ["--help"],
            prog_name="pccl",
            auto_envvar_prefix="PCCL",
            standalone_mode=False,
        )
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "pccl"
        click.echo(f"Error: {error.format_message()} (see {command} --help)", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(STATUS_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def main() -> NoReturn:
    """What the ``pccl`` script and ``python -m pccl.cli.main`` call."""
    run(sys.argv[1:])


def pccl_master() -> NoReturn:
    """What the ``pccl_master`` script calls: the name that users of PCCL know."""
    run(["master", *sys.argv[1:]])


if __name__ == "__main__":
    main()
