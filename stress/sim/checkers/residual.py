"""What compression leaves out of rounds is made good once, written apart from the code it checks.

* What a round has brought is what its contributors have put in, and what they had owed before it,
  less what each of them owes after it.
* Nobody owes anything else in its next round: residuals advance when a round is committed, stay
  when it is not, and are forgotten by who was told something else at first, or nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.outcomes import InRun, Violation

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

_TOLERANCE = 2.0**-18
"""Of float32 arithmetic, as a share of the largest value; a residual is larger by far."""


@dataclass(slots=True)
class _Account:
    """One fragment of one process."""

    owed: Floats | None = None
    """After the last round that it has seen committed; None: nothing."""
    is_void: bool = False
    """Whether that is not what it owes: the last round has ended otherwise than it had seen."""
    may_be_void: bool = False
    """Whether it may have been forgotten: rounds that it had seen are gone with their run."""


@dataclass(slots=True)
class _Round:
    """What is known of one that is committed."""

    result: Wide
    weight: float
    """Of an average contributor."""
    missing: set[PeerId]
    """Who has not said yet what it owes."""
    changes: list[Wide] = field(default_factory=list[Wide])


class ResidualCheckers:
    """Hears of every round that is compressed.

    Args:
        done: counts what was checked.
    """

    def __init__(self, done: Counter[str]) -> None:
        self._done = done
        self._accounts: dict[tuple[int, int], _Account] = {}
        """By axis and fragment."""
        self._seen: dict[tuple[int, int], dict[int, bool]] = {}
        """Likewise, by number of the round: whether it was seen to be committed."""
        self._rounds: dict[InRun, _Round] = {}

    def begins(self, who: str, axis: int, fragment: int, number: int, owed: Floats | None) -> None:
        """A process puts work into a round, and this is what it owes from before."""
        self._seen.setdefault((axis, fragment), {})[number] = False
        account = self._account(axis, fragment)
        is_void = account.is_void or (account.may_be_void and owed is None)
        expected = None if is_void else account.owed
        if not _are_equal(owed, expected):
            words = "what may have been paid" if account.is_void else "not what was left out last"
            raise Violation(f"{who}: it owes {words} in round {number}: {owed} and not {expected}")
        account.owed, account.is_void, account.may_be_void = owed, False, False

    def failed(self, who: str, axis: int, fragment: int, owed: Floats | None) -> None:
        """It has not seen the round committed, and owes this."""
        if not _are_equal(owed, self._account(axis, fragment).owed):
            raise Violation(f"{who}: what it owed was changed by a round that it has not seen end")

    def alone(self, axis: int, fragment: int, number: int) -> None:
        """There was nobody to reduce with: the work is applied as it is."""
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
        """It has seen the round committed, and owes this now.

        Args:
            who: has.
            axis: its places.
            fragment: of the round.
            number: of the round.
            operation: its reduce.
            peer: its id there.
            parts: what each contributor has put in, and its weight.
            total: the average times all weights.
            owed: what it owes.
        """
        account = self._account(axis, fragment)
        change = _wide(account.owed, len(total)) - _wide(owed, len(total))
        if number in self._seen.get((axis, fragment), {}):
            self._seen[axis, fragment][number] = True
        account.owed = owed
        known = self._rounds.get(operation)
        if known is None:
            exact = sum(
                (part.astype(np.float64) * weight for part, weight in parts.values()),
                start=np.zeros(len(total)),
            )
            mean = sum(weight for _, weight in parts.values()) / len(parts)
            known = self._rounds[operation] = _Round(total - exact, mean, set(parts))
        known.missing.discard(peer)
        known.changes.append(change)
        # Who has done nothing owes nothing either: what it has rounded for others is lost.
        all_pay = all(np.any(part) for part, _ in parts.values())
        if not known.missing and all_pay:
            self._check(who, operation, known, float(np.abs(total).max(initial=1.0)))

    def _check(self, who: str, operation: InRun, known: _Round, size: float) -> None:
        made_good = known.weight * sum(known.changes, start=np.zeros(len(known.result)))
        off = float(np.abs(known.result - made_good).max(initial=0.0))
        if off > _TOLERANCE * size * len(known.changes):
            raise Violation(f"{who}: {off} of {operation} is neither in the result nor owed")
        self._done["residuals checked"] += 1

    def settled(self, axis: int, fragment: int, applied: dict[int, bool], *, gone: bool) -> None:
        """A process is back in the run.

        Args:
            axis: its places.
            fragment: which.
            applied: of rounds that it had not merged, whether its work is in the run.
            gone: whether the run lacks rounds that it had.
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
