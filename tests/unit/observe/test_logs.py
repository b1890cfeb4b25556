"""The lines of the log: their form, their level, and when the library shows them itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from pccl.observe import handoff, logs
from pccl.observe.logs import LEVEL, TIME, LineFormatter, log_events, show_log
from pccl.telemetry import events as tell
from pccl.telemetry.stream import EventStream
from tests.support.patience import LIMIT_S

NOON_S = 1_772_366_400.25
"""2026-03-01, a quarter of a second after noon in UTC."""
JOINED = tell.MemberJoined(peer_id=3, name="bob", host="10.0.0.3", world_size=2)
ENDED = tell.CallEnded(
    call="barrier", tag=7, outcome="ok", reason="", seconds=1.5, attempts=1, tx_bytes=0,
    rx_bytes=0, waited_s=0.0, moved_s=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing has configured the log."""
    for variable in (LEVEL, TIME):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(handoff, "FLUSH_S_MAX", LIMIT_S)
    ours = logging.getLogger("pccl")
    kept = ours.handlers[:], ours.level, ours.propagate
    ours.handlers[:], ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield
    for handler in ours.handlers:
        handler.close()
    ours.handlers[:], level, ours.propagate = kept
    ours.setLevel(level)


@pytest.fixture(name="in_india")
def change_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "IST-5:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def record(name: str = "pccl.events", text: str = "is here", **more: object) -> logging.LogRecord:
    values = {"name": name, "levelno": 20, "levelname": "INFO", "msg": text, "created": NOON_S}
    return logging.makeLogRecord({**values, **more})


def show(who: str, *handlers: logging.Handler) -> None:
    """Call ``show_log`` in a program that has these handlers, and none of pytest."""
    with patch.object(logging.getLogger(), "handlers", list(handlers)):
        show_log(who)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the library has written to stderr, each line without its time."""
    for handler in logging.getLogger("pccl").handlers:
        handler.close()
    return [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]


# -- the form -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_india")
@pytest.mark.parametrize(
    ("local", "begins"),
    [(False, "2026-03-01T12:00:00.250Z"), (True, "2026-03-01T17:30:00.250+05:30")],
)
def test_a_line_has_the_time_in_utc_or_of_this_place(local: bool, begins: str) -> None:
    line = LineFormatter("alice", local=local).format(record())
    assert line == f"{begins} INFO pccl alice: is here"


def test_a_line_names_the_peer_of_its_record() -> None:
    """A process may have several peers, and a line about one of them names it."""
    formatter = LineFormatter("alice", local=False)
    assert formatter.format(record(who="bob")).endswith(" INFO pccl bob: is here")


def test_a_line_of_another_library_names_that() -> None:
    formatter = LineFormatter("alice", local=False)
    assert formatter.format(record("asyncio")).endswith(" INFO asyncio alice: is here")
    assert formatter.format(record("pccline")).endswith(" INFO pccline alice: is here")


def test_a_traceback_stands_below_its_line() -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        failed = record(exc_info=sys.exc_info())
    first, second, *_, last = LineFormatter("alice", local=False).format(failed).splitlines()
    assert first.endswith("pccl alice: is here")
    assert (second, last) == (
        "Traceback (most recent call last):",
        "ZeroDivisionError: a bug",
    )


# -- the variables ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [("", None), ("  ", None), ("debug", 10), ("INFO", 20), (" Warning ", 30), ("error", 40)],
)
def test_levels(monkeypatch: pytest.MonkeyPatch, text: str, level: int | None) -> None:
    monkeypatch.setenv(LEVEL, text)
    assert logs.resolve_level() == level


@pytest.mark.parametrize(("text", "local"), [("", False), ("utc", False), (" LOCAL ", True)])
def test_times(monkeypatch: pytest.MonkeyPatch, text: str, local: bool) -> None:
    monkeypatch.setenv(TIME, text)
    assert logs.resolve_local_time() is local


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        (LEVEL, "PCCL_LOG must be debug, info, warning, error, off, not 'loud'"),
        (TIME, "PCCL_LOG_TIME must be utc or local, not 'loud'"),
    ],
)
def test_a_wrong_value_is_refused_before_a_handler_is_added(
    monkeypatch: pytest.MonkeyPatch, variable: str, says: str
) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(ValueError, match=f"^{says}$"):
        show("alice")
    assert logging.getLogger("pccl").handlers == []


# -- whether the library shows it ---------------------------------------------------------------


def test_by_default_warnings_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    show("alice")
    show("bob")  # another communicator of the process
    log = logging.getLogger("pccl.peer")
    log.info("all is well")
    log.warning("the master is away")
    assert shown(capsys) == ["WARNING pccl alice: the master is away"]


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("info", ["INFO pccl alice: two", "CRITICAL pccl alice: three"]),
        ("error", ["CRITICAL pccl alice: three"]),
        ("off", []),
    ],
)
def test_the_level_may_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    lines: list[str],
) -> None:
    monkeypatch.setenv(LEVEL, level)
    show("alice")
    log = logging.getLogger("pccl.peer")
    log.debug("one")
    log.info("two")
    log.critical("three")
    assert shown(capsys) == lines


@pytest.mark.parametrize("name", ["", "pccl"])
def test_a_program_with_handlers_of_its_own_keeps_them(name: str) -> None:
    ours, handler = logging.getLogger("pccl"), logging.NullHandler()
    if name:
        ours.addHandler(handler)
        show("alice")
    else:
        show("alice", handler)
    assert ours.handlers == ([handler] if name else [])
    assert (ours.level, ours.propagate) == (logging.NOTSET, True)


def test_a_level_that_is_set_counts_although_the_program_has_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each record is shown once."""
    monkeypatch.setenv(LEVEL, "warning")
    show("alice", logging.NullHandler())
    logging.getLogger("pccl").warning("a line")
    assert shown(capsys) == ["WARNING pccl alice: a line"]
    assert not logging.getLogger("pccl").propagate


# -- events -------------------------------------------------------------------------------------


def test_events_are_logged_with_the_name_that_the_peer_has_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "pccl.events")
    stream, names = EventStream(), ["alice", "bob"]
    log_events(stream, lambda: names.pop(0))
    stream.put(JOINED, 0)
    stream.put(JOINED, 0)
    stream.put(ENDED, 0)  # of no interest at this level
    assert [(one.levelname, getattr(one, "who", "")) for one in caplog.records] == [
        ("INFO", "alice"),
        ("INFO", "bob"),
    ]
    text = "peer 3 (bob) joined from 10.0.0.3; the group has 2 members"
    assert caplog.messages == [text, text]


def test_the_end_of_each_call_is_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pccl.events")
    stream = EventStream()
    log_events(stream, lambda: "alice")
    stream.put(ENDED, 0)
    assert caplog.messages == ["barrier ended after 1.500 s"]


def test_an_event_is_one_line_whatever_an_error_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pccl.events")
    stream = EventStream()
    log_events(stream, lambda: "alice")
    stream.put(replace(ENDED, outcome="ValueError", reason="no\nsuch\x1b[2J"), 0)
    assert caplog.messages == ["barrier raised ValueError: no\ufffdsuch\ufffd[2J"]


# -- a paused reader ----------------------------------------------------------------------------


PAUSED = """
import logging
from pccl.observe.logs import show_log
show_log("alice")
for _ in range(3000):
    logging.getLogger("pccl").warning("x" * 100)
"""


def test_a_program_ends_although_nobody_reads_its_log() -> None:
    """The thread of the log waits in a write, for good, and must hold no lock there."""
    reader, writer = os.pipe()
    try:
        ended = subprocess.run([sys.executable, "-c", PAUSED], stderr=writer, timeout=LIMIT_S)
    finally:
        os.close(reader)
        os.close(writer)
    assert ended.returncode == 0
