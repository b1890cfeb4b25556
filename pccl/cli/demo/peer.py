"""One process of the demo, which trains a network on digits and averages its gradients.

This is the part to copy. All replicas start from the same seed and take the same steps with the
same averaged gradients. So their weights stay equal bit for bit, even if peers are lost. The
newcomer has other weights and no data. It downloads the state of the members, most of it while they
continue, and then trains with them. :class:`GradientAverager` does all of this.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pccl
from pccl.bindings.events import Event as TrainingEvent
from pccl.bindings.events import GradientsAveraged, MembersChanged, StateSynced
from pccl.bindings.gradient_averager import GradientAverager
from pccl.cli.demo.record import DemoTask, Told
from pccl.cli.processes.reports import say, work
from pccl.progress import SyncProgress, describe, size

DIGIT_COUNT = 1797
HELD_OUT_COUNT = 597
"""Digits for the accuracy test. The other 1200, a number with many divisors, are for training."""

BATCH_SIZE = 64
POLL_S = 0.05


Digits = dict[str, Tensor]
"""``images``, float32, shape (n, 8, 8), from 0 to 1, and their ``digits``, int64, shape (n,)."""


def load_digits(*, late: bool = False) -> Digits:
    """Return the 1797 handwritten digits of scikit-learn (UCI, Alpaydin & Kaynak 1998).

    With ``late``, return zeros of the same shapes; the newcomer downloads the digits into them.
    """
    if late:
        digits = torch.zeros(DIGIT_COUNT, dtype=torch.int64)
        return {"images": torch.zeros(DIGIT_COUNT, 8, 8), "digits": digits}
    found = find_spec("sklearn")  # the file alone: the import takes a second in each process
    assert found is not None
    assert found.origin is not None
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    table = torch.tensor(rows)
    images = table[:, :-1].reshape(-1, 8, 8).to(torch.float32) / 16.0
    return {"images": images, "digits": table[:, -1].to(torch.int64)}


def split(count: int, shards: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Split the numbers below ``count`` into held-out ones and shards, the same on all peers."""
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held_out, rest = shuffled[:HELD_OUT_COUNT], shuffled[HELD_OUT_COUNT:]
    return held_out, [rest[shard::shards] for shard in range(shards)]


def make_model(seed: int) -> nn.Module:
    """Return a convolutional network of about 29 000 weights, which depend on the seed only."""
    torch.default_generator.manual_seed(seed)
    first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    top = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), first, nn.ReLU(), second, nn.ReLU(), *top)


class DemoPeer:
    """One replica, which trains on its shard of the digits. A newcomer downloads the digits."""

    def __init__(self, task: DemoTask, tell: Callable[[Told], None], digits: Digits) -> None:
        self._task, self._tell, self._digits = task, tell, digits
        own_seed = task.seed + 1 + task.shard  # unique among the processes
        self.model = make_model(own_seed if task.late else task.seed)
        self._optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._held_out, shards = split(DIGIT_COUNT, task.shards, task.seed)
        self._shard, self._chance = shards[task.shard], torch.Generator().manual_seed(own_seed)
        self._told = Told()
        self._averaged_s = time.monotonic()

    def tell(self, **changes: Any) -> None:
        """Report this process's state, with these changes."""
        self._told = replace(self._told, **{"note": "", **changes})
        self._tell(self._told)

    def on_progress(self, progress: SyncProgress) -> None:
        """Report the progress of a download."""
        if progress.total_bytes:
            words = describe(progress)
            self.tell(fetched_bytes=progress.done_bytes, fetch=words, status="fetching")

    def on_event(self, event: TrainingEvent) -> None:
        """Handle an event of the gradient averager: report it, or record it for the next report."""
        told = self._told
        match event:
            case MembersChanged(peer_id=peer_id) if not told.peer_id:
                note = f"joined (shard {self._task.shard}, pid {os.getpid()})"
                self.tell(peer_id=peer_id, note=note)
            case StateSynced() if told.status == "fetching":
                joint = f"{size(event.rx_bytes)} of it while all peers waited {event.seconds:.3f} s"
                self.tell(status="synced", note=f"downloaded {size(told.fetched_bytes)}, {joint}")
            case GradientsAveraged():
                before_s, self._averaged_s = self._averaged_s, time.monotonic()
                rate = (event.tx_bytes + event.rx_bytes) / (self._averaged_s - before_s)
                rate, sent = 0.9 * told.rate + 0.1 * rate, told.tx_bytes + event.tx_bytes
                who = event.contributors
                self._told = replace(told, rate=rate, contributors=who, tx_bytes=sent)
            case _:
                pass

    def train_alone(self) -> None:
        """Take all steps without other peers."""
        for step in range(1, self._task.steps + 1):
            loss = self._go_backward()
            self._optimizer.step()
            self.tell(step=step, loss=loss.item(), status="training")

    def train_together(self) -> None:
        """Take all steps with the other peers of the run."""
        task = self._task
        await_at = task.await_at
        with (
            pccl.Communicator(task.master) as comm,
            GradientAverager(
                self.model,
                self._optimizer,
                comm=comm,
                min_peers=1 if task.late else task.peers,
                shared=self._digits,
                on_progress=self.on_progress if task.late else None,
                on_event=self.on_event,
            ) as averager,
        ):
            while True:
                was_member = averager.is_member  # if not, this peer joins in this update
                newcomers = averager.update()
                while averager.steps == await_at and not newcomers:
                    time.sleep(POLL_S)
                    newcomers = averager.update()
                if was_member and newcomers:
                    await_at = None
                if averager.steps >= task.steps:
                    break
                loss = self._go_backward()
                if averager.step(loss):
                    self.tell(step=averager.steps, loss=loss.item(), status="training")
            averager.verify()  # raises if a bit differs on any peer, in the momentum too

    def finish(self) -> None:
        """Report the accuracy of the weights, and a digest of all their bits."""
        images, digits = (self._digits[of][self._held_out] for of in ("images", "digits"))
        with torch.no_grad():
            guesses: Tensor = self.model(images).argmax(dim=1)
        accuracy = (guesses == digits).float().mean().item()
        weights = b"".join(each.detach().numpy().tobytes() for each in self.model.parameters())
        digest, note = hashlib.sha256(weights).hexdigest(), f"held-out accuracy {accuracy:.3f}"
        self.tell(status="finished", accuracy=accuracy, digest=digest, note=f"finished, {note}")

    def _go_backward(self) -> Tensor:
        """Compute the gradients of the next batch's loss, and return the loss, shape (1,)."""
        shard = self._shard
        batch = shard[torch.randint(len(shard), (BATCH_SIZE,), generator=self._chance)]
        self._optimizer.zero_grad()
        images, digits = self._digits["images"][batch], self._digits["digits"][batch]
        loss = nn.functional.cross_entropy(self.model(images), digits)
        torch.autograd.backward(loss)
        return loss.detach().reshape(1)


def run(task: DemoTask) -> None:
    """Train, and report the progress. A newcomer first waits for SIGUSR1."""
    torch.set_num_threads(1)  # the peers of the demo share one machine
    peer = DemoPeer(task, say, load_digits(late=task.late))
    if task.late:
        go = threading.Event()
        signal.signal(signal.SIGUSR1, lambda signum, frame: go.set())
        peer.tell(status="ready")
        go.wait()
        peer.tell(status="joining")
    (peer.train_together if task.master else peer.train_alone)()
    peer.finish()


if __name__ == "__main__":
    work(DemoTask, run)
