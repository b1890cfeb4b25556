"""Decides from the ticks of a process whether the process slept, and for how long.

A process sleeps if it is stopped, its machine is suspended, or its application holds the
interpreter lock. It then receives nothing, and no other process is to blame: all deadlines shift by
the time slept. A process with late ticks may also be busy. Much of the work of its I/O thread is
caused by data of other processes, so this time does not shift deadlines. The time between two ticks
less the processor time of the I/O thread is sleep, if it is two tick intervals or more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wakefulness:
    """Whether the process slept between two ticks, and whether it may judge silence now.

    Attributes:
        slept_ns: shift all deadlines by this; 0 if the process was awake.
        may_judge: False if messages may have arrived that the process has not read yet.
    """

    slept_ns: int
    may_judge: bool


class Ticks:
    """Separates the sleep of a process from its work.

    Args:
        tick_ns: interval between two ticks of a process that is awake and has little to do.
        now_ns: current time.
    """

    def __init__(self, tick_ns: int, now_ns: int) -> None:
        self._late_ns = 2 * tick_ns
        self._last_ns = now_ns
        self._was_late = False

    def note(self, now_ns: int, busy_ns: int) -> Wakefulness:
        """Record a tick; return whether the process slept, and whether it may judge silence.

        After a late tick, the process reads all arrived data before its next tick. So it
        judges at that tick, even if that tick is late too. A load that makes every tick late
        therefore does not postpone judgement.

        Args:
            now_ns: current time.
            busy_ns: processor time of the I/O thread since the previous tick.
        """
        gap_ns = now_ns - self._last_ns
        self._last_ns = now_ns
        idle_ns = gap_ns - min(busy_ns, gap_ns)
        is_late = gap_ns >= self._late_ns
        may_judge = not is_late or self._was_late
        self._was_late = is_late
        return Wakefulness(idle_ns if idle_ns >= self._late_ns else 0, may_judge)
