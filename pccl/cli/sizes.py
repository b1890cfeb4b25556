"""Arguments of commands that measure: sizes in bytes, and lists."""

from __future__ import annotations

import re
from typing import Any

import click

UNITS = {
    "": 1,
    "B": 1,
    **{
        letter + end: 1 << 10 * (place + 1)
        for place, letter in enumerate("KMG")
        for end in ("", "iB")
    },
    **{letter + "B": 1000 ** (place + 1) for place, letter in enumerate("KMG")},
}
"""Bytes of each unit. A letter alone is a power of 1024, as in nccl-tests."""

SIZE_MAX = 64 << 30
"""Largest size of one tensor, in bytes."""

SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Return the number of bytes that a text such as ``64MiB`` names.

    Raises:
        ValueError: not a size, or out of range; the message says what is allowed.
    """
    found = SIZE_PATTERN.fullmatch(text.strip())
    unit = found[2][:1].upper() + found[2][1:] if found else ""
    if found is None or unit not in UNITS:
        raise ValueError(
            f"{text!r} is not a size; write a number and a unit, such as 64MiB. Units: B; KiB, "
            "MiB, GiB or K, M, G (powers of 1024); KB, MB, GB (powers of 1000)"
        )
    size = float(found[1]) * UNITS[unit]
    if size != int(size) or not 0 < size <= SIZE_MAX:
        raise ValueError(
            f"{text!r} is not a whole number of bytes from 1 to {format_size(SIZE_MAX)}"
        )
    return int(size)


def format_size(size: int) -> str:
    """Return ``size`` bytes as an exact text, such as ``64 MiB``."""
    for unit in ("GiB", "MiB", "KiB"):
        if size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}"
    return f"{size} B"


class Size(click.ParamType[int]):
    """The type of an option that takes a size in bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size."""
        try:
            return value if isinstance(value, int) else parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class ListOf(click.ParamType[tuple[Any, ...]]):
    """The type of an option that takes values separated by commas; it drops duplicates.

    Args:
        kind: type of each value.
    """

    def __init__(self, kind: click.ParamType[Any]) -> None:
        self.name = f"{kind.name},..."
        self._kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Convert each value."""
        if isinstance(value, tuple):
            return value  # pyright: ignore[reportUnknownVariableType]
        parts = [self._kind.convert(part.strip(), param, ctx) for part in str(value).split(",")]
        return tuple(dict.fromkeys(parts))


class SizeList(ListOf):
    """``ListOf(Size())``, in which ``4KiB..1MiB`` is every size from 4 KiB by factors of 4."""

    def __init__(self) -> None:
        super().__init__(Size())

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Convert each size, and each range to its sizes."""
        if isinstance(value, tuple):
            return super().convert(value, param, ctx)
        sizes: list[int] = []
        for text in str(value).split(","):
            ends = [Size().convert(end.strip(), param, ctx) for end in text.split("..", 1)]
            if ends[0] > ends[-1]:
                self.fail(f"{text!r} begins above its end", param, ctx)
            powers = range((ends[-1] // ends[0]).bit_length())
            sizes += [ends[0] << power for power in powers if power % 2 == 0]
        return tuple(dict.fromkeys(sizes))
