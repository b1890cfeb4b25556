"""Finished runs as lines of JSON, so that an interrupted command resumes where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """The result of one run.

    Attributes:
        name: name of the variant.
        seed: seed of the run.
        loss: loss of the common model on the held-out excerpts, in nats per byte.
        digest: digest of the common model.
        cpu_s: CPU time of all its replicas, in seconds.
        settings: settings of the variant, and length of the run.
    """

    name: str
    seed: int
    loss: float
    digest: str
    cpu_s: float
    settings: dict[str, Any]

    @property
    def tuned(self) -> tuple[float, float, float]:
        """Inner rate, outer rate and outer momentum."""
        settings = self.settings
        return settings["lr"], settings["outer_lr"], settings["outer_momentum"]


def key(seed: int, settings: dict[str, Any]) -> str:
    """Return what identifies a run: equal keys give equal results."""
    return json.dumps([seed, settings], sort_keys=True)


def read(path: Path) -> list[FinishedRun]:
    """Return the runs in a file; none if there is no file.

    Raises:
        ValueError: a line is not one of ``append``; only the last one may be incomplete.
    """
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the process was killed while it wrote this line
    try:
        return [FinishedRun(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} holds something other than runs: {error}") from None


def append(path: Path, runs: Iterable[FinishedRun]) -> None:
    """Add runs to a file; first remove a last line that is not complete."""
    kept = path.read_bytes() if path.exists() else b""
    whole = kept[: kept.rfind(b"\n") + 1]
    with path.open("r+b" if path.exists() else "wb") as file:
        file.truncate(len(whole))
        file.seek(len(whole))
        file.write("".join(json.dumps(asdict(run)) + "\n" for run in runs).encode())
