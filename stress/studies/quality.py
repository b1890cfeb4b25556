"""What training together costs in quality: every mode of ``examples/train_gpt.py``, side by side.

Each run is a ``pccl launch`` of the example, as anybody would start it. Runs that are finished are
in a folder and are not made again, so a grid that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.streams import writing
from pccl.stress.studies.gpt_options import gpt_options
from pccl.stress.studies.quality_figures import SEEDS_MAX, Excess, QualityRun, Row, seen_in, table
from pccl.stress.studies.quality_grid import VARIANTS, Job, QualityVariant

YARDSTICK = "data-parallel"
RECORD = "run.json"
TOLD = re.compile(r"\[(\d+)\] (?:(\d+) parameters,|weights: (\w+))")


def _seeds(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        raise click.BadParameter("must be whole numbers, such as 1,2,3") from None
    if min(seeds) < 0 or len(seeds) > SEEDS_MAX:
        raise click.BadParameter(f"must be up to {SEEDS_MAX} numbers, none of them negative")
    return seeds


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--variant", "names", type=click.Choice(list(VARIANTS)), multiple=True)
@click.option("--seeds", default="1,2,3", callback=_seeds, show_default=True)
@click.option("--peers", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--warm-up", type=click.IntRange(0), default=100, show_default=True)
@gpt_options(
    steps=8000,
    sync_every=20,
    width=32,
    layers=2,
    batch=8,
    context=64,
    evaluate_every=800,
    held_out=512,
)
@click.option("--json", "as_json", is_flag=True, help="Print one object per variant.")
def quality(
    folder: Path,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    example: Path,
    as_json: bool,
    **job: Any,
) -> None:
    """Train in all modes with the same seeds, and compare held-out losses and bytes sent.

    What is finished is kept in FOLDER and is not made again.
    """
    signal.signal(signal.SIGTERM, _end)
    grid = _Grid(folder.resolve(), example.resolve(), Job(**job))
    wanted = [VARIANTS[name] for name in names or VARIANTS]
    runs: dict[str, dict[int, QualityRun]] = {}
    todo = [(seed, variant) for seed in seeds for variant in wanted]
    for number, (seed, variant) in enumerate(todo, 1):
        made = grid.run(variant, seed, f"{number}/{len(todo)}")
        runs.setdefault(variant.name, {})[seed] = made
    rows = table(runs, VARIANTS, YARDSTICK)
    with writing():
        if as_json:
            for row in rows:
                click.echo(json.dumps(asdict(row)))
        else:
            _show(rows)


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


@dataclass(frozen=True, slots=True)
class _Grid:
    folder: Path
    example: Path
    job: Job

    def run(self, variant: QualityVariant, seed: int, place: str) -> QualityRun:
        """Make one run, or read what came of it."""
        arguments = self.job.arguments(variant, seed)
        where = self.folder / f"{variant.name}-{seed}"
        said = f"{place} {variant.name}, seed {seed}"
        made = self._made(where / RECORD, arguments)
        if made is not None:
            click.echo(f"{said}: held-out loss {made.loss:.4f}, from before", err=True)
            return made
        where.mkdir(parents=True, exist_ok=True)
        for old in (where / RECORD, *where.glob("peer-*.jsonl")):  # logs are appended to
            old.unlink(missing_ok=True)
        made = self._train(arguments, where, said)
        record = {"peers": self.job.peers, "arguments": arguments, "run": asdict(made)}
        fresh = where / f"{RECORD}.new"
        fresh.write_text(json.dumps(record), encoding="utf-8")
        fresh.replace(where / RECORD)
        click.echo(f"{said}: held-out loss {made.loss:.4f}, {made.seconds:.0f} s", err=True)
        return made

    def _made(self, path: Path, arguments: list[str]) -> QualityRun | None:
        """What came of a run, if it was made as it is wanted."""
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if (record["peers"], record["arguments"]) != (self.job.peers, arguments):
            return None
        told: dict[str, Any] = record["run"]
        told["curve"] = tuple((tokens, loss) for tokens, loss in told["curve"])
        return QualityRun(**told)

    def _train(self, arguments: list[str], where: Path, said: str) -> QualityRun:
        launch = ["launch", "-n", str(self.job.peers), "--fail-fast", "--"]
        log = ["--log", str(where / "peer-{peer}.jsonl")]
        began_s, began_cpu_s = time.monotonic(), _cpu_s()
        parameters, weights = 0, dict[int, str]()
        console = Console(stderr=True)
        with console.status(said) as status, Crew() as crew:
            command = [*launch, sys.executable, str(self.example), *arguments, *log]
            crew.start(said, "pccl.cli.main", command)
            try:
                while crew.running([said]):
                    for _, line in crew.hear():
                        status.update(f"{said}: {line}")
                        told = TOLD.match(line)
                        if told and told[2]:
                            parameters = int(told[2])
                        elif told:
                            weights[int(told[1])] = told[3]
            except ProcessDied as death:
                raise click.ClickException("\n".join([str(death), *death.said])) from death
        if len(weights) != self.job.peers or len(set(weights.values())) != 1:
            raise click.ClickException(f"{said}: the peers' weights differ: {weights}")
        lines = (where / "peer-0.jsonl").read_text(encoding="utf-8").splitlines()
        return QualityRun(
            **seen_in(map(json.loads, lines)),
            parameters=parameters,
            weights=weights[0],
            seconds=round(time.monotonic() - began_s, 1),
            cpu_s=round(_cpu_s() - began_cpu_s, 1),
        )


def _cpu_s() -> float:
    """Of all processes that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _show(rows: list[Row]) -> None:
    shown = Table("variant", "held-out loss", "against", "excess", "limit", "verdict")
    for name in ("bytes/token", "fewer", "largest", "minutes"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.name,
            f"{row.loss:.4f}",
            row.against,
            _percent(row.excess) if row.excess else "",
            f"{row.limit:g} %" if row.excess else "",
            row.verdict,
            f"{row.bytes_per_token:.4g}",
            f"{row.fewer_bytes:.1f}x" if row.fewer_bytes else "",
            str(row.largest_tx_bytes),
            f"{row.seconds / 60:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    minutes, cpu = sum(row.seconds for row in rows) / 60, sum(row.cpu_s for row in rows) / 60
    click.echo(f"{minutes:.1f} minutes, in which {cpu:.1f} minutes of a core were used")


def _percent(found: Excess) -> str:
    return f"{found.mean:+.2f} % ({found.low:+.2f} to {found.high:+.2f})"
