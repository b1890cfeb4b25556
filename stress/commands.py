"""The harness's command line: ``python -m pccl.stress sim --seeds A:B``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from pccl.cli.streams import open_missing, writing
from pccl.stress.emulator.command_line import relay, verify_link
from pccl.stress.sim.planted import PLANTED, planted
from pccl.stress.sim.runner import Verdict, run_seed

STORY_LINES = 60


class SeedRange(click.ParamType[range]):
    """``A:B`` (A up to, not including, B) or a single seed."""

    name = "A:B"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> range:
        """Parse."""
        if isinstance(value, range):
            return value
        first, colon, last = str(value).partition(":")
        try:
            seeds = range(int(first), int(last) if colon else int(first) + 1)
        except ValueError:
            self.fail(f"{value!r} is not a range of seeds; write A:B, such as 0:200", param, ctx)
        if not seeds or seeds.start < 0:
            self.fail(f"{value!r} contains no seed; write A:B with 0 <= A < B", param, ctx)
        return seeds


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Prove the library: simulated runs under seeded faults, emulated links."""
    open_missing()


main.add_command(relay)
main.add_command(verify_link)


@main.command()
@click.option("--seeds", type=SeedRange(), default="0:200", show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)
@click.option("--planted", "bug", type=click.Choice(sorted(PLANTED)), help="Run with a known bug.")
@click.option("--json", "as_json", is_flag=True, help="Print one object.")
def sim(seeds: range, jobs: int, bug: str | None, as_json: bool) -> None:
    """Run simulated scenarios; exit code 1 if any promise was broken.

    Each seed draws peers, links, sizes, faults and timing; the same seed gives the same run, event
    by event. A failing seed is printed with its story and the command that replays it.
    """
    console = Console(stderr=as_json)
    started_s = time.monotonic()
    verdicts: list[Verdict] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for verdict in _verdicts(seeds, jobs, bug):
            verdicts.append(verdict)
            progress.advance(task)
            if not verdict.ok and not as_json:
                _tell(console, verdict, bug)
    summary = _summary(verdicts, time.monotonic() - started_s)
    with writing():
        if as_json:
            click.echo(json.dumps(summary))
        else:
            _show(console, summary)
    sys.exit(0 if not summary["failed"] else 1)


def _verdicts(seeds: range, jobs: int, bug: str | None) -> Iterator[Verdict]:
    run = partial(_run, bug=bug)
    if jobs == 1 or len(seeds) < 2 * jobs:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, seeds, chunksize=max(1, min(16, len(seeds) // (4 * jobs))))


def _run(seed: int, bug: str | None) -> Verdict:
    with planted(bug):
        return run_seed(seed)


def _show(console: Console, summary: dict[str, Any]) -> None:
    kills = ", ".join(f"{count} {phase}" for phase, count in summary["kills"].items())
    done = ", ".join(f"{count} {what}" for what, count in sorted(summary["done"].items()))
    for line in (
        f"{summary['seeds']} seeds, {len(summary['failed'])} failed; {summary['reduces']} reduces, "
        f"{summary['aborts']} failed calls, {summary['events']} events, "
        f"{summary['virtual_s']:.0f} virtual s in {summary['seconds']:.1f} s",
        f"killed while: {kills}",
        f"besides: {done}",
    ):
        console.print(line, highlight=False, soft_wrap=True)


@writing()
def _tell(console: Console, verdict: Verdict, bug: str | None) -> None:
    story = "\n".join(verdict.story.splitlines()[-STORY_LINES:])
    with_bug = f" --planted {bug}" if bug else ""
    seed = verdict.scenario.seed
    for line in (
        f"seed {seed}: {verdict.violation}",
        f"options: {verdict.scenario}",
        f"the last events:\n{story}",
        f"replay: {sys.executable} -m pccl.stress sim --seeds {seed}{with_bug}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _summary(verdicts: list[Verdict], seconds: float) -> dict[str, Any]:
    kills: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for verdict in verdicts:
        kills.update(verdict.kills)
        endings.update(verdict.endings)
        done.update(verdict.done)
    return {
        "seeds": len(verdicts),
        "failed": [v.scenario.seed for v in verdicts if not v.ok],
        "violations": {str(v.scenario.seed): v.violation for v in verdicts if not v.ok},
        "kills": dict(kills),
        "endings": dict(endings),
        "done": dict(done),
        "reduces": sum(v.reduces for v in verdicts),
        "aborts": sum(v.aborts for v in verdicts),
        "events": sum(v.events for v in verdicts),
        "virtual_s": sum(v.virtual_s for v in verdicts),
        "seconds": seconds,
        "trace_digests": {str(v.scenario.seed): v.trace_digest for v in verdicts},
    }
