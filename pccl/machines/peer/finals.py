"""Outcomes and answers that one peer was told, or has to store, until everybody has them.

State only. If the master dies, or cannot be reached, whoever knows one tells the next master, so
that it stays the same for all. What was only proposed is nobody's outcome yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected


@dataclass(frozen=True, slots=True)
class _Final:
    final: msg.OperationEnded | msg.RoundClosed
    told: bool
    """Whether it is the outcome; otherwise it may become that."""
    expected: Expected = NOTHING_EXPECTED


class SeenFinals:
    """By their place among everything that the run has decided."""

    def __init__(self) -> None:
        self._seen: dict[int, _Final] = {}
        self._settled = 0

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, final: msg.OperationEnded | msg.RoundClosed) -> None:
        """The master has told this; again perhaps."""
        known = self._seen.get(final.sequence)
        expected = known.expected if known is not None else NOTHING_EXPECTED
        self._keep(_Final(final, told=True, expected=expected))

    def store(self, final: msg.OperationEnded | msg.RoundClosed, expected: Expected) -> None:
        """The master has proposed this; it may have told it before."""
        known = self._seen.get(final.sequence)
        told = known is not None and known.told
        self._keep(_Final(final, told, expected))

    def _keep(self, final: _Final) -> None:
        place = final.final.sequence
        if place >= self._settled and place:
            self._seen[place] = final

    def settle(self, sequence: int) -> None:
        """Everybody has what was decided before this place."""
        if sequence <= self._settled:
            return
        self._settled = sequence
        self._seen = {place: final for place, final in self._seen.items() if place >= sequence}

    def report(self) -> Iterator[msg.KnownOutcome | msg.KnownAnswer]:
        """What another master has to know, in the order in which it was decided."""
        for _, known in sorted(self._seen.items(), key=lambda item: item[0]):
            if isinstance(known.final, msg.OperationEnded):
                yield msg.KnownOutcome(known.final, known.told, known.expected)
            else:
                yield msg.KnownAnswer(known.final, known.told)

    def clear(self) -> None:
        """This peer is no longer a part of the run."""
        self._seen.clear()
        self._settled = 0
