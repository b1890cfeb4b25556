"""Records of other processes: good ones pass, and nothing else does."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pccl.protocol.operation import Phase
from pccl.protocol.types import OperationId
from pccl.telemetry.recorder import SEGMENTS_MAX
from pccl.telemetry.records import TEXT_BYTES_MAX, check_record

GOOD: dict[str, Any] = {
    "schema": "1.0",
    "name": "alice",
    "host": "gpu-07",
    "pid": 7,
    "run": "ab" * 16,
    "peer_ids": [2, 3],
    "now_ns": 9_000,
    "time_s": 1.5,
    "clock": [[1000, -20, 20]],
    "events": [{"at_ns": 5, "schema": "1.0", "event": "LinkLost", "peer_id": 4, "reason": "x"}],
    "open_calls": [[10, "all_reduce", 5], [11, "connect", None]],
    "operations": [[1, 0, 2, 5, 0, "SUM"]],
    "phases": [[20, "requested", 0], [30, "aborted", 0]],
    "segments": [[21, 22, 4, 0, True, 100, "DATA", 0, 1, 64]],
    "left_out": 0,
}


def test_a_good_record_is_read() -> None:
    record = check_record(GOOD)
    operation = OperationId(1, 0, 2, 5, 0)
    assert record.events == ((5, "LinkLost", {"peer_id": 4, "reason": "x"}),)
    assert [each.phase for each in record.phases] == [Phase.REQUESTED, Phase.ABORTED]
    assert record.segments[0].operation == operation
    assert record.requests == {operation: "SUM"}
    assert record.open_calls[1] == (11, "connect", None)


def test_a_later_minor_version_is_read() -> None:
    later = copy.deepcopy(GOOD)
    later["schema"], later["more"] = "1.9", [1]
    later["events"].append({"at_ns": 6, "schema": "1.9", "event": "Unheard", "list": [1]})
    assert check_record(later).events[1] == (6, "Unheard", {})


HOSTILE: dict[str, Any] = {
    "schema": ["2.0", None, 1.0e9],
    "name": [None, 5, ["alice"]],
    "pid": [-1, 1.5, True, "7", 1 << 64],
    "peer_ids": [None, [True], [-1], list(range(100)), {}],
    "now_ns": [-1, 1 << 63, "9", 1e3],
    "time_s": [float("nan"), float("inf"), -1, 10**400, True, "1"],
    "clock": [[[1, 2]], [[1, 2, 3]] * 1000, [[1, 2, 1 << 80]], [[-1, 0, 0]], [{}]],
    "events": [
        [5],
        [{"at_ns": 5}],
        [{"at_ns": -5, "event": "x"}],
        [{"at_ns": 1, "event": "x", "n": float("nan")}],
        [{"at_ns": 1, "event": "x", "n": 1 << 70}],
        [{"at_ns": 1, "event": "x"}] * 2000,
    ],
    "open_calls": [[[1, "x"]], [[1, "x", "5"]], [[1, 2, 3]], [[1, "x", 1]] * 2000],
    "operations": [[[1, 0, 2, 5, 0]], [[1, 0, 2, 1 << 64, 0, ""]], [], [[-1, 0, 0, 0, 0, ""]]],
    "phases": [
        [[1, "requested", 1]],
        [[1, "requested", -1]],
        [[1, "elsewhere", 0]],
        [[1, ["done"], 0]],
        [[1, "done", True]],
    ],
    "segments": [
        [[22, 21, 4, 0, True, 100, "DATA", 0, 1, 64]],
        [[21, 22, 4, 0, 1, 100, "DATA", 0, 1, 64]],
        [[21, 22, 4, 0, True, 100, "PING", 0, 1, 64]],
        [[21, 22, 4, 0, True, 100, {}, 0, 1, 64]],
        [[21, 22, 4, 0, True, 100, "DATA", 0, 1]],
        GOOD["segments"] * (SEGMENTS_MAX + 1),
        "segments",
    ],
    "left_out": [-1, None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in HOSTILE.items() for value in values]
)
def test_a_record_that_breaks_a_rule_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        check_record({**GOOD, field: value})
    assert len(str(caught.value)) < TEXT_BYTES_MAX


@pytest.mark.parametrize("value", [None, 5, [], "x", {}, {"schema": "1.0"}])
def test_what_is_no_record_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        check_record(value)


def test_texts_are_made_printable_and_cut() -> None:
    event = {"at_ns": 5, "event": "E\x1b[2J" * 999, "reason": "\n" * 10**6, "\x00" * 999: "x"}
    record = check_record({**GOOD, "name": "a\x1b" * 500, "events": [event]})
    _, kind, told = record.events[0]
    texts = [record.name, kind, *told, *told.values()]
    assert all(text.isprintable() and len(text.encode()) <= TEXT_BYTES_MAX for text in texts)
