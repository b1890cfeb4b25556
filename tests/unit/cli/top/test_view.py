"""The lines of ``pccl top``."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import reduce

import pytest
from rich.cells import cell_len
from rich.console import Console

from pccl.cli.top.model import Model
from pccl.cli.top.view import KEYS, lines
from pccl.inquiry import LinkSpeed
from pccl.protocol.types import PeerId
from tests.support.paths import ROOT
from tests.support.statuses import SAMPLE, ended, member

PICTURE = ROOT / "docs" / "images" / "top.svg"

NOW_S = 100.0
MODEL = Model("127.0.0.1:48148").answered(SAMPLE, NOW_S)


def press(model: Model, *pressed: str) -> Model:
    return reduce(Model.press, pressed, model)


def shown(model: Model, width: int = 80, height: int = 24, now_s: float = NOW_S) -> str:
    drawn = [line.plain for line in lines(model, width, height, now_s)]
    assert len(drawn) == height
    assert {cell_len(line) for line in drawn} == {width}
    return "\n".join(drawn)


def test_the_whole_run_fits_a_small_terminal() -> None:
    text = shown(MODEL)
    for part in (
        "4 members  1 newcomer  1 removed  1.2 calls/s  3.30 MB/s",
        "slowest: 2 (bob), last in 3 of 4 calls, 31.0 ms late on average",
        ">    1 alice 10.0.0.1:48201  0/0 1200     2.5 waits          tag 7",
        "     4 dave  10.0.0.4:48204  0/3    -       - lost 6.00 s    -",
        "   3.20 s  update_topology waits for 2 (bob), 4 (dave)",
        "  newcomer 12 (erin) waits for the members' update_topology()",
        " 2.10 s ago   250 ms  MEMBER_LOST  last 2 (bob) +31.0 ms",
        "   12.4 MB/s  round trip 1.80 ms  2 (bob) to 1 (alice)",
    ):
        assert part in text
    assert text.endswith(KEYS.ljust(80))


def test_the_chosen_member_is_on_the_screen_of_a_large_run() -> None:
    members = tuple(member(n, f"peer-{n}") for n in range(1, 301))
    large = replace(SAMPLE, members=members, member_count=300, ended=(ended(),) * 32)
    model = MODEL.answered(large, NOW_S)
    for pressed in ("up", "200", "300"):
        chosen = press(model, *pressed, "escape") if pressed.isdecimal() else press(model, pressed)
        text = shown(chosen)
        assert f"> {chosen.chosen:>4} peer-{chosen.chosen} " in text
        assert text.count(" peer-") > 8


def test_details_of_a_member_and_of_one_that_is_gone() -> None:
    text = shown(press(MODEL, "2"), width=100)
    for part in (
        "peer        2 (bob)",
        "awaited     for 3.20 s",
        "progress    step 1196, loss 2.5, 1.92 steps/s",
        "last call   tag 7 (AVG of 1048576 x float32), 3.60 s ago",
        "12.4 MB/s  round trip 1.80 ms  2 (bob) to 1 (alice), relayed by peer 3 (carol)",
        "      neither peer 1 (alice) nor peer 2 (bob) can be dialled, and simultaneous open has",
        "      open a port of one of them, or switch on port mapping: docs/two-machines.md",
    ):
        assert part in text
    assert "1.13 GB/s" not in text
    gone = replace(MODEL, chosen=9, details=True)
    assert "peer 9 is no member any more: SILENT, silent for 10.0 s" in shown(gone)


def test_an_absent_master_is_said_above_the_last_state() -> None:
    away = MODEL.unanswered("no status from 127.0.0.1:48148: refused")
    text = shown(away, now_s=NOW_S + 7)
    assert "the state of 7.00 s ago; no status from 127.0.0.1:48148: refused" in text
    assert "alice" in text
    drawn = lines(away, 80, 24, NOW_S)
    assert all("dim" in [str(span.style) for span in line.spans] for line in drawn[5:8])
    assert "the state of" not in shown(away.answered(SAMPLE, NOW_S))
    first = Model("m").unanswered("refused")
    assert "refused" in shown(first)
    assert "waiting for the first answer" in shown(Model("m"))


@pytest.mark.parametrize("size", [(80, 24), (1, 1), (20, 5), (300, 100), (80, 3)])
def test_any_size_is_filled(size: tuple[int, int]) -> None:
    wide = replace(SAMPLE, members=(member(1, "\N{HANGUL SYLLABLE GAG}" * 20, calls="[bold]x"),))
    links = tuple(LinkSpeed(PeerId(1), PeerId(n), 0, 0) for n in range(50))
    for status in (SAMPLE, replace(wide, links=links), replace(SAMPLE, waits_for="it stands by")):
        for pressed in ("up", "1"):
            shown(press(MODEL.answered(status, NOW_S), pressed), *size)
    assert "[bold]x" in shown(MODEL.answered(wide, NOW_S), 200, 24)


def test_the_picture_of_the_documentation(request: pytest.FixtureRequest) -> None:
    """``--record`` writes the picture anew."""
    console = Console(record=True, width=100, file=io.StringIO(), color_system="standard")
    for line in lines(MODEL, 100, 24, NOW_S):
        console.print(line)
    drawn = console.export_svg(title="pccl top", unique_id="top")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # they lie elsewhere
    if request.config.getoption("--record"):
        PICTURE.write_text(drawn, encoding="utf-8")
    kept = PICTURE.read_text(encoding="utf-8")
    for part in ("alice", "awaited", "MEMBER_LOST", "LINKS"):
        assert part in kept
        assert part in drawn
