"""One peer's contact with the master: is it connected, when was the master heard, what it is owed.

State only. Deadlines count from the last word of the master, without the time in which this process
slept.
"""

from __future__ import annotations

from pccl.machines.ticks import Ticks
from pccl.protocol import messages as msg
from pccl.protocol.limits import ACKNOWLEDGED_BATCH_MAX, PROGRESS_BATCH_MAX, Timing
from pccl.protocol.types import NS_PER_MS, OperationId, RoundId


class MasterContact:
    """The control connection as one peer knows it.

    Args:
        timing: deadlines.
        now_ns: the present.
    """

    def __init__(self, timing: Timing, now_ns: int) -> None:
        self.connected = False
        self.heard_ns = now_ns
        """When the master was last heard."""
        self.resumed = False
        """Whether the master on the present connection coordinates the run with this peer in it."""
        self._served_ns = now_ns
        """When such a master was last heard."""
        self._opened_ns = now_ns
        self._clock_ahead_ms: int | None = None
        """The master's clock less ours; None: it has not told on this connection."""
        self._timing = timing
        self._beat_ns = now_ns
        self._ticks = Ticks(timing.ns(timing.tick_s), now_ns)
        self._redial_ns = timing.ns(timing.redial_min_s)
        self._operations: list[OperationId] = []
        self._rounds: list[RoundId] = []
        self._blocked = False
        """What the master was told last."""
        self._stored_place = 0
        """Up to where everything is stored here that the master followed has proposed."""

    def opened(self, now_ns: int) -> None:
        """There is a connection. That is no word from the master: it may be frozen behind it."""
        self.connected = True
        self.resumed = False
        self._opened_ns = now_ns
        self._clock_ahead_ms = None  # it may be another master's

    def begins(self, now_ns: int) -> None:
        """The time to wait for a master begins now."""
        self.heard_ns = self._served_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """The master has said something."""
        self.heard_ns = now_ns
        if self.resumed:
            self._served_ns = now_ns
            self._redial_ns = self._timing.ns(self._timing.redial_min_s)

    def served(self, now_ns: int) -> None:
        """The master has registered this peer, or knows it again."""
        self.resumed = True
        self.heard(now_ns)

    def note_clock(self, now_ms: int, now_ns: int) -> None:
        """The master has told its time. What took longest to arrive says least, so most counts."""
        ahead_ms = now_ms - now_ns // NS_PER_MS
        known_ms = self._clock_ahead_ms
        self._clock_ahead_ms = ahead_ms if known_ms is None else max(ahead_ms, known_ms)

    def ago_s(self, refused: msg.Refused, now_ns: int) -> float:
        """How long ago this peer was removed, also if it sleeps and reads of it much later."""
        present_ms = refused.now_ms
        if self._clock_ahead_ms is not None:
            present_ms = max(present_ms, now_ns // NS_PER_MS + self._clock_ahead_ms)
        return max(0, present_ms - refused.removed_ms) / 1000

    def is_silent(self, now_ns: int, *, known: bool) -> bool:
        """Whether the present connection has brought nothing for the whole deadline.

        Whoever is not ``known`` to be a master has less time: a master speaks at once.
        """
        since_ns = max(self.heard_ns, self._opened_ns)
        patience_s = self._timing.deadline_s if known else self._timing.dial_s
        return now_ns - since_ns >= self._timing.ns(patience_s)

    def is_lost(self, now_ns: int) -> bool:
        """Whether no master of the run was heard for so long that it is lost."""
        return self.unserved_ns(now_ns) >= self._timing.ns(self._timing.master_lost_s)

    def unserved_ns(self, now_ns: int) -> int:
        """For how long no master of the run was heard."""
        return now_ns - self._served_ns

    def redial_delay_ns(self) -> int:
        """How long to wait before the next attempt to connect; grows with every attempt."""
        delay_ns = self._redial_ns
        self._redial_ns = min(2 * delay_ns, self._timing.ns(self._timing.redial_max_s))
        return delay_ns

    def may_judge(self, now_ns: int, busy_ns: int) -> bool:
        """A tick has come: shift the deadlines if this process slept.

        Returns:
            False if the master may have spoken, and this process has not read it yet.
        """
        tick = self._ticks.note(now_ns, busy_ns)
        if tick.slept_ns:
            self.heard_ns = min(self.heard_ns + tick.slept_ns, now_ns)
            self._served_ns = min(self._served_ns + tick.slept_ns, now_ns)
            self._opened_ns = min(self._opened_ns + tick.slept_ns, now_ns)
        return tick.may_judge

    def is_beat_due(self, now_ns: int, *, blocked: bool) -> bool:
        """Whether it is time for a sign of life, or there is news about the callers."""
        due = now_ns - self._beat_ns >= self._timing.ns(self._timing.heartbeat_s)
        return due or blocked != self._blocked

    # -- acknowledgements ----------------------------------------------------------------------

    def acknowledge(self, final: OperationId | RoundId) -> None:
        """An outcome or an answer has arrived; the next heartbeat says so."""
        if isinstance(final, RoundId):
            self._rounds.append(final)
        else:
            self._operations.append(final)

    def stored(self, place: int) -> None:
        """Everything that the master has proposed is stored here up to ``place``."""
        self._stored_place = max(self._stored_place, place)

    def follows_another(self) -> None:
        """Another master is followed, or the same one in another term: nothing of it is stored."""
        self._stored_place = 0

    def is_batch_full(self) -> bool:
        """Whether there is so much to acknowledge that it should not wait."""
        return len(self._operations) + len(self._rounds) >= ACKNOWLEDGED_BATCH_MAX

    def beat(
        self,
        progress: tuple[msg.Progress, ...],
        now_ns: int,
        roster_version: int,
        term: int,
        *,
        blocked: bool,
    ) -> list[msg.Heartbeat]:
        """The sign of life to send now; several if it has much to say."""
        self._beat_ns = now_ns
        self._blocked = blocked
        return self.batch(roster_version, term, progress)

    def batch(
        self, roster_version: int, term: int, progress: tuple[msg.Progress, ...] = ()
    ) -> list[msg.Heartbeat]:
        """All acknowledgements so far, ahead of the next sign of life (which is sent as well)."""
        operations, self._operations = tuple(self._operations), []
        rounds, self._rounds = tuple(self._rounds), []
        size, acknowledged = PROGRESS_BATCH_MAX, ACKNOWLEDGED_BATCH_MAX
        longest = max(len(operations), len(rounds))
        count = max(1, -(-len(progress) // size), -(-longest // acknowledged))
        return [
            msg.Heartbeat(
                progress[i * size : (i + 1) * size],
                operations[i * acknowledged : (i + 1) * acknowledged],
                rounds[i * acknowledged : (i + 1) * acknowledged],
                self._blocked,
                roster_version,
                term,
                self._stored_place,
            )
            for i in range(count)
        ]
