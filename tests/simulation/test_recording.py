"""Recording changes nothing that peers do: traces are the same without it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pccl.stress.sim.runner import run_seed
from pccl.telemetry.recorder import Recorder
from pccl.transports.link import Lane

SEEDS = range(4)


def test_recording_does_not_change_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []
    begin = Recorder.__init__

    def kept(recorder: Recorder) -> None:
        begin(recorder)
        made.append(recorder)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "__init__", kept)
        recorded = [run_seed(seed) for seed in SEEDS]
    assert any(recorder.segments for recorder in made)
    assert any(recorder.phases for recorder in made)

    attach: Callable[..., None] = Lane.__init__

    def unrecorded(
        lane: Lane, connection: Any, number: int, link: Any, handler: Any, *_: Any
    ) -> None:
        attach(lane, connection, number, link, handler)

    def nothing(recorder: Recorder) -> None:
        begin(recorder)
        recorder.phases = deque(maxlen=0)

    with monkeypatch.context() as patch:
        patch.setattr(Lane, "__init__", unrecorded)
        patch.setattr(Recorder, "__init__", nothing)
        assert [run_seed(seed) for seed in SEEDS] == recorded
    assert all(verdict.trace_digest for verdict in recorded)
