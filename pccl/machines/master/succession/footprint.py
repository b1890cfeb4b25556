"""How much memory a decoded message takes, to limit what a peer can make a master store.

The size on the wire is a bad measure: a decoded list of small numbers takes ten times as much.
Lists of items of one size are not walked: the size of an item is multiplied by the length.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any

_NUMBER_BYTES = 32
_TEXT_BYTES = 56
"""Memory of an empty text or byte string."""
_OBJECT_BYTES = 48
"""Memory of a dataclass without fields, or of an empty tuple."""
_SLOT_BYTES = 8

_Measure = int | Callable[[Any], int]
"""The size of all values of a type, or a function from a value to its size."""


def footprint(message: object) -> int:
    """Return the memory of ``message`` in bytes, within a factor of two.

    Shared objects count in full.
    """
    kind: Any = type(message)
    measure = _measure_of(kind)
    return measure if isinstance(measure, int) else measure(message)


@cache
def _measure_of(hint: Any) -> _Measure:
    if isinstance(hint, typing.NewType):
        return _measure_of(hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _measure_of(typing.get_args(hint)[0])
    if origin is tuple:
        return _measure_of_list(_measure_of(typing.get_args(hint)[0]))
    if origin in (UnionType, typing.Union):
        return _measure_of_option(_measure_of(typing.get_args(hint)[0]))
    if hint is str:
        return lambda text: _TEXT_BYTES + (1 if text.isascii() else 4) * len(text)
    if hint is bytes:
        return lambda data: _TEXT_BYTES + len(data)
    if isinstance(hint, type) and is_dataclass(hint):
        return _measure_of_dataclass(hint)
    assert issubclass(hint, int | float | enum.Enum)
    return _NUMBER_BYTES


def _measure_of_list(item: _Measure) -> _Measure:
    if isinstance(item, int):
        return lambda items: _OBJECT_BYTES + len(items) * (_SLOT_BYTES + item)
    return lambda items: _OBJECT_BYTES + _SLOT_BYTES * len(items) + sum(map(item, items))


def _measure_of_option(some: _Measure) -> _Measure:
    return lambda value: 0 if value is None else some if isinstance(some, int) else some(value)


def _measure_of_dataclass(kind: type[Any]) -> _Measure:
    hints = typing.get_type_hints(kind, include_extras=True)
    plan = [(field.name, _measure_of(hints[field.name])) for field in fields(kind)]
    fixed = _OBJECT_BYTES + sum(
        _SLOT_BYTES + (measure if isinstance(measure, int) else 0) for _, measure in plan
    )
    varying = [(name, measure) for name, measure in plan if not isinstance(measure, int)]
    if not varying:
        return fixed
    return lambda value: fixed + sum(measure(getattr(value, name)) for name, measure in varying)
