"""Sizes and lists, as commands are given them."""

from __future__ import annotations

import click
import pytest

from pccl.checks import parse_size
from pccl.cli.sizes import ListOf, Size, SizeList, format_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("7B", 7),
        ("4KiB", 4096),
        ("4k", 4096),
        ("64 MiB", 67_108_864),
        ("64M", 67_108_864),
        ("1.5GiB", 1_610_612_736),
        ("1G", 1_073_741_824),
        ("4KB", 4000),
        ("2MB", 2_000_000),
        ("1GB", 1_000_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "12Foo", "MiB", "-4", "0", "1.5", "65GiB", "4KiBs", "1e6", "0.1KiB", "4 K B"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (size|whole number)"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1, "1 B"), (1000, "1000 B"), (1024, "1 KiB"), (1536, "1536 B"), (3 << 20, "3 MiB")],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


def test_lists() -> None:
    assert ListOf(click.IntRange(2, 64)).convert("4, 2,4", None, None) == (4, 2)
    assert ListOf(Size()).convert("4KiB,1MiB", None, None) == (4096, 1 << 20)
    with pytest.raises(click.BadParameter, match="1 is not in the range"):
        ListOf(click.IntRange(2, 64)).convert("2,1", None, None)


def test_lists_of_sizes() -> None:
    sizes = SizeList()
    assert sizes.convert("4KiB, 3,4KiB", None, None) == (4096, 3)
    assert sizes.convert("4KiB..64MiB", None, None) == tuple(4096 << 2 * n for n in range(8))
    assert sizes.convert("3 .. 47,12,1MiB..1MiB", None, None) == (3, 12, 1 << 20)
    assert sizes.convert((5,), None, None) == (5,)
    for text in ("4KiB..1KiB", "4KiB..", "..4KiB", "1..4..8", ""):
        with pytest.raises(click.BadParameter, match=r"is not a size|begins above its end"):
            sizes.convert(text, None, None)
