"""The numbers in nested dictionaries and lists, as one list and back. Pure.

Newcomers take over step counters, learning rates and the like as one tensor of float64. What is no
number (names, functions, None) is the program's own and the same on all peers anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard


def numbers_of(nested: object) -> Iterator[float]:
    """Every int, float and bool, in an order that does not depend on that of the dictionaries."""
    if isinstance(nested, int | float):
        yield float(nested)
    elif _is_dict(nested):
        for key in sorted(nested, key=str):
            yield from numbers_of(nested[key])
    elif _is_sequence(nested):
        for item in nested:
            yield from numbers_of(item)


def with_numbers(nested: Any, numbers: Iterator[float]) -> Any:
    """A copy with other numbers, of the types that were there; the rest is the same objects.

    An int that is given a fraction or infinity becomes a float: some programs begin to count at 0
    what they go on with as 0.5.

    Args:
        nested: as of ``numbers_of``.
        numbers: as many as that yields.
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
