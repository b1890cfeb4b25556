"""``ProgressBar``: what is written, where, and that whoever reports is never held up."""

import io
import os
import pty
import re
import threading

import pytest

from pccl import progress
from pccl.progress import Drawer, Lines, ProgressBar, SyncProgress, listener_of, showing
from tests.support.patience import LIMIT_S
from tests.support.screens import everything_from
from tests.support.waiting import wait_for_threads


def fetched(done: int, total: int = 400_000_000, phase: str = "fetching") -> SyncProgress:
    return SyncProgress(phase, done, total, 50e6, 3, 0)


class Held(io.StringIO):
    """A pipe that nobody reads: writing takes until ``released``."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str, /) -> int:
        assert self.released.wait(LIMIT_S)
        return super().write(text)


class Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError


def test_a_line_for_each_quarter_and_now_and_then() -> None:
    stream = io.StringIO()
    lines = Lines("joining", stream)
    for done, seconds in ((0, 0.1), (50, 1), (99, 2), (100, 3), (150, 4), (310, 5), (320, 14.9)):
        lines.draw(fetched(done * 1_000_000), seconds)
    lines.draw(fetched(330_000_000), 15.0)
    lines.finish(fetched(400_000_000, phase="done"), "all of it")
    assert stream.getvalue().splitlines() == [
        "pccl: joining: 0 %, 0 kB of 400.0 MB, 50.0 MB/s, 8 s left, 3 sources",
        "pccl: joining: 25 %, 100.0 MB of 400.0 MB, 50.0 MB/s, 6 s left, 3 sources",
        "pccl: joining: 77 %, 310.0 MB of 400.0 MB, 50.0 MB/s, 2 s left, 3 sources",
        "pccl: joining: 82 %, 330.0 MB of 400.0 MB, 50.0 MB/s, 1 s left, 3 sources",
        "pccl: joining: all of it",
    ]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (fetched(400_000_000, phase="prefetching"),
         "100 %, 400.0 MB of 400.0 MB, waiting for members"),
        (fetched(400_000_000, phase="placing"), "100 %, 400.0 MB of 400.0 MB, all received"),
        (SyncProgress("fetching", 1000, 2_000_000_000, 0.0, 1, 2),
         "0 %, 1 kB of 2.00 GB, 0 kB/s, 1 source, 2 pieces came with wrong bytes"),
    ],
)  # fmt: skip
def test_words(now: SyncProgress, words: str) -> None:
    assert progress.describe(now) == words


def test_conclusions() -> None:
    everything, some = fetched(400_000_000, phase="done"), fetched(100_000_000)
    assert progress.conclude(everything, 300_000_000, 2.0) == "400.0 MB in 2.0 s (150.0 MB/s)"
    assert progress.conclude(everything, 0, 0.1) == "400.0 MB"
    assert progress.conclude(some, 90_000_000, 0.1) == "100.0 MB of 400.0 MB"
    wrong = SyncProgress("done", 5000, 5000, 0.0, 0, 1)
    assert progress.conclude(wrong, 0, 0.1) == "5 kB, 1 piece came with wrong bytes"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words


def test_nothing_is_shown_when_nothing_is_fetched() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)
    for phase in ("hashing", "waiting", "placing", "done"):
        bar(fetched(0, 0, phase))
    bar.close()
    assert stream.getvalue() == ""


def test_it_ends_with_its_call_and_begins_anew_with_the_next() -> None:
    stream = io.StringIO()
    bar = ProgressBar("joining", stream=stream)
    for _ in range(2):
        assert listener_of(bar, "not used") is bar
        with showing(bar):
            bar(fetched(400_000_000, phase="placing"))
            bar(fetched(400_000_000, phase="done"))
    wait_for_threads(Drawer)
    assert len(re.findall(r"joining: 400.0 MB(?: in .*)?$", stream.getvalue(), re.MULTILINE)) == 2


def test_a_call_that_fails_ends_it_too() -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream=stream)

    def fail() -> None:
        with showing(bar):
            bar(fetched(100_000_000))
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        fail()
    wait_for_threads(Drawer)
    assert re.search(r"fetching: 100.0 MB of 400.0 MB(?: in .*)?$", stream.getvalue(), re.MULTILINE)


def test_a_quick_fetch_that_nobody_asked_to_see_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, now_s = io.StringIO(), [5.0]
    monkeypatch.setattr("pccl.progress.time.monotonic", lambda: now_s[0])
    bar = ProgressBar(after_s=1.0, stream=stream)
    bar(fetched(0))
    now_s[0] = 5.9
    bar(fetched(400_000_000))
    now_s[0] = 9.0
    bar(fetched(400_000_000, phase="prefetching"))  # all here, and waits for its admission
    bar.close()
    assert stream.getvalue() == ""
    bar(fetched(0))
    now_s[0] = 10.0
    bar(fetched(100_000_000))
    bar.close()
    wait_for_threads(Drawer)
    assert stream.getvalue().endswith("100.0 MB of 400.0 MB in 1.0 s (100.0 MB/s)\n")


@pytest.mark.parametrize(
    ("value", "kind"), [("1", ProgressBar), ("0", type(None)), ("", type(None))]
)
def test_the_environment_asks_for_one(
    value: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_PROGRESS", value)
    assert isinstance(listener_of(None, "joining"), kind)
    assert listener_of(print, "joining") is print


def test_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_PROGRESS", "yes")
    with pytest.raises(ValueError, match="PCCL_PROGRESS"):
        listener_of(None, "joining")


def test_a_stream_that_is_stuck_holds_nobody_up() -> None:
    stream = Held()
    bar = ProgressBar(stream=stream)

    def report() -> None:
        for count in range(1000):
            bar(fetched(count))

    reporter = threading.Thread(target=report)
    reporter.start()
    reporter.join(LIMIT_S)
    assert not reporter.is_alive()
    bar.close()
    assert stream.getvalue() == ""
    stream.released.set()
    wait_for_threads(Drawer)
    assert stream.getvalue().startswith("pccl: fetching: ")


def test_a_stream_that_is_gone_is_no_error() -> None:
    bar = ProgressBar(stream=Broken())
    bar(fetched(1))
    bar(fetched(400_000_000, phase="done"))
    bar.close()
    wait_for_threads(Drawer)


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as stream:
        bar = ProgressBar("joining [3]", stream=stream)
        bar(fetched(400_000_000, phase="placing"))
        bar.close()
        wait_for_threads(Drawer)
    seen = everything_from(reader)
    assert "joining [3]" in seen
    assert "━" in seen
    assert "400.0 MB" in seen
    assert "\x1b[" in seen
