"""The simulator's command: ``python -m pccl.stress sim --seeds A:B``."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from pccl.cli.command_line import Seconds
from pccl.cli.streams import writing
from pccl.stress.sim.planted import planted
from pccl.stress.sim.planting import PLANTED
from pccl.stress.sim.runner import Verdict, run_scenario
from pccl.stress.sim.scenarios.file import load, to_text
from pccl.stress.sim.scenarios.mixes import MIXES
from pccl.stress.sim.scenarios.scenario import Scenario
from pccl.stress.sim.scenarios.shrink import shrink
from pccl.stress.timeline import TimelineError

STORY_LINES = 60

_IN_FLIGHT = 4
"""Maximum number of seeds in flight per worker process."""


class SeedRange(click.ParamType[range]):
    """A range of seeds: ``A:B`` (B excluded), or a single seed."""

    name = "A:B"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> range:
        """Parse a range of seeds; return a range unchanged."""
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


@click.command()
@click.option("--seeds", type=SeedRange(), default="0:200", show_default=True)
@click.option(
    "--minutes",
    type=Seconds(0.0, min_open=True),
    help="Run further seeds until this many minutes have passed.",
)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True)
@click.option(
    "--mix",
    type=click.Choice(sorted(MIXES)),
    default="default",
    show_default=True,
    help="What seeds draw: calls of all kinds; training; naps; two live masters; flipped bits.",
)
@click.option("--sealed", is_flag=True, help="Encrypt all connections.")
@click.option("--planted", "bug", type=click.Choice(sorted(PLANTED)), help="Run with a known bug.")
@click.option(
    "--scenario",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run this file instead: a reduced scenario, or one of the chaos harness.",
)
@click.option(
    "--shrink",
    "shrinks",
    is_flag=True,
    help="Reduce each failing scenario, and write it to seed-N.json.",
)
@click.option("--first", is_flag=True, help="Stop at the first seed that fails.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def sim(
    seeds: range,
    minutes: float | None,
    jobs: int,
    mix: str,
    sealed: bool,
    bug: str | None,
    scenario: Path | None,
    shrinks: bool,
    first: bool,
    as_json: bool,
) -> None:
    """Run simulated scenarios; exit with 1 if a promise was broken or a fault never struck.

    Each seed draws peers, links, sizes, faults and timing; the same seed gives the same run. The
    command prints each failing seed with its last events, and a command that replays it.
    """
    console = Console(stderr=as_json)
    started_s = time.monotonic()
    summary = Summary()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=None if minutes else len(seeds))
        for verdict in _verdicts(seeds, minutes, jobs, mix, bug, scenario, sealed=sealed):
            summary.add(verdict)
            progress.advance(task)
            if not verdict.ok and shrinks:
                verdict = _shrunk(verdict, bug)
            if not verdict.ok and not as_json:
                _tell(console, verdict, _replay(verdict, mix, bug, scenario, shrunk=shrinks))
            if not verdict.ok and first:
                break
    result = summary.result(time.monotonic() - started_s)
    result["missed"] = [] if scenario is not None else MIXES[mix].missed(result)
    with writing():
        if as_json:
            click.echo(json.dumps(result))
        else:
            _show(console, result)
    sys.exit(1 if result["failed"] or result["missed"] else 0)


# -- running -------------------------------------------------------------------------------------


def _verdicts(
    seeds: range,
    minutes: float | None,
    jobs: int,
    mix: str,
    bug: str | None,
    scenario: Path | None,
    *,
    sealed: bool,
) -> Iterator[Verdict]:
    if scenario is not None:
        yield _run(bug, replace(_load(scenario), sealed=sealed))
        return
    run = partial(_run_seed, bug, mix, sealed)
    gc.freeze()  # the modules live to the end: garbage collections need not visit them
    if minutes is None and (jobs == 1 or len(seeds) < 2 * jobs):
        yield from map(run, seeds)
        return
    ends_s = time.monotonic() + (minutes or 0.0) * 60
    with ProcessPoolExecutor(jobs) as pool:
        running: deque[Future[Verdict]] = deque()
        for seed in count(seeds.start):
            if seed >= seeds.stop and time.monotonic() >= ends_s:
                break
            running.append(pool.submit(run, seed))
            if len(running) >= _IN_FLIGHT * jobs:
                yield from _next(running)
        while running:
            yield from _next(running)


def _next(running: deque[Future[Verdict]]) -> Iterator[Verdict]:
    try:
        yield running.popleft().result()
    except GeneratorExit:  # the caller stopped at a failing seed
        for future in running:
            future.cancel()
        raise


def _run_seed(bug: str | None, mix: str, sealed: bool, seed: int) -> Verdict:
    return _run(bug, replace(MIXES[mix].draw(seed), sealed=sealed))


def _run(bug: str | None, scenario: Scenario) -> Verdict:
    with planted(bug):
        return run_scenario(scenario)


def _load(path: Path) -> Scenario:
    try:
        return load(path)
    except TimelineError as error:
        raise click.ClickException(str(error)) from error


def _shrunk(verdict: Verdict, bug: str | None) -> Verdict:
    shrunk = shrink(verdict.scenario, partial(_run, bug))
    _reduced(shrunk).write_text(to_text(shrunk.scenario))
    return shrunk


def _reduced(verdict: Verdict) -> Path:
    return Path(f"seed-{verdict.scenario.seed}.json")


# -- output --------------------------------------------------------------------------------------


def _replay(
    verdict: Verdict, mix: str, bug: str | None, scenario: Path | None, *, shrunk: bool
) -> str:
    path = _reduced(verdict) if shrunk else scenario
    kind = "" if mix == "default" else f" --mix {mix}"
    what = f"--scenario {path}" if path else f"--seeds {verdict.scenario.seed}{kind}"
    what += " --sealed" if verdict.scenario.sealed else ""
    with_bug = f" --planted {bug}" if bug else ""
    return f"{sys.executable} -m pccl.stress sim {what}{with_bug}"


@writing()
def _tell(console: Console, verdict: Verdict, replay: str) -> None:
    story = "\n".join(verdict.story.splitlines()[-STORY_LINES:])
    for line in (
        f"seed {verdict.scenario.seed}: {verdict.violation}",
        f"options: {verdict.scenario}",
        f"the last events:\n{story}",
        f"replay: {replay}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show(console: Console, result: dict[str, Any]) -> None:
    def listed(name: str) -> str:
        return ", ".join(f"{number} {what}" for what, number in sorted(result[name].items()))

    for line in (
        f"{result['seeds']} seeds, {len(result['failed'])} failed; {result['reduces']} reduces, "
        f"{result['aborts']} failed calls, {result['events']} events, "
        f"{result['virtual_s']:.0f} virtual s in {result['seconds']:.1f} s",
        f"faults: {listed('faults')}",
        f"killed while: {listed('kills')}",
        f"by phase: {listed('struck_in')}",
        f"other counts: {listed('done')}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    if result["missed"]:
        text = f"drawn by the mix, but never seen in these runs: {', '.join(result['missed'])}"
        console.print(text, highlight=False, soft_wrap=True)


class Summary:
    """Adds up verdicts, without their stories."""

    def __init__(self) -> None:
        self._seeds = 0
        self._counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("kills", "faults", "struck_in", "endings", "done")
        }
        self._sums: Counter[str] = Counter()
        self._violations: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self._virtual_s = 0.0

    def add(self, verdict: Verdict) -> None:
        """Add the verdict of one seed."""
        seed = str(verdict.scenario.seed)
        self._seeds += 1
        for name, counts in self._counts.items():
            counts.update(getattr(verdict, name))
        for name in ("reduces", "aborts", "events"):
            self._sums[name] += getattr(verdict, name)
        self._virtual_s += verdict.virtual_s
        self._digests[seed] = verdict.trace_digest
        if verdict.violation is not None:
            self._violations[seed] = verdict.violation

    def result(self, seconds: float) -> dict[str, Any]:
        """Return the summary as a JSON object. ``seconds``: real time that the seeds took."""
        return {
            "seeds": self._seeds,
            "failed": [int(seed) for seed in self._violations],
            "violations": self._violations,
            **{name: dict(counts) for name, counts in self._counts.items()},
            **self._sums,
            "virtual_s": self._virtual_s,
            "seconds": seconds,
            "trace_digests": self._digests,
        }
