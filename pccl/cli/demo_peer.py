"""One process of the demo: a network that learns digits, its gradients averaged with the others'.

This is the part to copy. ``pccl demo`` starts it once for each shard of the data; by hand::

    pccl master &
    python -m pccl.cli.demo_peer --master 127.0.0.1:48148 --shard 0 --shards 2 &
    python -m pccl.cli.demo_peer --master 127.0.0.1:48148 --shard 1 --shards 2

All replicas start from the same seed and take the same steps with the same averaged gradients, so
their weights stay equal bit for bit, whoever is lost on the way. Each step costs one all-reduce:
all gradients, and the loss behind them, lie in one vector that is averaged in place.

What happens is reported on stdout, one JSON object per line (:mod:`pccl.cli.demo_record`).
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import sklearn.datasets
import torch
from torch import Tensor, nn

import pccl
from pccl.cli.demo_record import Event, Finished, Joined, Stepped, encode
from pccl.errors import CollectiveAborted, DescriptorMismatch, TooFewPeers

HELD_OUT_COUNT = 597
"""Digits that nobody trains on; 1200 remain, a number that divides well."""

BATCH_SIZE = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9

POLL_S = 0.05
"""Pause between two looks for newcomers, while waiting for all to have joined."""


class Examples(NamedTuple):
    """Images, float32, shape (n, 8, 8), from 0 to 1; and which digits they are, int64, (n,)."""

    images: Tensor
    digits: Tensor


def load_digits() -> Examples:
    """The 1797 handwritten digits that come with scikit-learn (UCI, Alpaydin & Kaynak 1998)."""
    bunch = cast(Any, sklearn.datasets).load_digits()  # scikit-learn ships no types
    return Examples(
        torch.tensor(bunch.images, dtype=torch.float32) / 16.0,
        torch.tensor(bunch.target, dtype=torch.int64),
    )


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


class Optimizer(Protocol):
    """All that training asks of an optimizer; torch types its own ``step`` only in part."""

    def step(self) -> object:
        """Change the weights as their gradients say."""
        ...


def make_optimizer(model: nn.Module) -> Optimizer:
    """Gradient descent with momentum. Its state stays equal on all peers, as the weights do."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


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


def train(
    model: nn.Module,
    shard: Examples,
    *,
    steps: int,
    seed: int,
    average: Callable[[Tensor], Averaged],
    report: Callable[[Event], None],
) -> None:
    """Train on a shard, with gradients averaged at every step.

    Args:
        model: changed in place.
        shard: what to train on.
        steps: how many steps to take.
        seed: chooses the batches.
        average: replaces a vector by its mean over everybody.
        report: is told about every step.
    """
    optimizer = make_optimizer(model)
    vector = gradient_vector(model)
    chance = torch.Generator().manual_seed(seed)
    tx_bytes = rx_bytes = 0
    for step in range(1, steps + 1):
        vector.zero_()
        batch = torch.randint(len(shard.digits), (BATCH_SIZE,), generator=chance)
        loss = nn.functional.cross_entropy(model(shard.images[batch]), shard.digits[batch])
        torch.autograd.backward(loss)
        vector[-1] = loss.detach()
        averaged = average(vector)
        optimizer.step()

        tx_bytes += averaged.tx_bytes
        rx_bytes += averaged.rx_bytes
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


def report(event: Event) -> None:
    """Tell whoever started this process."""
    print(encode(event), flush=True)


def run(master: str | None, *, shard: int, shards: int, steps: int, seed: int) -> None:
    """Train with the others that know the same master, or alone.

    Args:
        master: ``HOST:PORT``, or None to train alone.
        shard: which shard to train on, counted from 0.
        shards: how many there are; with a master also how many peers to wait for.
        steps: how many steps to take.
        seed: the same on all peers.
    """
    torch.set_num_threads(1)  # the peers of the demo share one machine
    digits = load_digits()
    held_out, parts = split(len(digits.digits), shards, seed)
    model = make_model(seed)
    mine = Examples(digits.images[parts[shard]], digits.digits[parts[shard]])
    batch_seed = seed + 1 + shard

    if master is None:
        nobody = Averaged((), 0, 0)
        train(model, mine, steps=steps, seed=batch_seed, average=lambda _: nobody, report=report)
    else:
        with pccl.Communicator(master) as comm:
            comm.connect()
            report(Joined(comm.peer_id))
            while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < shards:
                time.sleep(POLL_S)
                comm.update_topology()
            train(
                model,
                mine,
                steps=steps,
                seed=batch_seed,
                average=lambda vector: average(comm, vector),
                report=report,
            )

    accuracy = evaluate(model, Examples(digits.images[held_out], digits.digits[held_out]))
    report(Finished(accuracy, digest(model)))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m pccl.cli.demo_peer")
    parser.add_argument("--master", metavar="HOST:PORT", help="without it, train alone")
    parser.add_argument("--shard", type=int, required=True, help="counted from 0")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    run(given.master, shard=given.shard, shards=given.shards, steps=given.steps, seed=given.seed)


if __name__ == "__main__":
    main()
