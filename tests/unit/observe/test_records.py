"""Records as files: private, whole or not at all, and checked when they are read."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from pccl.observe.records import read_records, write_json
from tests.unit.telemetry.test_records import GOOD


def test_a_file_is_private_and_replaces_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "record.json"
    place.write_text("before")
    place.chmod(0o644)
    write_json(place, GOOD)
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert json.loads(place.read_text()) == GOOD
    assert list(tmp_path.iterdir()) == [place]


def test_a_failure_leaves_the_file_before_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "record.json"
    place.write_text("before")
    with pytest.raises(TypeError):
        write_json(place, {"cannot": object()})
    assert place.read_text() == "before"
    assert list(tmp_path.iterdir()) == [place]


def test_files_of_one_record_and_of_several(tmp_path: Path) -> None:
    one, several = tmp_path / "one.json", tmp_path / "several.json"
    write_json(one, {**GOOD, "why": "SIGQUIT", "stacks": "..."})
    unanswered = {"peer 4 (dan)": "silent\x1b"}
    write_json(several, {"records": [GOOD, {**GOOD, "name": "bob"}], "unanswered": unanswered})
    records, absent = read_records([one, several])
    assert [record.name for record in records] == ["alice", "alice", "bob"]
    assert absent == {"peer 4 (dan)": "silent\N{REPLACEMENT CHARACTER}"}


BAD: list[Any] = [
    *(5, [], {}, {"records": 5, "unanswered": {}}, {"records": [GOOD]}),
    *({"records": [5], "unanswered": {}}, {"records": [GOOD], "unanswered": 5}),
]


@pytest.mark.parametrize("value", BAD)
def test_another_file_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    place = tmp_path / "bad.json"
    write_json(place, value)
    with pytest.raises(ValueError, match="bad"):
        read_records([place])


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    place = tmp_path / "bad.json"
    place.write_bytes(content)
    with pytest.raises(ValueError, match="bad"):
        read_records([place])
    with pytest.raises(ValueError, match="absent"):
        read_records([tmp_path / "absent.json"])
