"""``GuardCheckers``: checks which contributions to guarded averages the master flags or excludes.

* The start of an operation flags the contributions that the rule of the guard flags, by an
  arithmetic of its own, and all members get the same start.
* The result of an operation reports that start. An excluded contribution has weight 0.
* A lie, values that are not finite although declared so, is in no committed average that a guard
  of such values protects. An operation is refused only for a lie, and names the liar.

A master that took over knows the norms of the last rounds only, or of none.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pccl.machines.peer.events import Post, ReduceCall, ReduceResult
from pccl.protocol.guards.contributions import (
    ContributionGuard,
    FlaggedContribution,
    GuardAction,
)
from pccl.protocol.messages import OperationEnded, OperationStarted
from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Array, Violation

_REFUSED = re.compile(r"values of peer (\d+) are not finite")
_TOLERANCE = 1e-9
"""Relative error of a limit."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a member said about its contribution, and whether its values are finite."""

    weight: float
    norm: float | None
    is_finite: bool

    @property
    def is_lie(self) -> bool:
        return self.norm is not None and not self.is_finite


@dataclass(slots=True)
class _Guarded:
    """A guarded operation."""

    guard: ContributionGuard
    ring: tuple[PeerId, ...]
    count: int
    declared: dict[PeerId, _Declared] = field(default_factory=dict[PeerId, _Declared])
    starts: list[OperationStarted] = field(default_factory=list[OperationStarted])
    """Its starts: one of each master that started it in another way."""
    is_committed: bool = False


class GuardCheckers:
    """Checks all guarded averages of one run.

    Args:
        done: counts of the run.
        excuses: reports what faults did to the master.
        may_part: whether the run has a standby.
    """

    def __init__(self, done: Counter[str], excuses: Excuses, *, may_part: bool) -> None:
        self._done = done
        self._excuses = excuses
        self._may_part = may_part
        self._operations: dict[InRun, _Guarded] = {}
        self._past: dict[tuple[bytes, int, int], list[tuple[int, list[float]]]] = defaultdict(list)
        """Run, group and tag -> elements and trusted norms of each committed round."""

    def posted(
        self, operation: InRun, peer: PeerId, post: Post, call: ReduceCall, content: Array
    ) -> None:
        """Record that ``peer`` began a guarded operation with ``content``."""
        asked = post.descriptor
        assert asked.guard is not None
        guarded = self._operations.get(operation)
        if guarded is None:
            guarded = self._operations[operation] = _Guarded(asked.guard, post.ring, asked.count)
        if len(post.ring) <= len(guarded.ring):  # the operation goes on with fewer members
            guarded.ring = post.ring
        is_finite = bool(np.isfinite(content.astype(np.float64)).all())
        guarded.declared[peer] = _Declared(call.weight, call.norm, is_finite)

    @property
    def _has_new_master(self) -> bool:
        return self._may_part or self._excuses.was_master_restarted

    # -- what the master decides -------------------------------------------------------------------

    def started(self, who: str, operation: InRun, start: OperationStarted) -> None:
        """Check the start of an operation that a member has received."""
        guarded = self._operations.get(operation)
        if guarded is None or start in guarded.starts:
            return
        if guarded.starts and not self._has_new_master:
            raise Violation(f"{who}: {operation} started as {start}, before as {guarded.starts}")
        if guarded.starts and len(start.weights) < len(guarded.ring):
            return  # a new master has not heard of all requests; members ignore such a start
        guarded.starts.append(start)
        parts = [guarded.declared[peer] for peer in guarded.ring]
        found = [_untrusted(guarded.guard, parts, past) for past in self._pasts(operation, guarded)]
        if not any(_are_equal(start.flagged, expected) for expected in found):
            raise Violation(f"{who}: {operation} flags {start.flagged}, not {found}, of {parts}")
        out = {one.rank for one in start.flagged if one.excluded}
        weights = [0.0 if rank in out else part.weight for rank, part in enumerate(parts)]
        if list(start.weights) != weights:
            raise Violation(f"{who}: {operation} has weights {start.weights}, not {weights}")
        self._done["flagged"] += len(start.flagged)
        self._done["excluded"] += len(out)

    def _pasts(self, operation: InRun, guarded: _Guarded) -> Iterator[list[float]]:
        """Yield the norms of earlier rounds that count; all that may count under a new master."""
        ran = operation.operation
        rounds: list[list[float]] = []
        for count, norms in reversed(self._past[operation.run, ran.group, ran.tag]):
            if count != guarded.count or len(rounds) == guarded.guard.rounds:
                break
            rounds.insert(0, norms)
        fewest = 0 if self._has_new_master else len(rounds)
        for last in range(fewest, len(rounds) + 1):
            yield [norm for norms in rounds[len(rounds) - last :] for norm in norms]

    def committed(self, operation: InRun) -> None:
        """Record that an operation was committed: its trusted norms count for the next ones."""
        guarded = self._operations.get(operation)
        if guarded is None or guarded.is_committed or not guarded.starts:
            return
        guarded.is_committed = True
        flagged = {one.rank for one in guarded.starts[-1].flagged}
        norms = [
            part.norm
            for rank, part in enumerate(guarded.declared[peer] for peer in guarded.ring)
            if part.norm is not None and part.weight and rank not in flagged
        ]
        if norms:
            ran = operation.operation
            self._past[operation.run, ran.group, ran.tag].append((guarded.count, norms))

    # -- what members get --------------------------------------------------------------------------

    def returned(
        self, who: str, operation: InRun, outcome: ReduceResult, result: Array, given: list[float]
    ) -> list[float]:
        """Check the report of a committed operation, and that no lie is in its result.

        Returns:
            The weights of the contributors, from their own weights ``given``.
        """
        guarded = self._operations.get(operation)
        if guarded is None:
            return given
        self._done["guarded"] += 1
        said = [(start.weights, start.flagged) for start in guarded.starts]
        if (outcome.weights, outcome.flagged) not in said:
            raise Violation(f"{who}: {operation} started as {guarded.starts}, but gave {outcome}")
        counts = [
            (peer, guarded.declared[peer])
            for peer, weight in zip(outcome.contributors, outcome.weights, strict=True)
            if weight
        ]
        # Beside values that may be infinite, nobody can tell a lie.
        protects = guarded.guard.not_finite and all(part.norm is not None for _, part in counts)
        for peer, part in counts:
            if protects and part.is_lie:
                raise Violation(f"{who}: {operation} averages values of peer {peer} that are a lie")
        excludes = guarded.guard.not_finite is GuardAction.EXCLUDE
        if excludes and not np.isfinite(result.astype(np.float64)).all():
            raise Violation(f"{who}: {operation} has a result that is not finite")
        return list(outcome.weights)

    def refused(self, who: str, run: bytes, ended: OperationEnded) -> PeerId | None:
        """Check an operation that ended because of a lie; return the liar. None: no such end."""
        found = _REFUSED.search(ended.reason)
        if found is None or ended.abort is None:
            return None
        operation, liar = InRun(run, ended.operation), PeerId(int(found[1]))
        guarded = self._operations[operation]
        part = guarded.declared.get(liar)
        if part is None or not (part.is_lie and part.weight and guarded.guard.not_finite):
            raise Violation(f"{who}: {operation} names peer {liar}, which told no lie: {part}")
        self._done["liar named"] += 1
        return liar


def _untrusted(
    guard: ContributionGuard, parts: Sequence[_Declared], past: list[float]
) -> list[FlaggedContribution]:
    """Return the contributions that the guard must flag."""
    own = [part.norm for part in parts if part.weight and part.norm is not None]
    limit = _limit(guard, np.array([*past, *own]))
    if 2 * sum(norm > limit for norm in own) > len(own):
        limit = _limit(guard, np.array(own))
    found: list[FlaggedContribution] = []
    for rank, part in enumerate(parts):
        is_large = part.norm is not None and part.norm > limit
        action = guard.not_finite if part.norm is None else guard.outliers
        if part.weight and action and (is_large or part.norm is None):
            is_out = action is GuardAction.EXCLUDE
            found.append(FlaggedContribution(rank, part.norm, limit if is_large else None, is_out))
    return found


def _limit(guard: ContributionGuard, norms: npt.NDArray[np.float64]) -> float:
    """Return the largest norm that is no outlier."""
    middle = float(np.median(norms)) if len(norms) >= 5 else 0.0
    spread = max(1.4826 * float(np.median(np.abs(norms - middle))), 0.05 * middle) if middle else 0
    return middle + guard.deviations * spread if middle else float("inf")


def _are_equal(
    flagged: Sequence[FlaggedContribution], expected: Sequence[FlaggedContribution]
) -> bool:
    if len(flagged) != len(expected):
        return False
    for one, other in zip(flagged, expected, strict=True):
        if (one.rank, one.norm, one.excluded) != (other.rank, other.norm, other.excluded):
            return False
        if one.limit is None or other.limit is None:
            if one.limit is not other.limit:
                return False
        elif abs(one.limit - other.limit) > _TOLERANCE * other.limit:
            return False
    return True
