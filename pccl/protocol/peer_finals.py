"""Outcomes and answers that one peer has been told, until everybody has them.

State only. If the master dies, whoever has seen one tells the next master, so that it stays the
same for all.
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.protocol import messages as msg


class SeenFinals:
    """By their place among everything that the run has decided."""

    def __init__(self) -> None:
        self._seen: dict[int, msg.OperationEnded | msg.RoundClosed] = {}
        self._settled = 0

    def __len__(self) -> int:
        return len(self._seen)

    def see(self, final: msg.OperationEnded | msg.RoundClosed) -> None:
        """The master has told this; again perhaps."""
        if final.sequence >= self._settled and final.sequence:
            self._seen[final.sequence] = final

    def settle(self, sequence: int) -> None:
        """Everybody has what was decided before this place."""
        if sequence <= self._settled:
            return
        self._settled = sequence
        self._seen = {place: final for place, final in self._seen.items() if place >= sequence}

    def report(self) -> Iterator[msg.KnownOutcome | msg.KnownAnswer]:
        """What another master has to know, in the order in which it was decided."""
        for _, final in sorted(self._seen.items()):
            if isinstance(final, msg.OperationEnded):
                yield msg.KnownOutcome(final)
            else:
                yield msg.KnownAnswer(final)

    def clear(self) -> None:
        """This peer is no longer a part of the run."""
        self._seen.clear()
        self._settled = 0
