"""What a benchmark shows: cells by hand, the same cases as table, lines and objects."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pccl.cli.bench import view
from pccl.cli.bench.command import all_faults, describe
from pccl.cli.bench.conditions import Conditions, conditions_of
from pccl.cli.bench.floor import Bandwidths, Costs, Floor
from pccl.cli.bench.peers.words import Doing
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.plot import draw, lines
from pccl.cli.bench.statistics import BenchResult, SideFigures
from pccl.cli.bench.variants import Variant
from pccl.cli.bench.view import (
    TABLE_WIDTH_MIN,
    VARIANT_WIDTH,
    BenchJsonView,
    BenchLiveView,
    BenchPlainView,
    BenchView,
    arrange,
    cells,
    cost_cells,
    duration,
    floor_lines,
    gigabytes,
    headings,
    percent,
)

PLAN = BenchPlan((1 << 20,), (4,), (0,), "float32", False, 2, 1, "gloo", "")
CONDITIONS = Conditions({"pccl": "9.8.7"}, "a processor", 2, "an OS", "bbr", PLAN, 1.5)
OURS = SideFigures((0.002, 0.004), (0.002, 0.004), 0.01, ())
THEIRS = SideFigures((0.006, 0.006), (0.006, 0.006), 0.02, ())
RESULT = BenchResult(
    peers=4,
    bytes=1 << 20,
    dtype="float32",
    lanes=2,
    in_place=False,
    ours=OURS,
    against="gloo",
    theirs=THEIRS,
    master_cpu_s=0.0,
    extra_bytes=3 << 19,
    connect_bytes=0,
    congestion="reno",
)
ALONE = dataclasses.replace(RESULT, against="", theirs=None, bytes=4 << 20)
COSTS = Costs(4, 2, 1 << 20, 0.003, 0.0005, 0.0001, 0.00002, 0.0, 0.0007, 2.0)
SPEEDS = Bandwidths(4e9, "reno", 100e9, 10e9, 50e9, 5e9, 120e9, 12.5e9)
FLOOR = Floor(SPEEDS, [COSTS])

ROW = ["1 MiB", "4", "2", "3.00 ms", "0.350", "0.524", "5.12", "1.50", "6.00 ms", "10.24", "2.00"]
COST_ROW = ["1 MiB", "4", "2", "1.20 ms", "2.50", "1.00 ms", "200 µs", "40.0 µs", "700 µs", "-"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.3456, "12.3 s"),
        (1.0, "1.00 s"),
        (0.1234, "123 ms"),
        (0.00987, "9.87 ms"),
        (0.000123, "123 µs"),
        (0.0000004, "0.40 µs"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_gigabytes() -> None:
    assert gigabytes(1.2346e9) == "1.235"
    assert gigabytes(64e3) == "6e-05"


def test_cells() -> None:
    # 1 MiB in 3 ms; 2 rounds of 1/1024 GiB took 10 and 20 ms of CPU
    assert cells(RESULT) == ROW
    assert cells(dataclasses.replace(RESULT, against="", theirs=None)) == ROW[:8]
    assert len(headings("gloo")) == len(ROW)
    assert len(headings("")) == 8
    assert headings("gloo")[8] == "gloo\ntime"
    assert cost_cells(COSTS) == COST_ROW


QUANTIZED = dataclasses.replace(
    ALONE,
    variant=Variant("auto", "int8", 16),
    algorithm="mesh",
    error=0.0078,
    wire_bytes_per_value=1.0625,
)
WAY = ["mesh*", "int8", "16"]


def test_cells_of_several_ways() -> None:
    found = cells(QUANTIZED, by_variant=True, against="gloo")
    assert found[:7] == ["4 MiB", "4", "2", *WAY, "3.00 ms"]
    assert found[-5:] == ["0.780%", "1.062", "-", "-", "-"]  # Gloo has nothing like it
    assert len(headings("gloo", by_variant=True)) == len(found)
    assert cells(ALONE, by_variant=True)[3:6] == ["ring*", "none", "1"]
    assert cells(ALONE, by_variant=True)[-2] == "0"


@pytest.mark.parametrize(
    ("error", "text"), [(0.0, "0"), (0.0078, "0.780%"), (0.19, "19.000%"), (3.4e-8, "3.4e-08")]
)
def test_percent(error: float, text: str) -> None:
    assert percent(error) == text


@pytest.mark.parametrize("width", [TABLE_WIDTH_MIN + VARIANT_WIDTH, 80, 160])
def test_a_table_of_several_ways(width: int) -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, legacy_windows=False, no_color=True
    )
    with BenchLiveView(console, "gloo", by_variant=True) as live:
        live.begin(CONDITIONS)
        live.add(RESULT)
        live.add(QUANTIZED)
        live.conclude(None)
    for cell in [*ROW, *cells(QUANTIZED, by_variant=True, against="gloo")]:
        assert cell in out.getvalue()
    assert "…" not in out.getvalue()
    rows = [line.split() for line in out.getvalue().splitlines() if "mesh*" in line]
    assert all(row[:7] == ["4", "MiB", "4", "2", *WAY] for row in rows)


def told(view: BenchView, floor: Floor | None = FLOOR) -> None:
    with view:
        view.begin(CONDITIONS)
        view.doing("something")
        view.add(RESULT)
        view.conclude(floor)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    told(BenchPlainView("gloo"))
    out = capsys.readouterr().out
    said = [line.split() for line in out.splitlines()]
    assert " ".join(ROW).split() in said
    assert " ".join(COST_ROW).split() in said
    assert ["copy", "100.00", "in", "the", "cache,", "10.00", "in", "memory"] in said
    assert "pccl 9.8.7" in out
    assert "a processor, 2 cores, an OS, bbr by default, load 1.50" in out
    assert "2 rounds in turn with gloo after 1 to warm up" in out
    assert "congestion control of the peers' connections: reno" in out
    assert "something" not in out


def test_objects(capsys: pytest.CaptureFixture[str]) -> None:
    told(BenchJsonView())
    result, *floor = map(json.loads, capsys.readouterr().out.splitlines())
    assert result["ratio"] == 2.0
    assert result["seconds"] == [0.002, 0.004]
    assert result["conditions"] == {
        "versions": {"pccl": "9.8.7"},
        "processor": "a processor",
        "cores": 2,
        "system": "an OS",
        "congestion_default": "bbr",
        "rounds": 2,
        "warmup": 1,
        "emulate": "",
        "data": "normal",
        "master": "",
        "load": 1.5,
    }
    assert len(floor) == 8
    assert floor[0] == {"floor": "loopback", "bytes_per_s": 4e9, "congestion": "reno"}
    assert floor[-1]["floor"] == "case"
    assert floor[-1]["floor_seconds"] == 0.0012


@pytest.mark.parametrize("floor", [FLOOR, None])
def test_the_table_fits_into_80_columns(floor: Floor | None) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, legacy_windows=False, no_color=True)
    told(BenchLiveView(console, "gloo"), floor)
    for cell in ROW + (COST_ROW if floor else []):
        assert cell in out.getvalue()
    assert "…" not in out.getvalue()
    assert ("raw loopback" in out.getvalue()) == (floor is not None)


@pytest.mark.parametrize("width", range(TABLE_WIDTH_MIN, 80))
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=width, legacy_windows=False, no_color=True
    )
    longest = dataclasses.replace(RESULT, bytes=(1 << 36) - 4, peers=64, lanes=64)
    live = BenchLiveView(console, "gloo")
    with live:
        live.begin(CONDITIONS)
        live.add(RESULT)
        live.add(longest)
        live.conclude(FLOOR)
    said = out.getvalue()
    for cell in ROW + COST_ROW + cells(longest):
        assert cell in said
    assert "…" not in said
    rows = [line for line in said.splitlines() if "1 MiB" in line]
    assert all(line.split()[:4] == ["1", "MiB", "4", "2"] for line in rows)


def test_columns_are_arranged_by_width() -> None:
    widths = [5, 5, 5, 8, 8, 8]
    assert arrange(widths, 46) == [[0, 1, 2, 3, 4, 5]]  # 39, and 7 between and at the edges
    assert arrange(widths, 45) == [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    assert arrange(widths, 37) == [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    assert arrange(widths, 36) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]
    assert arrange(widths, 1) == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 5]]


@pytest.mark.parametrize(("width", "kind"), [(40, BenchLiveView), (39, BenchPlainView)])
def test_a_terminal_without_room_for_a_table_gets_lines(
    width: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        view, "Console", lambda: Console(force_terminal=True, width=width, legacy_windows=False)
    )
    assert isinstance(view.choose_view(""), kind)


def test_without_the_floor_nothing_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    told(BenchPlainView(""), None)
    assert "floor" not in capsys.readouterr().out
    told(BenchJsonView(), None)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_floor_lines() -> None:
    assert floor_lines(SPEEDS)[1] == "  raw loopback     4.00 each way, both at a time (reno)"


def test_conditions_of_this_machine() -> None:
    found = conditions_of(dataclasses.replace(PLAN, against=""))
    assert set(found.versions) == {"pccl", "Python", "numpy"}
    assert found.cores >= 1
    assert found.processor
    assert found.to_dict()["rounds"] == 2


@pytest.mark.parametrize(
    ("doing", "words"),
    [
        (Doing("memory", 4096, 0), "memory for 4 KiB"),
        (Doing("warm up", 4096, 1), "4 KiB, warming up"),
        (Doing("rounds", 1 << 20, 3), "1 MiB, round 3 of 20"),
        (Doing("barriers", 0, 0), "barriers"),
    ],
)
def test_describe(doing: Doing, words: str) -> None:
    assert describe(doing, 20) == words


def test_faults_of_both_sides_are_named() -> None:
    wrong = dataclasses.replace(
        RESULT,
        ours=dataclasses.replace(OURS, faults=("peer 1: a",)),
        theirs=dataclasses.replace(THEIRS, faults=("peer 0: b",)),
    )
    assert all_faults(wrong) == ["pccl, 4 peers, peer 1: a", "gloo, 4 peers, peer 0: b"]
    assert all_faults(ALONE) == []


def test_lines_of_the_plot() -> None:
    other = dataclasses.replace(RESULT, lanes=1)
    assert lines([ALONE, other, RESULT]) == {
        "4 peers, 2 lanes": [RESULT, ALONE],
        "4 peers, 1 lane": [other],
    }
    assert list(lines([ALONE, QUANTIZED])) == [
        "4 peers, 2 lanes",
        "4 peers, 2 lanes, auto int8 16 tensors",
    ]
    joint = dataclasses.replace(QUANTIZED, variant=Variant("mesh", tensors=16, many=True))
    assert list(lines([joint])) == ["4 peers, 2 lanes, mesh 16 in one"]
    assert cells(joint, by_variant=True)[5] == "16 in one"


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    draw([RESULT, ALONE], picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
