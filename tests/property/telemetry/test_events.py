"""The form of events in JSON: each comes back, and what this version does not know is ignored."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.telemetry.events import SCHEMA, LinkLost, PeerReport, from_json, to_json

KINDS = typing.get_args(PeerReport)
LOST = LinkLost(peer_id=3, name="carol", reason="reset")
WRITTEN = {
    "schema": "1.3", "event": "LinkLost", "peer_id": 3, "name": "carol", "reason": "reset",
}  # fmt: skip
_VALUES = {
    int: st.integers(0, 2**62),
    str: st.text(),
    float: st.floats(0, 1e9),
    bool: st.booleans(),
    int | None: st.none() | st.integers(0, 2**62),
    float | None: st.none() | st.floats(0, 1e9),
}


@st.composite
def any_event(draw: st.DrawFn) -> PeerReport:
    kind = draw(st.sampled_from(KINDS))
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    event: PeerReport = kind(**{name: draw(_VALUES[hints[name]]) for name in names})
    return event


@given(any_event())
def test_an_event_survives_a_file(event: PeerReport) -> None:
    values = to_json(event)
    assert values["schema"] == ".".join(map(str, SCHEMA))
    assert from_json(json.loads(json.dumps(values))) == event


@given(any_event(), st.integers(0, 99))
def test_a_later_minor_version_may_add_fields(event: PeerReport, minor: int) -> None:
    values = {**to_json(event), "schema": f"{SCHEMA[0]}.{minor}", "added": [1, {"a": None}]}
    assert from_json(values) == event


def test_the_form_is_flat() -> None:
    assert to_json(LOST) == WRITTEN
    assert from_json(WRITTEN) == LOST


@pytest.mark.parametrize("kind", ["Exploded", "", None, 3, "to_json", ["LinkLost"]])
def test_a_kind_of_a_later_version_is_no_event_here(kind: Any) -> None:
    assert from_json({**WRITTEN, "event": kind}) is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "events of schema unknown cannot be read by 1"),
        ({**WRITTEN, "schema": "2.0"}, "events of schema 2 cannot be read by 1"),
        ({**WRITTEN, "schema": "10.0"}, "events of schema 10 cannot be read by 1"),
        ({**WRITTEN, "schema": None}, "events of schema None cannot be read by 1"),
        ({"schema": "1.0", "event": "LinkLost", "name": "a"}, "a LinkLost lacks peer_id, reason"),
    ],
)
def test_what_is_no_event(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}$"):
        from_json(values)
