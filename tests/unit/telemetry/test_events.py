"""The form of events in files: what earlier versions wrote stays readable.

The files ``tests/fixtures/events-*.jsonl`` were written by hand and must never change. A field that
is removed or renamed, or gets another type, breaks programs that read such files: that takes a new
major version. New kinds and new fields take a new minor version, and a new fixture.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, get_args, get_type_hints

import pytest

from pccl.observe import events as public
from pccl.telemetry.events import (
    SCHEMA,
    CallEnded,
    Joined,
    MemberLost,
    PeerReport,
    from_json,
    to_json,
)
from tests.support.paths import ROOT


def lines_of(version: str) -> list[dict[str, Any]]:
    path = ROOT / "tests" / "fixtures" / f"events-{version}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


LINES = lines_of("1.3")
KINDS: tuple[Any, ...] = get_args(PeerReport)


def line_of(kind: type[Any]) -> dict[str, Any]:
    (found,) = (line for line in LINES if line["event"] == kind.__name__)
    return dict(found)


def test_every_kind_is_in_the_fixture_once() -> None:
    assert SCHEMA == (1, 3), "a new version needs a new fixture"
    assert [line["event"] for line in LINES] == [kind.__name__ for kind in KINDS]


@pytest.mark.parametrize(
    "line",
    [*LINES, *lines_of("1.2"), *lines_of("1.1"), *lines_of("1.0")],
    ids=lambda line: f"{line['schema']}-{line['event']}",
)
def test_what_was_written_is_read_and_written_the_same(line: dict[str, Any]) -> None:
    event = from_json(line)
    assert event is not None
    assert type(event).__name__ == line["event"]
    for name, value in line.items():
        if name not in ("schema", "event"):
            assert getattr(event, name) == value
    written = to_json(event)
    assert written == {**line, "schema": "1.3"}
    assert list(written) == list(line)
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize("kind", KINDS)
def test_values_have_the_types_of_their_fields(kind: Any) -> None:
    hints = get_type_hints(kind)
    for name, value in line_of(kind).items():
        if name not in ("schema", "event"):
            assert type(value) is hints[name] or hints[name] == type(value) | None


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_documented(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        assert re.search(rf"^ {{4,8}}{field.name}: ", kind.__doc__, re.MULTILINE), field.name


def test_a_call_without_a_tag_is_read() -> None:
    event = from_json({**line_of(CallEnded), "tag": None})
    assert isinstance(event, CallEnded)
    assert event.tag is None


# -- other versions --------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["event"])
def test_a_later_minor_version_is_read_without_its_new_fields(line: dict[str, Any]) -> None:
    later = {"schema": "1.3", "spare": [1], **{n: v for n, v in line.items() if n != "schema"}}
    assert from_json(later) == from_json(line)


def test_an_unknown_kind_of_a_later_minor_version_is_none() -> None:
    assert from_json({"schema": "1.7", "event": "Teleported", "peer_id": 3}) is None
    assert from_json({"schema": "1.7"}) is None


@pytest.mark.parametrize("version", ["2.0", "0.9", "11.0", "", "x", None, 1])
def test_another_major_version_is_refused(version: object) -> None:
    line: dict[str, Any] = {**LINES[0], "schema": version}
    if str(version) == "1":
        assert from_json(line) == from_json(LINES[0])
        return
    with pytest.raises(ValueError, match="cannot be read by 1"):
        from_json(line)


def test_a_missing_version_is_refused() -> None:
    with pytest.raises(ValueError, match="schema unknown cannot be read"):
        from_json({name: value for name, value in LINES[0].items() if name != "schema"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_field_is_refused_by_its_name(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        line = line_of(kind)
        del line[field.name]
        with pytest.raises(ValueError, match=f"a {kind.__name__} lacks {field.name}"):
            from_json(line)


# -- what programs use -----------------------------------------------------------------------------


def test_all_kinds_are_public() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert names | {"SCHEMA", "PeerReport", "Stamped", "from_json", "to_json"} == {*public.__all__}


def test_events_are_values() -> None:
    line = line_of(Joined)
    assert from_json(line) == from_json(line)
    event = from_json(line_of(MemberLost))
    assert not hasattr(event, "__dict__")
