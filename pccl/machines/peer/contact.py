"""The contact of one peer with its master: which master to dial, its silence, messages to it.

Deadlines count from the last message of the master, less the time that this process slept.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.machines.peer import events as ev
from pccl.machines.ticks import Ticks
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.checksum import DamagedData
from pccl.protocol.handshake.exchange import AnotherRun, HandshakeRefused
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_MS
from pccl.telemetry.clocks import ClockSamples


class MasterTurns:
    """Which master a peer dials: the last one that knew this peer, then the other masters in turn.

    Args:
        masters: addresses at which a master may listen, the first choice first.
    """

    def __init__(self, masters: Sequence[msg.MasterAddress]) -> None:
        self.masters = list(masters)
        self._current = 0
        """Index of the last master that knew this peer."""
        self._failures = 0
        """Failed attempts since the last connection; each passes the turn to the next master."""
        self._is_spared = False
        """Whether the last greeting was cut off or damaged, and the one before it was not."""

    @property
    def turn(self) -> msg.MasterAddress:
        """The master whose turn it is."""
        order = [self._current, *(i for i in range(len(self.masters)) if i != self._current)]
        return self.masters[order[self._failures % len(order)]]

    @property
    def _all_had_their_turn(self) -> bool:
        return self._failures % len(self.masters) == 0

    def failed(self, error: errors.PCCLError, *, registered: bool, cut_off: bool) -> bool:
        """Record a failed attempt to connect; return whether further attempts are useless.

        ``cut_off``: the master had accepted the connection, which then broke, without a timeout.

        A newcomer learns at once what to fix. A member tries until its master counts as lost,
        because a process that answers instead proves nothing unless it knows the token.
        """
        # A greeting that is cut off, or damaged, says little about its master: dial it again, once.
        says_little = cut_off or isinstance(error, DamagedData)
        self._is_spared = says_little and not self._is_spared
        self._failures += not self._is_spared
        is_final = isinstance(error, AnotherRun if registered else HandshakeRefused)
        return is_final and self._all_had_their_turn

    def refused(self, refusal: msg.Refused, *, registered: bool) -> bool:
        """Record that a master refused this peer; return whether to ask another master instead.

        If all of several masters refuse, only a newcomer asks again: a standby may become master.
        """
        if refusal.cause is not None:
            return False
        self._failures += 1
        return not self._all_had_their_turn or (not registered and len(self.masters) > 1)

    def follow(self, master: msg.MasterAddress, standbys: tuple[msg.MasterAddress, ...]) -> None:
        """Record that ``master`` knows this peer, and the addresses of the standbys it names."""
        self.masters += dict.fromkeys(one for one in standbys if one not in self.masters)
        self._current, self._failures = self.masters.index(master), 0

    def lost(self) -> None:
        """Record that the connection was lost."""
        self._failures = 0


class MasterLiveness:
    """Whether the master is connected, and for how long it has been silent. State only.

    Args:
        timing: deadlines.
        now_ns: current time.
    """

    def __init__(self, timing: Timing, now_ns: int) -> None:
        self.connected = False
        self.heard_ns = now_ns
        """When the last message of a master arrived."""
        self.resumed = False
        """Whether the connected master coordinates the run with this peer in it."""
        self.clocks = ClockSamples()
        self._served_ns = now_ns
        """When the last message arrived from a master that coordinates the run with this peer."""
        self._opened_ns = now_ns
        self._clock_ahead_ms: int | None = None
        """The master's clock less this peer's; None: unknown on this connection."""
        self._timing = timing
        self._ticks = Ticks(timing.ns(timing.tick_s), now_ns)
        self._redial_ns = self._redial_min_ns = timing.ns(timing.redial_min_s)

    def opened(self, now_ns: int) -> None:
        """Record a new connection. It does not count as a message: the master may be frozen."""
        self.connected = True
        self.resumed = False
        self._opened_ns = now_ns
        self._clock_ahead_ms = None  # it may be another master
        self.clocks.reset()

    def begins(self, now_ns: int) -> None:
        """Restart the time limit for finding a master."""
        self.heard_ns = self._served_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """Record a message from the master."""
        self.heard_ns = now_ns
        if self.resumed:
            self._served_ns = now_ns
            self._redial_ns = self._redial_min_ns

    def served(self, now_ns: int) -> None:
        """Record that the master has registered this peer, or resumed it."""
        self.resumed = True
        self.heard(now_ns)

    def note_clock(self, beat: msg.MasterHeartbeat, now_ns: int) -> None:
        """Record the master's clock. The largest difference counts, as its message was fastest."""
        self.clocks.note(beat.now_ns, beat.echo_ns, beat.held_ns, now_ns)
        ahead_ms = (beat.now_ns - now_ns) // NS_PER_MS
        known_ms = self._clock_ahead_ms
        self._clock_ahead_ms = ahead_ms if known_ms is None else max(ahead_ms, known_ms)

    def ago_s(self, refused: msg.Refused, now_ns: int) -> float:
        """Return how many seconds ago the master evicted this peer, including time asleep."""
        present_ms = refused.now_ms
        if self._clock_ahead_ms is not None:
            present_ms = max(present_ms, now_ns // NS_PER_MS + self._clock_ahead_ms)
        return max(0, present_ms - refused.removed_ms) / 1000

    def is_silent(self, now_ns: int, *, known: bool) -> bool:
        """Whether the present connection has brought no message for so long that it may be dead.

        The master removes a peer whose connection is dead after ``deadline_s``. Until then the peer
        has time to resume on another connection. ``known``: whether a master has registered this
        peer; if not, ``dial_s`` is the deadline.
        """
        since_ns, timing = max(self.heard_ns, self._opened_ns), self._timing
        patience_s = max(timing.deadline_s / 2, timing.deadline_s - 2 * timing.resume_s)
        patience_s = max(patience_s, min(timing.deadline_s, 3 * timing.heartbeat_s))
        return now_ns - since_ns >= timing.ns(patience_s if known else timing.dial_s)

    def is_lost(self, now_ns: int) -> bool:
        """Whether this peer has received nothing from a master of the run for ``master_lost_s``."""
        return self.unserved_ns(now_ns) >= self._timing.ns(self._timing.master_lost_s)

    def unserved_ns(self, now_ns: int) -> int:
        """Return for how long this peer has received nothing from a master of the run."""
        return now_ns - self._served_ns

    def redial_delay_ns(self) -> int:
        """Return the delay of the next attempt to connect; doubles up to ``redial_max_s``."""
        delay_ns = self._redial_ns
        self._redial_ns = min(2 * delay_ns, self._timing.ns(self._timing.redial_max_s))
        return delay_ns

    def tick(self, now_ns: int, busy_ns: int) -> bool:
        """Record a tick: shift the deadlines if this process slept.

        Returns:
            False if messages may have arrived that this process has not read yet.
        """
        tick = self._ticks.note(now_ns, busy_ns)
        if tick.slept_ns:
            self.heard_ns = min(self.heard_ns + tick.slept_ns, now_ns)
            self._served_ns = min(self._served_ns + tick.slept_ns, now_ns)
            self._opened_ns = min(self._opened_ns + tick.slept_ns, now_ns)
        return tick.may_judge


class PeerOutbox:
    """Collects the effects of the parts of one peer, in order.

    Args:
        contact: whether a message can reach the master.
        effects: the list of effects of the current event.
    """

    def __init__(self, contact: MasterLiveness, effects: list[ev.PeerEffect]) -> None:
        self._contact = contact
        self._effects = effects

    @property
    def reaches_master(self) -> bool:
        """Whether there is a connection to the master."""
        return self._contact.connected

    def add(self, *effects: ev.PeerEffect) -> None:
        """Add effects at the end."""
        self._effects.extend(effects)

    def send(self, message: msg.PeerMessage) -> None:
        """Send a message if the master is connected; a reconnect repeats open requests."""
        if self._contact.connected:
            self._effects.append(ev.Send(message))

    def return_(self, call: int, value: ev.ReturnValue = None) -> None:
        """Return ``value`` to the caller of ``call``."""
        self._effects.append(ev.ReturnCall(call, value))

    def raise_(self, call: int, error: errors.PCCLError | ValueError) -> None:
        """Raise ``error`` in the caller of ``call``."""
        self._effects.append(ev.RaiseCall(call, error))

    def report_wait(self, call: int, what: str, whom: str, waited_s: int) -> None:
        """Report that a call has been waiting for other members."""
        self._effects.append(ev.ReportWait(call, what, whom, waited_s))
