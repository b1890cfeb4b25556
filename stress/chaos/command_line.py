"""``python -m pccl.stress run``: the harness as a command."""

from __future__ import annotations

import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from pccl.cli.command_line import Seconds, check_file, encrypt_option
from pccl.cli.streams import writing
from pccl.stress.chaos.namespaces import NamespacesRefused
from pccl.stress.chaos.run import ChaosRun, StartFailed
from pccl.stress.chaos.settings import Settings
from pccl.stress.chaos.verdict.judge import judge
from pccl.stress.chaos.verdict.report import show, write_html, write_json
from pccl.stress.chaos.view import ChaosView
from pccl.stress.drawing import draw
from pccl.stress.emulator.command_line import LinkParameter, ending_on_sigterm
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.timeline import PEERS_MAX, Timeline, TimelineError

STATUS_INTERRUPTED = 130
MINUTES_MAX = 7 * 24 * 60

OF_THE_SCENARIO = (
    "peers",
    "minutes",
    "seed",
    "every",
    "link",
    "local",
    "lanes",
    "groups",
    "deadline",
)
"""Options that a scenario file replaces."""


def check_page(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an HTML page that cannot be written, or whose plots cannot be drawn."""
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("the plots of the page need matplotlib; pip install 'pccl[demo]'")
    return check_file(ctx, param, value)


_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "--peers", type=click.IntRange(2, PEERS_MAX), default=6, show_default=True, help="At start."
)
@click.option(
    "--minutes", type=Seconds(0.05, MINUTES_MAX), default=5.0, show_default=True, metavar="MINUTES"
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True)
@click.option(
    "--every",
    type=Seconds(0.05, 3600),
    default=2.0,
    show_default=True,
    help="Mean seconds between two faults.",
)
@click.option(
    "--link",
    type=LinkParameter(),
    default="rate=200mbit,rtt=10ms",
    show_default=True,
    help="Link between any two processes.",
)
@click.option("--local", is_flag=True, help="Peers share memory; --link is to the master.")
@click.option("--lanes", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--groups", type=click.IntRange(1, 16), default=1, show_default=True)
@click.option(
    "--deadline",
    type=Seconds(0.5, 600),
    default=5.0,
    show_default=True,
    help="Seconds of silence after which the master removes a peer that others wait for.",
)
@click.option(
    "--scenario",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file that replaces the options above, and lists each fault.",
)
@click.option("--save-scenario", type=_FILE, callback=check_file, help="Write the drawn scenario.")
@encrypt_option()
@click.option("--json", "json_path", type=_FILE, callback=check_file, help="Write the report.")
@click.option("--html", "html_path", type=_FILE, callback=check_page, help="Write an HTML page.")
@click.option("--netns", is_flag=True, help="Use network namespaces (root and Linux).")
@click.option("--plant", type=click.IntRange(1), hidden=True, help="Spoil a result of peer 0.")
@click.pass_context
def run(
    ctx: click.Context,
    peers: int,
    minutes: float,
    seed: int,
    every: float,
    link: LinkSpec,
    local: bool,
    lanes: int,
    groups: int,
    deadline: float,
    scenario: Path | None,
    save_scenario: Path | None,
    json_path: Path | None,
    html_path: Path | None,
    netns: bool,
    plant: int | None,
) -> None:
    """Run real processes under faults, and check every bit of their results.

    Starts a master and peers on this machine, with an emulated link between any two. The seed or a
    scenario file gives the faults: kills, freezes, cut and slow connections, restarts, newcomers,
    garbage. The exit code is 0 only if no value was wrong, no input damaged, no process hung or
    leaked, and a fault explains every removal.
    """
    if scenario is not None:
        timeline = _load(ctx, scenario)
    else:
        timeline = draw(
            seed, peers, minutes * 60, every, lanes=lanes, groups=groups, deadline_s=deadline,
            link=str(link), local=local,
        )  # fmt: skip
    if netns and timeline.local:
        raise click.UsageError("in namespaces no memory is shared; leave out --netns or local")
    if save_scenario is not None:
        timeline.dump(save_scenario)
    with tempfile.TemporaryDirectory(prefix="pccl-stress-") as folder:
        settings = Settings(timeline, Path(folder), netns=netns, plant=plant)
        sys.exit(_run(settings, json_path, html_path))


def _load(ctx: click.Context, path: Path) -> Timeline:
    given = [
        name
        for name in OF_THE_SCENARIO
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"--{given[0]} is set by the scenario file; leave it out")
    try:
        return Timeline.load(path)
    except TimelineError as error:
        raise click.BadParameter(str(error), param_hint="--scenario") from error


def _run(settings: Settings, json_path: Path | None, html_path: Path | None) -> int:
    interrupted = False
    view = ChaosView()
    with ending_on_sigterm(), view:
        chaos = ChaosRun(settings, view)
        try:
            chaos.run()
        except (StartFailed, NamespacesRefused) as error:
            raise click.ClickException(str(error)) from error
        except (KeyboardInterrupt, SystemExit):
            interrupted = True
            # The rest is short, and a second Ctrl-C must not prevent the report.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    judgement = judge(chaos.record, interrupted=interrupted)
    try:
        if json_path is not None:
            write_json(judgement, json_path)
        if html_path is not None:
            write_html(judgement, chaos.record, html_path)
    except OSError as error:
        raise click.ClickException(f"cannot write the report: {error}") from error
    with writing():
        show(judgement, Console())
    if interrupted and not chaos.record.wrong_values.count:
        return STATUS_INTERRUPTED
    return 0 if judgement.is_ok else 1
