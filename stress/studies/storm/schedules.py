"""The published schedules of faults, and our own, for any number of replicas.

What a source leaves open, such as durations, stands in :data:`SCHEDULES` and in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault

HOUR_S = 3600.0
PARTITION_S = 30.0
STOP_S = 20.0
RESTART_S = 0.5
"""Seconds after a kill until the next process is started, as a supervisor does it."""
CALM_S = 10.0
"""The last seconds of a storm, in which no fault begins or lasts."""

_KILLED, _CUT, _STOPPED = FaultKind.RESTART, FaultKind.PARTITION, FaultKind.FREEZE
_FT_DILOCO = {_KILLED: 28, _CUT: 9, _STOPPED: 8}
_HOME_S = {
    FaultKind.NAP: (2.0, 20.0),
    FaultKind.CLOCK_PAUSE: (20.0, 90.0),
    FaultKind.RESTART: (5.0, 60.0),
}
_LASTS_S = {_KILLED: RESTART_S, _CUT: PARTITION_S, _STOPPED: STOP_S}


class _Draw:
    """Draws the faults of a storm; no replica has two at once."""

    def __init__(self, replicas: int, seconds: float, seed: int, recovery_s: float) -> None:
        self.replicas, self.seconds = replicas, seconds
        self.rng = Random(f"{seed}/storm")
        self._free_s = [0.0] * replicas
        self._recovery_s = recovery_s

    def times(self, every_s: float) -> Iterator[float]:
        """Yield the times of a Poisson process."""
        at_s = self.rng.expovariate(1 / every_s)
        while at_s < self.seconds - CALM_S:
            yield at_s
            at_s += self.rng.expovariate(1 / every_s)

    def one(self, at_s: float, kind: FaultKind, lasts_s: float) -> TimelineFault | None:
        """Return a fault of a replica that has none now; None: there is no time or no replica."""
        free = [n for n, free_s in enumerate(self._free_s) if free_s <= at_s]
        if not free or at_s + lasts_s > self.seconds - CALM_S:
            return None
        peer = self.rng.choice(free)
        self._free_s[peer] = at_s + lasts_s + self._recovery_s
        return TimelineFault(at_s, kind, peer, duration_s=lasts_s)


def _ft_diloco(draw: _Draw) -> Iterator[TimelineFault | None]:
    for at_s in draw.times(HOUR_S / 125 * 32 / draw.replicas):
        (kind,) = draw.rng.choices(tuple(_FT_DILOCO), tuple(_FT_DILOCO.values()))
        yield draw.one(at_s, kind, _LASTS_S[kind])


def _kills(every_s: float) -> Callable[[_Draw], Iterator[TimelineFault | None]]:
    def kills(draw: _Draw) -> Iterator[TimelineFault | None]:
        at_s = every_s
        while at_s < draw.seconds - CALM_S:
            yield draw.one(at_s, _KILLED, RESTART_S)
            at_s += every_s

    return kills


def _home_internet(draw: _Draw) -> Iterator[TimelineFault | None]:
    for peer in range(draw.replicas):
        up_mbit = 10 ** draw.rng.uniform(1, 2)
        yield TimelineFault(0.0, FaultKind.BANDWIDTH, peer, None, draw.seconds, up_mbit * 125_000)
    each_s = HOUR_S / draw.replicas
    often = {FaultKind.NAP: 4, FaultKind.CLOCK_PAUSE: 2, FaultKind.RESTART: 1, FaultKind.RESET: 4}
    times = [(at_s, kind) for kind, n in often.items() for at_s in draw.times(each_s / n)]
    for at_s, kind in sorted(times):
        if kind is FaultKind.RESET:
            yield TimelineFault(at_s, kind, draw.rng.randrange(draw.replicas))
        else:
            yield draw.one(at_s, kind, draw.rng.uniform(*_HOME_S[kind]))


def _sleeper(draw: _Draw) -> Iterator[TimelineFault | None]:
    yield TimelineFault(20.0, FaultKind.NAP, draw.replicas - 1, duration_s=25.0)


def _none(draw: _Draw) -> Iterator[TimelineFault | None]:
    yield from ()


Drawn = Callable[[_Draw], Iterator[TimelineFault | None]]

SCHEDULES: dict[str, tuple[Drawn, StormTraining, str]] = {
    "quiet": (_none, StormTraining(source="no faults"), ""),
    "ft-diloco": (
        _ft_diloco,
        StormTraining(
            source=(
                "ft-diloco: 125 faults an hour among 32 replicas, 28 kills to 9 partitions to 8 "
                f"SIGSTOPs; ours: a partition lasts {PARTITION_S:g} s, a stop {STOP_S:g} s"
            ),
            delay=20,
            eager=True,
        ),
        "",
    ),
    "torchft-60": (_kills(60.0), StormTraining(source="torchft: a kill every 60 s"), ""),
    "torchft-15": (_kills(15.0), StormTraining(source="torchft: a kill every 15 s"), ""),
    "home-internet": (
        _home_internet,
        StormTraining(
            source=(
                "ours: 10 to 100 Mbit/s for each peer; each hour and peer 4 naps of 2 to 20 s, 2 "
                "sleeps of 20 to 90 s, a restart after 5 to 60 s, 4 resets of all connections"
            ),
            width=128,
            delay=20,
            eager=True,
        ),
        "rtt=40ms",
    ),
    "slow-links": (
        _none,
        StormTraining(source="ours: all links slow", width=128, delay=20, eager=True),
        "rate=10mbit,rtt=40ms",
    ),
    "sleeper": (
        _sleeper,
        StormTraining(source="ours: one replica naps for 25 s", grace_s=1.0),
        "",
    ),
    "unequal": (
        _none,
        StormTraining(source="ours: the last replica is four times slower", paces=(4.0,)),
        "",
    ),
}
"""Name -> how to draw its faults, the training, and the link between any two processes."""


def make_storm(
    name: str, replicas: int, seconds: float, seed: int, *, link: str | None = None
) -> Storm:
    """Draw the storm of a schedule; it depends on the arguments only.

    Args:
        name: a key of ``SCHEDULES``.
        replicas: number of replicas.
        seconds: duration of the storm.
        seed: seed of all draws.
        link: link between any two processes; None: that of the schedule.

    Raises:
        TimelineError: an argument is out of range.
    """
    drawn, training, own_link = SCHEDULES[name]
    recovery_s = 2 * training.step_s * training.sync_every
    faults = drawn(_Draw(replicas, seconds, seed, recovery_s))
    timeline = Timeline(
        seed,
        replicas,
        seconds,
        tuple(fault for fault in faults if fault is not None),
        lanes=1,
        deadline_s=5.0,
        link=own_link if link is None else link,
    )
    return Storm(timeline, replace(training))
