"""Converts the numbers in nested dictionaries and lists to one list, and back. Pure.

Newcomers receive step counters, learning rates and similar numbers as one float64 tensor. Other
values (names, functions, None) come from the program, and are the same on all peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard


def numbers_of(nested: object) -> Iterator[float]:
    """Yield every int, float and bool; the order of dictionary entries does not matter."""
    if isinstance(nested, int | float):
        yield float(nested)
    elif _is_dict(nested):
        for key in sorted(nested, key=str):
            yield from numbers_of(nested[key])
    elif _is_sequence(nested):
        for item in nested:
            yield from numbers_of(item)


def with_numbers(nested: Any, numbers: Iterator[float]) -> Any:
    """Return a copy of ``nested`` with other numbers of the same types.

    A fraction or infinity in place of an int becomes a float, because some programs start a float
    at the int 0.

    Args:
        nested: the dictionaries and lists, as for ``numbers_of``.
        numbers: the new numbers, as many as ``numbers_of`` yields.
    """
    if isinstance(nested, bool):
        return bool(next(numbers))
    if isinstance(nested, int):
        number = next(numbers)
        return int(number) if number.is_integer() else number
    if isinstance(nested, float):
        return next(numbers)
    if _is_dict(nested):
        changed = {key: with_numbers(nested[key], numbers) for key in sorted(nested, key=str)}
        return {key: changed[key] for key in nested}
    if _is_sequence(nested):
        items = [with_numbers(item, numbers) for item in nested]
        return items if isinstance(nested, list) else tuple(items)
    return nested


def _is_dict(nested: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(nested, dict)


def _is_sequence(nested: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(nested, list | tuple)
