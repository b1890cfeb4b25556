"""``Storm``: a schedule of faults, and how the replicas train under it. One file drives both forms.

The file is a JSON object: ``training`` holds the fields of :class:`StormTraining`, and ``timeline``
is a scenario of the harness (:mod:`pccl.stress.timeline`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from pccl.checks import check_quorum
from pccl.stress.timeline import Timeline, TimelineError


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
        width: width of the GPT; its number of parameters grows with the square.
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
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                continue
            if each.name in ("compression", "grace_s", "quorum", "paces"):
                continue
            if not isinstance(value, kind):
                raise TimelineError(f"training.{each.name}: must be of type {kind.__name__}")
        try:
            check_quorum(self.quorum, self.grace_s)
        except (TypeError, ValueError) as error:
            raise TimelineError(f"training: {error}") from error

    def pace(self, index: int, peers: int) -> float:
        """Return how many times longer an inner step of the replica ``index`` takes."""
        place = index - (peers - len(self.paces))
        return self.paces[place] if 0 <= place < len(self.paces) else 1.0


@dataclass(frozen=True, slots=True)
class Storm:
    """A schedule of faults, and the training under it."""

    timeline: Timeline
    training: StormTraining

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
        try:
            given = json.loads(path.read_text())
        except OSError as error:
            raise TimelineError(f"{path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise TimelineError(f"{path}: is not JSON: {error}") from error
        if not isinstance(given, dict) or set(cast("Any", given)) != {"training", "timeline"}:
            raise TimelineError(f"{path}: must be an object of training and timeline")
        held = cast("dict[str, Any]", given)
        try:
            return Storm(Timeline.from_json(held["timeline"]), _training(held["training"]))
        except TimelineError as error:
            raise TimelineError(f"{path}: {error}") from error


def _training(given: object) -> StormTraining:
    if not isinstance(given, dict):
        raise TimelineError("training: must be an object")
    values = dict(cast("dict[str, Any]", given))
    known = [each.name for each in fields(StormTraining)]
    for name in values:
        if name not in known:
            raise TimelineError(f"training.{name}: no such field; known are {', '.join(known)}")
    values["paces"] = tuple(values.get("paces", ()))
    return StormTraining(**values)
