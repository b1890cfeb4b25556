"""One replica, driven by the production classes of ``pccl.bindings.diloco``.

``Rounds`` makes the joint calls, ``LocalTrainer`` decides on launches and merges, and the outer
optimizer is that of ``OuterParameters``. :class:`MemoryRounds` carries out the joint calls of all
replicas of a run, in memory. It is the only thing that takes the place of a network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

import pccl
from gpt.model import GPT
from pccl.bindings.compression import of_pseudo_gradients
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged, Steps
from pccl.bindings.diloco.model.local_model import LocalModel
from pccl.bindings.diloco.model.outer import OuterParameters
from pccl.bindings.diloco.rounds import (
    Average,
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    Notice,
    Reduce,
    RoundCommitted,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import partition, schedule
from pccl.stress.studies.quality.exchange import MemoryExchange
from pccl.stress.studies.quality.variants import TrainingVariant


class DiLoCoReplica:
    """What ``DiLoCo`` is made of, without a communicator and a thread.

    Args:
        model: the model, which this object changes at merges.
        variant: how to train.
        rank: number of the replica in its run, from 0.

    Attributes:
        pace: steps of the fastest replica that a step of this one takes, which are its seconds.
        now_s: the time, in steps of the fastest replica.
        local: the local model.
        outer: the outer parameters.
        trainer: decides on launches and merges.
        calls: the joint calls.
        queue: contributions that wait for their rounds.
        compression: wire format and residuals of the averages.
    """

    def __init__(self, model: GPT, variant: TrainingVariant, rank: int) -> None:
        options = variant.options()
        self.pace, self.now_s = variant.pace(rank), 0.0
        named = list(model.named_parameters())
        timing = schedule(options["sync_every"], variant.fragments, variant.delay)
        parts = partition([p.numel() for _, p in named], variant.fragments, "strided")
        self.local = LocalModel([[named[i] for i in part] for part in parts], options["outer"])
        self.outer = OuterParameters(
            [part.outer for part in self.local.parts], previews=variant.eager
        )
        mixing = timing.mixing(variant.mixing)
        timing.check_eager(variant.eager, mixing)
        self.trainer = LocalTrainer(
            timing, self.local.parts, mixing, lambda: self.now_s, eager=variant.eager
        )
        self.compression = of_pseudo_gradients(variant.compression)
        self.queue: deque[Contribution] = deque()
        rounds = Rounds(timing, self.outer, self._heard, min_peers=variant.replicas)
        self.calls: Generator[Effect, Any, None] = rounds.run()

    def _heard(self, notice: Notice) -> None:
        match notice:
            case Entered():
                copies = [fragment.flat.clone() for fragment in self.outer.fragments]
                self.trainer.enter(notice, copies)
            case RoundCommitted():
                self.trainer.commit(notice)
            case Members():
                pass

    def take(self) -> Contribution:
        """Return the next contribution, with a copy of its values, which an average replaces."""
        contribution = self.queue.popleft()
        room = self.outer.fragments[contribution.fragment].empty()
        return replace(contribution, values=room.copy_(contribution.values))

    def format(self, contribution: Contribution) -> pccl.QuantizationOptions | None:
        """Return the wire format of a contribution, as ``JointCaller`` does."""
        return self.compression.options(str(contribution.fragment) if contribution.weight else None)


class MemoryRounds:
    """All replicas of one run, and the joint calls between them.

    Args:
        replicas: the replicas, at least two, in the order of their ids.
    """

    def __init__(self, replicas: list[DiLoCoReplica]) -> None:
        self._replicas = replicas
        self._exchange = MemoryExchange(len(replicas))
        self._effects = [next(one.calls) for one in replicas]
        self._advance()

    def stepped(self) -> None:
        """Count a step of the fastest replica; make the launches and merges that are due.

        A slower one ends its step only in some of them.
        """
        for one in self._replicas:
            one.now_s += 1
        ended = [one for one in self._replicas if one.now_s % one.pace == 0]
        self._carry_out(ended, [one.trainer.step(1.0) for one in ended])

    def finish(self) -> None:
        """Make the final rounds, and give all replicas the outer parameters."""
        self._carry_out(self._replicas, [one.trainer.finish() for one in self._replicas])
        for one in self._replicas:
            one.local.take_over()

    def _carry_out(self, replicas: list[DiLoCoReplica], steps: list[Steps]) -> None:
        """Carry out the actions of trainers; joint calls follow when no trainer can go on."""
        pending = list(zip(replicas, steps, strict=True))
        while pending:
            pending = [pair for pair in pending if not self._ends(*pair)]
            moved = self._advance()
            assert moved or not pending, "trainers wait for a round that no replica makes"

    def _ends(self, replica: DiLoCoReplica, steps: Steps) -> bool:
        """Carry out actions until the end (True), or until an average is missing."""
        for action in steps:
            match action:
                case None:
                    return False
                case Contribution():
                    replica.queue.append(action)
                case RoundMerged():
                    pass
        replica.local.hold()
        return True

    def _advance(self) -> bool:
        """Make joint calls until a replica has nothing to contribute; return whether any moved."""
        moved = False
        while (answers := self._answers()) is not None:
            moved = True
            pairs = zip(self._replicas, answers, strict=True)
            self._effects = [one.calls.send(answer) for one, answer in pairs]
        return moved

    def _answers(self) -> list[Any] | None:
        ids = self._exchange.ids
        match self._effects[0]:
            case Connect() | Update() | Sync():  # all began with the same parameters
                return [Members(own, ids) for own in ids]
            case Take():
                has_all = all(one.queue for one in self._replicas)
                return [one.take() for one in self._replicas] if has_all else None
            case Reduce():
                return [self._reduce()] * len(ids)
            case effect:
                raise AssertionError(f"{effect} in a run without faults")

    def _reduce(self) -> Average:
        given = [e.contribution for e in self._effects if isinstance(e, Reduce)]
        weights = [one.weight for one in given]
        formats = [r.format(one) for r, one in zip(self._replicas, given, strict=True)]
        self._exchange.average([one.values for one in given], weights, formats)
        return Average(self._exchange.ids, sum(weights))


class GradientCalls:
    """All replicas of one data-parallel run: their gradients are averaged in every step.

    Args:
        gradients: those of each replica, shape (replicas, n), float32, as after ``backward``.
    """

    def __init__(self, gradients: torch.Tensor) -> None:
        self._gradients = list(gradients)
        self._exchange = MemoryExchange(len(self._gradients))

    def average(self) -> None:
        """Replace all gradients by their averages."""
        count = len(self._gradients)
        self._exchange.average(self._gradients, [1.0] * count, [None] * count)
