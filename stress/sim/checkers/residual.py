"""``ResidualCheckers``: checks that members pay back the rounding error of rounds once.

* The result of a round is the sum of its contributions, plus the residuals of the contributors
  before it, minus their residuals after it. With decay, a process keeps a part of its residual.
* A residual advances when its process sees the round committed, and otherwise stays, also if the
  round went on without the process. A process forgets its residual if the ledger contradicts what
  it saw.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Violation

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

_TOLERANCE = 2.0**-18
"""Error of float32 arithmetic, relative to the largest value; residuals are far larger."""


@dataclass(slots=True)
class _Account:
    """The residual of one fragment of one process."""

    owed: Floats | None = None
    """Residual after the last round that the process saw committed; None: no residual."""
    is_void: bool = False
    """Whether ``owed`` is void, because the last round did not end as the process saw."""
    may_be_void: bool = False
    """Whether ``owed`` may be void, because the run lacks rounds that the process saw."""


@dataclass(slots=True)
class _Round:
    """A committed round."""

    result: Wide
    weight: float
    """Mean weight of a contributor."""
    size: float
    """Largest value of the result, and of the residuals in it."""
    missing: set[PeerId]
    """Contributors with work whose new residual is not known yet."""
    changes: list[Wide] = field(default_factory=list[Wide])


class ResidualCheckers:
    """Checks the residuals of every compressed round.

    Args:
        done: counts of the run.
        decay: share of an error that a process keeps.
        is_gathered: whether a process rounds only its own contribution.
    """

    def __init__(
        self, done: Counter[str], decay: float = 1.0, *, is_gathered: bool = False
    ) -> None:
        self._done = done
        self._decay = decay
        self._is_gathered = is_gathered
        self._accounts: dict[tuple[int, int], _Account] = {}
        """Axis and fragment -> residual."""
        self._seen: dict[tuple[int, int], dict[int, bool]] = {}
        """Axis and fragment -> number of a round -> whether the process saw it committed."""
        self._rounds: dict[InRun, _Round] = {}
        self._axes: dict[tuple[bytes, PeerId], int] = {}
        """Run and id -> axis of the process."""
        self._owed: dict[InRun, list[Wide | None]] = {}
        self._carried: dict[InRun, Wide | float] = {}

    def begins(
        self,
        who: str,
        member: tuple[bytes, PeerId],
        axis: int,
        fragment: int,
        number: int,
        owed: Floats | None,
    ) -> None:
        """Check the residual ``owed`` that a process, ``member``, brings into a round."""
        self._axes[member] = axis
        self._seen.setdefault((axis, fragment), {})[number] = False
        account = self._account(axis, fragment)
        is_void = account.is_void or (account.may_be_void and owed is None)
        expected = None if is_void else account.owed
        if not _are_equal(owed, expected):
            words = "may have been added already" if account.is_void else "is wrong"
            raise Violation(f"{who}: residual {words} in round {number}: {owed}, not {expected}")
        account.owed, account.is_void, account.may_be_void = owed, False, False

    def owed(
        self, operation: InRun, fragment: int, parts: dict[PeerId, tuple[Floats, float]]
    ) -> list[Wide | None]:
        """Return the residual that each contributor brought into a round, in their order.

        Call this before ``returned``.

        Args:
            operation: reduce of the round.
            fragment: fragment of the round.
            parts: input and weight of each contributor; zeros if it was excluded.
        """
        if operation not in self._owed:
            owed: list[Wide | None] = []
            for peer, (part, weight) in parts.items():
                pays = weight and np.any(part)
                axis = self._axes[operation.run, peer] if pays else None
                own = None if axis is None else self._account(axis, fragment).owed
                owed.append(None if own is None else own.astype(np.float64))
            self._owed[operation] = owed
            mean = sum(weight for _, weight in parts.values()) / len(parts)
            self._carried[operation] = mean * sum((one for one in owed if one is not None), start=0)
        return self._owed[operation]

    def carried(self, operation: InRun) -> Wide | float:
        """Return what residuals of earlier rounds add to the total of a round.

        A residual is an error of an average. If the sum of the weights was much smaller then, it
        can add more than 1 to the total of this round. If no member has the result yet, return 0.
        """
        return self._carried.get(operation, 0.0)

    def failed(self, who: str, axis: int, fragment: int, owed: Floats | None) -> None:
        """Check that a round that the process did not see committed left its residual unchanged."""
        if not _are_equal(owed, self._account(axis, fragment).owed):
            raise Violation(f"{who}: a round that it did not see committed changed its residual")

    def missed(self, who: str, axis: int, fragment: int, number: int, owed: Floats | None) -> None:
        """Check that a round that went on without the process left its residual unchanged."""
        del self._seen[axis, fragment][number]
        if not _are_equal(owed, self._account(axis, fragment).owed):
            raise Violation(f"{who}: a round that went on without it changed its residual")
        self._done["residual kept in a missed round"] += owed is not None

    def alone(self, axis: int, fragment: int, number: int) -> None:
        """Record a round of a process that was alone, and applied its work without rounding."""
        self._seen.setdefault((axis, fragment), {})[number] = True

    def returned(
        self,
        who: str,
        axis: int,
        fragment: int,
        number: int,
        operation: InRun,
        peer: PeerId,
        parts: dict[PeerId, tuple[Floats, float]],
        total: Wide,
        owed: Floats | None,
    ) -> None:
        """Check the residual of a process that saw a round committed.

        Args:
            who: name of the process.
            axis: its axis.
            fragment: fragment of the round.
            number: number of the round.
            operation: reduce of the round.
            peer: id of the process in it.
            parts: input and weight of each contributor; zeros if it was excluded.
            total: the average times the sum of the weights.
            owed: new residual of the process.
        """
        account = self._account(axis, fragment)
        before, after = _wide(account.owed, len(total)), _wide(owed, len(total))
        pays = bool(parts[peer][1]) and bool(np.any(parts[peer][0]))
        is_void = account.is_void or account.may_be_void
        may_differ = pays or is_void or not self._is_gathered  # others encode partial results, too
        if not may_differ and not np.array_equal(before, after):
            raise Violation(f"{who}: round {number} without its work changed its residual")
        change = before - after / (self._decay if pays else 1.0)
        if number in self._seen.get((axis, fragment), {}):
            self._seen[axis, fragment][number] = bool(parts[peer][1])
        account.owed = owed
        known = self._rounds.get(operation)
        if known is None:
            exact = sum(
                (part.astype(np.float64) * weight for part, weight in parts.values()),
                start=np.zeros(len(total)),
            )
            mean = sum(weight for _, weight in parts.values()) / len(parts)
            payers = {one for one, (part, weight) in parts.items() if weight and np.any(part)}
            size = float(np.abs(total).max(initial=1.0))
            known = self._rounds[operation] = _Round(total - exact, mean, size, payers)
        is_awaited = peer in known.missing
        known.missing.discard(peer)
        known.changes.append(change)
        owes = float(np.abs([before, after]).max(initial=0.0))
        known.size = max(known.size, known.weight * owes)
        # A process without work has no residual, and its rounding errors for others are lost.
        all_pay = self._is_gathered or all(np.any(part) for part, _ in parts.values())
        if is_awaited and not known.missing and all_pay:
            self._check(who, operation, known)

    def _check(self, who: str, operation: InRun, known: _Round) -> None:
        made_good = known.weight * sum(known.changes, start=np.zeros(len(known.result)))
        off = float(np.abs(known.result - made_good).max(initial=0.0))
        if off > _TOLERANCE * known.size * len(known.changes):
            raise Violation(f"{who}: {off} of {operation} is in neither result nor residuals")
        self._done["residuals checked"] += 1

    def settled(self, axis: int, fragment: int, applied: dict[int, bool], *, gone: bool) -> None:
        """Record that a process has returned to the run.

        Args:
            axis: its axis.
            fragment: the fragment.
            applied: number of a round that it had not merged -> whether its work is in the run.
            gone: whether the run lacks rounds that the process had.
        """
        seen = self._seen.pop((axis, fragment), {})
        account = self._account(axis, fragment)
        wrong = [n for n, is_applied in applied.items() if seen.get(n, is_applied) != is_applied]
        if wrong:
            self._done["residual void"] += account.owed is not None
            account.is_void = True
        account.may_be_void |= gone

    def _account(self, axis: int, fragment: int) -> _Account:
        return self._accounts.setdefault((axis, fragment), _Account())


def _wide(owed: Floats | None, count: int) -> Wide:
    return np.zeros(count) if owed is None else owed.astype(np.float64)


def _are_equal(a: Floats | None, b: Floats | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.tobytes() == b.tobytes()
