"""All scenarios: ``peer/`` and ``master/``, as text with what the machines made of it.

How to read and record them: ``tests/support/scenarios.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pccl.machines.master import membership
from pccl.protocol.types import AlgorithmTable
from tests.support.master_stage import MasterStage
from tests.support.paths import ROOT
from tests.support.peer_stage import PeerStage
from tests.support.scenarios import Scenario, Stage, play, read, write

FOLDER = ROOT / "tests" / "scenario"
STAGES: dict[str, Callable[[], Stage]] = {"master": MasterStage, "peer": PeerStage}
FILES = sorted(path for machine in STAGES for path in (FOLDER / machine).glob("*.txt"))


@pytest.fixture(autouse=True)
def _rings_only(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Which algorithm is the quickest is not the subject here."""

    def ring(*known: object) -> AlgorithmTable:
        return AlgorithmTable()

    monkeypatch.setattr(membership, "plan_view", ring)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_scenarios_go_as_recorded(path: Path, records: bool) -> None:
    recorded = read(path)
    stage = STAGES[path.parent.name]
    played = [Scenario(one.title, one.above, play(one, stage())) for one in recorded]
    if records:
        write(path, played)
        return
    for then, now in zip(recorded, played, strict=True):
        assert now.as_text() == then.as_text()
