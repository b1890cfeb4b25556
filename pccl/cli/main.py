"""``pccl``: the group of commands. Each is imported only when it is used.

To add a command, give it a module with a click command and a line in ``COMMANDS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import NamedTuple

import click

import pccl


class Command(NamedTuple):
    """Where a command lives and what ``pccl --help`` says about it without importing it."""

    place: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        "pccl.cli.demo:demo", "Train with several processes, kill one half-way, watch them go on."
    ),
    "master": Command("pccl.cli.master:master", "Run a master until Ctrl-C or SIGTERM."),
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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pccl.__version__, message="%(prog)s %(version)s")
def group() -> None:
    """Average tensors across the internet, stay bit-identical, carry on when a peer dies."""


def main() -> None:
    """What the ``pccl`` script and ``python -m pccl.cli.main`` call."""
    group(prog_name="pccl", auto_envvar_prefix="PCCL")


if __name__ == "__main__":
    main()
