"""The file of a storm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pccl.stress.studies.storm.schedules import make_storm
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.timeline import TimelineError


@pytest.mark.parametrize("name", ["ft-diloco", "unequal", "sleeper", "home-internet"])
def test_a_file_keeps_a_storm(name: str, tmp_path: Path) -> None:
    storm = make_storm(name, 4, 300, 7)
    storm.dump(tmp_path / "storm.json")
    assert Storm.load(tmp_path / "storm.json") == storm


def test_the_last_replicas_have_the_paces() -> None:
    training = StormTraining(paces=(2.0, 4.0))
    assert [training.pace(index, 4) for index in range(4)] == [1.0, 1.0, 2.0, 4.0]


TIMELINE: dict[str, Any] = {"seed": 1, "peers": 2, "duration_s": 60.0}
JOINERS = {"at_s": 1.0, "kind": "joiners", "amount": 1}


def _changed(**changes: Any) -> str:
    return json.dumps({"training": {}, "timeline": TIMELINE, **changes})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object of training and timeline"),
        (_changed(more=1), "must be an object of training and timeline"),
        (_changed(training=[]), "training: must be an object"),
        (
            _changed(training={"steps": 1}),
            r"training.steps: no such field; known are source, step_s",
        ),
        (_changed(training={"sync_every": "20"}), "training.sync_every: must be of type int"),
        (_changed(training={"computes": 1}), "training.computes: must be of type bool"),
        (
            _changed(training={"grace_s": "soon"}),
            'training: grace_s must be a number of seconds or "auto"',
        ),
        (_changed(training={"quorum": 1.5}), "training: quorum must be"),
        (_changed(timeline={"seed": 1}), "peers: is missing"),
        (_changed(training={"step_s": 0}), "training.step_s: must be from 0.001 to 3600, not 0"),
        (_changed(training={"step_s": float("nan")}), "training.step_s: must be from .* not nan"),
        (_changed(training={"start_s": -1}), "training.start_s: must be from 0 to 3600, not -1"),
        (_changed(training={"width": 6}), "training.width: must be a multiple of 4"),
        (_changed(training={"layers": 0}), "training.layers: must be from 1 to 64"),
        (_changed(training={"excerpts": 10**9}), "training.excerpts: must be from 1 to 4096"),
        (_changed(training={"lr": -0.1}), "training.lr: must be from 0 to 1"),
        (_changed(training={"sync_every": 0}), "training: sync_every must be from 1"),
        (_changed(training={"delay": 30}), r"training: delay must be at most sync_every \(20\)"),
        (_changed(training={"eager": True}), "training: eager needs a delay of sync_every"),
        (_changed(training={"compression": "zip"}), "training: compression must be one of"),
        (_changed(training={"paces": 2}), "training.paces: must be a list of numbers"),
        (_changed(training={"paces": ["a"]}), "training.paces: must be from 0.01 to 1000, not 'a'"),
        (_changed(training={"paces": [0]}), "training.paces: must be from 0.01 to 1000, not 0"),
        (_changed(training={"paces": [1, 2, 3]}), "training.paces: must be at most 2"),
        (_changed(timeline={**TIMELINE, "groups": 2}), "timeline.groups: must be 1"),
        (
            _changed(timeline={**TIMELINE, "faults": [JOINERS]}),
            "timeline.faults: replicas have no newcomers; write restart instead of joiners",
        ),
    ],
)
def test_a_wrong_file_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "storm.json"
    path.write_text(text)
    with pytest.raises(TimelineError, match=why) as refused:
        Storm.load(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"gone.json: No such file"):
        Storm.load(tmp_path / "gone.json")
