"""The ways to train together, and the settings of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from gpt.trainers import outer

EVERY = 20
"""Inner steps between two averages of a parameter, unless a variant says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingVariant:
    """One way to train together.

    Attributes:
        mode: name of the mode, as in ``MODES``.
        replicas: number of replicas.
        lr: peak rate of the inner optimizer.
        sync_every: inner steps between two averages of a parameter; 0: all gradients are averaged
            in every step (data-parallel).
        fragments: parts of the model that take turns.
        delay: inner steps from a pseudo-gradient to the merge of its average.
        mixing: share of the local parameters that a merge keeps; None: the default of ``DiLoCo``.
        eager: whether merges preview the own latest pseudo-gradient.
        outer_lr: rate of the outer SGD.
        outer_momentum: its Nesterov momentum; 0: plain SGD.
        compression: wire format of the averages, with error feedback; None: none.
        inner: inner optimizer: ``"adamw"`` or ``"muon"``.
        slowest: steps that the other replicas make while the last one makes one. Above 1,
            ``sync_every`` is a time: a multiple of the time of its step.
    """

    mode: str
    replicas: int = 2
    lr: float = 0.012
    sync_every: int = EVERY
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    eager: bool = False
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compression: str | None = None
    inner: str = "adamw"
    slowest: int = 1

    @property
    def name(self) -> str:
        """``sync``, ``streaming-int4``, ``sync, 4 replicas``."""
        format = f"-{self.compression}" if self.compression else ""
        return f"{self.mode}{format}{f', {self.replicas} replicas' if self.replicas != 2 else ''}"

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``DiLoCo`` that this variant stands for."""
        return {
            "sync_every": self.sync_every if self.slowest == 1 else f"{self.sync_every}s",
            "outer": partial(outer, self.outer_lr, self.outer_momentum),
            "delay": self.delay,
            "mixing": self.mixing,
            "eager": self.eager,
            "fragments": self.fragments,
            "compression": self.compression,
            "min_peers": self.replicas,
        }

    def settings(self) -> dict[str, Any]:
        """Return all settings in plain values, for a line of JSON."""
        settings = asdict(self)
        if self.slowest == 1:
            del settings["slowest"]  # as in lines that are older than this setting
        return settings

    def pace(self, rank: int) -> int:
        """Return how many steps of the fastest replica a step of a replica takes."""
        return self.slowest if rank == self.replicas - 1 else 1

    def longest(self, steps: int) -> int:
        """Return the steps of the fastest replica if all replicas make ``steps`` on average."""
        return round(steps * self.replicas / (self.replicas - 1 + 1 / self.slowest))

    @property
    def tuned(self) -> tuple[float, float, float]:
        """The settings that a sweep tunes: inner rate, outer rate, outer momentum."""
        return self.lr, self.outer_lr, self.outer_momentum

    def tune(self, lr: float, outer_lr: float, outer_momentum: float) -> TrainingVariant:
        """Return this variant with other tuned settings; data-parallel has the first only."""
        if not self.sync_every:
            return replace(self, lr=lr)
        return replace(self, lr=lr, outer_lr=outer_lr, outer_momentum=outer_momentum)


MODES: Mapping[str, TrainingVariant] = {
    variant.mode: variant
    for variant in (
        TrainingVariant(mode="data-parallel", sync_every=0),
        TrainingVariant(mode="sync"),
        TrainingVariant(mode="streaming", fragments=4, delay=5),
        TrainingVariant(mode="delayed", delay=2),
        TrainingVariant(mode="late", delay=EVERY, outer_lr=0.7),
        TrainingVariant(mode="eager", delay=EVERY, eager=True),
        TrainingVariant(mode="muon", sync_every=30, inner="muon"),
        TrainingVariant(mode="unequal", slowest=4),
    )
}
"""The modes, with settings to begin a sweep from. ``late`` and ``eager`` merge one round late.
In ``unequal`` the last replica is four times slower than the others, and averages are weighted."""

BASELINES: Mapping[str, str] = {
    "sync": "data-parallel",
    "streaming": "sync",
    "delayed": "sync",
    "late": "sync",
    "eager": "sync",
    "muon": "sync",
    "unequal": "sync",
}
"""The mode that each mode is compared with. A compressed variant is compared with its own mode."""


def uncompressed(variant: TrainingVariant) -> TrainingVariant:
    """Return the variant without compression."""
    return replace(variant, compression=None)


def tuned_as(variant: TrainingVariant) -> TrainingVariant:
    """Return the variant whose tuned settings a variant has: without compression, equally fast."""
    mode = variant.mode if variant.slowest == 1 else BASELINES[variant.mode]
    return replace(uncompressed(variant), mode=mode, slowest=1)


def baseline(variant: TrainingVariant) -> str | None:
    """Return the name of the variant that ``variant`` is compared with; None: there is none."""
    if variant.compression:
        return uncompressed(variant).name
    mode = BASELINES.get(variant.mode)
    return None if mode is None else replace(variant, mode=mode).name


def variants(
    modes: Sequence[str], formats: Sequence[str], replicas: Sequence[int]
) -> list[TrainingVariant]:
    """Return a variant for each mode and number of replicas, and compressed ones of DiLoCo modes.

    Args:
        modes: names in ``MODES``.
        formats: wire formats; ``"none"`` adds none.
        replicas: numbers of replicas.

    Raises:
        ValueError: there is no such mode.
    """
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise ValueError(f"there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    plain = [replace(MODES[mode], replicas=count) for count in replicas for mode in modes]
    coded = [
        replace(variant, compression=format)
        for variant in plain
        for format in formats
        if variant.sync_every and format != "none"
    ]
    return plain + coded
