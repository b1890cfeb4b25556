"""Paired differences with intervals, and the best settings of a sweep. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pccl.stress.studies.quality.results import FinishedRun

STUDENT_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Two-sided 95 % quantiles of Student's t distribution for 1, 2, ... degrees of freedom."""

Settings = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PairedExcess:
    """By how much the losses of one variant exceed those of another, seed by seed.

    Attributes:
        mean: mean of the differences, in percent of the baseline's loss.
        low: lower end of the 95 % interval; -inf with one pair.
        high: upper end; inf with one pair.
        above: number of pairs in which the variant has the higher loss.
        pairs: number of pairs.
    """

    mean: float
    low: float
    high: float
    above: int
    pairs: int

    def __str__(self) -> str:
        where = f"{self.low:+.2f} to {self.high:+.2f}" if self.pairs > 1 else "one pair"
        return f"{self.mean:+.2f} % ({where})"


def excess(losses: Mapping[int, float], others: Mapping[int, float]) -> PairedExcess | None:
    """Compare the losses of two variants; return None if no seed has both.

    Args:
        losses: by seed.
        others: those of the baseline.

    Raises:
        ValueError: there are more pairs than ``STUDENT_95`` has quantiles for.
    """
    seeds = sorted(losses.keys() & others.keys())
    if not seeds:
        return None
    if len(seeds) > len(STUDENT_95) + 1:
        raise ValueError(f"at most {len(STUDENT_95) + 1} pairs can be compared, not {len(seeds)}")
    percent = [100 * (losses[seed] / others[seed] - 1) for seed in seeds]
    mean, half = statistics.fmean(percent), math.inf
    if len(seeds) > 1:
        deviation = statistics.stdev(percent) / math.sqrt(len(seeds))
        half = STUDENT_95[len(seeds) - 2] * deviation
    above = sum(one > 0 for one in percent)
    return PairedExcess(mean, mean - half, mean + half, above, len(seeds))


def by_settings(runs: Iterable[FinishedRun]) -> dict[str, dict[Settings, dict[int, float]]]:
    """Return the losses by name of the variant, tuned settings and seed."""
    found: defaultdict[str, defaultdict[Settings, dict[int, float]]]
    found = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        found[run.name][run.tuned][run.seed] = run.loss
    return {name: dict(settings) for name, settings in found.items()}


def best(tried: Mapping[Settings, Mapping[int, float]]) -> Settings:
    """Return the settings with the lowest mean loss over the seeds that all settings have.

    Raises:
        ValueError: no seed was tried with all settings.
    """
    every = {seed for losses in tried.values() for seed in losses}
    seeds = [seed for seed in sorted(every) if all(seed in losses for losses in tried.values())]
    if not seeds:
        raise ValueError("no seed was tried with all settings; finish the sweep")

    def mean(settings: Settings) -> float:
        found = statistics.fmean(tried[settings][seed] for seed in seeds)
        return math.inf if math.isnan(found) else found

    return min(sorted(tried), key=mean)


def is_at_edge(chosen: float, tried: Sequence[float]) -> bool:
    """Whether a rate is the lowest or highest of several that were tried."""
    return len(set(tried)) > 1 and chosen in (min(tried), max(tried))
