"""Real training under churn: processes of ``examples/train_gpt.py`` are killed, and others come.

Afterwards the same is trained in quiet, with as many tokens as the churned run has in its model.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import pccl
from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.streams import writing
from pccl.stress.studies.churn_figures import Survivor, survivor, tokens_of
from pccl.stress.studies.gpt_options import gpt_options

PROGRESS = re.compile(r"step (\d+): held-out loss")
WEIGHTS = re.compile(r"weights: (\w+)")
LOGGED_EVERY = 10
"""Inner steps between two in the logs of the example."""

LAST_JOIN = 0.9
"""Of the steps: whoever came still later would find that the run is over."""

MIN_PEERS = 2
"""Who is left alone waits for the next one. In quiet all begin together."""

START_S = 120.0
"""For a process to make its first steps."""


@dataclass(frozen=True, slots=True)
class ChurnLoad:
    """What is trained; as of ``train_gpt.py``."""

    mode: str
    compression: str | None
    sync_every: int
    fragments: int
    width: int
    layers: int
    batch: int
    context: int
    seed: int

    @property
    def tokens(self) -> int:
        """In a step of one peer."""
        return self.batch * self.context

    def steps_for(self, tokens: float, peers: int) -> int:
        """After how many steps so many peers have so many tokens in the model."""
        rounds = tokens / (peers * self.tokens) / self.sync_every
        return max(1, round(rounds)) * self.sync_every

    def arguments(self, steps: int, min_peers: int, log: Path) -> list[str]:
        """Of one process."""
        words: dict[str, object] = {"mode": self.mode, "steps": steps, "min_peers": min_peers}
        words |= {"log": log, "threads": 1}
        for name in ("sync_every", "width", "layers", "batch", "context", "seed", "fragments"):
            words[name] = getattr(self, name)
        if self.compression is not None:
            words["compression"] = self.compression
        return [
            text
            for name, value in words.items()
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]


@dataclass(frozen=True, slots=True)
class ChurnOutcome:
    """What came of one run.

    Attributes:
        seconds: from the first steps to the last.
        killed: how many processes were killed; as many have joined.
        tokens: in the model at the end.
        steps: that a member from the beginning has made.
        weights: the digests of the survivors' models; one, if they are equal.
        survivors: all that trained to the end.
    """

    seconds: float
    killed: int
    tokens: float
    steps: int
    weights: tuple[str, ...]
    survivors: tuple[Survivor, ...]

    @property
    def loss(self) -> float:
        """Of the common model."""
        return max(one.loss for one in self.survivors)


@click.command()
@click.option("--peers", type=click.IntRange(2, 16), default=4, show_default=True)
@click.option(
    "--every-s",
    type=click.FloatRange(min=5),
    default=20.0,
    show_default=True,
    help="One is killed, and one joins.",
)
@click.option("--mode", type=click.Choice(["sync", "delayed", "streaming"]), default="streaming")
@click.option("--compression", help="A wire format.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@gpt_options(steps=6000, sync_every=40, width=64, layers=2, batch=4, context=128)
@click.option("--json", "as_json", is_flag=True, help="Print one object for each run.")
def churn(
    peers: int, every_s: float, steps: int, example: Path, as_json: bool, **load: Any
) -> None:
    """Train while processes die and join, and then in quiet with as many tokens.

    Fails if models differ, or a step of a survivor is lost.
    """
    load["fragments"] = 4 if load["mode"] == "streaming" else 1
    what = ChurnLoad(**load)
    turn = what.fragments * LOGGED_EVERY
    if steps % what.sync_every or what.sync_every % turn:
        raise click.UsageError(f"--steps must be a multiple of --sync-every, and that of {turn}")
    with writing():
        churned = _run(example, what, peers, steps, every_s)
        _show("churn", churned, as_json)
        fair = what.steps_for(churned.tokens, peers)
        quiet = _run(example, what, peers, fair, None)
        _show("quiet", quiet, as_json)
        excess = 100 * (churned.loss / quiet.loss - 1)
        click.echo(f"held-out loss {excess:+.2f} % against the quiet run", err=as_json)
    for name, outcome in (("churn", churned), ("quiet", quiet)):
        if len(outcome.weights) != 1:
            raise click.ClickException(f"{name}: the models differ: {outcome.weights}")
        if any(one.lost_steps for one in outcome.survivors):
            raise click.ClickException(f"{name}: steps are in no average")


def _run(
    example: Path, load: ChurnLoad, peers: int, steps: int, every_s: float | None
) -> ChurnOutcome:
    """Train to the end; ``every_s``: None: nobody is killed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        pccl.MasterNode("127.0.0.1:0") as node,
        Crew() as crew,
    ):
        run = _Run(crew, node.address, example.resolve(), load, peers, steps, Path(folder))
        try:
            return run.to_the_end(every_s)
        except ProcessDied as death:
            raise click.ClickException("\n".join([str(death), *death.said])) from death


class _Run:
    """The processes of one run."""

    def __init__(
        self,
        crew: Crew,
        master: str,
        example: Path,
        load: ChurnLoad,
        peers: int,
        steps: int,
        folder: Path,
    ) -> None:
        self._crew, self._master, self._example = crew, master, example
        self._load, self._peers, self._steps, self._folder = load, peers, steps, folder
        self._min_peers = MIN_PEERS
        self._started = 0
        self._step_of: dict[str, int] = {}
        """Of each that lives, as it has told; 0: nothing yet."""
        self._weights: dict[str, str] = {}

    def to_the_end(self, every_s: float | None) -> ChurnOutcome:
        """Start all, disturb them, and wait until those that are left have ended."""
        self._min_peers = self._peers if every_s is None else MIN_PEERS
        chance = random.Random(self._load.seed)
        for _ in range(self._peers):
            self._start()
        began_s = time.monotonic()
        while not all(self._step_of.values()):
            if time.monotonic() - began_s > START_S:
                raise click.ClickException(f"not all train after {START_S:g} s")
            self._hear(1.0)
        began_s = time.monotonic()
        killed, last = 0, LAST_JOIN * self._steps
        while self._crew.running(self._step_of):
            due_s = None if every_s is None else began_s + (killed + 1) * every_s
            if due_s is None or max(self._step_of.values()) >= last:
                self._hear(None)
                continue
            self._hear(max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= due_s:
                victim = chance.choice([name for name, step in self._step_of.items() if step])
                self._crew.kill(victim)
                del self._step_of[victim]
                self._start()
                killed += 1
        return self._outcome(time.monotonic() - began_s, killed)

    def _start(self) -> None:
        name = f"peer-{self._started}"
        log = self._folder / f"{name}.jsonl"
        arguments = self._load.arguments(self._steps, self._min_peers, log)
        told = {
            "PCCL_MASTER": self._master,
            "PCCL_PEER_INDEX": str(self._started),
            "PCCL_PEERS": "1",
        }
        self._crew.start(name, self._example, arguments, told)
        self._step_of[name] = 0
        self._started += 1

    def _hear(self, timeout_s: float | None) -> None:
        for name, line in self._crew.hear(timeout_s):
            if name in self._step_of and (told := PROGRESS.match(line)):
                self._step_of[name] = int(told[1])
            elif told := WEIGHTS.match(line):
                self._weights[name] = told[1]
                self._turn_away_latecomers()

    def _turn_away_latecomers(self) -> None:
        """The run is over: whoever is not in it yet would begin another one."""
        for name in [name for name, step in self._step_of.items() if not step]:
            self._crew.kill(name)
            del self._step_of[name]

    def _outcome(self, seconds: float, killed: int) -> ChurnOutcome:
        load = self._load
        logs = {
            path.stem: [_event(line) for line in path.read_text("utf-8").splitlines()]
            for path in self._folder.iterdir()
        }
        survivors = tuple(
            survivor(name, logs[name], fragments=load.fragments, tokens=load.tokens)
            for name in self._step_of
        )
        tokens = tokens_of(logs.values(), load.fragments)
        weights = tuple(sorted({self._weights.get(name, "none") for name in self._step_of}))
        return ChurnOutcome(round(seconds, 1), killed, tokens, self._steps, weights, survivors)


def _event(line: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(line)
    except ValueError:  # the last line of one that was killed
        return {"event": "cut"}
    return event


def _show(name: str, outcome: ChurnOutcome, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": name, **asdict(outcome)}))
        return
    click.echo(
        f"{name}: {outcome.seconds:.0f} s, {outcome.steps} steps, {outcome.killed} killed, "
        f"{outcome.tokens / 1e6:.3f} M tokens, held-out loss {outcome.loss:.4f}"
    )
    for one in outcome.survivors:
        click.echo(
            f"  {one.name}: {one.inner_steps} inner steps, {one.lost_steps:g} lost, "
            f"joined {one.entries} times"
        )
    click.echo(f"  weights: {', '.join(outcome.weights)}")
