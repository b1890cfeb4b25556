"""JSONL and TensorBoard: what is written for each event, to the last value."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pccl.bindings.consumers import JsonlWriter, TensorBoardWriter, scalars
from pccl.bindings.events import (
    Event,
    GradientsAveraged,
    InnerStep,
    MembersChanged,
    OuterStep,
    StateSynced,
    TrainsAlone,
)
from pccl.observe.events import CallEnded, Joined, WaitingEnded, from_json

OUTER = OuterStep(
    step=100,
    number=7,
    fragment=2,
    contributors=(1, 4, 9),
    own_weight=25.0,
    total_weight=75.5,
    tx_bytes=4096,
    rx_bytes=8192,
    reduce_s=0.75,
    hidden_s=0.5,
    exposed_s=0.25,
    pseudo_gradient_norm=3.0,
    mean_norm=1.5,
    step_norm=0.75,
    cosine=0.5,
    noise_scale=3.0,
)
CHANGED = MembersChanged(step=101, peer_id=4, members=(1, 4, 9), joined=(9,), lost=())
SYNCED = StateSynced(step=102, revision=8, tx_bytes=0, rx_bytes=1000, seconds=0.125)
AVERAGED = GradientsAveraged(
    step=103, contributors=(1, 4), tx_bytes=10, rx_bytes=20, hidden_s=0.5, exposed_s=0.0
)


@dataclass(frozen=True)
class Evaluated:
    """An event of somebody's own program."""

    step: int
    loss: float
    of: str = "held-out"
    best: float | None = None


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Each line without its time, strictly parsed."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    found = [
        json.loads(line, parse_constant=refuse)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    for line in found:
        assert list(line)[:2] == ["event", "time"]
        del line["time"]
    return found


WAITED = WaitingEnded(call="all_reduce", waited_s=2.5)
REJOINED = Joined(
    peer_id=7, name="alice", run="ab", rank=1, world_size=3, rejoined=True, away_s=4.0
)
ENDED = CallEnded(
    call="barrier", tag=3, outcome="TooFewPeers", reason="alone", seconds=0.5, waited_s=0.25,
    moved_s=0.25, attempts=1, tx_bytes=0, rx_bytes=8,
)  # fmt: skip


# --- JSONL -----------------------------------------------------------------------------------


def test_each_event_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path) as log:
        for event in (OUTER, CHANGED, SYNCED, TrainsAlone(step=104), AVERAGED):
            log(event)
    assert lines_of(path) == [
        {
            "event": "OuterStep",
            "step": 100,
            "number": 7,
            "fragment": 2,
            "contributors": [1, 4, 9],
            "own_weight": 25.0,
            "total_weight": 75.5,
            "tx_bytes": 4096,
            "rx_bytes": 8192,
            "reduce_s": 0.75,
            "hidden_s": 0.5,
            "exposed_s": 0.25,
            "pseudo_gradient_norm": 3.0,
            "mean_norm": 1.5,
            "step_norm": 0.75,
            "cosine": 0.5,
            "noise_scale": 3.0,
        },
        {
            "event": "MembersChanged",
            "step": 101,
            "peer_id": 4,
            "members": [1, 4, 9],
            "joined": [9],
            "lost": [],
        },
        {
            "event": "StateSynced",
            "step": 102,
            "revision": 8,
            "tx_bytes": 0,
            "rx_bytes": 1000,
            "seconds": 0.125,
        },
        {"event": "TrainsAlone", "step": 104},
        {
            "event": "GradientsAveraged",
            "step": 103,
            "contributors": [1, 4],
            "tx_bytes": 10,
            "rx_bytes": 20,
            "hidden_s": 0.5,
            "exposed_s": 0.0,
        },
    ]


def test_the_time_is_the_wall_clock_in_utc(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    before = datetime.now(UTC)
    with JsonlWriter(path) as log:
        log(TrainsAlone(step=1))
    after = datetime.now(UTC)
    time = datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["time"])
    assert time.utcoffset() == UTC.utcoffset(None)
    assert before.timestamp() - 0.001 <= time.timestamp() <= after.timestamp()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_null(value: float, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path) as log:
        log(InnerStep(step=1, seconds=value))
    assert lines_of(path) == [{"event": "InnerStep", "step": 1, "seconds": None}]


def test_a_line_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path) as log:
        for step in (1, 2):
            log(TrainsAlone(step=step))
            assert lines_of(path)[-1] == {"event": "TrainsAlone", "step": step}


def test_events_of_the_peer_carry_the_version_of_their_form(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path) as log:
        for event in (WAITED, REJOINED, ENDED):
            log(event)
    first, *rest = lines_of(path)
    assert first == {
        "event": "WaitingEnded",
        "schema": "1.3",
        "call": "all_reduce",
        "waited_s": 2.5,
    }
    assert [from_json(line) for line in rest] == [REJOINED, ENDED]


def test_inner_steps_are_thinned_out_and_nothing_else_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path, every_inner=10) as log:
        for step in range(1, 31):
            log(InnerStep(step=step, seconds=0.5))
            if step in (3, 4):
                log(TrainsAlone(step=step))
    assert [(line["event"], line["step"]) for line in lines_of(path)] == [
        ("TrainsAlone", 3),
        ("TrainsAlone", 4),
        ("InnerStep", 10),
        ("InnerStep", 20),
        ("InnerStep", 30),
    ]


def test_appends_also_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for step in (1, 2):
        with JsonlWriter(str(path)) as log:
            log(TrainsAlone(step=step))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"event": "Trai')  # whoever wrote this lost power
    with JsonlWriter(path) as log:
        log(TrainsAlone(step=3))
    first, second, torn, third = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in (first, second, third)] == [1, 2, 3]
    assert torn == '{"event": "Trai'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_with_the_name_of_the_file_and_not_again_when_closing() -> None:
    with JsonlWriter("/dev/full") as log:
        for step in (1, 2):
            with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
                log(TrainsAlone(step=step))


class Part:
    """A disk with room for a few bytes more, then none, then plenty."""

    def __init__(self) -> None:
        self.written, self.rooms = b"", [30, 0, 1000]
        self.closed = False

    def write(self, data: bytes) -> int:
        room = self.rooms.pop(0) if self.rooms else 1000
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.written += bytes(data[:room])
        return min(room, len(data))


def test_a_line_after_one_that_did_not_fit_is_a_line_of_its_own(tmp_path: Path) -> None:
    with JsonlWriter(tmp_path / "run.jsonl") as log:
        vars(log)["_file"].close()
        disk = vars(log)["_file"] = Part()
        with pytest.raises(OSError, match=r"run\.jsonl"):
            log(TrainsAlone(step=1))
        log(TrainsAlone(step=2))
        vars(log)["_file"] = (tmp_path / "run.jsonl").open("ab")
    torn, second = disk.written.splitlines()
    assert torn == b'{"event": "TrainsAlone", "time'
    assert json.loads(second)["step"] == 2


def test_takes_a_programs_own_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with JsonlWriter(path) as log:
        log(Evaluated(step=5, loss=2.5))
    assert lines_of(path) == [
        {"event": "Evaluated", "step": 5, "loss": 2.5, "of": "held-out", "best": None}
    ]


def test_mistakes_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="every_inner must be from 1 to 2147483647, not 0"):
        JsonlWriter(path, every_inner=0)
    with pytest.raises(TypeError, match=r"every_inner must be an integer, not 1\.5"):
        JsonlWriter(path, every_inner=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        JsonlWriter(tmp_path / "none" / "run.jsonl")
    log = JsonlWriter(path)
    for wrong in ({"step": 1}, InnerStep, None):
        with pytest.raises(TypeError, match="an event is a dataclass instance, not"):
            log(wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    log.close()
    log.close()
    with pytest.raises(ValueError, match=r"run\.jsonl has been closed"):
        log(TrainsAlone(step=1))
    assert path.read_bytes() == b""


# --- TensorBoard -----------------------------------------------------------------------------


class Board:
    """Takes what a SummaryWriter would."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.closed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed += 1


def drawn(*events: Event | Evaluated, every_inner: int = 1) -> list[tuple[str, float, int]]:
    board = Board()
    with TensorBoardWriter(board, every_inner=every_inner) as writer:
        for event in events:
            writer(event)
    assert board.closed == 0  # it is the program's
    return board.points


def test_curves_of_an_outer_step() -> None:
    assert drawn(OUTER) == [
        ("outer_step/number", 7.0, 100),
        ("outer_step/contributors", 3.0, 100),
        ("outer_step/own_weight", 25.0, 100),
        ("outer_step/total_weight", 75.5, 100),
        ("outer_step/tx_bytes", 4096.0, 100),
        ("outer_step/rx_bytes", 8192.0, 100),
        ("outer_step/reduce_s", 0.75, 100),
        ("outer_step/hidden_s", 0.5, 100),
        ("outer_step/exposed_s", 0.25, 100),
        ("outer_step/pseudo_gradient_norm/fragment_2", 3.0, 100),
        ("outer_step/mean_norm/fragment_2", 1.5, 100),
        ("outer_step/step_norm/fragment_2", 0.75, 100),
        ("outer_step/cosine", 0.5, 100),
        ("outer_step/noise_scale", 3.0, 100),
    ]


def test_curves_of_the_other_events() -> None:
    assert drawn(CHANGED, SYNCED, TrainsAlone(step=104), AVERAGED) == [
        ("group/members", 3.0, 101),
        ("group/joined", 1.0, 101),
        ("group/lost", 0.0, 101),
        ("state_synced/revision", 8.0, 102),
        ("state_synced/tx_bytes", 0.0, 102),
        ("state_synced/rx_bytes", 1000.0, 102),
        ("state_synced/seconds", 0.125, 102),
        ("group/members", 1.0, 104),
        ("gradients_averaged/contributors", 2.0, 103),
        ("gradients_averaged/tx_bytes", 10.0, 103),
        ("gradients_averaged/rx_bytes", 20.0, 103),
        ("gradients_averaged/hidden_s", 0.5, 103),
        ("gradients_averaged/exposed_s", 0.0, 103),
    ]


def test_events_of_the_peer_have_no_step_to_be_drawn_at() -> None:
    assert drawn(WAITED, REJOINED, ENDED) == []


def test_ids_are_no_amounts() -> None:
    assert scalars(WAITED) == {"waiting_ended/waited_s": 2.5}
    assert scalars(REJOINED) == {
        "joined/world_size": 3.0,
        "joined/rejoined": 1.0,
        "joined/away_s": 4.0,
    }
    assert scalars(ENDED) == {
        "barrier/seconds": 0.5,
        "barrier/waited_s": 0.25,
        "barrier/moved_s": 0.25,
        "barrier/attempts": 1.0,
        "barrier/tx_bytes": 0.0,
        "barrier/rx_bytes": 8.0,
    }


def test_curves_of_inner_steps_and_of_own_events() -> None:
    steps = [InnerStep(step=step, seconds=step / 4) for step in range(1, 9)]
    first = InnerStep(step=4, seconds=math.nan)
    assert drawn(first, *steps, Evaluated(step=9, loss=2.5), every_inner=4) == [
        ("inner_step/seconds", 1.0, 4),
        ("inner_step/seconds", 2.0, 8),
        ("evaluated/loss", 2.5, 9),
    ]


def test_a_folder_gets_files_that_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    with TensorBoardWriter(tmp_path / "board") as writer:
        writer(OUTER)
        writer(InnerStep(step=101, seconds=0.5))
    read: Any = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert [(point.step, point.value) for point in read.Scalars("outer_step/tx_bytes")] == [
        (100, 4096.0)
    ]
    assert [(point.step, point.value) for point in read.Scalars("inner_step/seconds")] == [
        (101, 0.5)
    ]


def test_the_own_writer_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board, folders = Board(), list[str]()

    def make(folder: str) -> Board:
        folders.append(folder)
        return board

    monkeypatch.setattr("pccl.bindings.consumers._summary_writer", lambda: make)
    writer = TensorBoardWriter(str(tmp_path / "board"))
    writer.close()
    writer.close()
    assert (folders, board.closed) == ([str(tmp_path / "board")], 1)
    with pytest.raises(ValueError, match="has been closed"):
        writer(TrainsAlone(step=1))


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("torch.utils"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'pccl\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)


def test_mistakes_of_the_board() -> None:
    with pytest.raises(TypeError, match="takes a folder or a SummaryWriter, not 3"):
        TensorBoardWriter(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="every_inner must be from 1 to 2147483647, not -2"):
        TensorBoardWriter(Board(), every_inner=-2)

    @dataclass
    class Stepless:
        loss: float

    with pytest.raises(TypeError, match="Stepless has no int field 'step'"):
        TensorBoardWriter(Board())(Stepless(1.0))
    with pytest.raises(TypeError, match="an event is a dataclass instance"):
        TensorBoardWriter(Board())("OuterStep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
