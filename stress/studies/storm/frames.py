"""What a storm looks like at a time: the state of each replica, and the figures so far. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pccl.stress.studies.storm.figures import Span, figures_of, rounds_of, without
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaAway,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaTrains,
    StormBegan,
    TapeEvent,
)
from pccl.stress.timeline import FaultKind


class ReplicaState(StrEnum):
    """What a replica does, in a word for a reader."""

    TRAINS = "training"
    STARTS = "restarting"
    """Its process was killed, or has ended, and the next one does not train yet."""
    CUT_OFF = "cut off"
    STOPPED = "stopped"
    NAPS = "napping"
    SLEEPS = "asleep"


STATE_OF = {
    FaultKind.PARTITION: ReplicaState.CUT_OFF,
    FaultKind.FREEZE: ReplicaState.STOPPED,
    FaultKind.NAP: ReplicaState.NAPS,
    FaultKind.CLOCK_PAUSE: ReplicaState.SLEEPS,
}
"""Kind of a fault -> state of a replica that is away because of it."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A replica was in one state from ``begin`` to ``end``."""

    begin: float
    end: float
    state: ReplicaState


def states_of(events: Iterable[TapeEvent], peers: int, ends: float) -> list[list[StateSpan]]:
    """Return the states of each replica, in order and without gaps, from the first event on.

    A replica that is away is so even if its process ends meanwhile.
    """
    ordered = sorted(events, key=lambda one: one.at)
    begin = min(ordered[0].at, ends) if ordered else ends
    changes = [[(begin, ReplicaState.STARTS)] for _ in range(peers)]
    aways: list[list[ReplicaAway]] = [[] for _ in range(peers)]
    for event in ordered:
        match event:
            case ReplicaKilled(at, index) | ReplicaStarted(at, index):
                changes[index].append((at, ReplicaState.STARTS))
            case ReplicaTrains(at, index):
                changes[index].append((at, ReplicaState.TRAINS))
            case ReplicaAway():
                aways[event.index].append(event)
            case _:
                pass
    return [_spans(own, away, ends) for own, away in zip(changes, aways, strict=True)]


def state_at(spans: Sequence[StateSpan], at: float, linger_s: float = 0.0) -> ReplicaState:
    """Return the state of a replica at a time; one that was hindered shows it for a while longer.

    Args:
        spans: states of the replica.
        at: the time.
        linger_s: seconds for which a state other than training remains visible after its end.
    """
    recent = [one for one in spans if one.begin <= at and one.end + linger_s > at]
    hindered = [one for one in recent if one.state is not ReplicaState.TRAINS]
    return (hindered or recent or spans)[-1].state


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of ``spans`` that are in ``others``, too."""
    both = ((max(a, c), min(b, d)) for a, b in spans for c, d in others)
    return [(begin, end) for begin, end in both if begin < end]


def joined(spans: Iterable[Span]) -> list[Span]:
    """Return ordered spans with those that touch made one."""
    found: list[Span] = []
    for begin, end in spans:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


@dataclass(frozen=True, slots=True)
class StormFrame:
    """What a frame shows.

    Attributes:
        at_s: seconds since the storm began.
        states: state of each replica.
        took_part: indices of the replicas whose work is in the last round.
        faults: number of faults so far that are not there from the beginning.
        rounds: number of rounds so far since the beginning.
        share_kept: share of the possible inner steps that is in the model; None: not known yet.
        losses: (seconds since the storm began, loss on held-out text) so far.
    """

    at_s: float
    states: tuple[ReplicaState, ...]
    took_part: frozenset[int]
    faults: int
    rounds: int
    share_kept: float | None
    losses: tuple[tuple[float, float], ...]


def frame_at(
    storm: Storm, events: Sequence[TapeEvent], at: float, linger_s: float = 0.0
) -> StormFrame:
    """Return what is known at a time.

    Args:
        storm: the storm.
        events: its tape.
        at: the time, on the clock of the tape.
        linger_s: seconds for which a fault remains visible after its end.
    """
    timeline = storm.timeline
    began = began_at(events)
    known = [one for one in events if one.at <= at or isinstance(one, StormBegan)]
    states = states_of(known, timeline.peers, began + timeline.duration_s)
    rounds = rounds_of(storm, known)
    try:
        share_kept = figures_of(storm, known).share_kept
    except ValueError:  # there are too few rounds
        share_kept = None
    losses = (one for one in known if isinstance(one, HeldOutLoss))
    return StormFrame(
        at_s=at - began,
        states=tuple(state_at(spans, at, linger_s) for spans in states),
        took_part=rounds[-1].took_part if rounds else frozenset(),
        faults=sum(0 < fault.at_s <= at - began for fault in timeline.faults),
        rounds=sum(one.at >= began for one in rounds),
        share_kept=share_kept,
        losses=tuple(sorted((max(0.0, one.at - began), one.loss) for one in losses)),
    )


def frames_of(storm: Storm, events: Sequence[TapeEvent], number: int) -> list[StormFrame]:
    """Return frames at equal distances; a fault is in at least one, however short it is."""
    began, distance_s = began_at(events), storm.timeline.duration_s / (number - 1)
    return [
        frame_at(storm, events, began + place * distance_s, distance_s) for place in range(number)
    ]


def began_at(events: Sequence[TapeEvent]) -> float:
    """Return when the storm of a tape began."""
    return next(one.at for one in events if isinstance(one, StormBegan))


def _spans(
    changes: Sequence[tuple[float, ReplicaState]], aways: Sequence[ReplicaAway], ends: float
) -> list[StateSpan]:
    stops = [at for at, _ in changes[1:]] + [ends]
    found = [
        StateSpan(at, min(stop, ends), state)
        for (at, state), stop in zip(changes, stops, strict=True)
    ]
    for away in aways:
        hole = (away.at, min(away.until, ends))
        found = [
            StateSpan(begin, end, one.state)
            for one in found
            for begin, end in without([(one.begin, one.end)], [hole])
        ]
        found.append(StateSpan(*hole, STATE_OF[FaultKind(away.why)]))
    return sorted(
        (one for one in found if one.begin < one.end), key=lambda one: (one.begin, one.end)
    )
