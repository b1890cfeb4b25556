"""What a tick says about the process itself: whether it slept, and how long.

A process that slept (it was stopped, its machine was suspended, or its application held the
interpreter lock) has heard nobody, and nobody is to blame for that: all deadlines shift by the
time of the sleep. A process that was busy has not slept, however late its ticks are: the time in
which its I/O thread computes belongs to it, and much of that is caused by what others send. So
sleep is what is left of the time between two ticks without the processor time of that thread.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wakefulness:
    """What happened between two ticks.

    Attributes:
        slept_ns: by how much all deadlines shift; 0 if the process was awake.
        may_judge: False if others may have spoken, and the process has not read it yet.
    """

    slept_ns: int
    may_judge: bool


class Ticks:
    """Tells sleep from work.

    Args:
        tick_ns: the time between two ticks of a process that is awake and has little to do.
        now_ns: the present.
    """

    def __init__(self, tick_ns: int, now_ns: int) -> None:
        self._late_ns = 2 * tick_ns
        self._last_ns = now_ns
        self._was_late = False

    def note(self, now_ns: int, busy_ns: int) -> Wakefulness:
        """A tick has come.

        After a late tick the process first reads what has come in. It does so before the next
        tick, so that one is judged even if it is late again: a load that makes every tick late
        puts no judgement off.

        Args:
            now_ns: the present.
            busy_ns: processor time of the I/O thread since the tick before.
        """
        gap_ns = now_ns - self._last_ns
        self._last_ns = now_ns
        idle_ns = gap_ns - min(busy_ns, gap_ns)
        is_late = gap_ns >= self._late_ns
        may_judge = not is_late or self._was_late
        self._was_late = is_late
        return Wakefulness(idle_ns if idle_ns >= self._late_ns else 0, may_judge)
