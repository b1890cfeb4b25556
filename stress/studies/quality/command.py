"""The commands ``quality sweep`` and ``quality grid``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from pccl.cli.streams import writing
from pccl.stress.sim.command_line import SeedRange
from pccl.stress.studies.quality import results
from pccl.stress.studies.quality.results import FinishedRun
from pccl.stress.studies.quality.speeds import speeds
from pccl.stress.studies.quality.statistics import best, by_settings, excess, is_at_edge

if TYPE_CHECKING:
    from pccl.stress.studies.quality.variants import TrainingVariant

F = TypeVar("F", bound=Callable[..., Any])

PLAIN = ("data-parallel", "sync", "streaming", "delayed", "late", "eager")
"""Modes that are trained unless the command line says otherwise."""

RATES = (0.004, 0.008, 0.016, 0.032)

OPTIONS = (
    click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True,
                 help="File of results, lines of JSON. Runs that it has are not repeated."),
    click.option("--mode", "modes", multiple=True, default=PLAIN, show_default=True,
                 help="A mode to train; may be repeated."),
    click.option("--replicas", multiple=True, type=click.IntRange(2), default=(2,),
                 show_default=True, help="Replicas of a run; may be repeated."),
    click.option("--steps", type=click.IntRange(1), default=8000, show_default=True,
                 help="Inner steps of each replica."),
    click.option("--excerpts", type=click.IntRange(1), default=8, show_default=True,
                 help="Excerpts of 64 bytes in a batch of one replica."),
    click.option("--warm-up", type=click.IntRange(0), default=100, show_default=True,
                 help="Steps in which the inner rate rises."),
    click.option("--held-out", type=click.IntRange(1), default=8192, show_default=True,
                 help="Excerpts of held-out text for the final loss."),
)  # fmt: skip
"""Options of both commands."""


def _options(function: F) -> F:
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@click.group()
def quality() -> None:
    """Train small models in many ways in one process, and compare their losses."""


@quality.command()
@_options
@click.option(
    "--rate",
    "rates",
    multiple=True,
    type=float,
    default=RATES,
    show_default=True,
    help="Inner rate to try; may be repeated.",
)
@click.option(
    "--outer",
    "outers",
    multiple=True,
    type=(float, float),
    help="Outer rate and momentum to try; may be repeated. [default: those of the mode]",
)
@click.option("--format", "formats", multiple=True,
              help="Wire format, which each DiLoCo mode is trained with too.")  # fmt: skip
@click.option("--seeds", type=SeedRange(), default="1000:1002", show_default=True,
              help="Seeds, which no grid should use.")  # fmt: skip
def sweep(
    out: Path,
    modes: Sequence[str],
    replicas: Sequence[int],
    rates: Sequence[float],
    outers: Sequence[tuple[float, float]],
    formats: Sequence[str],
    seeds: range,
    **length: int,
) -> None:
    """Train each mode with several rates, and print the losses."""
    from pccl.stress.studies.quality.variants import variants

    tried = [
        variant.tune(rate, *outer)
        for variant in _checked(variants, modes, formats, replicas)
        for rate in rates
        for outer in outers or [variant.tuned[1:]]
    ]
    jobs = [(variant, seed) for seed in seeds for variant in dict.fromkeys(tried)]
    _print(_sweep_table(_train(jobs, out, length)))


@quality.command()
@_options
@click.option(
    "--tuned",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Results of a sweep; its best settings are used.",
)
@click.option(
    "--format",
    "formats",
    multiple=True,
    default=("int8", "int4"),
    show_default=True,
    help="Wire format, which each DiLoCo mode is trained with too; may be repeated; none: without.",
)
@click.option("--seeds", type=SeedRange(), default="0:10", show_default=True,
              help="Seeds; all variants use the same.")  # fmt: skip
def grid(
    out: Path,
    modes: Sequence[str],
    replicas: Sequence[int],
    tuned: Path,
    formats: Sequence[str],
    seeds: range,
    **length: int,
) -> None:
    """Train each mode with its best settings, and print the differences seed by seed.

    A variant that was not swept has the settings of its mode without compression, and ``unequal``
    those of ``sync``.
    """
    from pccl.stress.studies.quality.variants import tuned_as, variants

    swept = by_settings(_read(tuned))
    jobs: list[tuple[TrainingVariant, int]] = []
    for variant in _checked(variants, modes, formats, replicas):
        name = variant.name if variant.name in swept else tuned_as(variant).name
        if name not in swept:
            raise click.ClickException(f"{tuned} has no run of {name!r}; sweep it first")
        jobs += [(variant.tune(*best(swept[name])), seed) for seed in seeds]
    jobs.sort(key=lambda job: job[1])
    _print(_grid_table(_train(jobs, out, length), [variant for variant, _ in jobs]))


quality.add_command(speeds)


def _checked(make: Callable[..., list[TrainingVariant]], *asked: Sequence[Any]) -> Any:
    try:
        return make(*asked)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _read(path: Path) -> list[FinishedRun]:
    try:
        return results.read(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _train(
    jobs: Sequence[tuple[TrainingVariant, int]], out: Path, given: dict[str, int]
) -> list[FinishedRun]:
    """Train the runs that ``out`` lacks, append them, and return all runs."""
    from gpt.text import load
    from pccl.stress.studies.quality.batch import SHAPE
    from pccl.stress.studies.quality.trainer import RunLength, batches, train

    length = RunLength(**given)
    known = {results.key(run.seed, run.settings): run for run in _read(out)}
    keys = [results.key(seed, variant.settings() | length.settings()) for variant, seed in jobs]
    missing = [job for job, key in zip(jobs, keys, strict=True) if key not in known]
    text = load(None, SHAPE.context + 1)
    done = len(jobs) - len(missing)
    for group in batches(missing):
        runs = train(group, length, text)
        results.append(out, runs)
        known |= {results.key(run.seed, run.settings): run for run in runs}
        done += len(runs)
        click.echo(f"{done} of {len(jobs)} runs, {sum(run.cpu_s for run in runs):.0f} s", err=True)
    return [known[key] for key in keys]


def _sweep_table(runs: Sequence[FinishedRun]) -> Table:
    table = Table("variant", "inner rate", "outer", "loss by seed", "mean", "")
    for name, tried in by_settings(runs).items():
        chosen = best(tried)
        for settings, losses in tried.items():
            note = ""
            if settings == chosen:
                note = (
                    "best, at the edge" if is_at_edge(chosen[0], [s[0] for s in tried]) else "best"
                )
            table.add_row(
                name,
                f"{settings[0]:g}",
                f"{settings[1]:g}/{settings[2]:g}",
                " ".join(f"{losses[seed]:.4f}" for seed in sorted(losses)),
                f"{statistics.fmean(losses.values()):.4f}",
                note,
            )
    return table


def _grid_table(runs: Sequence[FinishedRun], variants: Sequence[TrainingVariant]) -> Table:
    from pccl.stress.studies.quality.variants import baseline

    losses = {name: next(iter(tried.values())) for name, tried in by_settings(runs).items()}
    table = Table(
        "variant", "inner rate", "outer", "loss", "excess, 95 % interval", "over", "above"
    )
    for variant in {variant.name: variant for variant in variants}.values():
        own, other = losses[variant.name], baseline(variant)
        found = excess(own, losses[other]) if other in losses else None
        table.add_row(
            variant.name,
            f"{variant.lr:g}",
            f"{variant.outer_lr:g}/{variant.outer_momentum:g}" if variant.sync_every else "",
            f"{statistics.fmean(own.values()):.4f}",
            str(found) if found is not None else "",
            other if found is not None else "",
            f"{found.above} of {found.pairs}" if found is not None else "",
        )
    return table


def _print(table: Table) -> None:
    with writing():
        Console(width=120).print(table)
