"""One process of the demo: a network that learns digits, its gradients averaged with the others'.

This is the part to copy. ``pccl demo`` starts it once for each shard of the data; by hand::

    pccl master &
    python -m pccl.cli.demo_peer --master 127.0.0.1:48148 --peers 2 --shards 3 --shard 0 &
    python -m pccl.cli.demo_peer --master 127.0.0.1:48148 --peers 2 --shards 3 --shard 1 &
    python -m pccl.cli.demo_peer --master 127.0.0.1:48148 --late --shards 3 --shard 2

All replicas start from the same seed and take the same steps with the same averaged gradients, so
their weights stay equal bit for bit, whoever is lost on the way. Each step costs one all-reduce:
all gradients, and the loss behind them, lie in one vector that is averaged in place.

Who comes late has weights of its own and no data. It fetches what the others hold (data, weights,
momentum, step counter: one shared state), most of it while they go on, and trains along.

What happens is reported on stdout, one JSON object per line (:mod:`pccl.cli.demo_record`).
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

import pccl
from pccl.cli.demo_record import Event, Finished, Joined, Ready, Stepped, Synced, encode
from pccl.errors import CollectiveAborted, DescriptorMismatch, TooFewPeers
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


class Replica:
    """What every peer has, bit for bit the same: data, weights, momentum, steps taken.

    Args:
        digits: the data.
        seed: of the weights.
    """

    def __init__(self, digits: Examples, seed: int) -> None:
        self.digits = digits
        self.model = make_model(seed)
        self.optimizer: Any = torch.optim.SGD(  # torch types it only in part
            self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM
        )
        for parameter in self.model.parameters():
            # Otherwise it is made at the first step, and could not be shared before.
            momentum = torch.zeros_like(parameter)
            self.optimizer.state[parameter]["momentum_buffer"] = momentum
        self.step_count = torch.zeros(1, dtype=torch.int64)

    def shared_state(self) -> pccl.SharedState:
        """All of it, in place."""
        tensors = {
            "images": self.digits.images,
            "digits": self.digits.digits,
            "step_count": self.step_count,
        }
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach()
            tensors[f"{name}.momentum"] = self.optimizer.state[parameter]["momentum_buffer"]
        return pccl.SharedState(
            [pccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()]
        )


def gradient_vector(model: nn.Module) -> Tensor:
    """One float32 vector whose parts are the model's gradients, with room for the loss at its end.

    Each parameter's ``grad`` becomes a view, so going backward adds into the vector, and what is
    written there is what the optimizer reads: no copies, one tensor to average.
    """
    parameters = list(model.parameters())
    vector = torch.zeros(sum(parameter.numel() for parameter in parameters) + 1)
    begin = 0
    for parameter in parameters:
        end = begin + parameter.numel()
        parameter.grad = vector[begin:end].view_as(parameter)
        begin = end
    return vector


class Averaged(NamedTuple):
    """Whose vectors one averaging took in, and the bytes that it moved."""

    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int


def average(comm: pccl.Communicator, vector: Tensor) -> Averaged:
    """Average a vector over all peers, in place, with whoever is left if somebody is lost.

    Args:
        comm: a connected communicator.
        vector: this peer's values; afterwards the mean, the same bits on every peer.
    """
    while True:
        try:
            info = comm.all_reduce(vector, op=pccl.ReduceOp.AVG)
        except DescriptorMismatch:
            raise  # the peers do not run the same program: trying again will not help
        except CollectiveAborted:
            continue  # a peer was lost; the vector is what it was: ask again, without that peer
        except TooFewPeers:
            return Averaged((comm.peer_id,), 0, 0)  # alone: the mean of one is itself
        return Averaged(tuple(info.contributors), info.tx_bytes, info.rx_bytes)


def report(event: Event) -> None:
    """Tell whoever started this process. Any thread: a line is written at once."""
    sys.stdout.write(encode(event) + "\n")
    sys.stdout.flush()


class Progress:
    """Reports what a newcomer fetches, and knows how much it was in the end."""

    def __init__(self) -> None:
        self.done_bytes = 0

    def __call__(self, progress: SyncProgress) -> None:
        """It is so far. Called by the library's thread."""
        self.done_bytes = progress.done_bytes
        report(progress)


class Meetings:
    """Where newcomers come in: between two steps, and all peers know of it.

    Args:
        comm: connected.
        state: what newcomers take over.
        step_count: steps taken, one of the state's tensors.
        await_at: after so many steps nobody goes on before somebody new has come; None: nobody is
            waited for.
        progress: of a newcomer; is told what it fetches.
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        state: pccl.SharedState,
        step_count: Tensor,
        await_at: int | None,
        progress: Progress | None,
    ) -> None:
        self._comm = comm
        self._state = state
        self._step_count = step_count
        self._await_at = await_at
        self._progress = progress
        self._members: frozenset[int] = frozenset()

    def hold(self) -> None:
        """Let newcomers in; afterwards all replicas are equal. Joint call of all peers."""
        if self._members:  # otherwise this peer comes in itself
            self._comm.update_topology()
            while self._step_count.item() == self._await_at and not self._newcomers():
                time.sleep(POLL_S)
                self._comm.update_topology()
        if self._newcomers():
            if self._members:
                self._await_at = None
            self._synchronize()
        self._members = self._now()

    def _synchronize(self) -> None:
        began_s = time.monotonic()
        info = self._comm.sync_shared_state(self._state, on_progress=self._progress)
        self._state.push_revision()  # who was in this one is in step for the next one
        if self._progress is not None:
            fetched_bytes, self._progress = self._progress.done_bytes, None
            report(Synced(fetched_bytes, info.rx_bytes, time.monotonic() - began_s))

    def _newcomers(self) -> frozenset[int]:
        return self._now() - self._members

    def _now(self) -> frozenset[int]:
        return frozenset(member.peer_id for member in self._comm.members())


def train(
    replica: Replica,
    shard: Tensor,
    *,
    steps: int,
    seed: int,
    meet: Callable[[], object],
    average: Callable[[Tensor], Averaged],
    report: Callable[[Event], None],
) -> None:
    """Train on a shard, with gradients averaged at every step.

    Args:
        replica: changed in place.
        shard: which of its digits to train on.
        steps: how many steps to take in all.
        seed: chooses the batches.
        meet: called before each step, and after the last; may change the replica.
        average: replaces a vector by its mean over everybody.
        report: is told about every step.
    """
    vector = gradient_vector(replica.model)
    chance = torch.Generator().manual_seed(seed)
    tx_bytes = rx_bytes = 0
    while True:
        meet()
        if replica.step_count.item() >= steps:
            return
        vector.zero_()
        batch = shard[torch.randint(len(shard), (BATCH_SIZE,), generator=chance)]
        guesses = replica.model(replica.digits.images[batch])
        loss = nn.functional.cross_entropy(guesses, replica.digits.digits[batch])
        torch.autograd.backward(loss)
        vector[-1] = loss.detach()
        averaged = average(vector)
        replica.optimizer.step()
        replica.step_count += 1

        tx_bytes += averaged.tx_bytes
        rx_bytes += averaged.rx_bytes
        step = int(replica.step_count.item())
        report(Stepped(step, vector[-1].item(), averaged.contributors, tx_bytes, rx_bytes))


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


def train_together(replica: Replica, shard: Tensor, given: argparse.Namespace) -> None:
    """Train with the others that know the same master.

    Args:
        replica: changed in place.
        shard: which of the digits are this peer's.
        given: the command line.
    """
    state = replica.shared_state()
    with pccl.Communicator(given.master) as comm:
        progress = Progress() if given.late else None
        meetings = Meetings(comm, state, replica.step_count, given.await_at, progress)
        if given.late:
            comm.connect(shared_state=state, on_progress=progress)
        else:
            comm.connect(min_peers=given.peers)
        report(Joined(comm.peer_id))
        train(
            replica,
            shard,
            steps=given.steps,
            seed=given.seed + 1 + given.shard,
            meet=meetings.hold,
            average=lambda vector: average(comm, vector),
            report=report,
        )
        comm.verify(state)  # raises if any bit differs anywhere, of the momentum too


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m pccl.cli.demo_peer")
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
        replica = Replica(no_digits(), seed=given.seed + 1 + given.shard)
    else:
        replica = Replica(load_digits(), given.seed)
    if given.on_signal:
        wait_for_signal()
    if given.master is None:
        train(
            replica,
            shard,
            steps=given.steps,
            seed=given.seed + 1 + given.shard,
            meet=lambda: None,
            average=lambda _: Averaged((), 0, 0),
            report=report,
        )
    else:
        train_together(replica, shard, given)
    images, digits = replica.digits
    accuracy = evaluate(replica.model, Examples(images[held_out], digits[held_out]))
    report(Finished(accuracy, digest(replica.model)))


if __name__ == "__main__":
    main()
