"""What must hold in every run, written apart from the code that it checks.

* A result equals the fold over the contributors that its outcome names, and is the same for all.
* An operation has one outcome. One that is committed names all who began it as contributors, also
  those who were lost since.
* Inputs are intact after every failure, and separate inputs always.
* Nothing is written into a buffer after its call has returned.
* Living members have a link to each other when they leave a run whose faults are over.
* Whoever was inside hears that the place in the run is lost, from every call and handle.
* Nobody is removed without a cause: nobody who is alive, unless something was done to him.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pccl.machines.peer.events import ReduceResult
from pccl.protocol.errors import Evicted, MasterLost, NotConnected, PCCLError
from pccl.protocol.types import SYNC_TAG, Algorithm, OperationId, PeerId, RemovalCause
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.fold import differences, fold, implausible, inaccurate, weighed
from pccl.stress.sim.scenarios.scenario import Scenario, Slot
from pccl.transports.base import Address

if TYPE_CHECKING:
    from pccl.stress.sim.checkers.state import StateCheckers
    from pccl.stress.sim.checkers.training import TrainingCheckers
    from pccl.stress.sim.process import PeerProcess

Array = npt.NDArray[Any]

Sleep = Callable[[int], Coroutine[Any, Any, None]]
"""Lets so many nanoseconds of virtual time pass."""


async def _pass(process: PeerProcess, sleep: Sleep) -> None:
    """Nobody judges."""


class Violation(AssertionError):
    """A promise was broken."""


class InRun(NamedTuple):
    """An operation, and its run: a master that knows of none begins another, with the same ids."""

    run: bytes
    operation: OperationId

    def __str__(self) -> str:
        return f"{self.operation} of run {self.run.hex()[:8]}"


@dataclass(slots=True)
class _Returned:
    """A buffer whose call has returned, and what was in it then."""

    who: str
    what: str
    buffer: Array
    content: bytes


class Checkers:
    """Hears of everything that the processes of one run do and see."""

    def __init__(self, scenario: Scenario, excuses: Excuses) -> None:
        self.reduces = 0
        self.aborts = 0
        self.done: Counter[str] = Counter()
        """What callers were told: broadcasts, barriers and handles that succeeded, and errors;
        and how many lanes were cut."""
        self.state: StateCheckers | None = None
        """Of shared state; None: there is none."""
        self.training: TrainingCheckers | None = None
        """Of processes that train; None: they don't."""
        self.before_goodbye: Callable[[PeerProcess, Sleep], Coroutine[Any, Any, None]] = _pass
        """Judges the links of a process that has finished and is still a member."""
        self._scenario = scenario
        self._inputs: dict[tuple[InRun, PeerId], Array] = {}
        self._weights: dict[tuple[InRun, PeerId], float] = {}
        self._entered: set[tuple[InRun, PeerId]] = set()
        self._results: dict[InRun, tuple[tuple[PeerId, ...], bytes]] = {}
        self._interrupted: set[InRun] = set()
        self._outcomes: dict[
            InRun, tuple[tuple[bool, tuple[PeerId, ...]], dict[Address, PeerId]]
        ] = {}
        """How each has ended, and who was told so, under which id."""
        self._returned: list[_Returned] = []
        self._excuses = excuses
        self._addresses: dict[tuple[bytes, PeerId], Address] = {}
        """Where the process of each id of each run listens: every process has a port of its own."""
        self._admitted: dict[tuple[bytes, PeerId], tuple[int, int]] = {}
        """How many members a run had when it admitted each of them, and how many had gone."""
        self._gone: Counter[bytes] = Counter()
        """Peers removed, by run."""
        self._left_behind: set[tuple[bytes, PeerId]] = set()
        """Living members that a restarted master without a standby went on without."""
        self.believes: Callable[[Address], tuple[bytes, PeerId] | None] = lambda address: None
        """Of which run the process that listens there takes itself for a member, and under which
        id; None: of none, or it is dead."""
        self.follows: Callable[[Address], int] = lambda address: 0
        """The term of the master that the process that listens there follows."""
        self.waits: Callable[[Address], bool] = lambda address: True
        """Whether anybody but the process that listens there is in a call."""

    # -- results -------------------------------------------------------------------------------

    def posted(
        self, operation: InRun, peer: PeerId, content: Array | None, weight: float | None = None
    ) -> None:
        """A peer lends ``content`` (a copy of the input; a barrier has none) to an operation."""
        self._entered.add((operation, peer))
        if weight is not None:
            self._weights[operation, peer] = weight
        if content is not None:
            self._inputs.setdefault((operation, peer), content)

    def given(
        self, operation: InRun, contributors: tuple[PeerId, ...]
    ) -> list[tuple[Array, float]]:
        """What each of them has put into a weighted average, and its weight."""
        return [
            (self._inputs[operation, peer], self._weights[operation, peer]) for peer in contributors
        ]

    def began_intact(self, who: str, operation: InRun, peer: PeerId, original: Array) -> None:
        """A call returned: its last attempt began with what the caller had given to the first."""
        own = self._inputs.get((operation, peer))
        if own is not None and own.tobytes() != original.tobytes():
            raise Violation(f"{who}: an attempt before {operation} has changed the input")

    def was_interrupted(self, operation: InRun) -> None:
        """A member was lost while an operation moved data."""
        self._interrupted.add(operation)

    def outcome(
        self,
        operation: InRun,
        address: Address,
        peer: PeerId,
        outcome: tuple[bool, tuple[PeerId, ...]],
    ) -> None:
        """A member is told how an operation has ended: whether committed, and who contributed.

        A master that is restarted may decide anew what only the dead have seen. The same holds for
        a member that was frozen and did not come back to it, if there is no standby. It wakes up,
        reads the last words of the master before, and then hears that it was removed.
        """
        committed, contributors = outcome
        if operation not in self._outcomes and operation in self._interrupted:
            self.done["repaired" if committed else "not repaired"] += 1
        entered = {peer for entered, peer in self._entered if entered == operation}
        if operation.operation.tag == SYNC_TAG:  # of which those who are left are told
            entered.intersection_update(contributors)
        if committed and (set(contributors) != entered or len(contributors) != len(entered)):
            raise Violation(f"{operation} of {entered} was committed for {contributors}")
        if (operation.run, peer) in self._left_behind:
            return
        known, seen_by = self._outcomes.setdefault(operation, (outcome, {}))
        if known == outcome:
            seen_by[address] = peer
            return
        alive = [
            str(a)
            for a, p in seen_by.items()
            if a != address
            and self.believes(a) == (operation.run, p)
            and (operation.run, p) not in self._left_behind
        ]
        if alive or address in seen_by:
            others = ", ".join(alive)
            raise Violation(
                f"{operation} ended as {known} for {others}, and for {address} as {outcome}"
            )
        self._outcomes[operation] = (outcome, {address: peer})

    def known_committed(self, run: bytes, term: int) -> Iterator[OperationId]:
        """The operations that any member that follows this master was told to be committed."""
        for operation, ((committed, _), seen_by) in self._outcomes.items():
            seen = committed and operation.run == run
            if seen and any(
                self.believes(a) == (run, peer) and self.follows(a) == term
                for a, peer in seen_by.items()
            ):
                yield operation.operation

    def succeeded(
        self,
        who: str,
        run: bytes,
        outcome: ReduceResult,
        slot: Slot,
        result: Array,
    ) -> None:
        """A call returned with a result, in that run."""
        self.reduces += 1
        operation, contributors = InRun(run, outcome.operation), outcome.contributors
        content = result.tobytes()
        known = self._results.get(operation)
        if known is None:
            self.done[outcome.algorithm.label] += 1
            self.done["quantized"] += slot.quantization.active
            inputs = [self._inputs[operation, peer] for peer in contributors]
            weights: list[float] = []
            if slot.weighted:
                self.done["weighted"] += 1
                weights = [self._weights[operation, peer] for peer in contributors]
            if list(outcome.weights) != weights:
                raise Violation(f"{who}: weights of {operation} are {weights}, not {outcome}")
            for wrong in self._wrong(operation, outcome.algorithm, slot, inputs, weights, result):
                values = [own[wrong] for own in inputs]
                raise Violation(
                    f"{who}: wrong result of {operation} over {contributors}: element {wrong} is "
                    f"{result[wrong]!r}, of {values!r} with weights {weights}"
                )
            self._results[operation] = (contributors, content)
        elif known != (contributors, content):
            raise Violation(f"{who}: {operation} differs from what another member got")

    def _wrong(
        self,
        operation: InRun,
        algorithm: Algorithm,
        slot: Slot,
        inputs: list[Array],
        weights: list[float],
        result: Array,
    ) -> list[int]:
        """The indices at which a result cannot be right."""
        divisor = None
        if weights:
            inputs, divisor = weighed(inputs, weights)
        if slot.quantization.active:
            return inaccurate(result, inputs, slot.op, algorithm, divisor)
        if algorithm is Algorithm.MESH:
            return implausible(result, inputs, slot.op, divisor)
        firsts = None if algorithm is Algorithm.RING else [0]
        return differences(result, fold(inputs, slot.op, firsts, divisor), slot.op)

    def was_broadcast(
        self,
        who: str,
        operation: InRun,
        contributors: tuple[PeerId, ...],
        root: int,
        result: Array,
    ) -> None:
        """A broadcast returned: everybody has what the root had."""
        self.done["broadcast"] += 1
        if result.tobytes() != self._inputs[operation, contributors[root]].tobytes():
            raise Violation(f"{who}: {operation} did not bring what rank {root} had")

    def passed_barrier(self, who: str, operation: InRun, contributors: tuple[PeerId, ...]) -> None:
        """A barrier returned: everybody had come to it."""
        self.done["barrier"] += 1
        for peer in contributors:
            if (operation, peer) not in self._entered:
                raise Violation(f"{who}: {operation} was passed without peer {peer}")

    def failed(self, who: str, buffer: Array, original: Array) -> None:
        """A call raised; its input must be what it was."""
        self.aborts += 1
        self.untouched(who, buffer, original)

    def untouched(self, who: str, buffer: Array, original: Array) -> None:
        """An input must be what it was."""
        if buffer.tobytes() != original.tobytes():
            wrong = np.flatnonzero(buffer != original)
            raise Violation(f"{who}: input damaged in {len(wrong)} of {len(buffer)} elements")

    # -- memory --------------------------------------------------------------------------------

    def returned(self, who: str, what: str, buffer: Array) -> None:
        """A call has returned: nobody but the caller may write into ``buffer`` from now on."""
        self._returned.append(_Returned(who, what, buffer, buffer.tobytes()))
        if len(self._returned) > 256:
            self._look(self._returned.pop(0))

    def look_at_memory(self) -> None:
        """Look at every buffer whose call has returned."""
        for entry in self._returned:
            self._look(entry)
        if self.state is not None:
            self.state.look_at_memory()

    def _look(self, entry: _Returned) -> None:
        if entry.buffer.tobytes() != entry.content:
            raise Violation(f"{entry.who}: {entry.what} was written after its call had returned")

    # -- membership ----------------------------------------------------------------------------

    def registered(self, run: bytes, peer: PeerId, host: str, port: int) -> None:
        """The master of a run has given an id to the process that listens there."""
        self._addresses[run, peer] = Address(host, port)

    def admitted(self, run: bytes, peer: PeerId, world_size: int) -> None:
        """The master of a run has made it a member, one of so many."""
        self._admitted[run, peer] = world_size, self._gone[run]

    def joined(self, who: str, run: bytes, peer: PeerId, seen: int, min_peers: int) -> None:
        """A process that wanted so many hears that it is a member, and sees so many.

        Fewer only if they have gone since the master admitted it.
        """
        world_size, gone_before = self._admitted[run, peer]
        gone = self._gone[run] - gone_before
        if world_size < min_peers or seen < min_peers - gone:
            raise Violation(
                f"{who} wanted {min_peers} members, was admitted as one of {world_size} and sees "
                f"{seen}; {gone} have gone since"
            )

    def removed(self, run: bytes, peer: PeerId, why: str) -> None:
        """The master of a run has removed a peer."""
        self._gone[run] += 1
        address = self._addresses[run, peer]
        if self.believes(address) != (run, peer):
            return  # killed, gone by itself, or it has another id by now: nobody has lost a place
        cause = RemovalCause[why.split(":")[0]]
        waits = self.waits(address) or self._excuses.masters_divided
        if cause is RemovalCause.SILENT and "awaited" in why and not waits:
            raise Violation(f"peer {peer} ({address.host}) was removed, and nobody waited: {why}")
        if not self._excuses.removal(address.host, cause, why, partial(self._host_of, run)):
            raise Violation(f"peer {peer} ({address.host}) was removed without a cause: {why}")
        self.done["removed alive"] += 1
        if "did not come back" in why and not self._scenario.standby:
            self._left_behind.add((run, peer))

    def undialable(self, run: bytes, peer: PeerId, why: str) -> None:
        """The master of a run says that nobody can dial a peer."""
        address = self._addresses[run, peer]
        if self.believes(address) == (run, peer) and not self._excuses.undialable(address.host):
            raise Violation(f"peer {peer} ({address.host}) can be dialled, and is told: {why}")
        self.done["undialable"] += 1

    def removed_together(self, lost: int, left: int) -> None:
        """A master that has a standby has removed so many at once that had not said goodbye."""
        if lost >= left and lost:
            self._excuses.majority_died = True

    def not_removed(self, peer: PeerId, waited_s: float) -> None:
        """A busy master lets others wait for a silent peer for longer than the deadline."""
        raise Violation(f"peer {peer} is silent and awaited for {waited_s:.1f} s, and a member")

    def may_raise(self, host: str, error: PCCLError) -> None:
        """The process there has lost its place, or found none."""
        if isinstance(error, MasterLost) and not self._excuses.lost_master(host):
            raise Violation(f"{host} has lost its master, which lives: {error}")

    @property
    def nobody_to_join(self) -> bool:
        """Whether there may be no master any more that admits anybody."""
        return self._excuses.may_stay_without_master

    def handles_told(self, who: str, failures: list[PCCLError]) -> None:
        """These are the failures of calls and handles of one step, in that order.

        A lost place ends all that were open, and all that was launched before a caller was told.
        """
        losses = {type(error) for error in failures if isinstance(error, Evicted | MasterLost)}
        if len(losses) > 1:
            raise Violation(f"{who} lost its place in two ways: {failures}")
        if losses and len(failures) > 1:
            self.done["handles told of a loss"] += 1
        if any(isinstance(error, NotConnected) for error in failures) and not losses:
            raise Violation(f"{who} was not told how it has lost its place: {failures}")

    def _host_of(self, run: bytes, peer: int) -> str | None:
        address = self._addresses.get((run, PeerId(peer)))
        return address.host if address else None
