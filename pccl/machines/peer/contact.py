"""One peer's contact with its master: whose turn it is, how long it is silent, what to send.

Deadlines count from the last word of the master, without the time in which this process slept.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.machines.peer import events as ev
from pccl.machines.ticks import Ticks
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.checksum import DamagedData
from pccl.protocol.handshake import AnotherRun, HandshakeRefused
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_MS, NS_PER_S

SAY_AFTER_S, SAY_EVERY_S = 1, 10
"""That a member looks for its master. At the end of a run it may be gone a moment before."""


class MasterTurns:
    """Which master a peer dials: the one that has known it last, then each of the others.

    Args:
        masters: where a master may listen, the first choice first.
    """

    def __init__(self, masters: Sequence[msg.MasterAddress]) -> None:
        self.masters = list(masters)
        self._current = 0
        """The master that has known us last."""
        self._failures = 0
        """Attempts since then that came to nothing: each time it is another one's turn."""
        self._is_damaged = False
        """Whether the last greeting was damaged on the way, and no other one right before it."""
        self._lost_ns = self._said_ns = 0
        """When the connection was lost, and when that was said last; 0: it is there."""

    @property
    def turn(self) -> msg.MasterAddress:
        """The master whose turn it is."""
        order = [self._current, *(i for i in range(len(self.masters)) if i != self._current)]
        return self.masters[order[self._failures % len(order)]]

    @property
    def _all_had_their_turn(self) -> bool:
        return self._failures % len(self.masters) == 0

    def failed(self, error: errors.PCCLError, *, registered: bool) -> bool:
        """No connection was made; return whether it is of no use to try on.

        A newcomer is told at once what to mend. A member tries on until its master counts as lost:
        whoever answers instead has proven nothing, unless he knows the token.
        """
        # One damaged greeting says nothing of the master that it was for: dial that one again.
        self._is_damaged = isinstance(error, DamagedData) and not self._is_damaged
        self._failures += not self._is_damaged
        is_final = isinstance(error, AnotherRun if registered else HandshakeRefused)
        return is_final and self._all_had_their_turn

    def refused(self, refusal: msg.Refused, *, registered: bool) -> bool:
        """A master wants nothing of this peer; return whether another one is asked instead.

        When all have had their turn, only a newcomer tries on: a standby's run may be coming to it.
        """
        if refusal.cause is not None:
            return False
        self._failures += 1
        return not self._all_had_their_turn or (not registered and len(self.masters) > 1)

    def follow(self, master: msg.MasterAddress, standbys: tuple[msg.MasterAddress, ...]) -> None:
        """A master has known this peer; it says where others may be, should it be gone."""
        self.masters += dict.fromkeys(one for one in standbys if one not in self.masters)
        self._current, self._failures = self.masters.index(master), 0

    def lost(self, now_ns: int) -> None:
        """The connection is gone."""
        self._failures, self._lost_ns = 0, now_ns

    def found(self) -> bool:
        """There is a connection; return whether people were told that there was none."""
        was_said = self._said_ns > 0
        self._lost_ns = self._said_ns = 0
        return was_said

    def lost_s_to_say(self, now_ns: int) -> int | None:
        """For how long a member has been looking for a master, when it is time to say so."""
        after_ns, said_ns = SAY_AFTER_S * NS_PER_S, self._lost_ns
        if self._said_ns:
            after_ns, said_ns = SAY_EVERY_S * NS_PER_S, self._said_ns
        if not self._lost_ns or now_ns < said_ns + after_ns:
            return None
        self._said_ns = now_ns
        return (now_ns - self._lost_ns) // NS_PER_S


class MasterLiveness:
    """Whether the master is connected, and whether it is silent for too long. State only.

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
        self._ticks = Ticks(timing.ns(timing.tick_s), now_ns)
        self._redial_ns = self._redial_min_ns = timing.ns(timing.redial_min_s)

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
            self._redial_ns = self._redial_min_ns

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

    def tick(self, now_ns: int, busy_ns: int) -> bool:
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


class PeerOutbox:
    """What the parts of one peer want done, in order.

    Args:
        contact: whether a message can reach the master.
        effects: of the event that is being handled.
    """

    def __init__(self, contact: MasterLiveness, effects: list[ev.PeerEffect]) -> None:
        self._contact = contact
        self._effects = effects

    @property
    def reaches_master(self) -> bool:
        """Whether there is a connection to the master."""
        return self._contact.connected

    def add(self, *effects: ev.PeerEffect) -> None:
        """Do these next."""
        self._effects.extend(effects)

    def send(self, message: msg.PeerMessage) -> None:
        """Send to the master, or leave it to the repetition after the reconnect."""
        if self._contact.connected:
            self._effects.append(ev.Send(message))

    def return_(
        self, call: int, value: ev.ReduceResult | ev.SyncResult | bool | None = None
    ) -> None:
        """A call returns."""
        self._effects.append(ev.ReturnCall(call, value))

    def raise_(self, call: int, error: errors.PCCLError | ValueError) -> None:
        """A call raises."""
        self._effects.append(ev.RaiseCall(call, error))

    def report_wait(self, text: str, waited_s: int) -> None:
        """A call has been waiting for others for a while; empty ``text``: it has no caller."""
        if text:
            self._effects.append(ev.ReportWait(text, waited_s))
