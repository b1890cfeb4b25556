"""``Storm``: a schedule of faults, and how the replicas train under it. One file drives both forms.

The file is a JSON object: ``training`` holds the fields of :class:`StormTraining`, and ``timeline``
is a scenario of the harness (:mod:`pccl.stress.timeline`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from pccl.bindings.arguments import check_compression
from pccl.bindings.diloco.schedule import schedule
from pccl.checks import check_quorum, shown
from pccl.stress.timeline import FaultKind, Timeline, TimelineError, read_file

HEADS = 4
"""Number of attention heads of the GPT."""

PACE_MIN, PACE_MAX = 0.01, 1000.0

RANGES: Mapping[str, tuple[float, float]] = {
    "step_s": (0.001, 3600.0),
    "start_s": (0.0, 3600.0),
    "width": (HEADS, 4096),
    "layers": (1, 64),
    "excerpts": (1, 4096),
    "lr": (0.0, 1.0),
}
"""Numbers of :class:`StormTraining` -> the smallest and the largest value."""


@dataclass(frozen=True, slots=True)
class StormTraining:
    """How the replicas train.

    Attributes:
        source: the schedule that the faults follow, and what it leaves open.
        step_s: duration of an inner step, in seconds; processes wait for the rest of it, so that
            two cores can be many machines.
        sync_every: inner steps between two rounds of a fragment.
        delay: inner steps between the launch and the merge of a round. 0 and ``sync_every``
            discard no inner steps.
        fragments: number of fragments.
        eager: whether merges preview the next outer step.
        compression: as for ``DiLoCo``.
        quorum: as for ``DiLoCo``.
        grace_s: as for ``DiLoCo``.
        start_s: seconds from the start of a process to its first call, for simulated processes;
            real ones take as long as they take.
        paces: how many times longer the inner steps of the last replicas are.
        width: width of the GPT, a multiple of ``HEADS``; parameters grow with
            its square.
        layers: number of blocks of the GPT.
        excerpts: excerpts of 64 bytes in a batch.
        lr: rate of the inner optimizer, AdamW.
        computes: whether the replicas compute gradients; otherwise a step changes some numbers.
    """

    source: str = ""
    step_s: float = 0.25
    sync_every: int = 20
    delay: int = 0
    fragments: int = 1
    eager: bool = False
    compression: str | None = None
    quorum: float = 0.5
    grace_s: float | str = "auto"
    start_s: float = 4.0
    paces: tuple[float, ...] = ()
    width: int = 32
    layers: int = 2
    excerpts: int = 4
    lr: float = 0.004
    computes: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            value: object = getattr(self, each.name)
            kind: type[object] = type(cast("object", each.default))
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if each.name in ("compression", "grace_s", "quorum", "paces"):
                continue
            if not (isinstance(value, kind) or (kind is float and is_whole)):
                raise TimelineError(f"training.{each.name}: must be of type {kind.__name__}")
            if each.name in RANGES:
                _check_range(each.name, cast("float", value), *RANGES[each.name])
        if self.width % HEADS:
            raise TimelineError(f"training.width: must be a multiple of {HEADS}")
        for pace in self.paces:
            _check_range("paces", pace, PACE_MIN, PACE_MAX)
        try:
            check_quorum(self.quorum, self.grace_s)
            check_compression(self.compression)
            timing = schedule(self.sync_every, self.fragments, self.delay)
            timing.check_eager(self.eager, timing.mixing(None))
        except (TypeError, ValueError) as error:
            raise TimelineError(f"training: {error}") from error

    def pace(self, index: int, peers: int) -> float:
        """Return how many times longer an inner step of the replica ``index`` takes."""
        place = index - (peers - len(self.paces))
        return self.paces[place] if 0 <= place < len(self.paces) else 1.0


@dataclass(frozen=True, slots=True)
class Storm:
    """A schedule of faults, and the training under it.

    Raises:
        TimelineError: the timeline has newcomers or groups, or there are more paces than replicas.
    """

    timeline: Timeline
    training: StormTraining

    def __post_init__(self) -> None:
        if self.timeline.groups != 1:
            raise TimelineError("timeline.groups: must be 1, because all replicas train together")
        if any(fault.kind is FaultKind.JOINERS for fault in self.timeline.faults):
            raise TimelineError(
                f"timeline.faults: replicas have no newcomers; write {FaultKind.RESTART} instead "
                f"of {FaultKind.JOINERS}"
            )
        paces, peers = len(self.training.paces), self.timeline.peers
        if paces > peers:
            raise TimelineError(f"training.paces: must be at most {peers}, one for each replica")

    @property
    def quiet(self) -> Storm:
        """The same training without faults."""
        return Storm(replace(self.timeline, faults=()), self.training)

    def dump(self, path: Path) -> None:
        """Write the file.

        Raises:
            OSError: the file cannot be written.
        """
        training = json.dumps(asdict(self.training))
        path.write_text(f'{{"training": {training},\n"timeline": {self.timeline.to_text()}}}\n')

    @staticmethod
    def load(path: Path) -> Storm:
        """Read a file.

        Raises:
            TimelineError: the file cannot be read, or is not valid.
        """
        return read_file(path, Storm.from_json)

    @staticmethod
    def from_json(given: object) -> Storm:
        """Check an object strictly, and return its storm.

        Raises:
            TimelineError: a field is missing, unknown, of the wrong type or out of range.
        """
        if not isinstance(given, dict) or set(cast("Any", given)) != {"training", "timeline"}:
            raise TimelineError("must be an object of training and timeline")
        held = cast("dict[str, Any]", given)
        return Storm(Timeline.from_json(held["timeline"]), _training(held["training"]))


def _training(given: object) -> StormTraining:
    if not isinstance(given, dict):
        raise TimelineError("training: must be an object")
    values = dict(cast("dict[str, Any]", given))
    known = [each.name for each in fields(StormTraining)]
    for name in values:
        if name not in known:
            raise TimelineError(f"training.{name}: no such field; known are {', '.join(known)}")
    paces: object = values.get("paces", [])
    if not isinstance(paces, list):
        raise TimelineError("training.paces: must be a list of numbers")
    values["paces"] = tuple(cast("list[object]", paces))
    return StormTraining(**values)


def _check_range(name: str, value: object, least: float, most: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= cast("float", value) <= most:  # NaN is in no range
        raise TimelineError(
            f"training.{name}: must be from {least:g} to {most:g}, not {shown(value)}"
        )
