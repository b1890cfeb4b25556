"""What ``python -m pccl.stress quality`` trains: ways to train together, and how they are told.

All of them see the same bytes in the same steps and begin with the same weights: both follow from
the seed alone. What is set for each (rates, momentum) was found with a seed that is not among
those that count, and is the same for all of these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """A mode of ``train_gpt.py``, and what was found for it."""

    mode: str
    settings: str


OUTER = "--lr 0.012 --outer-lr 0.8 --outer-momentum 0.4"
WAYS = {
    "data-parallel": Way("data-parallel", "--lr 0.012"),
    "sync": Way("sync", OUTER),
    "delayed": Way("delayed", f"{OUTER} --delay 2 --mixing 0.5"),
    "late": Way("delayed", "--lr 0.012 --outer-lr 0.7 --outer-momentum 0"),
    "streaming": Way("streaming", OUTER),
}
"""``late`` is delayed by a whole round, the others by less."""


@dataclass(frozen=True, slots=True)
class QualityVariant:
    """One way to train together, and what is claimed of it.

    Attributes:
        way: its name.
        compression: a wire format; empty: none.
        against: the variant that it is compared with; empty: none.
        limit: by how many percent its held-out loss may be higher than that one's.
    """

    way: str
    compression: str = ""
    against: str = ""
    limit: float = 0.0

    @property
    def name(self) -> str:
        """``streaming-int4``."""
        return "-".join(filter(None, (self.way, self.compression)))


VARIANTS = {
    variant.name: variant
    for variant in (
        QualityVariant("data-parallel"),
        QualityVariant("sync", "", "data-parallel", 2.0),
        QualityVariant("sync", "int8", "sync", 0.5),
        QualityVariant("sync", "int4", "sync", 0.5),
        QualityVariant("delayed", "", "sync", 1.0),
        QualityVariant("late", "", "sync", 1.0),
        QualityVariant("streaming", "", "sync", 1.0),
        QualityVariant("streaming", "int8", "streaming", 0.5),
        QualityVariant("streaming", "int4", "streaming", 0.5),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all variants have alike; as of ``train_gpt.py``."""

    peers: int
    steps: int
    sync_every: int
    width: int
    layers: int
    batch: int
    context: int
    warm_up: int
    evaluate_every: int
    held_out: int

    def arguments(self, variant: QualityVariant, seed: int) -> list[str]:
        """Of ``train_gpt.py``, for one run."""
        words = ["--mode", WAYS[variant.way].mode, "--seed", str(seed), "--threads", "1"]
        for name in (
            "steps",
            "sync_every",
            "width",
            "layers",
            "batch",
            "context",
            "warm_up",
            "evaluate_every",
            "held_out",
        ):
            words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        words += WAYS[variant.way].settings.split()
        if variant.compression:
            words += ["--compression", variant.compression]
        return words
