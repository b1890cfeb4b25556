"""``Checkers``: checks results, outcomes, inputs, memory and membership in every run.

* A result equals the fold over the contributors that its outcome names, and is the same for all.
* An operation has one outcome. A committed operation names all peers that began it as contributors,
  also peers that were lost later. With a quorum, it may name fewer; the others get the same result.
* Inputs are intact after every failure. Inputs with a separate result buffer are always intact.
* The library writes nothing into a buffer after its call has returned.
* Living members have a link to each other when they leave a run whose faults are over.
* If a process loses its place in the run, its calls and handles fail, and an error says why.
* The master removes a living process only if a fault explains the removal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pccl.machines.peer.events import ReduceResult
from pccl.protocol.errors import Evicted, MasterLost, NotConnected, PCCLError
from pccl.protocol.types import SYNC_TAG, Algorithm, OperationId, PeerId, RemovalCause
from pccl.runtime.state.replay import ObservedReduction
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.fold import (
    differences,
    fold,
    implausible,
    inaccurate,
    inaccurate_sparse,
    weighed,
)
from pccl.stress.sim.scenarios.scenario import Scenario, Slot
from pccl.transports.base import Address

if TYPE_CHECKING:
    from pccl.stress.sim.checkers.guards import GuardCheckers
    from pccl.stress.sim.checkers.state import StateCheckers
    from pccl.stress.sim.checkers.training import TrainingCheckers
    from pccl.stress.sim.checkers.turns import Departures
    from pccl.stress.sim.process import PeerProcess
    from pccl.stress.sim.publication.checker import PublicationChecker
    from pccl.stress.sim.store.checker import StoreChecker

Array = npt.NDArray[Any]

Sleep = Callable[[int], Coroutine[Any, Any, None]]
"""Waits for a number of nanoseconds of virtual time."""


async def _pass(process: PeerProcess, sleep: Sleep) -> None:
    """Check nothing."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class _Returned:
    """A buffer whose call has returned, and its content at that time."""

    who: str
    what: str
    buffer: Array
    content: bytes


_NAMED = re.compile(r"linked to peer (\d+)")
"""The member to which a newcomer could not be linked."""


class Checkers:
    """Checks all calls and results of the processes of one run."""

    def __init__(self, scenario: Scenario, excuses: Excuses) -> None:
        self.reduces = 0
        self.aborts = 0
        self.done: Counter[str] = Counter()
        """Counts by name: calls that succeeded, errors that callers got, lanes that were cut."""
        self.guards: GuardCheckers | None = None
        """Checks guarded averages; None: the run has none."""
        self.state: StateCheckers | None = None
        """Checks shared state; None: the run has no shared state."""
        self.store: StoreChecker | None = None
        """Checks calls to the run's store; None: nobody calls it."""
        self.publication: PublicationChecker | None = None
        """Checks what members publish and readers show; None: there are no readers."""
        self.training: TrainingCheckers | None = None
        """Checks processes that train; None: no process trains."""
        self.departures: Departures | None = None
        """Checks members of processes that leave soon; None: no process trains."""
        self.before_goodbye: Callable[[PeerProcess, Sleep], Coroutine[Any, Any, None]] = _pass
        """Checks the links of a process that has finished and is still a member."""
        self._scenario = scenario
        self._inputs: dict[tuple[InRun, PeerId], Array] = {}
        self._weights: dict[tuple[InRun, PeerId], float] = {}
        self._entered: dict[InRun, set[PeerId]] = {}
        self._results: dict[InRun, tuple[ReduceResult, bytes]] = {}
        self._replayed: dict[InRun, bytes] = {}
        """Operation -> result with which a newcomer replayed it before a member returned."""
        self._interrupted: set[InRun] = set()
        self._outcomes: dict[
            InRun, tuple[tuple[bool, tuple[PeerId, ...]], dict[Address, PeerId]]
        ] = {}
        """Operation -> outcome, and the processes that received it, with their ids."""
        self._returned: list[_Returned] = []
        self._excuses = excuses
        self._addresses: dict[tuple[bytes, PeerId], Address] = {}
        """Run and id -> address of the process: every process has its own port."""
        self._admitted: dict[tuple[bytes, PeerId], tuple[int, int]] = {}
        """Run and id -> number of members at the admission, and number of peers removed before."""
        self._first_views: dict[tuple[bytes, PeerId], int] = {}
        """Run and id -> the view with which a master admitted the peer first."""
        self._gone: Counter[bytes] = Counter()
        """Run -> number of removed peers."""
        self._left_behind: set[tuple[bytes, PeerId]] = set()
        """Run and id of living members without which a restarted master continued (no standby)."""
        self.believes: Callable[[Address], tuple[bytes, PeerId] | None] = lambda address: None
        """Returns the run and id that the process at an address believes to have; None: the process
        is in no run, or dead."""
        self.follows: Callable[[Address], int] = lambda address: 0
        """Term of the master that the process at an address follows."""
        self.waits: Callable[[Address], bool] = lambda address: True
        """Whether any process except the one at an address is dead or has an open operation."""

    # -- results -------------------------------------------------------------------------------

    def posted(
        self, operation: InRun, peer: PeerId, content: Array | None, weight: float | None = None
    ) -> None:
        """Record that ``peer`` began an operation with ``content``, a copy of its input."""
        self._entered.setdefault(operation, set()).add(peer)
        if weight is not None:
            self._weights[operation, peer] = weight
        if content is not None:
            self._inputs.setdefault((operation, peer), content)

    def input_of(self, operation: InRun, peer: PeerId) -> Array:
        """Return the input with which ``peer`` began an operation."""
        return self._inputs[operation, peer]

    def given(
        self, operation: InRun, contributors: Sequence[int], weights: Sequence[float]
    ) -> list[tuple[Array, float]]:
        """Return what counts of each contributor to a weighted average: input and weight."""
        found: list[tuple[Array, float]] = []
        for peer, weight in zip(contributors, weights, strict=True):
            own = self._inputs[operation, PeerId(peer)]
            found.append((own if weight else np.zeros_like(own), weight))
        return found

    def began_intact(self, who: str, operation: InRun, peer: PeerId, original: Array) -> None:
        """Check that the last attempt of a call began with the input of the first attempt."""
        own = self._inputs.get((operation, peer))
        if own is not None and own.tobytes() != original.tobytes():
            raise Violation(f"{who}: an attempt before {operation} has changed the input")

    def was_interrupted(self, operation: InRun) -> None:
        """Record that a member was lost while ``operation`` moved data."""
        self._interrupted.add(operation)

    def outcome(
        self,
        operation: InRun,
        address: Address,
        peer: PeerId,
        outcome: tuple[bool, tuple[PeerId, ...]],
    ) -> None:
        """Check an outcome that a member received: whether committed, and the contributors.

        A restarted master may change an outcome that only dead processes have seen. Without a
        standby, this also holds for a frozen member that did not return to the master in time. That
        member wakes up, reads the last messages of the old master, and learns of its removal.
        """
        committed, contributors = outcome
        if operation not in self._outcomes and operation in self._interrupted:
            self.done["repaired" if committed else "not repaired"] += 1
        entered = set(self._entered.get(operation, ()))
        if operation.operation.tag == SYNC_TAG:  # its outcome names only members that are left
            entered.intersection_update(contributors)
        if committed and len(contributors) < len(entered) and self._scenario.quorum is not None:
            self.done["went on without members"] += 1
            entered.intersection_update(contributors)
        if committed and (set(contributors) != entered or len(contributors) != len(entered)):
            raise Violation(f"{operation} was begun by {entered}, but committed for {contributors}")
        if committed and self.guards is not None:
            self.guards.committed(operation)
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
                f"{operation} ended as {known} for {others}, but for {address} as {outcome}"
            )
        self._outcomes[operation] = (outcome, {address: peer})

    def known_committed(self, run: bytes, term: int) -> Iterator[OperationId]:
        """Yield the committed operations that a follower of the master of ``term`` knows of."""
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
        owed: Sequence[Array | None] = (),
    ) -> None:
        """Check the result of a call that returned in ``run``.

        Args:
            who: name of the caller.
            run: the run.
            outcome: outcome of the reduce.
            slot: what the call asked for.
            result: its result.
            owed: residuals that the contributors brought into a compressed average, in their order.
        """
        self.reduces += 1
        operation, contributors = InRun(run, outcome.operation), outcome.contributors
        content = result.tobytes()
        alike = replace(outcome, attempts=1, flagged=(), took_part=True)
        self.done["late result"] += not outcome.took_part
        known = self._results.get(operation)
        if known is None:
            self.done[outcome.algorithm.label] += 1
            self.done["quantized"] += slot.quantization.active
            self.done["sparse"] += slot.quantization.is_gathered
            inputs = [self._inputs[operation, peer] for peer in contributors]
            weights: list[float] = []
            if slot.weighted:
                self.done["weighted"] += 1
                weights = [self._weights[operation, peer] for peer in contributors]
            if self.guards is not None and outcome.took_part:
                weights = self.guards.returned(who, operation, outcome, result, weights)
            if list(outcome.weights) != weights:
                raise Violation(f"{who}: {operation} has weights {weights}, not {outcome}")
            whole, divisor = _summands(slot, inputs, weights, owed)
            for wrong in _wrong(outcome.algorithm, slot, whole, divisor, result):
                values = [own[wrong] for own in inputs]
                raise Violation(
                    f"{who}: wrong result of {operation} over {contributors}: element {wrong} is "
                    f"{result[wrong]!r}, from inputs {values!r} with weights {weights}"
                )
            if self._replayed.get(operation, content) != content:
                raise Violation(f"{who}: a newcomer replayed {operation} with another result")
            self._results[operation] = (alike, content)
        elif known != (alike, content):
            raise Violation(f"{who}: the result of {operation} differs from another member's")

    def replayed(self, process: PeerProcess, seen: ObservedReduction) -> InRun:
        """Check a reduce that a newcomer replays: it must have the result that the members have.

        Returns:
            The operation.
        """
        rest = process.group, seen.view, seen.tag, seen.n
        operation = next(
            one
            for one in reversed(self._entered)
            if one == (process.run, OperationId(one.operation.term, *rest))
        )
        content = seen.values.tobytes()
        known = self._results.get(operation)
        expected = known[1] if known else self._replayed.setdefault(operation, content)
        if content != expected:
            raise Violation(f"{process.name}: it replays {operation} with another result")
        return operation

    def may_be_late(self, host: str) -> bool:
        """Whether a fault may delay the calls of the process on ``host``."""
        return self._excuses.is_touched(host)

    def was_broadcast(
        self,
        who: str,
        operation: InRun,
        contributors: tuple[PeerId, ...],
        root: int,
        result: Array,
    ) -> None:
        """Check that a broadcast that returned gave the values of its root."""
        self.done["broadcast"] += 1
        if result.tobytes() != self._inputs[operation, contributors[root]].tobytes():
            raise Violation(f"{who}: {operation} did not give the values of its root, rank {root}")

    def passed_barrier(self, who: str, operation: InRun, contributors: tuple[PeerId, ...]) -> None:
        """Check that all contributors had entered a barrier that returned."""
        self.done["barrier"] += 1
        for peer in contributors:
            if peer not in self._entered.get(operation, ()):
                raise Violation(f"{who}: {operation} returned before peer {peer} entered it")

    def failed(self, who: str, buffer: Array, original: Array) -> None:
        """Check that a call that raised left its input unchanged."""
        self.aborts += 1
        self.untouched(who, buffer, original)

    def untouched(self, who: str, buffer: Array, original: Array) -> None:
        """Check that an input is unchanged."""
        if buffer.tobytes() != original.tobytes():
            wrong = np.flatnonzero(buffer != original)
            raise Violation(f"{who}: input damaged in {len(wrong)} of {len(buffer)} elements")

    # -- memory --------------------------------------------------------------------------------

    def returned(self, who: str, what: str, buffer: Array) -> None:
        """Watch ``buffer``, because its call returned: now only the caller may write into it."""
        self._returned.append(_Returned(who, what, buffer, buffer.tobytes()))
        if len(self._returned) > 256:
            self._look(self._returned.pop(0))

    def look_at_memory(self) -> None:
        """Check that the library wrote into no watched buffer, and into no shared state."""
        for entry in self._returned:
            self._look(entry)
        if self.state is not None:
            self.state.look_at_memory()

    def _look(self, entry: _Returned) -> None:
        if entry.buffer.tobytes() != entry.content:
            raise Violation(f"{entry.who}: {entry.what} was written after its call had returned")

    # -- membership ----------------------------------------------------------------------------

    def registered(self, run: bytes, peer: PeerId, host: str, port: int) -> None:
        """Record that the master of a run gave an id to the process that listens at this port."""
        self._addresses[run, peer] = Address(host, port)

    def admitted(self, run: bytes, peer: PeerId, world_size: int, view: int) -> None:
        """Record that a master admitted ``peer``, with a view, as one of ``world_size`` members."""
        self._admitted[run, peer] = world_size, self._gone[run]
        self._first_views.setdefault((run, peer), view)

    def first_view(self, run: bytes, peer: PeerId) -> int:
        """Return the view with which a master admitted ``peer`` first; 0: no master has."""
        return self._first_views.get((run, peer), 0)

    def joined(self, who: str, run: bytes, peer: PeerId, seen: int, min_peers: int) -> None:
        """Check that a process that asked for ``min_peers`` members was admitted with that many.

        It may see fewer members only if some have left since its admission.
        """
        world_size, gone_before = self._admitted[run, peer]
        gone = self._gone[run] - gone_before
        if world_size < min_peers or seen < min_peers - gone:
            raise Violation(
                f"{who} wanted {min_peers} members, was admitted as one of {world_size} and sees "
                f"{seen}; {gone} have gone since"
            )

    def removed(self, run: bytes, peer: PeerId, cause: RemovalCause, why: str) -> None:
        """Check that faults explain a removal by the master of a run."""
        self._gone[run] += 1
        address = self._addresses[run, peer]
        if self.believes(address) != (run, peer):
            return  # it was killed, has left, or has another id by now: it lost no place
        may_be_late = self._scenario.quorum is not None  # the others go on, but not for ever
        waits = self.waits(address) or self._excuses.masters_divided or may_be_late
        if cause is RemovalCause.SILENT and "awaited" in why and not waits:
            raise Violation(f"peer {peer} ({address.host}) was removed, but no peer waited: {why}")
        if cause is RemovalCause.UNREACHABLE and self._names_gone(run, why):
            return  # the master cannot know that the member is dead, if nothing has told it
        if not self._excuses.removal(address.host, cause, why, partial(self._host_of, run)):
            raise Violation(f"peer {peer} ({address.host}) was removed without a cause: {why}")
        self.done["removed alive"] += 1
        if "did not come back" in why and not self._scenario.standby:
            self._left_behind.add((run, peer))

    def _names_gone(self, run: bytes, why: str) -> bool:
        """Whether ``why`` names a member whose process was killed, or has left."""
        named = [(run, PeerId(int(number))) for number in _NAMED.findall(why)]
        return any(
            one in self._addresses and self.believes(self._addresses[one]) != one for one in named
        )

    def undialable(self, run: bytes, peer: PeerId, why: str) -> None:
        """Check that faults explain why the master of a run calls ``peer`` undialable."""
        address = self._addresses[run, peer]
        if self.believes(address) == (run, peer) and not self._excuses.undialable(address.host):
            raise Violation(f"peer {peer} ({address.host}) is dialable, but the master says: {why}")
        self.done["undialable"] += 1

    def removed_together(self, lost: int, left: int) -> None:
        """Note that a master with a standby removed ``lost`` peers at once; ``left`` remain."""
        if lost >= left and lost:
            self._excuses.majority_died = True

    def not_removed(self, peer: PeerId, waited_s: float) -> None:
        """Raise ``Violation``: a busy master kept a silent peer for longer than the deadline."""
        raise Violation(f"peer {peer}, silent and awaited for {waited_s:.1f} s, is still a member")

    def may_raise(self, host: str, error: PCCLError) -> None:
        """Check that faults explain a ``MasterLost`` of the process on ``host``."""
        if isinstance(error, MasterLost) and not self._excuses.lost_master(host):
            raise Violation(f"{host} reports a lost master, but no fault explains that: {error}")

    @property
    def nobody_to_join(self) -> bool:
        """Whether the run may no longer have a master that admits newcomers."""
        return self._excuses.may_stay_without_master

    def handles_told(self, who: str, failures: list[PCCLError]) -> None:
        """Check the failures of the calls and handles of one step, in that order.

        The loss fails all open operations, and all launches until a caller gets the error.
        """
        losses = {type(error) for error in failures if isinstance(error, Evicted | MasterLost)}
        if len(losses) > 1:
            raise Violation(f"{who} lost its membership for two reasons: {failures}")
        if losses and len(failures) > 1:
            self.done["handles told of a loss"] += 1
        if any(isinstance(error, NotConnected) for error in failures) and not losses:
            raise Violation(f"{who} got NotConnected, but no error says why: {failures}")

    def _host_of(self, run: bytes, peer: int) -> str | None:
        address = self._addresses.get((run, PeerId(peer)))
        return address.host if address else None


def _summands(
    slot: Slot, inputs: list[Array], weights: list[float], owed: Sequence[Array | None]
) -> tuple[list[Array | None], float | None]:
    """Return what an operation adds up, None for nothing, and the divisor of an average."""
    if not weights:
        return list[Array | None](inputs), None
    summands, divisor = weighed(inputs, weights)
    mean = divisor / len(inputs)
    for rank, one in enumerate(owed):
        own = summands[rank]
        if one is not None and own is not None:
            summands[rank] = own + mean * one
    return summands, divisor


def _wrong(
    algorithm: Algorithm,
    slot: Slot,
    summands: list[Array | None],
    divisor: float | None,
    result: Array,
) -> list[int]:
    """Return the indices at which a result cannot be right."""
    whole = [np.zeros_like(result) if part is None else part for part in summands]
    if slot.quantization.active and not all(_is_finite(part) for part in whole):
        return []  # the other values of a block need not be accurate
    if slot.quantization.is_gathered:
        return inaccurate_sparse(result, whole, slot.op, divisor)
    if slot.quantization.active:
        wire = slot.quantization.format
        return inaccurate(result, whole, slot.op, algorithm, wire, divisor)
    if algorithm is Algorithm.MESH:
        return implausible(result, whole, slot.op, divisor)
    firsts = None if algorithm is Algorithm.RING else [0]
    return differences(result, fold(summands, slot.op, firsts, divisor), slot.op)


def _is_finite(values: Array) -> bool:
    return bool(np.isfinite(values.astype(np.float64)).all())
