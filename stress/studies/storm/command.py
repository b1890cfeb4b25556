"""The command ``storm``: trains under a schedule of faults, and reports what was lost."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pccl.cli.command_line import Seconds, check_file
from pccl.cli.streams import writing
from pccl.stress.chaos.command_line import check_page
from pccl.stress.chaos.run import StartFailed
from pccl.stress.chaos.view import ChaosView
from pccl.stress.emulator.command_line import LinkParameter, ending_on_sigterm
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.studies.storm.figures import (
    NoFigures,
    StormFigures,
    at_equal_steps,
    figures_of,
    loss_curve,
)
from pccl.stress.studies.storm.schedules import SCHEDULES, make_storm
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import TapeEvent, write_tape
from pccl.stress.timeline import PEERS_MAX, TimelineError

JUDGED_EVERY = 10
"""Number of rounds between two losses on held-out text."""

OF_THE_FILE = ("replicas", "minutes", "seed", "link")
"""Options that a file replaces."""

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@dataclass(frozen=True, slots=True)
class StormRun:
    """A storm that has run.

    Attributes:
        tape: its tape.
        harness: with real processes, the report of the harness; otherwise None.
        is_ok: whether nothing was wrong.
    """

    tape: list[TapeEvent]
    harness: dict[str, Any] | None
    is_ok: bool


@click.command()
@click.argument("schedule")
@click.option("--replicas", type=click.IntRange(2, PEERS_MAX), default=8, show_default=True)
@click.option("--minutes", type=Seconds(0.5, 24 * 60), default=10.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=1, show_default=True)
@click.option("--link", type=LinkParameter(), help="Link between any two; else the schedule's.")
@click.option("--simulate", is_flag=True, help="In the simulator instead of with real processes.")
@click.option("--no-compute", is_flag=True, help="Replace the gradients by noise: much faster.")
@click.option("--quiet", is_flag=True, help="Run it without faults, too, and compare the losses.")
@click.option("--save", type=_FILE, callback=check_file, help="Write the file of the storm.")
@click.option("--tape", type=_FILE, callback=check_file, help="Write all events as JSON lines.")
@click.option("--json", "json_path", type=_FILE, callback=check_file, help="Write the report.")
@click.option("--html", "html_path", type=_FILE, callback=check_page, help="Write a page.")
@click.option("--gif", "gif_path", type=_FILE, callback=check_page, help="Write a moving picture.")
@click.pass_context
def storm(
    ctx: click.Context,
    schedule: str,
    replicas: int,
    minutes: float,
    seed: int,
    link: LinkSpec | None,
    simulate: bool,
    no_compute: bool,
    quiet: bool,
    save: Path | None,
    tape: Path | None,
    json_path: Path | None,
    html_path: Path | None,
    gif_path: Path | None,
) -> None:
    """Train a small GPT with DiLoCo while faults strike, and report what was lost.

    SCHEDULE names a schedule of faults, or is a file that --save has written.
    """
    if schedule in SCHEDULES:
        drawn = make_storm(
            schedule, replicas, minutes * 60, seed, link=None if link is None else str(link)
        )
    else:
        drawn = _load(ctx, schedule)
    if no_compute:
        drawn = replace(drawn, training=replace(drawn.training, computes=False))
    if save is not None:
        with _saving(save):
            drawn.dump(save)
    with ending_on_sigterm():
        ran = _run(drawn, simulate=simulate)
        calm = _run(drawn.quiet, simulate=simulate) if quiet else None
    if tape is not None:
        with _saving(tape):
            write_tape(ran.tape, tape)
    try:
        figures = figures_of(drawn, ran.tape)
        calm_figures = None if calm is None else figures_of(drawn.quiet, calm.tape)
    except NoFigures as error:
        raise click.ClickException(str(error)) from error
    losses = _losses(drawn, ran, calm)
    report = {
        "form": "simulated" if simulate else "real",
        "figures": figures.to_json(),
        "loss": losses,
        "quiet": None if calm_figures is None else calm_figures.to_json(),
        "harness": ran.harness,
        "storm": {"training": asdict(drawn.training), "timeline": drawn.timeline.to_json()},
    }
    with writing():
        show(figures, losses, Console())
    if json_path is not None:
        with _saving(json_path):
            json_path.write_text(json.dumps(report, indent=1) + "\n")
    title = f"{Path(schedule).stem}, {'simulated' if simulate else 'real processes'}"
    _draw(drawn, ran, calm, title, html_path, gif_path)
    is_ok = ran.is_ok and figures.is_equal and (calm is None or calm.is_ok)
    sys.exit(0 if is_ok else 1)


@contextlib.contextmanager
def _saving(path: Path) -> Generator[None, None, None]:
    """Report that a file cannot be written, as when the disk is full."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise click.ClickException(f"cannot write {path}: {reason}") from error


def _load(ctx: click.Context, path: str) -> Storm:
    source = click.core.ParameterSource.COMMANDLINE
    given = [name for name in OF_THE_FILE if ctx.get_parameter_source(name) is source]
    if not Path(path).exists():
        known = ", ".join(SCHEDULES)
        raise click.BadParameter(f"{path!r} is no file, and none of {known}", param_hint="SCHEDULE")
    if given:
        raise click.UsageError(f"--{given[0]} is set by the file; leave it out")
    try:
        return Storm.load(Path(path))
    except TimelineError as error:
        raise click.BadParameter(str(error), param_hint="SCHEDULE") from error


def _run(drawn: Storm, *, simulate: bool) -> StormRun:
    # Imported here, because torch takes seconds.
    from pccl.stress.studies.storm.real import RealStorm
    from pccl.stress.studies.storm.simulated import SimulatedStorm, StormFailed
    from pccl.stress.studies.storm.work import StormWork

    every = JUDGED_EVERY if drawn.training.computes else 0
    if simulate:
        work = StormWork(drawn.training, drawn.timeline.seed, every)
        try:
            return StormRun(SimulatedStorm(drawn, work).run(), None, is_ok=True)
        except StormFailed as error:
            raise click.ClickException(f"a promise was broken: {error}") from error
    with tempfile.TemporaryDirectory(prefix="pccl-storm-") as folder, ChaosView() as view:
        try:
            tape, judgement = RealStorm(drawn, Path(folder), every).run(view)
        except StartFailed as error:
            raise click.ClickException(str(error)) from error
    return StormRun(tape, judgement.report, judgement.is_ok)


def _losses(drawn: Storm, ran: StormRun, calm: StormRun | None) -> dict[str, float | None]:
    """Return the last loss, and that of the quiet run after as many inner steps."""
    curve = loss_curve(drawn, ran.tape)
    quiet_curve = [] if calm is None else loss_curve(drawn.quiet, calm.tape)
    points = [(loss, at_equal_steps(quiet_curve, steps)) for steps, loss in curve]
    last = next((point for point in reversed(points) if point[1] is not None), None)
    with contextlib.suppress(IndexError):
        return {"last": curve[-1][1], "compared": last and last[0], "quiet": last and last[1]}
    return {"last": None, "compared": None, "quiet": None}


def _draw(
    drawn: Storm,
    ran: StormRun,
    calm: StormRun | None,
    title: str,
    html: Path | None,
    gif: Path | None,
) -> None:
    # Imported here, because only these files need matplotlib, which may not be installed.
    if html is not None:
        from pccl.stress.studies.storm.page import write_page

        with _saving(html):
            write_page(drawn, ran.tape, None if calm is None else calm.tape, html, title)
    if gif is not None:
        from pccl.stress.studies.storm.picture import write_picture

        with _saving(gif):
            write_picture(drawn, ran.tape, gif)


def show(figures: StormFigures, losses: dict[str, float | None], console: Console) -> None:
    """Print the figures as a table."""
    table = Table("figure", "value", show_header=False)

    def times(values: tuple[float, ...]) -> str:
        return "median {:.1f} s, 90 % below {:.1f} s, at most {:.1f} s".format(*values)

    faults = ", ".join(f"{count} {kind}" for kind, count in figures.faults.items()) or "none"
    table.add_row("replicas, rounds", f"{figures.replicas}, {figures.rounds}")
    table.add_row("faults", faults)
    if figures.failures or figures.never_again:
        words = f"{figures.failures}; {figures.never_again} replicas did not train again"
        table.add_row("errors that ended a replica", words)
    table.add_row("inner steps in the model", f"{figures.steps:.0f}")
    table.add_row("of what could be made", f"{100 * figures.share_kept:.2f} %")
    table.add_row("took part in a round", f"{100 * figures.took_part:.1f} % of those available")
    if figures.training_again_s:
        table.add_row("from a kill to training", times(figures.training_again_s))
        table.add_row("from a kill to a commit", times(figures.in_commit_again_s))
    table.add_row("longest wait for a round", f"{figures.longest_wait_s:.2f} s")
    table.add_row("bytes sent for averages", f"{figures.tx_bytes / 1e6:.1f} MB")
    if losses["compared"] is not None and losses["quiet"] is not None:
        more = 100 * (losses["compared"] / losses["quiet"] - 1)
        words = f"{losses['compared']:.4f}, {more:+.2f} % against the quiet run at equal steps"
        table.add_row("loss on held-out text", words)
    elif losses["last"] is not None:
        table.add_row("loss on held-out text", f"{losses['last']:.4f}")
    table.add_row("replicas are bit-identical", "yes" if figures.is_equal else "NO")
    console.print(table)
