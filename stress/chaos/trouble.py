"""Carries out a timeline: begins and ends each fault at its time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from functools import partial

from pccl.stress.chaos.crew import ChaosCrew
from pccl.stress.chaos.network import Network
from pccl.stress.chaos.verdict.record import Done, Life, RunRecord
from pccl.stress.timeline import MASTER, OF_PAIR, STANDBY, FaultKind, TimelineFault

SLOW_PERIOD_S = 0.1
"""A slow process runs for its share of each of these periods, and is stopped for the rest."""

LAST_WORDS_S = 30.0
"""How long the last bytes of an ended process may take to arrive, over slow or stalled links."""


class Trouble:
    """Begins and ends each fault of a timeline at its time.

    Args:
        crew: the processes.
        network: the proxies between the processes.
        record: gets each fault that was carried out.
        note: called with a line of text for each fault.
    """

    def __init__(
        self, crew: ChaosCrew, network: Network, record: RunRecord, note: Callable[[str], None]
    ) -> None:
        self._crew = crew
        self._network = network
        self._record = record
        self._note = note
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._undo: dict[int, Callable[[], None]] = {}
        self._began_s = 0.0
        """Time at which the current fault began."""
        self._known = record.timeline.peers

    def plan(self, began_s: float) -> None:
        """Schedule all faults of the timeline, which starts at ``began_s``."""
        for fault in self._record.timeline.faults:
            self._at(began_s + fault.at_s, partial(self._begin, fault))

    def next_s(self) -> float | None:
        """Return the time of the next action; None: no action is left."""
        return self._due[0][0] if self._due else None

    def act(self) -> None:
        """Carry out all due actions."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def lift(self) -> None:
        """End all faults at once, and begin no more."""
        self._due.clear()
        for undo in list(self._undo.values()):
            undo()

    # -- faults ----------------------------------------------------------------------------------

    def _begin(self, fault: TimelineFault) -> None:
        # Before the fault: processes may report its effects before this method returns.
        self._began_s = time.monotonic()
        if fault.kind in OF_PAIR:
            if not self._lives_at_both_ends(fault):
                self._skip(fault)
                return
            self._network.begin(fault)
            self._lasts(fault, lambda: self._network.end(fault))
            return
        match fault.kind:
            case FaultKind.KILL | FaultKind.RESTART:
                self._kill(fault)
            case FaultKind.FREEZE | FaultKind.CLOCK_PAUSE | FaultKind.SLOW | FaultKind.NAP:
                self._hold(fault)
            case FaultKind.LEAVE:
                if self._crew.tell_to_leave(fault.peer):
                    self._happened(fault)
                else:
                    self._skip(fault)
            case FaultKind.JOINERS:
                first, self._known = self._known, self._known + round(fault.amount)
                for index in range(first, self._known):
                    self._crew.start_peer(index)
                self._happened(fault)
            case FaultKind.GARBAGE:
                if self._crew.living(fault.peer) is None:
                    self._skip(fault)
                    return
                self._network.pour_garbage(self._crew.door(fault.peer), fault)
                self._happened(fault)
            case _:
                self._kill_master(fault)

    def ended(self, life: Life) -> None:
        """Handle the end of a process: close its proxies later, unless a new process follows."""
        if life.index >= 0 and not life.comes_back:
            self._at(time.monotonic() + LAST_WORDS_S, partial(self._network.remove, life.index))

    def _kill(self, fault: TimelineFault) -> None:
        life = self._crew.living(fault.peer)
        if life is None:
            self._skip(fault)
            return
        life.comes_back = fault.kind is FaultKind.RESTART
        self._crew.kill(fault.peer)
        if life.comes_back:
            self._lasts(fault, lambda: self._start_again(fault.peer))
        else:
            self._happened(fault)

    def _start_again(self, index: int) -> None:
        if self._crew.living(index) is None:
            self._crew.start_peer(index)

    def _hold(self, fault: TimelineFault) -> None:
        life = self._crew.living(fault.peer)
        if life is None:
            self._skip(fault)
            return
        match fault.kind:
            case FaultKind.SLOW:
                self._slow(fault, life, time.monotonic() + fault.duration_s)
            case FaultKind.NAP:
                self._crew.let_nap(fault.peer)
            case _:
                self._crew.stop(life, fault)
        if fault.kind is FaultKind.CLOCK_PAUSE:
            self._network.begin(fault)

        def end() -> None:
            if fault.kind is FaultKind.NAP:
                self._crew.wake(fault.peer)
                return
            self._crew.go_on(life, fault)
            if fault.kind is FaultKind.CLOCK_PAUSE:
                self._network.end(fault)

        self._lasts(fault, end)

    def _slow(self, fault: TimelineFault, life: Life, until_s: float) -> None:
        """Let a process run for its share of a period, and stop it for the rest."""
        now = time.monotonic()
        self._crew.go_on(life, fault)
        run_s = fault.amount * SLOW_PERIOD_S
        if now + SLOW_PERIOD_S < until_s:
            self._at(now + run_s, lambda: self._crew.stop(life, fault))
            self._at(now + SLOW_PERIOD_S, lambda: self._slow(fault, life, until_s))

    def _kill_master(self, fault: TimelineFault) -> None:
        takes_over = fault.kind is FaultKind.STANDBY
        if (takes_over and self._crew.living(STANDBY) is None) or not self._crew.kill(MASTER):
            self._skip(fault)
            return
        if takes_over:
            self._crew.promote()
            self._happened(fault)
            return
        blank = fault.kind is FaultKind.MASTER_RESTART_BLANK
        self._lasts(fault, lambda: self._restart_master(blank))

    def _restart_master(self, blank: bool) -> None:
        if self._crew.living(MASTER) is None:
            self._crew.restart_master(blank=blank)

    # -- time ------------------------------------------------------------------------------------

    def _at(self, when_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when_s, next(self._order), work))

    def _happened(self, fault: TimelineFault) -> None:
        self._record.done.append(Done(fault, self._began_s, time.monotonic()))
        self._note(words(fault))

    def _lasts(self, fault: TimelineFault, end: Callable[[], None]) -> None:
        """Record a fault that has begun; end it once, at its time or when ``lift`` ends all."""
        began_s = self._began_s
        place = len(self._record.done)
        self._record.done.append(Done(fault, began_s, began_s + fault.duration_s))
        number = next(self._order)

        def undo() -> None:
            if self._undo.pop(number, None) is not None:
                end()
                self._record.done[place] = Done(fault, began_s, time.monotonic())

        self._undo[number] = undo
        self._at(began_s + fault.duration_s, undo)
        self._note(words(fault))

    def _skip(self, fault: TimelineFault) -> None:
        self._record.skipped[fault.kind] += 1

    def _lives_at_both_ends(self, fault: TimelineFault) -> bool:
        other = fault.peer if fault.other is None else fault.other
        return all(self._crew.living(index) is not None for index in (fault.peer, other))


def words(fault: TimelineFault) -> str:
    """Return a fault as text."""
    who = _who(fault.peer)
    if fault.kind in OF_PAIR:
        who += " - all others" if fault.other is None else f" - {_who(fault.other)}"
    if fault.kind is FaultKind.JOINERS:
        who = f"{fault.amount:g}"
    lasting = f" for {fault.duration_s:.1f} s" if fault.duration_s else ""
    return f"{fault.kind} {who}{lasting}"


def _who(index: int) -> str:
    return "master" if index == MASTER else f"peer {index}"
