"""Stores scenarios as JSON, so that a reduced one can be replayed."""

from __future__ import annotations

import enum
import json
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from pccl.stress.sim.faults.base import Fault
from pccl.stress.sim.faults.draws import KINDS
from pccl.stress.sim.scenarios.from_timeline import from_timeline
from pccl.stress.sim.scenarios.scenario import Scenario
from pccl.stress.timeline import Timeline, TimelineError, read_file


def to_text(scenario: Scenario) -> str:
    """Return the scenario as a JSON object, one option per line."""
    return json.dumps(_encode(scenario), indent=1) + "\n"


def load(path: Path) -> Scenario:
    """Read a scenario of the simulator, or a timeline of the chaos harness.

    Raises:
        TimelineError: the file cannot be read, or contains neither.
    """
    return read_file(path, _parse)


def _parse(given: Any) -> Scenario:
    if not (isinstance(given, dict) and "slots" in given):
        return from_timeline(Timeline.from_json(cast("object", given)))
    try:
        return cast("Scenario", _decode(Scenario, given))
    except (KeyError, TypeError, ValueError) as error:
        raise TimelineError(f"not a scenario of this version: {error!r}") from error


def _encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if is_dataclass(value):
        found = {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
        return {"kind": value.kind, **found} if isinstance(value, Fault) else found
    if isinstance(value, tuple):
        return [_encode(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _decode(kind: Any, given: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        if given is None:
            return None
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is tuple:
        return tuple(_decode(get_args(kind)[0], each) for each in given)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[given]
    if kind is Fault:
        given = dict(given)
        kind = KINDS[given.pop("kind")]
    if is_dataclass(cast("object", kind)):
        hints = get_type_hints(cast("Any", kind))
        return cast("Any", kind)(**{name: _decode(hints[name], given[name]) for name in given})
    if kind is float and isinstance(given, int):
        given = float(given)
    if not isinstance(given, kind):
        raise TypeError(f"{given!r} should be of type {cast('Any', kind)}")
    return given
