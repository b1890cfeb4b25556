"""``Pipeline``: what one replica has to do after each of its inner steps.

It counts inner steps and the work in them, and tells when a pseudo-gradient is to be taken and
when the outcome of a round is to be merged. Where both are due for one fragment, as with a delay
of a whole period, the pseudo-gradient is taken first: it is the work since the merge before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pccl.bindings.diloco.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Launch:
    """Take the pseudo-gradient of a fragment and send it into its round.

    Attributes:
        number: of the round.
        fragment: its fragment.
        weight: work done in it since the last launch that counted.
    """

    number: int
    fragment: int
    weight: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Wait for a round, and take over what came of it.

    Attributes:
        number: of the round.
        fragment: its fragment.
        is_taken: a pseudo-gradient was taken for it; otherwise all work since the merge before is
            still to be taken, and has to outlive this one.
    """

    number: int
    fragment: int
    is_taken: bool


@dataclass(slots=True)
class _Flight:
    """A round that was launched and not merged."""

    launch: Launch
    due_steps: int
    is_taken: bool = True

    def merge(self) -> Merge:
        return Merge(self.launch.number, self.launch.fragment, self.is_taken)


class Pipeline:
    """The steps of one replica between its entry into the run and the next.

    Args:
        schedule: when what is due.

    Attributes:
        steps: inner steps made altogether.
        number: of the next round that this replica launches.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.steps = 0
        self.number = 0
        self._since = 0
        """Inner steps since the last launch, or the entry; negative: it came so much too early."""
        self._began_s = -math.inf
        """The time of either."""
        self._work = [0.0] * schedule.fragments
        self._flights: dict[int, _Flight] = {}
        """By number of the round, in that order."""

    @property
    def run_steps(self) -> int:
        """Inner steps that a member from the beginning of the run has made up to here."""
        period, fragments = self._schedule.sync_steps, self._schedule.fragments
        if not period:
            return self.steps
        turns, turn = divmod(self.number, fragments)
        return turns * period + turn * period // fragments + self._since

    # -- entering ----------------------------------------------------------------------------------

    def enter(self, number: int, now_s: float, *, is_open: bool) -> None:
        """This replica holds the outer parameters as of before a round.

        What was in flight is not any more: see ``carry``.

        Args:
            number: of the round.
            now_s: the present, in seconds.
            is_open: the members are in it, and this replica takes part without a contribution.
        """
        self._flights.clear()
        self._since, self._began_s = 0, now_s
        self.number = number
        if is_open:
            launch = Launch(number, self._schedule.fragment(number), 0.0)
            self._flights[number] = _Flight(
                launch, self.steps + self._schedule.delay, is_taken=False
            )
            self.number += 1

    def in_flight(self) -> tuple[Launch, ...]:
        """What was launched and not merged, in order."""
        return tuple(flight.launch for flight in self._flights.values())

    def carry(self, launch: Launch) -> None:
        """A pseudo-gradient was not applied: its work counts in the next launch."""
        self._work[launch.fragment] += launch.weight

    def give_up(self, launch: Launch, *, is_applied: bool) -> None:
        """A round will not be merged: its work counts in the next launch, unless it is applied."""
        del self._flights[launch.number]
        if not is_applied:
            self.carry(launch)

    def position(self) -> dict[str, Any]:
        """Where it is, in plain numbers, for ``resume``."""
        return {
            "steps": self.steps,
            "number": self.number,
            "since": self._since,
            "work": list(self._work),
            "flights": [
                (flight.launch.number, flight.launch.weight, flight.due_steps)
                for flight in self._flights.values()
            ],
            "watched": [number for number, flight in self._flights.items() if not flight.is_taken],
        }

    def resume(self, position: dict[str, Any], now_s: float) -> None:
        """Go on from where another one was; a time budget begins anew."""
        self.steps, self.number = position["steps"], position["number"]
        self._since, self._began_s = position["since"], now_s
        self._work = list(position["work"])
        self._flights = {
            number: _Flight(
                Launch(number, self._schedule.fragment(number), weight),
                due_steps,
                number not in position["watched"],
            )
            for number, weight, due_steps in position["flights"]
        }

    # -- stepping ----------------------------------------------------------------------------------

    def step(self, weight: float, now_s: float) -> list[Launch | Merge]:
        """An inner step was made.

        Args:
            weight: the work in it.
            now_s: the present, in seconds.

        Returns:
            What is due now, in the order in which it has to be done.
        """
        self.steps += 1
        self._since += 1
        self._work = [work + weight for work in self._work]
        due: list[Launch | Merge] = []
        if self._is_launch_due(now_s):
            due.append(self._launch(now_s))
        return due + self.due_merges()

    def due_merges(self) -> list[Merge]:
        """What is to be merged now."""
        return [
            flight.merge() for flight in self._flights.values() if flight.due_steps <= self.steps
        ]

    def flush(self) -> list[Merge]:
        """What is to be merged so that nothing is in flight."""
        return [flight.merge() for flight in self._flights.values()]

    @property
    def last_number(self) -> int:
        """Of the round before which the run may end: all fragments but one have had one more turn.

        Whoever stops after a whole period, right after the last fragment's turn, leaves no work
        out. It follows from the number of rounds alone: those who were cut off, or have come,
        between here and there find the same end.
        """
        last = self._schedule.fragments - 1
        return self.number + (last - self.number) % self._schedule.fragments

    def launch_early(self, now_s: float) -> Launch:
        """Begin the next round now; those that follow are due when they would have been anyway."""
        since = self._since - self._schedule.steps_before(self.number)
        launch = self._launch(now_s)
        self._since = since if self._schedule.sync_steps else 0
        return launch

    def leave_out_work(self) -> float:
        """The model became what the outer parameters are: what was not launched is gone.

        Returns:
            How much work that was, of the fragment that has lost most.
        """
        left_out, self._work = max(self._work), [0.0] * self._schedule.fragments
        return left_out

    def merged(self, number: int, now_s: float) -> None:
        """A round was merged. It is over for all members: a time budget begins with that."""
        del self._flights[number]
        self._began_s = max(self._began_s, now_s)

    def _is_launch_due(self, now_s: float) -> bool:
        if self._schedule.sync_steps:
            return self._since >= self._schedule.steps_before(self.number)
        return now_s - self._began_s >= self._schedule.seconds_between

    def _launch(self, now_s: float) -> Launch:
        number, fragment = self.number, self._schedule.fragment(self.number)
        launch = Launch(number, fragment, self._work[fragment])
        for flight in self._flights.values():
            if flight.launch.fragment == fragment:  # with a delay of a whole period, or more
                flight.due_steps = self.steps
        self._work[fragment] = 0.0
        self._flights[number] = _Flight(launch, self.steps + self._schedule.delay)
        self._since, self._began_s = 0, now_s
        self.number += 1
        return launch
