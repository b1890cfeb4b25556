"""A storm with real processes on this machine, by the harness of ``stress run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pccl.stress.chaos.run import ChaosRun
from pccl.stress.chaos.settings import Settings
from pccl.stress.chaos.verdict.judge import Judgement, judge
from pccl.stress.chaos.verdict.record import Life, RunRecord
from pccl.stress.chaos.view import ChaosView
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import (
    TAPE_KINDS,
    ReplicaStarted,
    StormBegan,
    TapeEvent,
    of_fault,
)

SLACK_S = 120.0
"""How long the last rounds of a storm may take over slow links."""


class RealStorm:
    """A storm to run with real processes.

    Args:
        storm: the storm.
        folder: an empty folder for the state of the run.
        judged_every: number of rounds between two losses on held-out text.
    """

    def __init__(self, storm: Storm, folder: Path, judged_every: int) -> None:
        self._storm, self._folder, self._every = storm, folder, judged_every
        self._told: list[TapeEvent] = []

    def run(self, view: ChaosView) -> tuple[list[TapeEvent], Judgement]:
        """Run the storm, and return its tape and what the harness found.

        Raises:
            StartFailed: the run did not begin.
            KeyboardInterrupt: Ctrl-C; all processes have ended.
        """
        path = self._folder / "storm.json"
        self._storm.dump(path)
        settings = Settings(
            self._storm.timeline,
            self._folder,
            program="pccl.stress.studies.storm.replica_process",
            arguments=(
                *("--index", "{index}", "--storm", str(path)),
                *("--judged-every", str(self._every)),
            ),
            kinds=TAPE_KINDS,
            slack_s=SLACK_S,
        )
        chaos = ChaosRun(settings, view, self._listen)
        chaos.run()
        return [*self._told, *events_of(chaos.record)], judge(chaos.record)

    def _listen(self, life: Life, event: Any) -> None:
        if isinstance(event, TAPE_KINDS):
            self._told.append(event)


def events_of(record: RunRecord) -> list[TapeEvent]:
    """Return what the harness did to the replicas, as events of the tape."""
    events: list[TapeEvent] = [StormBegan(record.began_s)]
    for done in record.done:
        events += of_fault(done.fault, record.timeline.peers, done.began_s, done.ended_s)
    events += [
        ReplicaStarted(life.began_s, life.index)
        for life in record.lives
        if life.index >= 0 and life.began_s > record.began_s
    ]
    return events
