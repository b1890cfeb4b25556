"""``Pipeline``: decides what a replica has to do after each inner step.

It counts inner steps and the work in them. It decides when the replica takes a pseudo-gradient, and
when it merges the average of a round. If both are due for one fragment, as with a delay of a whole
period, it takes the pseudo-gradient first, which contains the work since the previous merge.
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
        number: number of the round.
        fragment: fragment of the round.
        weight: work on the fragment since its last launch, except for what a merge has dropped;
            and work of launches that were lost.
    """

    number: int
    fragment: int
    weight: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Wait for a round, and merge its average.

    Attributes:
        number: number of the round.
        fragment: fragment of the round.
        is_taken: whether all work since the previous merge was taken for the round; otherwise this
            merge must keep that work.
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
    keeps: bool = False
    """Whether work of an earlier round has come back, and is not taken yet."""

    def merge(self) -> Merge:
        is_taken = self.is_taken and not self.keeps
        return Merge(self.launch.number, self.launch.fragment, is_taken)


EARLY_ROUNDS = 4
"""Number of rounds for which a replica that was late launches early, unless it is slow."""

EARLY_SHARE = 0.1
"""Share of a step by which it is earlier than the end of its last step before a round."""


class RoundTempo:
    """When the members will begin their next round, for a replica that was late for one.

    Then it launches one step before the next rounds: some of them, or as long as it is slower than
    the others. If it is late twice in a row, it launches the next one at once.
    """

    def __init__(self) -> None:
        self._misses = self._early_left = 0
        """Rounds in a row that went on without it, and number of rounds for which it is early."""
        self._is_slow = False
        """Whether its last launch came more than a step before its schedule."""
        self._number = -1
        """The last round whose outcome it knows."""
        self._at_s: float = math.nan
        self._stepped_s: float = math.nan
        """End of that round, as well as it is known, and of the last inner step."""
        self._gap_s: float = math.nan
        self._step_s: float = math.nan
        """Durations of a round and of the last inner step."""

    @property
    def step_s(self) -> float:
        """Duration of the last inner step, without waits; NaN: not known."""
        return self._step_s

    def stepped(self, now_s: float) -> None:
        """Record the end of an inner step."""
        self._step_s, self._stepped_s = now_s - self._stepped_s, now_s

    def waited(self, now_s: float) -> None:
        """Record the end of a wait after the last inner step."""
        self._stepped_s = now_s

    def launched(self, *, is_slow: bool) -> None:
        """Record a launch. ``is_slow``: the schedule has it more than one step later."""
        self._is_slow = is_slow

    def heard(self, number: int, now_s: float, *, took_part: bool) -> None:
        """Record that the outcome of a round is known here.

        If the round went on without this replica, it ended up to a step ago.
        """
        rounds = number - self._number
        at_s = now_s
        if not took_part:
            earliest_s, expected_s = now_s - self._step_s, self._at_s + rounds * self._gap_s
            is_known = not math.isnan(expected_s)
            at_s = max(earliest_s, min(now_s, expected_s)) if is_known else earliest_s
        if took_part or math.isnan(self._gap_s):
            self._gap_s = (at_s - self._at_s) / rounds
        self._number, self._at_s = number, at_s
        self._misses = 0 if took_part else self._misses + 1
        if not took_part:
            self._early_left = EARLY_ROUNDS
        elif not self._is_slow:
            self._early_left -= 1

    def is_next_due(self, number: int, now_s: float) -> bool:
        """Whether to launch round ``number`` now, so that it is there in time."""
        if self._early_left <= 0 or number != self._number + 1:  # its last round has no outcome yet
            return False
        begins_s = self._at_s + self._gap_s - EARLY_SHARE * self._step_s
        return self._misses > 1 or not now_s + self._step_s < begins_s


class Pipeline:
    """The position of one replica in the schedule.

    Args:
        schedule: determines when rounds begin and are merged.

    Attributes:
        steps: inner steps made altogether.
        number: number of the next round that this replica launches.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.steps = 0
        self.number = 0
        self._since = 0
        """Inner steps since the last launch or entry; negative after an early launch."""
        self._began_s = -math.inf
        """Time of the last launch, entry or merge."""
        self._work = [0.0] * schedule.fragments
        self._given_up = [0.0] * schedule.fragments
        """Weight of the work that merges have dropped since the fragment's last launch."""
        self._flights: dict[int, _Flight] = {}
        """Rounds in flight by number, ascending."""
        self._tempo = RoundTempo()
        self._early = -math.inf
        """The last round that began early, for a member that leaves."""

    @property
    def has_work(self) -> bool:
        """Whether there is work that was not launched yet."""
        return any(self._work)

    @property
    def has_flights(self) -> bool:
        """Whether there are rounds in flight."""
        return bool(self._flights)

    @property
    def run_steps(self) -> int:
        """Inner steps that a member from the beginning of the run has made by now."""
        period, fragments = self._schedule.sync_steps, self._schedule.fragments
        if not period:
            return self.steps
        turns, turn = divmod(self.number, fragments)
        return turns * period + turn * period // fragments + self._since

    # -- entering ----------------------------------------------------------------------------------

    def enter(self, number: int, now_s: float, *, is_open: bool) -> None:
        """Continue from the outer parameters before a round.

        Rounds in flight are dropped; to keep their work, call ``carry`` first.

        Args:
            number: number of the round.
            now_s: current time, in seconds.
            is_open: whether the members have begun the round; then this replica contributes zeros.
        """
        self._flights.clear()
        self._tempo = RoundTempo()
        self._since, self._began_s = 0, now_s
        self.number = number
        if is_open:
            launch = Launch(number, self._schedule.fragment(number), 0.0)
            self._flights[number] = _Flight(
                launch, self.steps + self._schedule.delay, is_taken=False
            )
            self.number += 1

    def work(self, fragment: int) -> float:
        """Return the weight of a fragment's work since its last launch."""
        return self._work[fragment]

    def in_flight(self) -> tuple[Launch, ...]:
        """Return the launched and unmerged rounds, in order."""
        return tuple(flight.launch for flight in self._flights.values())

    def carry(self, launch: Launch) -> None:
        """Count the work of ``launch``, which was not applied, in the fragment's next launch."""
        self._work[launch.fragment] += launch.weight

    def heard(self, number: int, now_s: float, *, took_part: bool) -> None:
        """Record that this replica knows the outcome of a round; ``took_part``: its work counts."""
        self._tempo.heard(number, now_s, took_part=took_part)
        if not took_part:
            self.miss(number)

    def is_behind(self, now_s: float) -> bool:
        """Whether the next round is due because the members went on without this replica.

        Otherwise it would be late again each time: it would begin its rounds when the others call.
        """
        return self._tempo.is_next_due(self.number, now_s)

    def miss(self, number: int) -> None:
        """Record that a round left this replica out; its work goes into the next round.

        A later round of the fragment may be in flight. Its merge must keep this work.
        """
        flight = self._flights.get(number)
        if flight is None or not flight.is_taken:
            return
        flight.is_taken = False
        self.carry(flight.launch)
        for later in self._flights.values():
            later.keeps |= later.launch.fragment == flight.launch.fragment

    def give_up(self, launch: Launch, *, is_applied: bool) -> None:
        """Drop a round that will not be merged; carry its work unless ``is_applied``."""
        del self._flights[launch.number]
        if not is_applied:
            self.carry(launch)

    def position(self) -> dict[str, Any]:
        """Return the position in plain numbers, for ``resume``."""
        return {
            "steps": self.steps,
            "number": self.number,
            "since": self._since,
            "early": self._early,
            "work": list(self._work),
            "flights": [
                (flight.launch.number, flight.launch.weight, flight.due_steps)
                for flight in self._flights.values()
            ],
            "watched": [n for n, flight in self._flights.items() if not flight.merge().is_taken],
        }

    def resume(self, position: dict[str, Any], now_s: float) -> None:
        """Continue from a position that ``position`` returned; a time budget restarts."""
        self.steps, self.number = position["steps"], position["number"]
        self._since, self._began_s = position["since"], now_s
        self._early = position.get("early", -math.inf)
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

    def step(
        self, weight: float, now_s: float, *, is_awaited: bool = False, has_quorum: bool = True
    ) -> list[Launch | Merge]:
        """Count an inner step.

        Args:
            weight: weight of the work in the step.
            now_s: current time, in seconds.
            is_awaited: whether members wait for this replica, so that its next round is due now.
            has_quorum: whether rounds go on without late members. Otherwise all members begin the
                awaited round early, for one that leaves, and later rounds stay due as before.

        Returns:
            The actions that are due now, in the order in which the replica must take them.
        """
        self.steps += 1
        self._since += 1
        self._tempo.stepped(now_s)
        self._work = [work + weight for work in self._work]
        due: list[Launch | Merge] = []
        is_due = self._is_launch_due(now_s)
        if is_awaited and not is_due and not has_quorum:
            self._early = self.number
            due.append(self.launch_early(now_s))
        elif is_awaited or is_due:
            self._tempo.launched(is_slow=not self._is_launch_due(now_s + self._tempo.step_s, 1))
            due.append(self._launch(now_s))
        return due + self.due_merges()

    def due_merges(self) -> list[Merge]:
        """Return the merges that are due now."""
        return [
            flight.merge() for flight in self._flights.values() if flight.due_steps <= self.steps
        ]

    def merge(self, number: int) -> Merge:
        """Return the merge of a round in flight, as it is after the news so far."""
        return self._flights[number].merge()

    def flush(self) -> list[Merge]:
        """Return the merges of all rounds in flight, due or not."""
        return [flight.merge() for flight in self._flights.values()]

    @property
    def last_number(self) -> int:
        """Number of the first round that ``finish`` does not launch.

        A replica that stops right after a launch of the last fragment launches one round for each
        other fragment, so that all its work is averaged. It launches one for each fragment if the
        last round of one began early. Otherwise the result depends only on ``number``, so members
        that were cut off or joined meanwhile end at the same round.
        """
        fragments = self._schedule.fragments
        if self._early >= self.number - fragments:
            return self.number + fragments
        return self.number + (fragments - 1 - self.number) % fragments

    def launch_now(self, now_s: float) -> Launch:
        """Launch the next round now, as if it were due; so the next one is due a period later."""
        return self._launch(now_s)

    def launch_early(self, now_s: float) -> Launch:
        """Launch the next round now. Without a time budget, later rounds stay due as before."""
        since = self._since - self._schedule.steps_before(self.number)
        launch = self._launch(now_s)
        self._since = since if self._schedule.sync_steps else 0
        return launch

    def leave_out_work(self) -> float:
        """Drop the work that was not launched, because the model now has the outer parameters.

        Returns:
            The largest weight that was dropped in a fragment, by this call or by merges.
        """
        left_out = max(map(sum, zip(self._work, self._given_up, strict=True)))
        self._work = [0.0] * self._schedule.fragments
        self._given_up = list(self._work)
        return left_out

    def merged(self, number: int, now_s: float, kept: float) -> None:
        """Record that a round was merged. A time budget restarts.

        Args:
            number: number of the round.
            now_s: current time, in seconds.
            kept: share of the work since the fragment's last launch that the model still has.
        """
        fragment = self._flights.pop(number).launch.fragment
        self._given_up[fragment] += self._work[fragment] * (1 - kept)
        self._work[fragment] *= kept
        self._began_s = max(self._began_s, now_s)
        self._tempo.waited(now_s)

    def _is_launch_due(self, now_s: float, more_steps: int = 0) -> bool:
        if self._schedule.sync_steps:
            return self._since + more_steps >= self._schedule.steps_before(self.number)
        return now_s - self._began_s >= self._schedule.seconds_between

    def _launch(self, now_s: float) -> Launch:
        number, fragment = self.number, self._schedule.fragment(self.number)
        launch = Launch(number, fragment, self._work[fragment])
        for flight in self._flights.values():
            if flight.launch.fragment == fragment:  # the delay is a whole period or more
                flight.due_steps, flight.keeps = self.steps, False
        self._work[fragment] = self._given_up[fragment] = 0.0
        self._flights[number] = _Flight(launch, self.steps + self._schedule.delay)
        self._since, self._began_s = 0, now_s
        self.number += 1
        return launch
