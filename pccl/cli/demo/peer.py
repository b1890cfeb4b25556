"""One process of the demo: a network that learns digits, its gradients averaged with the others'.

This is the part to copy. ``pccl demo`` starts it once for each shard of the data; by hand::

    pccl master &
    python -m pccl.cli.demo.peer --master 127.0.0.1:48148 --peers 2 --shards 3 --shard 0 &
    python -m pccl.cli.demo.peer --master 127.0.0.1:48148 --peers 2 --shards 3 --shard 1 &
    python -m pccl.cli.demo.peer --master 127.0.0.1:48148 --late --shards 3 --shard 2

All replicas start from the same seed and take the same steps with the same averaged gradients, so
their weights stay equal bit for bit, whoever is lost on the way. Who comes late has weights of its
own and no data. It fetches what the others hold (data, weights, momentum, step counter), most of it
while they go on, and trains along. All of that is :class:`GradientAverager`'s work.

What happens is reported on stdout, one JSON object per line (:mod:`pccl.cli.demo.record`).
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import pccl
from pccl.bindings.events import Event as TrainingEvent
from pccl.bindings.events import GradientsAveraged, MembersChanged, StateSynced
from pccl.bindings.gradient_averager import GradientAverager
from pccl.cli.demo.record import Event, Finished, Joined, Ready, Stepped, Synced, encode
from pccl.progress import SyncProgress

DIGIT_COUNT = 1797
"""Digits that come with scikit-learn."""

HELD_OUT_COUNT = 597
"""Digits that nobody trains on; 1200 remain, a number that divides well."""

BATCH_SIZE = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9

POLL_S = 0.05
"""Pause between two looks for a newcomer, where one is waited for."""


class Examples(NamedTuple):
    """Images, float32, shape (n, 8, 8), from 0 to 1; and which digits they are, int64, (n,)."""

    images: Tensor
    digits: Tensor


def load_digits() -> Examples:
    """The 1797 handwritten digits that come with scikit-learn (UCI, Alpaydin & Kaynak 1998)."""
    import sklearn.datasets  # a second that a newcomer saves: it gets the digits from the others

    bunch = cast(Any, sklearn.datasets).load_digits()  # scikit-learn ships no types
    return Examples(
        torch.tensor(bunch.images, dtype=torch.float32) / 16.0,
        torch.tensor(bunch.target, dtype=torch.int64),
    )


def no_digits() -> Examples:
    """Room for as many, where they will be fetched to."""
    return Examples(torch.zeros(DIGIT_COUNT, 8, 8), torch.zeros(DIGIT_COUNT, dtype=torch.int64))


def split(count: int, shards: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Deal out the numbers below ``count``: some held out, the rest into disjoint shards.

    Args:
        count: how many examples there are.
        shards: how many shards to make; their sizes differ by one at most.
        seed: the same on all peers, for that makes the shards disjoint.

    Returns:
        Indices that are held out, and those of each shard.
    """
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held_out, rest = shuffled[:HELD_OUT_COUNT], shuffled[HELD_OUT_COUNT:]
    return held_out, [rest[shard::shards] for shard in range(shards)]


def make_model(seed: int) -> nn.Module:
    """A small convolutional network, about 29 000 weights; the same seed gives the same ones."""
    torch.default_generator.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def batches(shard: Tensor, seed: int) -> Iterator[Tensor]:
    """Indices of one batch after the other, for ever.

    Args:
        shard: the indices to choose from.
        seed: of the choice.
    """
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield shard[torch.randint(len(shard), (BATCH_SIZE,), generator=chance)]


def go_backward(model: nn.Module, digits: Examples, batch: Tensor) -> Tensor:
    """Make the gradients of a batch's loss; the loss, shape (1,)."""
    guesses = model(digits.images[batch])
    loss = nn.functional.cross_entropy(guesses, digits.digits[batch])
    torch.autograd.backward(loss)
    return loss.detach().reshape(1)


def report(event: Event) -> None:
    """Tell whoever started this process. Any thread: a line is written at once."""
    sys.stdout.write(encode(event) + "\n")
    sys.stdout.flush()


class DemoProgress:
    """Reports what a newcomer fetches, and knows how much it was in the end."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self.done_bytes = 0

    def __call__(self, progress: SyncProgress) -> None:
        """It is so far. Called by the library's thread."""
        self.done_bytes = progress.done_bytes
        self._report(progress)


class Reporter:
    """Reports what happens to this peer, in the demo's words.

    Args:
        report: whom to tell.
        progress: of one that comes late, until it has taken over what the others hold.

    Attributes:
        latest: how the latest gradients were averaged.
        tx_bytes: sent for gradients since the beginning.
        rx_bytes: received likewise.
    """

    def __init__(self, report: Callable[[Event], None], progress: DemoProgress | None) -> None:
        self._report = report
        self._progress = progress
        self._has_joined = False
        self.latest: GradientsAveraged | None = None
        self.tx_bytes = self.rx_bytes = 0

    def __call__(self, event: TrainingEvent) -> None:
        """Something has happened."""
        match event:
            case MembersChanged(peer_id=peer_id) if not self._has_joined:
                self._has_joined = True
                self._report(Joined(peer_id))
            case StateSynced(rx_bytes=rx_bytes, seconds=seconds) if self._progress is not None:
                self._report(Synced(self._progress.done_bytes, rx_bytes, seconds))
                self._progress = None
            case GradientsAveraged(tx_bytes=tx_bytes, rx_bytes=rx_bytes):
                self.latest = event
                self.tx_bytes += tx_bytes
                self.rx_bytes += rx_bytes
            case _:
                pass

    def stepped(self, step: int, loss: float) -> None:
        """A step was taken with the latest gradients."""
        contributors = self.latest.contributors if self.latest is not None else ()
        self._report(Stepped(step, loss, contributors, self.tx_bytes, self.rx_bytes))


def train_alone(
    model: nn.Module,
    digits: Examples,
    shard: Tensor,
    *,
    steps: int,
    seed: int,
    report: Callable[[Event], None],
) -> None:
    """Train on a shard.

    Args:
        model: changed in place.
        digits: the data.
        shard: which of it to train on.
        steps: how many steps to take.
        seed: chooses the batches.
        report: is told about every step.
    """
    optimizer: Any = make_optimizer(model)  # torch types it only in part
    reporter = Reporter(report, None)
    for step, batch in zip(range(1, steps + 1), batches(shard, seed), strict=False):
        optimizer.zero_grad()
        loss = go_backward(model, digits, batch)
        optimizer.step()
        reporter.stepped(step, loss.item())


def train_together(
    model: nn.Module,
    digits: Examples,
    shard: Tensor,
    *,
    master: str,
    steps: int,
    seed: int,
    report: Callable[[Event], None],
    min_peers: int = 1,
    await_at: int | None = None,
    late: bool = False,
) -> None:
    """Train on a shard, with the others that know the same master.

    Args:
        model: changed in place.
        digits: the data; one that comes late receives it.
        shard: which of it to train on.
        master: its address.
        steps: how many steps to take in all, with those of the others before this one came.
        seed: chooses the batches.
        report: is told about every step.
        min_peers: how many begin together.
        await_at: nobody goes beyond so many steps before somebody new has come; None: nobody is
            waited for.
        late: this peer is such a one.
    """
    optimizer: Any = make_optimizer(model)
    progress = DemoProgress(report) if late else None
    reporter = Reporter(report, progress)
    with (
        pccl.Communicator(master) as comm,
        GradientAverager(
            model,
            optimizer,
            comm=comm,
            min_peers=min_peers,
            shared=digits._asdict(),
            on_progress=progress,
            on_event=reporter,
        ) as averager,
    ):
        for batch in batches(shard, seed):
            was_member = averager.is_member  # otherwise this peer comes in itself
            newcomers = averager.update()
            while averager.steps == await_at and not newcomers:
                time.sleep(POLL_S)
                newcomers = averager.update()
            if was_member and newcomers:
                await_at = None
            if averager.steps >= steps:
                break
            optimizer.zero_grad()
            loss = go_backward(model, digits, batch)
            if averager.step(loss):
                reporter.stepped(averager.steps, loss.item())
        averager.verify()  # raises if any bit differs anywhere, of the momentum too


def evaluate(model: nn.Module, held_out: Examples) -> float:
    """Share of the examples that the model gets right."""
    with torch.no_grad():
        guesses: Tensor = model(held_out.images).argmax(dim=1)
    return (guesses == held_out.digits).float().mean().item()


def digest(model: nn.Module) -> str:
    """SHA-256 of all weights, in hexadecimal: equal if and only if every bit is."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def wait_for_signal() -> None:
    """Say that all is ready, and go on at SIGUSR1."""
    go = threading.Event()
    signal.signal(signal.SIGUSR1, lambda signum, frame: go.set())
    report(Ready())
    go.wait()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m pccl.cli.demo.peer")
    parser.add_argument("--master", metavar="HOST:PORT", help="without it, train alone")
    parser.add_argument("--peers", type=int, default=2, help="how many begin together")
    parser.add_argument("--shard", type=int, required=True, help="counted from 0")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--await-at", type=int, metavar="STEP", help="wait there until somebody new has come"
    )
    parser.add_argument("--late", action="store_true", help="come to a run that is under way")
    parser.add_argument("--on-signal", action="store_true", help="load all, join at SIGUSR1")
    given = parser.parse_args()

    torch.set_num_threads(1)  # the peers of the demo share one machine
    held_out, shards = split(DIGIT_COUNT, given.shards, given.seed)
    shard: Tensor = shards[int(given.shard)]
    if given.late:
        model, digits = make_model(given.seed + 1 + given.shard), no_digits()
    else:
        model, digits = make_model(given.seed), load_digits()
    if given.on_signal:
        wait_for_signal()
    steps, seed = int(given.steps), int(given.seed) + 1 + int(given.shard)
    if given.master is None:
        train_alone(model, digits, shard, steps=steps, seed=seed, report=report)
    else:
        train_together(
            model,
            digits,
            shard,
            master=given.master,
            steps=steps,
            seed=seed,
            report=report,
            min_peers=1 if given.late else given.peers,
            await_at=given.await_at,
            late=given.late,
        )
    images, labels = digits
    accuracy = evaluate(model, Examples(images[held_out], labels[held_out]))
    report(Finished(accuracy, digest(model)))


if __name__ == "__main__":
    main()
