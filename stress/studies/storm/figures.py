"""The figures of a storm, from its file and its tape. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaAway,
    ReplicaDone,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaSynced,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
)

Span = tuple[float, float]


class NoFigures(ValueError):
    """A tape has no figures; the message says why."""


@dataclass(frozen=True, slots=True)
class OneRound:
    """A round of the storm.

    Attributes:
        at: when the first replica knew its average.
        weight: inner steps in it; those of one of F fragments count 1/F.
        took_part: indices of the replicas whose work is in it.
        available: indices of the replicas that were alive and reachable then.
    """

    at: float
    number: int
    weight: float
    took_part: frozenset[int]
    available: frozenset[int]


class Presence:
    """When each replica was alive, and when it could compute and be reached.

    A replica whose program ended by itself counts as alive: no fault kept it from training.

    Args:
        events: the tape.
        peers: number of replicas at the start.
        until: end of the storm.
    """

    def __init__(self, events: Iterable[TapeEvent], peers: int, until: float) -> None:
        alive: dict[int, list[list[float]]] = {index: [[0.0, until]] for index in range(peers)}
        self._away: dict[int, list[ReplicaAway]] = {index: [] for index in range(peers)}
        for event in sorted(events, key=lambda one: one.at):
            match event:
                case ReplicaKilled(at, index, by_itself=False):
                    last = alive[index][-1]
                    last[1] = min(last[1], at)
                case ReplicaStarted(at, index) if alive[index][-1][1] < until:
                    alive[index].append([at, until])
                case ReplicaAway():
                    self._away[event.index].append(event)
                case _:
                    pass
        self.alive = {index: [(a, b) for a, b in spans] for index, spans in alive.items()}

    def spans(self, index: int, *, reachable: bool) -> list[Span]:
        """Return when a replica could make inner steps; ``reachable``: and could be reached."""
        away = [one for one in self._away[index] if reachable or not one.computes]
        return without(self.alive[index], [(one.at, one.until) for one in away])

    def is_available(self, index: int, at: float) -> bool:
        """Whether a replica was alive and reachable at a time, and its program ran."""
        lives = any(begin <= at < end for begin, end in self.alive[index])
        return lives and not any(one.at <= at < one.until for one in self._away[index])


def without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return the parts of ``spans`` that are in none of ``holes``."""
    left = list(spans)
    for begin, end in holes:
        pieces = [((a, min(b, begin)), (max(a, end), b)) for a, b in left]
        left = [piece for pair in pieces for piece in pair if piece[0] < piece[1]]
    return left


def seconds_in(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return how many seconds of ``spans`` lie between ``begin`` and ``end``."""
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)


@dataclass(frozen=True, slots=True)
class StormFigures:
    """The figures of a storm.

    Attributes:
        replicas: number of replicas.
        seconds: duration of the measured part: from the first round to the last one of the storm.
        faults: number of faults, by kind.
        failures: how often a replica's program ended by itself with an error.
        rounds: number of rounds in it.
        steps: inner steps in the model that were made in it.
        steps_possible: what the replicas could have made that were alive and reachable, from the
            start of their processes on; in a partition, those that are in the model.
        share_kept: the quotient of the two.
        took_part: mean share of the available replicas whose work is in a round.
        took_part_min: the smallest share of a round.
        training_again_s: median, 90th percentile and maximum of the seconds from a kill until the
            new process trains, or that after an error.
        never_again: number of kills and errors after which the replica did not train again.
        in_commit_again_s: likewise until its work is in a round.
        longest_wait_s: the longest time between two rounds, or from the last one to the end of
            the storm, less a usual one.
        lost_s: index -> seconds in which it could have made steps, less those of its steps in the
            model; in a partition, it could.
        tx_bytes: bytes that the replicas sent for averages.
        loss: of the final model on held-out text; None: not measured.
        is_equal: whether replicas have equal bits: after each synchronization that two or more of
            them report, and at the end, if they ended after the same round.
    """

    replicas: int
    seconds: float
    faults: dict[str, int]
    failures: int
    rounds: int
    steps: float
    steps_possible: float
    share_kept: float
    took_part: float
    took_part_min: float
    training_again_s: tuple[float, ...]
    never_again: int
    in_commit_again_s: tuple[float, ...]
    longest_wait_s: float
    lost_s: dict[int, float]
    tx_bytes: int
    loss: float | None
    is_equal: bool

    def to_json(self) -> dict[str, Any]:
        """Return an object of plain values, rounded for a reader."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def rounds_of(storm: Storm, events: Sequence[TapeEvent]) -> list[OneRound]:
    """Return the rounds of a tape, in order; a round that several replicas report counts once."""
    timeline = storm.timeline
    presence = Presence(events, timeline.peers, _ends(storm, events))
    indices = {one.peer: one.index for one in events if isinstance(one, ReplicaTrains)}
    found: dict[tuple[str, int], RoundDone] = {}
    for event in sorted(events, key=lambda one: one.at):
        if isinstance(event, RoundDone):
            found.setdefault((event.run, event.number), event)
    return [
        OneRound(
            at=one.at,
            number=one.number,
            weight=one.weight / storm.training.fragments,
            took_part=frozenset(indices[peer] for peer in one.contributors if peer in indices),
            available=frozenset(
                index for index in range(timeline.peers) if presence.is_available(index, one.at)
            ),
        )
        for one in found.values()
    ]


def figures_of(storm: Storm, events: Sequence[TapeEvent]) -> StormFigures:
    """Return the figures of a tape.

    Raises:
        NoFigures: there are no two rounds after the storm began, or no replica was available.
    """
    timeline, training = storm.timeline, storm.training
    ends = _ends(storm, events)
    began = next(one.at for one in events if isinstance(one, StormBegan))
    rounds = [one for one in rounds_of(storm, events) if began <= one.at <= ends]
    if len(rounds) < 2:
        raise NoFigures(
            f"the replicas made {len(rounds)} rounds in the storm, and figures need two; make it "
            "longer, or leave replicas alive: if all are killed at once, no member has the "
            "parameters that the next ones wait for"
        )
    times = [*(one.at for one in rounds), ends]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    begin, ends, rounds = rounds[0].at, rounds[-1].at, rounds[1:]
    presence = Presence(events, timeline.peers, ends)
    step_s = [training.step_s * training.pace(i, timeline.peers) for i in range(timeline.peers)]
    computing_s, reachable_s = (
        [
            seconds_in(presence.spans(index, reachable=only), begin, ends)
            for index in range(timeline.peers)
        ]
        for only in (False, True)
    )
    numbers = {one.number for one in rounds}
    own = [e for e in events if isinstance(e, RoundDone) and e.number in numbers]
    possible = sum(seconds / step for seconds, step in zip(reachable_s, step_s, strict=True))
    possible += _steps_in_partitions(storm, own, presence, begin)
    steps = sum(one.weight for one in rounds)
    if not possible:
        raise NoFigures("no replica was available in the storm")
    shares = [
        len(one.took_part & one.available) / len(one.available) for one in rounds if one.available
    ]
    own_steps = [0.0] * timeline.peers
    for event in own:
        own_steps[event.index] += event.own_weight / training.fragments
    killed = [e for e in events if isinstance(e, ReplicaKilled) and began <= e.at <= times[-1]]
    again = [_seconds_away(one, events) for one in killed]
    losses = [one for one in events if isinstance(one, HeldOutLoss)]
    kinds = [str(fault.kind) for fault in timeline.faults]
    return StormFigures(
        replicas=timeline.peers,
        seconds=ends - begin,
        faults={kind: kinds.count(kind) for kind in sorted(set(kinds))},
        failures=sum(one.by_itself for one in killed),
        rounds=len(rounds),
        steps=steps,
        steps_possible=possible,
        share_kept=steps / possible,
        took_part=statistics.fmean(shares or [0.0]),
        took_part_min=min(shares, default=0.0),
        training_again_s=_spread([one[0] for one in again]),
        never_again=sum(one[0] is None for one in again),
        in_commit_again_s=_spread([one[1] for one in again]),
        longest_wait_s=max(0.0, max(gaps) - statistics.median(gaps[:-1])),
        lost_s={
            index: round(computing_s[index] - own_steps[index] * step_s[index], 2)
            for index in range(timeline.peers)
        },
        tx_bytes=sum(one.tx_bytes for one in events if isinstance(one, RoundDone)),
        loss=max(losses, key=lambda one: one.number).loss if losses else None,
        is_equal=_are_equal(events),
    )


def loss_curve(storm: Storm, events: Sequence[TapeEvent]) -> list[tuple[float, float]]:
    """Return (inner steps in the model, loss on held-out text), in order."""
    total, steps = 0.0, dict[int, float]()
    for one in rounds_of(storm, events):
        total += one.weight
        steps[one.number] = total
    losses = sorted((e for e in events if isinstance(e, HeldOutLoss)), key=lambda one: one.number)
    return [(steps[one.number], one.loss) for one in losses if one.number in steps]


def at_equal_steps(curve: Sequence[tuple[float, float]], steps: float) -> float | None:
    """Return the loss of a curve after so many steps, between its points; None: it ends before."""
    for (a, first), (b, second) in itertools.pairwise(curve):
        if a <= steps <= b:
            return first + (second - first) * (steps - a) / (b - a)
    return None


def _ends(storm: Storm, events: Iterable[TapeEvent]) -> float:
    began = next(one.at for one in events if isinstance(one, StormBegan))
    return began + storm.timeline.duration_s


def _are_equal(events: Iterable[TapeEvent]) -> bool:
    """Whether replicas had equal bits at equal points, of which there is one at least."""
    digests, replicas = defaultdict[object, set[str]](set), defaultdict[object, set[int]](set)
    for one in events:
        if isinstance(one, ReplicaSynced | ReplicaDone):
            point = (one.run, one.revision) if isinstance(one, ReplicaSynced) else one.number
            digests[point].add(one.digest)
            replicas[point].add(one.index)
    was_compared = any(len(known) > 1 for known in replicas.values())
    return was_compared and all(len(known) == 1 for known in digests.values())


def _steps_in_partitions(
    storm: Storm, own: Iterable[RoundDone], presence: Presence, begin: float
) -> float:
    """Return how many inner steps in rounds must have been made in partitions.

    These are steps of a replica for which it had no other time since its round before.

    Args:
        storm: the storm.
        own: the rounds, as all replicas report them.
        presence: when replicas were reachable.
        begin: time of the round before the first one.
    """
    fragments, found = storm.training.fragments, 0.0
    last: dict[tuple[int, int], float] = {}
    for one in sorted((one for one in own if one.own_weight), key=lambda one: one.at):
        before = last.get((one.index, one.number % fragments), begin)
        last[one.index, one.number % fragments] = one.at
        computing_s, reachable_s = (
            seconds_in(presence.spans(one.index, reachable=only), before, one.at)
            for only in (False, True)
        )
        step_s = storm.training.step_s * storm.training.pace(one.index, storm.timeline.peers)
        rest = one.own_weight - reachable_s / step_s
        found += min(max(0.0, rest), (computing_s - reachable_s) / step_s) / fragments
    return found


def _seconds_away(
    killed: ReplicaKilled, events: Iterable[TapeEvent]
) -> tuple[float | None, float | None]:
    """Return the seconds until the replica trains again, and until a commit; None: never."""
    later = sorted((one for one in events if one.at >= killed.at), key=lambda one: one.at)
    trains = next(
        (e for e in later if isinstance(e, ReplicaTrains) and e.index == killed.index), None
    )
    if trains is None:
        return None, None
    commit = next(
        (e for e in later if isinstance(e, RoundDone) and trains.peer in e.contributors), None
    )
    return trains.at - killed.at, None if commit is None else commit.at - killed.at


def _spread(values: Iterable[float | None]) -> tuple[float, ...]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return ()
    tail = known[min(len(known) - 1, int(0.9 * len(known)))]
    return tuple(round(one, 3) for one in (statistics.median(known), tail, known[-1]))
