"""Weights & Biases, MLflow and OpenTelemetry: which method is called with what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pccl.bindings.events import InnerStep, MembersChanged, StateSynced
from pccl.bindings.trackers import MlflowWriter, OtlpWriter, WandbWriter
from pccl.observe.events import CallEnded, WaitingEnded

SYNCED = StateSynced(step=12, revision=8, tx_bytes=0, rx_bytes=1000, seconds=0.125)
POINTS = {
    "state_synced/revision": 8.0,
    "state_synced/tx_bytes": 0.0,
    "state_synced/rx_bytes": 1000.0,
    "state_synced/seconds": 0.125,
}
WAITED = WaitingEnded(call="all_reduce", waited_s=2.5)
ENDED = CallEnded(
    call="barrier", tag=None, outcome="ok", reason="", seconds=0.5, waited_s=0.5, moved_s=0.0,
    attempts=1, tx_bytes=0, rx_bytes=0,
)  # fmt: skip


@dataclass(frozen=True)
class Evaluated:
    """An event of somebody's own program."""

    step: int
    loss: float


class Target:
    """A tracker that remembers its calls, whatever they are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((data, {"step": step}))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, {"step": step}))

    def emit(self, **record: Any) -> None:
        self.calls.append((record.pop("attributes"), record))


MAKERS: list[Callable[..., Callable[[Any], None]]] = [WandbWriter, MlflowWriter]


@pytest.mark.parametrize("make", MAKERS)
def test_curves_over_the_inner_step(make: Callable[..., Callable[[Any], None]]) -> None:
    target = Target()
    write = make(target, every_inner=10)
    write(WAITED)  # before the first step
    for step in range(1, 13):
        write(InnerStep(step=step, seconds=0.5))
    write(SYNCED)
    write(WAITED)
    write(MembersChanged(step=13, peer_id=4, members=(1, 4), joined=(1,), lost=()))
    write(Evaluated(step=14, loss=1.75))
    assert target.calls == [
        ({"waiting_ended/waited_s": 2.5}, {"step": 0}),
        ({"inner_step/seconds": 0.5}, {"step": 10}),
        (POINTS, {"step": 12}),
        ({"waiting_ended/waited_s": 2.5}, {"step": 12}),
        ({"group/members": 2.0, "group/joined": 1.0, "group/lost": 0.0}, {"step": 13}),
        ({"evaluated/loss": 1.75}, {"step": 14}),
    ]


@pytest.mark.parametrize("make", MAKERS)
def test_events_without_numbers_add_nothing(make: Callable[..., Callable[[Any], None]]) -> None:
    target = Target()
    make(target)(InnerStep(step=1, seconds=float("nan")))
    assert target.calls == []


def test_a_record_has_the_fields_of_the_event() -> None:
    target = Target()
    write = OtlpWriter(target, every_inner=2)
    before_ns = time.time_ns()
    for event in (InnerStep(step=1, seconds=0.5), SYNCED, ENDED):
        write(event)
    (synced, first), (ended, second) = target.calls
    assert before_ns <= first.pop("timestamp") <= second.pop("timestamp") <= time.time_ns()
    assert first == {
        "severity_text": "INFO",
        "body": "StateSynced",
        "event_name": "pccl.StateSynced",
    }
    assert synced == {"step": 12, "revision": 8, "tx_bytes": 0, "rx_bytes": 1000, "seconds": 0.125}
    assert second["event_name"] == "pccl.CallEnded"
    assert "tag" not in ended  # None is no attribute
    assert ended["outcome"] == "ok"


@pytest.mark.parametrize("make", [*MAKERS, OtlpWriter])
def test_mistakes(make: Callable[..., Callable[[Any], None]]) -> None:
    with pytest.raises(TypeError, match=r"the argument must be the (result|module)"):
        make(object())
    with pytest.raises(ValueError, match="every_inner"):
        make(Target(), every_inner=0)
    with pytest.raises(TypeError, match="an event is a dataclass instance"):
        make(Target())("StateSynced")


# -- with the real packages ------------------------------------------------------------------------


@pytest.mark.filterwarnings("default")
def test_wandb_keeps_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb: Any = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="pccl") as run:
        write = WandbWriter(run)
        write(SYNCED)
        write(WAITED)
        write(Evaluated(step=13, loss=1.75))  # the next step completes the row
        found = dict(run.summary)
    assert found.items() >= {**POINTS, "waiting_ended/waited_s": 2.5}.items()


@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("pccl")
    with mlflow.start_run() as run:
        MlflowWriter(mlflow)(SYNCED)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == POINTS
    (point,) = client.get_metric_history(run.info.run_id, "state_synced/seconds")
    assert (point.step, point.value) == (12, 0.125)


def test_opentelemetry_exports_the_record() -> None:
    logs: Any = pytest.importorskip(
        "opentelemetry.sdk._logs", reason="opentelemetry-sdk is not installed"
    )
    export: Any = pytest.importorskip("opentelemetry.sdk._logs.export")
    exporter = export.InMemoryLogRecordExporter()
    provider = logs.LoggerProvider()
    provider.add_log_record_processor(export.SimpleLogRecordProcessor(exporter))
    write = OtlpWriter(provider.get_logger("pccl"))
    write(ENDED)
    write(MembersChanged(step=13, peer_id=4, members=(1, 4), joined=(1,), lost=()))
    ended, changed = (one.log_record for one in exporter.get_finished_logs())
    assert (ended.event_name, ended.attributes["outcome"]) == ("pccl.CallEnded", "ok")
    assert tuple(changed.attributes["members"]) == (1, 4)
    provider.shutdown()
