"""What the runs of ``python -m pccl.stress quality`` have shown: losses, intervals, bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pccl.stress.studies.quality_grid import QualityVariant

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's distribution at 97.5 %, for 1 to 9 degrees of freedom: an interval of 95 %."""

SEEDS_MAX = len(T_QUANTILES) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRun:
    """One run, as one of its peers has seen it; all end with the same weights.

    Attributes:
        loss: on the held-out text at the end, in nats per byte.
        curve: pairs of tokens and loss.
        tokens: bytes of text that this peer has trained on.
        tx_bytes: what it has sent for averages.
        largest_tx_bytes: what it has sent for the largest of them.
        averages: how many there were.
        parameters: of the model.
        weights: digest of them at the end.
        seconds: from start to end, loading included.
        cpu_s: of all processes.
    """

    loss: float
    curve: tuple[tuple[int, float], ...]
    tokens: int
    tx_bytes: int
    largest_tx_bytes: int
    averages: int
    parameters: int
    weights: str
    seconds: float
    cpu_s: float

    @property
    def bytes_per_token(self) -> float:
        """Sent per byte of text."""
        return self.tx_bytes / self.tokens


def seen_in(log: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Those fields of ``QualityRun`` that a peer's log tells.

    Args:
        log: its lines, as ``JsonlWriter`` has written them.

    Raises:
        ValueError: no held-out loss is in it.
    """
    curve: list[tuple[int, float]] = []
    sent: list[int] = []
    for line in log:
        if line["event"] == "Evaluated" and line["loss"] is not None:
            curve.append((line["tokens"], line["loss"]))
        elif line["event"] in ("OuterStep", "GradientsAveraged"):
            sent.append(line["tx_bytes"])
    if not curve:
        raise ValueError("the log holds no held-out loss")
    return {
        "loss": curve[-1][1],
        "curve": tuple(curve),
        "tokens": curve[-1][0],
        "tx_bytes": sum(sent),
        "largest_tx_bytes": max(sent, default=0),
        "averages": len(sent),
    }


@dataclass(frozen=True, slots=True)
class Excess:
    """By how many percent one loss is higher than another: the mean over seeds, and its interval.

    Attributes:
        each: for every seed.
        mean: of these.
        low: where the interval of 95 % begins; NaN for a single seed.
        high: where it ends.
    """

    each: tuple[float, ...]
    mean: float
    low: float
    high: float


def excess(losses: Sequence[float], others: Sequence[float]) -> Excess:
    """Compare losses of the same seeds, pair by pair.

    What a seed does to both of a pair is not in their difference. The interval is Student's.

    Args:
        losses: one for each seed.
        others: what they are compared with, in the same order.

    Raises:
        ValueError: they are not as many, or too many.
    """
    each = tuple(100 * (a / b - 1) for a, b in zip(losses, others, strict=True))
    count = len(each)
    if not 0 < count <= SEEDS_MAX:
        raise ValueError(f"1 to {SEEDS_MAX} seeds can be compared, not {count}")
    mean = statistics.fmean(each)
    half = math.nan
    if count > 1:
        half = T_QUANTILES[count - 2] * statistics.stdev(each) / math.sqrt(count)
    return Excess(each, mean, mean - half, mean + half)


def verdict(found: Excess, variant: QualityVariant) -> str:
    """What became of the claim.

    "within": the whole interval is. "within on average": the mean is. A compressed variant may also
    be "indistinguishable" from what is not compressed: 0 lies in the interval.
    """
    if found.high <= variant.limit:
        return "within"
    if found.mean <= variant.limit:
        return "within on average"
    if variant.compression and found.low <= 0 <= found.high:
        return "indistinguishable"
    return "not within"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All seeds of one variant.

    Attributes:
        name: of the variant.
        seeds: those that it was trained with.
        loss: mean over them.
        against: what it is compared with; empty: nothing that was trained.
        excess: how it compares; None likewise.
        limit: what was claimed, in percent.
        verdict: what became of that.
        bytes_per_token: what a peer has sent.
        fewer_bytes: by this factor less than with data parallelism; None if that was not trained.
        largest_tx_bytes: what a peer has sent for one average at most.
        seconds: all runs together.
        cpu_s: likewise.
    """

    name: str
    seeds: tuple[int, ...]
    loss: float
    against: str
    excess: Excess | None
    limit: float
    verdict: str
    bytes_per_token: float
    fewer_bytes: float | None
    largest_tx_bytes: int
    seconds: float
    cpu_s: float


def table(
    runs: Mapping[str, Mapping[int, QualityRun]],
    variants: Mapping[str, QualityVariant],
    yardstick: str,
) -> list[Row]:
    """A row for each variant that was trained.

    Args:
        runs: by name of the variant and seed.
        variants: by name.
        yardstick: the variant whose bytes are compared with.
    """
    rows: list[Row] = []
    for name, by_seed in runs.items():
        variant = variants[name]
        mine = list(by_seed.values())
        others = runs.get(variant.against, {})
        pairs = [(run.loss, others[seed].loss) for seed, run in by_seed.items() if seed in others]
        found = excess(*zip(*pairs, strict=True)) if pairs else None
        sent = statistics.fmean(run.bytes_per_token for run in mine)
        usual = [run.bytes_per_token for run in runs.get(yardstick, {}).values()]
        rows.append(
            Row(
                name=name,
                seeds=tuple(by_seed),
                loss=statistics.fmean(run.loss for run in mine),
                against=variant.against if found else "",
                excess=found,
                limit=variant.limit,
                verdict=verdict(found, variant) if found else "",
                bytes_per_token=sent,
                fewer_bytes=statistics.fmean(usual) / sent if usual and sent else None,
                largest_tx_bytes=max(run.largest_tx_bytes for run in mine),
                seconds=sum(run.seconds for run in mine),
                cpu_s=sum(run.cpu_s for run in mine),
            )
        )
    return rows
