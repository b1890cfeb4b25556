"""The rounds that one peer has requested: at most one of each kind at a time.

State only. A caller may leave a round, but the request stands: the next call of the kind takes the
round over, also when its answer is here already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pccl.protocol import messages as msg
from pccl.protocol.types import RoundId, RoundKind


@dataclass(slots=True)
class OpenRound:
    """A round that was requested and whose answer no caller has taken yet."""

    id: RoundId
    call: int | None
    """None once the caller has left; the next call of the kind takes it over."""
    answer: msg.RoundClosed | None = None
    waits_for: str = ""
    """Whom it waits for, as far as the master has said."""


class OpenRounds:
    """All requested rounds of one peer, and how many of each kind the run has had."""

    def __init__(self) -> None:
        self._open: dict[RoundKind, OpenRound] = {}
        self._counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._last: dict[RoundKind, OpenRound] = {}
        """The last round of each kind whose answer a caller has taken."""

    def __iter__(self) -> Iterator[OpenRound]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def start_from(self, counts: tuple[msg.RoundCount, ...]) -> None:
        """So many rounds were before this peer was admitted."""
        self._counts.update({count.kind: count.n for count in counts})

    def counts(self) -> tuple[msg.RoundCount, ...]:
        """How many rounds of each kind were closed, as far as this peer knows."""
        return tuple(msg.RoundCount(kind, n) for kind, n in self._counts.items())

    def get(self, kind: RoundKind) -> OpenRound | None:
        """The open round of a kind, if there is one."""
        return self._open.get(kind)

    def open(self, kind: RoundKind, call: int) -> OpenRound:
        """Request the present round of a kind."""
        current = self._open[kind] = OpenRound(RoundId(kind, self._counts[kind]), call)
        return current

    def answer(self, message: msg.RoundClosed) -> OpenRound | None:
        """An answer has arrived; None if nobody waits for it (told twice)."""
        current = self._open.get(message.round.kind)
        if current is None or current.id != message.round or current.answer is not None:
            return None
        current.answer = message
        return current

    def note_wait(self, message: msg.RoundWaits) -> str:
        """Remember whom a round waits for; return what to report, if there is a caller."""
        current = self._open.get(message.round.kind)
        if current is None or current.id != message.round or current.call is None:
            return ""
        current.waits_for = message.whom
        return f"{current.id.kind.call_name} waits for {message.whom}"

    def skip(self, closed: RoundId) -> None:
        """A round is closed: never request it, or an older one, (again)."""
        self._counts[closed.kind] = max(self._counts[closed.kind], closed.n + 1)

    def close(self, current: OpenRound) -> None:
        """A caller has taken the answer: the next call of the kind opens the next round."""
        self._last[current.id.kind] = self._open.pop(current.id.kind)
        self.skip(current.id)

    def put_back(self, kind: RoundKind) -> bool:
        """The answer that was taken last was not noticed: keep it for the next call.

        Returns False if there is none, because no round of the kind was needed.
        """
        last = self._last.pop(kind, None)
        if last is None:
            return False
        if kind not in self._open:
            last.call = None
            self._open[kind] = last
        return True

    def forget_last(self, kind: RoundKind) -> None:
        """A call of the kind has returned without a round."""
        self._last.pop(kind, None)

    def clear(self) -> None:
        """This peer is no longer a part of the run."""
        self._open.clear()
        self._last.clear()
