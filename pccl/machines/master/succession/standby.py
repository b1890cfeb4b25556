"""Which run a standby may take up, and when it asks its masters for it.

A run id is learnt from a master that was dialled where the operator said that it listens, and that
has proven the token; never from a member. So whoever knows the token and invents a run, or is left
over from an older one, cannot make a standby take that up.

A master whose run is young may yet give it up, so what it says does not replace a run that was
settled. And a run stays the one to take up as long as any of several masters says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import messages as msg
from pccl.protocol.handshake import NO_RUN, RUN_BYTES
from pccl.protocol.limits import TERM_MAX, Timing


@dataclass(slots=True)
class _Master:
    """A master that is asked."""

    name: str
    asked_ns: int | None = None
    is_waiting: bool = False
    says: msg.RunIs | None = None
    """Its last answer; None: there was none, or it has stopped to answer since."""
    trouble: str = ""
    """Why not."""


class StandbyWatch:
    """What a standby knows of the run of its masters.

    Args:
        timing: it asks each of them every ``heartbeat_s``, and at every tick while it knows of no
            run: a master that dies before it has said which one it coordinates has no successor.
        masters: their addresses, for people; the first choice first.
        run: a run that was learnt before a restart; None: none was.
        term: the one that was learnt with it.
        vouched: the members that were learnt with it.
    """

    def __init__(
        self,
        timing: Timing,
        masters: Sequence[str],
        run: bytes | None = None,
        term: int = 0,
        vouched: Vouched = NOT_TOLD,
    ) -> None:
        self.run = run
        self.term = term
        """The highest that a master of it is known to have been in."""
        self._is_settled = run is not None
        self.vouched = vouched if run is not None else NOT_TOLD
        """The members of the run, as its master has named them."""
        self._sources = [_Master(name) for name in masters]
        self._interval_ns = timing.ns(timing.heartbeat_s)

    def due(self, now_ns: int) -> list[int]:
        """Which masters to ask now: each answers, or is given up, before it is asked again."""
        interval_ns = 0 if self.run is None else self._interval_ns
        numbers: list[int] = []
        for number, source in enumerate(self._sources):
            asked_ns = source.asked_ns
            if source.is_waiting or (asked_ns is not None and now_ns - asked_ns < interval_ns):
                continue
            source.asked_ns, source.is_waiting = now_ns, True
            numbers.append(number)
        return numbers

    def answered(self, number: int, answer: msg.RunIs) -> bool:
        """A master has answered; return whether that changes what is known."""
        source = self._sources[number]
        source.is_waiting = False
        if len(answer.run) != RUN_BYTES or answer.run == NO_RUN or not 0 < answer.term < TERM_MAX:
            source.says, source.trouble = None, "it coordinates no run"
            return False
        source.says, source.trouble = answer, ""
        changes = self._choose()
        return self._learn_members(answer) or changes

    def _learn_members(self, answer: msg.RunIs) -> bool:
        """Take over the members from an answer; return whether they are newer than the known."""
        known = self.vouched.version
        if answer.run != self.run or answer.members is None:
            return False
        if known is not None and answer.version <= known:
            return False  # another master has named them already
        self.vouched = Vouched.of(answer.version, answer.members)
        return True

    def failed(self, number: int, reason: str) -> bool:
        """A master was not reached, or is none; return whether that is another reason than before.

        What it has said before counts on, as long as no other one says otherwise.
        """
        source = self._sources[number]
        changed = source.trouble != reason
        source.is_waiting, source.says, source.trouble = False, None, reason
        return changed

    def _choose(self) -> bool:
        before = (self.run, self.term, self._is_settled)
        said = [source.says for source in self._sources if source.says is not None]
        same = [answer for answer in said if answer.run == self.run]
        others = [answer for answer in said if answer.settled] or said
        if same:
            self.term = max(self.term, *(answer.term for answer in same))
            self._is_settled |= any(answer.settled for answer in same)
        elif others and (others[0].settled or not self._is_settled):
            self.run, self.term, self.vouched = others[0].run, others[0].term, NOT_TOLD
            self._is_settled = others[0].settled
        return (self.run, self.term, self._is_settled) != before

    def waits_for(self) -> str:
        """Why it can take up no run."""
        if self.run is not None:
            return ""
        asked = [
            f"{source.name}: {source.trouble}" if source.trouble else source.name
            for source in self._sources
        ]
        return (
            "it is a standby, and takes up no run before a master that it stands by for has said "
            f"which one that is: {'; '.join(asked) or 'no master is named'}"
        )
