"""What must hold in every run, written apart from the code that it checks.

* A result equals the fold over the contributors that its outcome names, and is the same for all.
* An operation has one outcome.
* Inputs are intact after every failure, and separate inputs always.
* Nothing is written into a buffer after its call has returned.
* Nobody is removed without a cause, and without faults nobody is removed who is alive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import NS_PER_S, OperationId, PeerId, ReduceOp, RemovalCause
from pccl.stress.sim.fold import differences, fold
from pccl.stress.sim.scenario import Scenario

Array = npt.NDArray[Any]

_BY_DEADLINE = (
    RemovalCause.SILENT.name,
    RemovalCause.NO_PROGRESS.name,
    RemovalCause.UNREACHABLE.name,
)
"""A live process may be removed for these only if something kept its bytes from moving."""


LONG_STALL_NS = 9 * NS_PER_S
"""Shorter than every deadline that could tell a stalled peer from a dead one."""


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class _Returned:
    """A buffer whose call has returned, and what was in it then."""

    who: str
    what: str
    buffer: Array
    content: bytes


class Checkers:
    """Hears of everything that the processes of one run do and see."""

    def __init__(self, scenario: Scenario) -> None:
        self.reduces = 0
        self.aborts = 0
        self.done: Counter[str] = Counter()
        """What callers were told: broadcasts, barriers and handles that succeeded, and errors;
        and how many lanes were cut."""
        self._scenario = scenario
        self._inputs: dict[tuple[OperationId, PeerId], Array] = {}
        self._entered: set[tuple[OperationId, PeerId]] = set()
        self._results: dict[OperationId, tuple[tuple[PeerId, ...], bytes]] = {}
        self._aborted: dict[OperationId, str] = {}
        self._outcomes: dict[OperationId, object] = {}
        self._returned: list[_Returned] = []
        self._hosts: dict[PeerId, str] = {}
        self._killed: set[str] = set()

    # -- results -------------------------------------------------------------------------------

    def posted(self, operation: OperationId, peer: PeerId, content: Array | None) -> None:
        """A peer lends ``content`` (a copy of the input; a barrier has none) to an operation."""
        self._entered.add((operation, peer))
        if content is not None:
            self._inputs[operation, peer] = content

    def outcome(self, operation: OperationId, who: str, outcome: object) -> None:
        """The master (or a peer) says how an operation has ended."""
        known = self._outcomes.setdefault(operation, outcome)
        if known != outcome:
            raise Violation(f"{operation} ended as {known} and, for {who}, as {outcome}")

    def succeeded(
        self,
        who: str,
        operation: OperationId,
        contributors: tuple[PeerId, ...],
        op: ReduceOp,
        result: Array,
    ) -> None:
        """A call returned with a result."""
        self.reduces += 1
        content = result.tobytes()
        known = self._results.get(operation)
        if known is None:
            inputs = [self._inputs[operation, peer] for peer in contributors]
            expected = fold(inputs, op)
            for wrong in differences(result, expected, op):
                raise Violation(
                    f"{who}: wrong result of {operation} over {contributors}: element {wrong} is "
                    f"{result[wrong]!r}, should be {expected[wrong]!r}"
                )
            self._results[operation] = (contributors, content)
        elif known != (contributors, content):
            raise Violation(f"{who}: {operation} differs from what another member got")

    def was_broadcast(
        self,
        who: str,
        operation: OperationId,
        contributors: tuple[PeerId, ...],
        root: int,
        result: Array,
    ) -> None:
        """A broadcast returned: everybody has what the root had."""
        self.done["broadcast"] += 1
        if result.tobytes() != self._inputs[operation, contributors[root]].tobytes():
            raise Violation(f"{who}: {operation} did not bring what rank {root} had")

    def passed_barrier(
        self, who: str, operation: OperationId, contributors: tuple[PeerId, ...]
    ) -> None:
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

    def _look(self, entry: _Returned) -> None:
        if entry.buffer.tobytes() != entry.content:
            raise Violation(f"{entry.who}: {entry.what} was written after its call had returned")

    # -- membership ----------------------------------------------------------------------------

    def registered(self, peer: PeerId, host: str) -> None:
        """The master has given an id to the process on ``host``."""
        self._hosts[peer] = host

    def killed(self, host: str) -> None:
        """The process on ``host`` was killed."""
        self._killed.add(host)

    def removed(self, peer: PeerId, why: str) -> None:
        """The master has removed a peer."""
        cause = why.split(":")[0]
        if cause == RemovalCause.GOODBYE.name or self._hosts[peer] in self._killed:
            return
        long_stall = any(s.duration_ns >= LONG_STALL_NS for s in self._scenario.stalls)
        if cause in _BY_DEADLINE and not long_stall:
            raise Violation(f"peer {peer} was removed though nothing stood still: {why}")
        if self._scenario.undisturbed:
            raise Violation(f"peer {peer} was removed without a fault: {why}")
