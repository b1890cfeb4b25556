"""Arguments of commands that measure: sizes in bytes, and lists."""

from __future__ import annotations

from typing import Any

import click

from pccl.checks import UNITS, parse_size


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
