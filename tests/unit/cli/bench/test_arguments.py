"""What ``pccl bench`` is asked for, and what it refuses."""

from __future__ import annotations

import dataclasses

import click
import pytest

from pccl.cli.bench.arguments import ListOf, Size, format_size, parse_size, sweep
from pccl.cli.bench.plan import BenchPlan, check, check_memory

PLAN = BenchPlan(
    sizes=(4096,),
    peers=(2, 4),
    lanes=(0,),
    dtype="float32",
    in_place=False,
    rounds=20,
    warmup=3,
    against="",
    emulate="",
)


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


def test_sweep() -> None:
    assert sweep(4, 64, 4) == (4, 16, 64)
    assert sweep(4, 63, 4) == (4, 16)
    assert sweep(5, 4, 2) == ()


def test_lists() -> None:
    assert ListOf(click.IntRange(2, 64)).convert("4, 2,4", None, None) == (4, 2)
    assert ListOf(Size()).convert("4KiB,1MiB", None, None) == (4096, 1 << 20)
    with pytest.raises(click.BadParameter, match="1 is not in the range"):
        ListOf(click.IntRange(2, 64)).convert("2,1", None, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": ()}, "make 0 sizes"),
        ({"sizes": (4,) * 65}, "1 to 64 can be measured"),
        ({"sizes": (4096, 4098)}, "4098 B is no whole number of float32 elements"),
        ({"against": "gloo", "emulate": "rate=1mbit"}, "leave out --against"),
        ({"against": "gloo", "dtype": "uint16"}, "Gloo does not add uint16"),
    ],
)
def test_plans_that_are_refused(change: dict[str, object], words: str) -> None:
    check(PLAN)
    with pytest.raises(click.UsageError, match=words):
        check(dataclasses.replace(PLAN, **change))  # type: ignore[arg-type]


def test_memory() -> None:
    plan = dataclasses.replace(PLAN, sizes=(1 << 20, 1 << 30), against="gloo")
    check_memory(plan, 12 << 30)  # three tensors of 1 GiB for each of four peers
    check_memory(plan, None)
    with pytest.raises(click.UsageError, match=r"need 12\.0 GiB of memory, and 11\.0 GiB"):
        check_memory(plan, 11 << 30)
