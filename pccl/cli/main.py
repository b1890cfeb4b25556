"""The ``pccl`` program: a group of commands, each imported on first use.

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
"""The status of a command that Ctrl-C ended, as shells report it."""


class Command(NamedTuple):
    """The place of a command, and its summary for ``pccl --help``, which does not import it."""

    place: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "bench": Command(
        "pccl.cli.bench.command:bench",
        "Measure how fast the library is here, with every value checked.",
    ),
    "checkpoint": Command(
        "pccl.cli.checkpoint:checkpoint",
        "Verify a checkpoint of shared state, and show its contents.",
    ),
    "demo": Command(
        "pccl.cli.demo.command:demo",
        "Train with several processes; half-way, kill one and let another join.",
    ),
    "doctor": Command(
        "pccl.cli.doctor.command:doctor",
        "Check this machine and its path to a run, and show what to change.",
    ),
    "expel": Command(
        "pccl.cli.tokens.expel:expel",
        "Remove a member from a run, and revoke the token with which it joined.",
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
    "plan": Command(
        "pccl.cli.runs.plan:plan", "Show which algorithms a run uses, why, and how long they take."
    ),
    "publish": Command(
        "pccl.cli.publish:publish", "Hand a checkpoint, and each change of it, to readers."
    ),
    "record": Command("pccl.cli.record:record", "Save what the peers of a run did last."),
    "status": Command(
        "pccl.cli.status:status", "Show a run: its members, open calls, and removed peers."
    ),
    "subscribe": Command(
        "pccl.cli.publish:subscribe", "Write each version that a run publishes to a file."
    ),
    "token": Command("pccl.cli.tokens.token:token", "Make, list and rotate the tokens of a run."),
    "top": Command("pccl.cli.top.command:top", "Watch a run live in the terminal."),
    "why": Command("pccl.cli.why:why", "Say which member holds up a run, and why."),
    "stress": Command(
        "pccl.cli.stress:stress", "Kill, freeze and cut off real processes, and check every bit."
    ),
    "trace": Command(
        "pccl.cli.record:trace", "Show what all peers did last, on one clock, for Perfetto."
    ),
}


class LazyGroup(click.Group):
    """A click group that imports each command of ``COMMANDS`` on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help text."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None if no command has this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{COMMANDS[cmd_name].place} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from ``COMMANDS``, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in sorted(COMMANDS)])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: pccl launch -n 4 -- python train.py",
)
@click.version_option(pccl.__version__, message="%(prog)s %(version)s")
def group() -> None:
    """All-reduce tensors over the internet, bit-identical, also when peers die."""


def run(arguments: Sequence[str]) -> NoReturn:
    """Run a command, and exit. For a mistake in ``arguments``, print one line and exit with 2."""
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
    """Run ``pccl``: the entry point of the script and of ``python -m pccl.cli.main``."""
    run(sys.argv[1:])


def pccl_master() -> NoReturn:
    """Run ``pccl master``: the entry point of ``pccl_master``, a script name from PCCL."""
    run(["master", *sys.argv[1:]])


if __name__ == "__main__":
    main()
