"""Options of ``pccl bench allreduce`` that belong together: ways to reduce, and other hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pccl import config
from pccl.checks import PEER_GROUP_MAX
from pccl.cli.bench.arguments import ListOf
from pccl.cli.bench.hosts import HostPlace
from pccl.cli.bench.peers.samples import KINDS
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.variants import ALGORITHMS, FORMATS, NO_FORMAT, Variant, variants_of
from pccl.cli.command_line import Seconds, check_address, check_own_address

BLOCK_MIN, BLOCK_MAX = 8, 65_536
"""As ``QuantizationOptions`` has it."""

TENSORS_MAX = 4096

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Default(click.Group):
    """A group that does its first command if none is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the command's name before its options."""
        helps = self.get_help_option_names(ctx)
        if not args or (args[0].startswith("-") and args[0] not in helps):
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)


def check_token(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file that holds no secret."""
    if value is not None:
        try:
            config.read_token_file(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


def _all(options: list[Callable[[_Function], _Function]], function: _Function) -> _Function:
    for option in reversed(options):
        function = option(function)
    return function


def variant_options(function: _Function) -> _Function:
    """Options that :func:`variants_from` reads."""
    return _all(
        [
            click.option(
                "--algorithm",
                "algorithms",
                type=ListOf(click.Choice(ALGORITHMS)),
                multiple=True,
                metavar="NAME,...",
                help="How values travel: auto, ring, star (up to 4 MiB), mesh; several take turns "
                "round by round.  [default: auto]",
            ),
            click.option(
                "--quantize",
                "formats",
                type=ListOf(click.Choice(list(FORMATS))),
                multiple=True,
                metavar="FORMAT,...",
                help=f"Wire formats, likewise: {', '.join(FORMATS)}.  [default: {NO_FORMAT}]",
            ),
            click.option(
                "--block",
                type=click.IntRange(BLOCK_MIN, BLOCK_MAX),
                metavar="COUNT",
                help="Values that share a step, with --quantize.  [default: the format's]",
            ),
            click.option(
                "--stochastic",
                is_flag=True,
                help="Round up with the probability that keeps the mean, with --quantize.",
            ),
            click.option(
                "--data",
                type=click.Choice(KINDS),
                help="The values, with --quantize: normal, or one of 100 at 20 sigma.  "
                "[default: normal]",
            ),
            click.option(
                "--tensors",
                type=ListOf(click.IntRange(1, TENSORS_MAX)),
                metavar="COUNT,...",
                default="1",
                show_default=True,
                help="Split each size into so many tensors that are reduced at the same time.",
            ),
            click.option(
                "--many",
                type=ListOf(click.IntRange(1, TENSORS_MAX)),
                metavar="COUNT,...",
                help="Likewise, but into a list that one all_reduce_many reduces; taken in turn "
                "with --tensors.",
            ),
        ],
        function,
    )


def host_options(function: _Function) -> _Function:
    """Options that :func:`place_from` reads."""
    return _all(
        [
            click.option(
                "--master",
                metavar="HOST:PORT",
                callback=check_address,
                help="Measure between hosts: run this on each, as a peer of the run there.",
            ),
            click.option(
                "--group",
                metavar="GROUP",
                type=click.IntRange(0, PEER_GROUP_MAX),
                help="With --master: peer group (PCCL_GROUP).",
            ),
            click.option(
                "--advertise",
                metavar="HOST[:PORT]",
                callback=check_own_address,
                help="With --master: where the others reach this peer (PCCL_ADVERTISE).",
            ),
            click.option(
                "--listen",
                metavar="HOST[:PORT]",
                callback=check_own_address,
                help="With --master: where its port is bound, if not there (PCCL_LISTEN).",
            ),
            click.option(
                "--token",
                metavar="FILE",
                type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
                callback=check_token,
                help="With --master: file that holds the run's secret (PCCL_TOKEN_FILE).",
            ),
            click.option(
                "--timeout",
                "timeout_s",
                metavar="SECONDS",
                type=Seconds(0.0, min_open=True),
                help="With --master: give up if it, or then the others, are not there for so "
                "long.  [default: never]",
            ),
        ],
        function,
    )


def variants_from(given: dict[str, Any]) -> tuple[tuple[Variant, ...], str]:
    """The ways to reduce, and the kind of values.

    Args:
        given: all options of the command; those of ``variant_options`` are taken out.

    Raises:
        click.UsageError: an option has nothing to act on.
    """
    algorithms: tuple[tuple[str, ...], ...] = given.pop("algorithms")
    formats: tuple[tuple[str, ...], ...] = given.pop("formats")
    tensors: tuple[int, ...] = given.pop("tensors")
    many: tuple[int, ...] = given.pop("many") or ()
    block, stochastic, data = given.pop("block"), given.pop("stochastic"), given.pop("data")
    variants = variants_of(
        _flat(algorithms) or ("auto",),
        _flat(formats) or (NO_FORMAT,),
        tensors,
        many,
        block=block,
        stochastic=stochastic,
    )
    if all(variant.exact for variant in variants):
        for name, value in (("--block", block), ("--stochastic", stochastic), ("--data", data)):
            if value:
                raise click.UsageError(f"{name} is of wire formats; name one with --quantize")
    return variants, data or KINDS[0]


def place_from(given: dict[str, Any]) -> HostPlace:
    """How this host takes part.

    Args:
        given: all options of the command; those of ``host_options`` but ``master`` are taken out.
    """
    names = ("group", "advertise", "listen", "token", "timeout_s")
    return HostPlace(**{name: given.pop(name) for name in names})


def check_place(plan: BenchPlan, place: HostPlace, floor: bool | None) -> None:
    """Refuse what is for one machine on several, and the other way round.

    Raises:
        click.UsageError: it says which.
    """
    if not plan.master:
        if place != HostPlace(None, None, None, None, None):
            raise click.UsageError(
                "--group, --advertise, --listen, --token and --timeout are for --master"
            )
        return
    if len(plan.peers) > 1 or len(plan.lanes) > 1:
        raise click.UsageError("with --master, give one count of --peers and one of --lanes")
    for name, value in (
        ("--against", plan.against),
        ("--emulate", plan.emulate),
        ("--floor", floor),
    ):
        if value:
            raise click.UsageError(f"{name} is for peers of one machine; leave out --master")


def _flat(lists: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in lists for name in names))
