"""What ``pccl bench allreduce`` refuses to measure."""

from __future__ import annotations

from typing import Any

import click
import pytest

from pccl.cli.bench.machine import check_memory
from pccl.cli.bench.plan import BenchPlan, Variant
from pccl.cli.processes.reports import decode, encode

PLAN: dict[str, Any] = {"sizes": (4096,), "peers": (2, 4)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": (4096, 4098)}, "not a multiple of 4 bytes, the size of a float32"),
        ({"against": ("ring",), "emulate": "rate=1mbit"}, "leave out --against"),
        ({"against": ("gloo",), "dtype": "uint16"}, "Gloo does not sum uint16"),
        ({"against": ("ring",), "formats": ("int8",)}, "add 'none' to --quantize"),
        ({"algorithms": ("star",), "sizes": (8 << 20,)}, "star is for tensors up to 4 MiB"),
        ({"formats": ("int8",), "dtype": "int32"}, "int32 cannot be quantized"),
        ({"formats": ("bfloat16",), "dtype": "float16"}, "not shorter than float16"),
    ],
)
def test_plans_that_are_refused(change: dict[str, Any], words: str) -> None:
    if change.get("against") == ("gloo",):
        pytest.importorskip("torch")
    BenchPlan(**PLAN).check(4)
    with pytest.raises(click.UsageError, match=words):
        BenchPlan(**PLAN | change).check(4)


def test_what_the_machine_has_no_memory_for() -> None:
    check_memory(1 << 10, 12)
    with pytest.raises(click.UsageError, match=r"1 GiB need 4194304\.0 GiB of memory"):
        check_memory(1 << 30, 1 << 22)


def test_variants_are_all_combinations() -> None:
    plan = BenchPlan((4,), algorithms=("ring", "mesh"), formats=("none", "int8"))
    assert [str(variant) for variant in plan.variants] == ["ring", "ring int8", "mesh", "mesh int8"]
    assert [variant.exact for variant in plan.variants] == [True, False, True, False]
    assert BenchPlan((4,)).variants == (Variant("auto", "none"),)


def test_a_plan_survives_the_command_line() -> None:
    plan = BenchPlan(
        (4, 8), (3,), (1, 2), "int8", True, 3, 1, ("gloo",), algorithms=("mesh", "ring")
    )
    assert decode(encode(plan), (BenchPlan,)) == plan


def test_a_bare_ring_adds_every_type() -> None:
    BenchPlan(**PLAN, against=("ring",), dtype="float16").check(4)
    BenchPlan(**PLAN, against=("ring",), dtype="uint32").check(4)
