"""``TrainingReduces``: the reduces of a process that trains, with checks of their results."""

from __future__ import annotations

from functools import partial
from math import fsum

import numpy as np

from pccl.bindings.diloco.rounds import Average, Contribution, Rounds
from pccl.error_feedback import ErrorFeedback
from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import PCCLError, TooFewPeers
from pccl.protocol.types import PeerId, ReduceOp
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import JoinRequest, ReduceRequest
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.replay import ObservedReduction
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.training import Contents, contribution
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.scenarios.scenario import Slot
from pccl.stress.sim.workloads.application import join, name_of, patience_s
from pccl.stress.sim.workloads.inputs import Flaw, declared_norm, draw_flaw, spoil
from pccl.stress.sim.workloads.toy_model import Doubles, Floats, ToyOuter, ToyReplica, Whole, whole


class TrainingReduces:
    """Makes the reduces of one life of a process, as ``JointCaller`` does.

    In a guarded run, the contributions to some rounds are not finite, or have a wrong norm.

    Args:
        parts: shared objects of the run.
        process: the process.
        outer: its outer parameters.
        replica: its local parameters.

    Attributes:
        feedback: the residuals of compressed rounds.
        last: of the last round: its reduce (None: the process was alone), the contents before it,
            and the work of each contributor.
        replays: takes the outer steps of rounds of the members.
    """

    def __init__(
        self, parts: RunParts, process: PeerProcess, outer: ToyOuter, replica: ToyReplica
    ) -> None:
        training, training_checkers = parts.scenario.training, parts.checkers.training
        assert training is not None
        assert training_checkers is not None
        self.feedback = ErrorFeedback(decay=training.decay)
        self.last: tuple[InRun | None, Contents, list[Whole]] | None = None
        self.replays: Rounds | None = None
        self._replayed: Doubles | None = None
        self._scenario = parts.scenario
        self._seed = parts.scenario.seed
        self._quorum = parts.scenario.quorum
        self._training = training
        self._process = process
        self._checkers = parts.checkers
        self._training_checkers = training_checkers
        self._outer = outer
        self._replica = replica

    @property
    def buffers_tag(self) -> int:
        """Tag of the reduces of buffers."""
        return self._training.fragments + 1

    @property
    def is_coded(self) -> bool:
        """Whether rounds are compressed."""
        return self._training.quantization.active

    @property
    def _who(self) -> str:
        return name_of(self._process)

    def _flaw(self, number: int, weight: float) -> tuple[Flaw, float]:
        flaw, size = draw_flaw(self._seed, self._replica.axis, number)
        if self._training.guard is None or not weight or flaw is Flaw.LIE:
            return Flaw.NONE, size  # a lie ends the training of all
        return (Flaw.WRONG_NORM if flaw is Flaw.LARGE else flaw), size  # whole numbers must fit

    def is_broken(self, given: Contribution) -> bool:
        """Whether the model has values that are not finite when it contributes to a round."""
        return self._flaw(given.number, given.weight)[0] is Flaw.NOT_FINITE

    async def connect(self, *, again: bool) -> None:
        """Join the run; the first time, replay the reduces of its members meanwhile."""
        memory, replay = self._outer.memory, None if again else self.replay
        prefetch = PrefetchRequest(memory, FetchedPieces(memory, 1 << 20), on_reduction=replay)
        timeout_s = patience_s(self._scenario)
        await join(self._process, JoinRequest(100, prefetch=prefetch, timeout_s=timeout_s))

    async def buffers(self, sums: Doubles, *, leads: bool) -> None:
        """Add up the buffers of all members."""
        if not leads:
            sums[1] = sums[-1] = 0.0
        own, quorum = sums.copy(), self._quorum
        result = sums if quorum is None else np.empty_like(sums)
        slot = Slot(self.buffers_tag, sums.size, DataType.DOUBLE, ReduceOp.SUM, quorum=quorum)
        call = ReduceCall(0, slot.tag, slot.descriptor())
        request = ReduceRequest(borrow(sums, result), call, None, observable=True, retry=True)
        try:
            await self._process.engine.reduce(request)
        except PCCLError as error:
            if not isinstance(error, TooFewPeers):
                self._checkers.failed(self._who, sums, own)
            raise
        if quorum is not None:
            self._checkers.untouched(self._who, sums, own)
            sums[:] = result
        run, outcome = self._process.results[slot.tag]
        self._checkers.succeeded(self._who, run, outcome, slot, sums)
        self._checkers.done["buffers"] += 1

    def _slot(self, fragment: int, count: int) -> Slot:
        return Slot(
            tag=fragment + 1,
            count=count,
            data_type=DataType.FLOAT,
            op=ReduceOp.AVG,
            quantization=self._training.quantization,
            weighted=True,
            guard=self._training.guard,
            quorum=self._quorum,
        )

    async def work(self, given: Contribution) -> Average:
        """Average the work of a round, and replace ``given.values`` by the sum of all work."""
        weight, before, fragment = given.weight, self._outer.contents(), given.fragment
        own = given.values / np.float32(weight) if weight else given.values
        flaw, size = self._flaw(given.number, weight)
        self.last = None, before, [whole(given.values)]
        if flaw is Flaw.NOT_FINITE:
            spoil(own, size, np.random.default_rng([self._seed, self._replica.axis, given.number]))
        buffer = own.copy()
        result_buffer = buffer if self._quorum is None else np.full_like(own, 7)
        slot = self._slot(fragment, own.size)
        axis, residuals = self._replica.axis, self._training_checkers.residuals
        if weight:
            self._training_checkers.reduces(axis, given.number)
        pays = self.is_coded and bool(np.any(own))
        begin = partial(self.feedback.begin, f"{fragment}", own.size, slot.data_type)
        request = ReduceRequest(
            borrow(buffer, result_buffer),
            ReduceCall(
                0,
                slot.tag,
                slot.descriptor(),
                weight=weight,
                norm=declared_norm(own, flaw, size) if weight else 0.0,
            ),
            begin if pays else None,
            observable=True,
            retry=True,
        )
        member = self._process.run, self._process.peer
        if pays:
            residuals.begins(self._who, member, axis, fragment, given.number, self._owed(fragment))
        try:
            info = await self._process.engine.reduce(request)
        except PCCLError as error:
            self._checkers.untouched(self._who, buffer, own)
            if pays:
                residuals.failed(self._who, axis, fragment, self._owed(fragment))
            if not isinstance(error, TooFewPeers):
                self._checkers.failed(self._who, buffer, own)
                raise
            if flaw is Flaw.NOT_FINITE:
                self.last = None, before, []
                return Average((), 0.0, is_excluded=True, shares=((self._process.peer, 0.0),))
            residuals.alone(axis, fragment, given.number)
            raise
        run, result = self._process.results[slot.tag]
        if result_buffer is not buffer:
            self._checkers.untouched(self._who, buffer, own)
        buffer = result_buffer
        total = fsum(info.weights)
        contributors = tuple(PeerId(peer) for peer in info.contributors)
        operation = InRun(run, result.operation)
        parts = self._checkers.given(operation, result.contributors, result.weights)
        named = dict(zip(contributors, parts, strict=True))
        paid = residuals.owed(operation, fragment, named) if self.is_coded else ()
        self._checkers.succeeded(self._who, run, result, slot, buffer, paid)
        self.last = operation, before, [contribution(*part) for part in parts]
        given.values[:] = self._whole(operation, buffer, total, parts)
        if pays and not info.took_part:
            residuals.missed(self._who, axis, fragment, given.number, self._owed(fragment))
        elif self.is_coded and info.took_part:
            work, owed = np.multiply(buffer, total, dtype=np.float64), self._owed(fragment)
            residuals.returned(
                self._who,
                axis,
                fragment,
                given.number,
                operation,
                self._process.peer,
                named,
                work,
                owed,
            )
        return Average(
            tuple(peer for peer in contributors if peer not in info.excluded),
            total,
            info.tx_bytes,
            info.rx_bytes,
            self._process.peer in info.excluded,
            workers_of(contributors, info.weights),
            took_part=info.took_part,
            shares=tuple(zip(contributors, info.weights, strict=True)),
        )

    def replay(self, seen: ObservedReduction) -> None:
        """Take the outer step of a round of the members, before the admission."""
        self._checkers.done["training replay"] += 1
        operation = self._checkers.replayed(self._process, seen)
        if seen.tag == self.buffers_tag:
            self._replayed = seen.values.copy()
            return
        buffers, self._replayed = self._replayed, None
        total = seen.total_weight or 0.0
        workers = workers_of(seen.contributors, seen.weights)
        shares = tuple(zip(seen.contributors, seen.weights, strict=True))
        average = Average(seen.contributors, total, workers=workers, shares=shares)
        parts = self._checkers.given(operation, seen.contributors, seen.weights)
        work = self._whole(operation, seen.values, total, parts)
        assert self.replays is not None
        self.replays.finish(seen.tag - 1, work, average, buffers)

    def _whole(
        self,
        operation: InRun,
        average: Floats,
        total: float,
        parts: list[tuple[Floats, float]],
    ) -> Whole:
        """Return the sum of all work in a round.

        Coarse formats do not show its digits. Then it is the sum of the contributions, so that the
        model shows which rounds a process has seen, and checkers compare the average with them.
        """
        if not self._training.is_exact:
            return sum((contribution(*part) for part in parts), start=np.zeros(len(average), int))
        work = np.multiply(average, total, dtype=np.float64)
        carried = self._training_checkers.residuals.carried(operation)
        return whole(work - carried, coded=self.is_coded)

    def _owed(self, fragment: int) -> Floats | None:
        return self.feedback.state_dict().get(f"{fragment}")


def workers_of(contributors: tuple[int, ...], weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the contributors whose work is in an average."""
    return tuple(peer for peer, weight in zip(contributors, weights, strict=True) if weight)
