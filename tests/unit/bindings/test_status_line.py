"""``StatusLine``: what the events add up to, where it is seen, that nobody is held up."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import sys
import threading

import pytest

from pccl.bindings import status_line
from pccl.bindings.consumers import StatusLine
from pccl.bindings.events import (
    Event,
    GradientsAveraged,
    InnerStep,
    MembersChanged,
    OuterStep,
    RoundsMissed,
    StateSynced,
    TrainsAlone,
)
from pccl.bindings.status_line import Plain, Tally, Writer
from pccl.observe.events import WaitingEnded
from tests.support.patience import LIMIT_S
from tests.support.screens import everything_from
from tests.support.waiting import wait_for_threads


def outer(step: int, number: int, *, tx_bytes: int = 600_000) -> OuterStep:
    return OuterStep(
        step=step,
        number=number,
        fragment=0,
        contributors=(1, 2, 3),
        own_weight=1.0,
        total_weight=3.0,
        tx_bytes=tx_bytes,
        rx_bytes=tx_bytes,
        reduce_s=2.0,
        hidden_s=1.75,
        exposed_s=0.25,
        pseudo_gradient_norm=1.0,
        mean_norm=1.0,
        step_norm=1.0,
        cosine=1.0,
        noise_scale=1.0,
    )


def tallied(*events: Event) -> str:
    tally = Tally()
    for event in events:
        tally.add(event)
    return tally.words()


# --- the words -------------------------------------------------------------------------------


def test_events_without_a_step_do_not_count() -> None:
    steps: list[Event] = [InnerStep(step=step, seconds=0.5) for step in (1, 2)]
    waited = WaitingEnded(call="all_reduce", waited_s=2.5)
    missed = RoundsMissed(step=2, number=9, missed=3)
    assert tallied(*steps, waited, missed) == tallied(*steps) == "step 2, 2 steps/s"


def test_everything_together() -> None:
    assert (
        tallied(
            StateSynced(step=0, revision=11, tx_bytes=5, rx_bytes=5, seconds=1.0),
            MembersChanged(step=0, peer_id=1, members=(1, 2, 3, 4), joined=(2, 3, 4), lost=()),
            InnerStep(step=1199, seconds=math.nan),
            InnerStep(step=1200, seconds=0.0625),
            outer(1200, 12, tx_bytes=12_300_000),
            InnerStep(step=1201, seconds=0.1875),
            outer(1201, 13, tx_bytes=0),
        )
        == "step 1201, 8 steps/s, outer step 13, 4 peers, sent 12.3 MB, hidden 3.5 s, exposed 0.5 s"
    )


def test_only_what_is_known_is_said() -> None:
    assert tallied(InnerStep(step=1, seconds=math.nan)) == "step 1"
    assert tallied(InnerStep(step=2, seconds=1.5)) == "step 2, 0.667 steps/s"
    assert tallied(TrainsAlone(step=7)) == "step 7, alone"
    averaged = GradientsAveraged(
        step=5, contributors=(1, 2), tx_bytes=4000, rx_bytes=9, hidden_s=0.5, exposed_s=2.0
    )
    assert tallied(averaged) == "step 5, 2 peers, sent 4 kB, hidden 0.5 s, exposed 2.0 s"


def test_the_last_word_on_who_is_there_counts() -> None:
    pair = MembersChanged(step=1, peer_id=1, members=(1, 2), joined=(2,), lost=())
    assert tallied(TrainsAlone(step=1), pair) == "step 1, 2 peers"
    assert tallied(pair, TrainsAlone(step=2)) == "step 2, alone"
    assert "2 peers" in tallied(pair, outer(2, 1))  # one of its contributors has gone since


def test_the_rate_forgets() -> None:
    slow = [InnerStep(step=step, seconds=9.0) for step in range(1, 1000)]
    quick = [InnerStep(step=step, seconds=0.25) for step in range(1000, 1100)]
    assert tallied(*slow, *quick) == "step 1099, 4 steps/s"


# --- where they are seen ---------------------------------------------------------------------


def test_plain_lines_only_when_there_is_news() -> None:
    stream = io.StringIO()
    plain = Plain(stream)
    for words in ("step 1", "step 1", "step 2"):
        plain.draw(words)
    plain.finish("step 2")
    assert stream.getvalue() == "pccl: step 1\npccl: step 2\n"


def test_a_pipe_gets_the_end_at_once_and_lines_between(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with StatusLine(stream) as line:
        for step in range(1, 50):
            line(InnerStep(step=step, seconds=0.5))
    wait_for_threads(Writer)
    assert stream.getvalue() == "pccl: step 49, 2 steps/s\n"  # ten seconds are not over
    line(InnerStep(step=50, seconds=0.5))
    line.close()
    assert stream.getvalue() == "pccl: step 49, 2 steps/s\n"

    written = threading.Event()

    class Noted(io.StringIO):
        def flush(self) -> None:
            written.set()

    monkeypatch.setattr(status_line.Plain, "interval_s", 0.01)
    noted = Noted()
    with StatusLine(noted) as line:
        line(InnerStep(step=1, seconds=math.nan))
        assert written.wait(LIMIT_S)
        assert noted.getvalue() == "pccl: step 1\n"


def test_nothing_is_shown_of_nothing() -> None:
    stream = io.StringIO()
    StatusLine(stream).close()
    assert stream.getvalue() == ""


def test_stderr_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusLine() as line:
        line(TrainsAlone(step=1))
    wait_for_threads(Writer)
    assert capsys.readouterr() == ("", "pccl: step 1, alone\n")


def test_on_a_terminal_it_is_rewritten_and_prints_come_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(status_line.Rewritten, "interval_s", 0.01)
    ours, theirs = pty.openpty()
    routed = threading.Event()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        drawn = status_line.Rewritten.draw

        def draw(self: status_line.Rewritten, words: str) -> None:
            drawn(self, words)
            routed.set()

        monkeypatch.setattr(status_line.Rewritten, "draw", draw)
        with StatusLine() as line:
            line(TrainsAlone(step=1))
            assert routed.wait(LIMIT_S)
            sys.stdout.write("the program's own\n")
            line(TrainsAlone(step=2))
        wait_for_threads(Writer)
        assert sys.stdout is terminal
        assert sys.stderr is terminal
    seen = everything_from(ours)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert "the program's own\r\nstep 1, alone" in shown
    assert shown.endswith("step 2, alone\r\n")
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor is there


# --- nobody is held up -----------------------------------------------------------------------


def test_a_stream_that_nobody_reads_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line.Plain, "interval_s", 0.001)
    monkeypatch.setattr(status_line, "CLOSE_S_MAX", 0.01)
    writing, released = threading.Event(), threading.Event()

    class Held(io.StringIO):
        def write(self, text: str, /) -> int:
            writing.set()
            assert released.wait(LIMIT_S)
            return super().write(text)

    stream = Held()
    line = StatusLine(stream)
    line(InnerStep(step=1, seconds=math.nan))
    assert writing.wait(LIMIT_S)
    for step in range(2, 100):
        line(InnerStep(step=step, seconds=0.5))  # returns
    line.close()
    assert stream.getvalue() == ""
    released.set()
    wait_for_threads(Writer)
    assert stream.getvalue().endswith("pccl: step 99, 2 steps/s\n")


def test_a_broken_stream_is_none_of_the_programs_business() -> None:
    class Broken(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    with StatusLine(Broken()) as line:
        line(TrainsAlone(step=1))
    wait_for_threads(Writer)


def test_mistakes() -> None:
    with pytest.raises(TypeError, match=r"writes to a text stream, not 'run\.log'"):
        StatusLine("run.log")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
