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


def _changed(**changes: Any) -> str:
    path_text = {"training": {}, "timeline": {"seed": 1, "peers": 2, "duration_s": 60.0}}
    return json.dumps({**path_text, **changes})


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
