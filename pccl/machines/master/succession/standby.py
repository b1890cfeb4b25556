"""Which run a standby may continue, and when it asks its masters about the run.

A standby learns a run id only from a master at an address that the operator named, after this
master has proven the token. Members cannot name a run to a standby. So a process that knows the
token cannot make a standby continue an older run, or a run that the process has invented.

A master may still give up a young run, so a young run does not replace a settled run. A standby
keeps its run as long as any of its masters names this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import messages as msg
from pccl.protocol.handshake.opening import NO_RUN, RUN_BYTES
from pccl.protocol.limits import TERM_MAX, Timing


@dataclass(slots=True)
class _Master:
    """A master that the standby asks."""

    name: str
    asked_ns: int | None = None
    is_waiting: bool = False
    says: msg.RunIs | None = None
    """The master's last answer; None if it gave none, or if the last question failed."""
    trouble: str = ""
    """Why ``says`` is None; empty if there was no question yet."""


class StandbyWatch:
    """What a standby knows of the run of its masters.

    Args:
        timing: the standby asks each master every ``heartbeat_s``. Without a run, it asks at every
            tick, because a master that dies before it has named its run has no successor.
        masters: the addresses of its masters, for logs, in order of preference.
        run: a run that the standby learnt before a restart; None if there is none.
        term: the term that it learnt with this run.
        vouched: the members that it learnt with this run.
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
        """The highest known term of a master of the run."""
        self._is_settled = run is not None
        self.vouched = vouched if run is not None else NOT_TOLD
        """The members of the run, as its master has named them."""
        self._sources = [_Master(name) for name in masters]
        self._interval_ns = timing.ns(timing.heartbeat_s)

    def due(self, now_ns: int) -> list[int]:
        """Return the masters to ask now: each answers or fails before it is asked again."""
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
        """Record a master's answer; return whether it changes what the standby knows."""
        source = self._sources[number]
        source.is_waiting = False
        if len(answer.run) != RUN_BYTES or answer.run == NO_RUN or not 0 < answer.term < TERM_MAX:
            source.says, source.trouble = None, "it named no valid run"
            return False
        source.says, source.trouble = answer, ""
        changes = self._choose()
        return self._learn_members(answer) or changes

    def _learn_members(self, answer: msg.RunIs) -> bool:
        """Store the members that an answer names; return whether they are new."""
        known = self.vouched.version
        if answer.run != self.run or answer.members is None:
            return False
        if known is not None and answer.version <= known:
            return False  # a master has named the members of this roster already
        self.vouched = Vouched.of(answer.version, answer.members)
        return True

    def failed(self, number: int, reason: str) -> bool:
        """Record that a master did not answer; return whether the reason has changed.

        The run that it named before counts until another master names a different one.
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
        """Return why the standby can continue no run; empty if it knows its run."""
        if self.run is not None:
            return ""
        asked = [
            f"{source.name}: {source.trouble}" if source.trouble else source.name
            for source in self._sources
        ]
        return (
            "it is a standby, and continues no run until one of its masters has named the run: "
            f"{'; '.join(asked) or 'no master is configured'}"
        )
