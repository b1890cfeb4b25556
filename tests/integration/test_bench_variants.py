"""``pccl bench`` with algorithms, wire formats and several tensors: real processes, tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from pccl.cli.main import group
from tests.support.commands import environment_with, printed_objects

ONCE = ("--rounds", "1", "--warmup", "1")


def measure(pccl: tuple[str, ...], *options: str) -> list[dict[str, Any]]:
    """The objects that a benchmark prints."""
    return printed_objects(*pccl, "bench", "--json", *options, env=environment_with())


def test_eight_bits_through_a_mesh(ready_pccl: tuple[str, ...]) -> None:
    # More values than a period has, so that the tight bound is the one that holds.
    way = ("--quantize", "int8", "--algorithm", "mesh")
    [result] = measure(ready_pccl, "--size", "512KiB", *way, *ONCE)
    assert result["algorithm"] == result["algorithm_asked"] == "mesh"
    assert result["quantize"] == "int8"
    assert result["values_ok"] is True
    assert 0.005 < result["error"] < 0.009
    assert result["wire_bytes_per_value"] == pytest.approx(1 + 2 / 32, abs=1e-3)


def test_ways_take_turns_in_one_run(ready_pccl: tuple[str, ...]) -> None:
    ways = ("--algorithm", "ring,mesh,star", "--quantize", "none,companded8")
    found = measure(ready_pccl, "--size", "64KiB", *ways, *ONCE)
    assert [(each["algorithm"], each["quantize"]) for each in found] == [
        (algorithm, wire)
        for algorithm in ("ring", "mesh", "star")
        for wire in ("none", "companded8")
    ]
    for each in found:
        assert each["values_ok"] is True
        exact = each["quantize"] == "none"
        assert (each["error"] == 0) is exact
        assert each["wire_bytes_per_value"] == pytest.approx(4.0 if exact else 1.0625, abs=0.01)


@pytest.mark.parametrize("wire", ["uint8", "int4", "e3m0", "int2", "sparse", "bfloat16", "uint16"])
def test_every_format(wire: str, ready_pccl: tuple[str, ...]) -> None:
    way = ("--quantize", wire, "--in-place")
    [result] = measure(ready_pccl, "--size", "512KiB", *way, *ONCE)
    assert result["values_ok"] is True
    largest = {
        "int4": 0.25,
        "e3m0": 0.5,
        "int2": 1.2,
        "sparse": 1.0,
        "uint16": 1e-4,
        "bfloat16": 0.01,
    }
    assert 0 < result["error"] < largest.get(wire, 0.02)
    assert result["algorithm_asked"] == "auto"
    assert result["algorithm"] in {"ring", "star", "mesh"}


def test_beside_gloo(ready_pccl: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    ways = ("--size", "64KiB", "--quantize", "none,int8", "--rounds", "1", "--against", "gloo")
    found = measure(ready_pccl, *ways)
    sides = [(each["side"].partition("-")[0], each["quantize"]) for each in found]
    assert sides[:3] == [("pccl", "none"), ("pccl", "int8"), ("gloo", "none")]
    assert all(each["values_ok"] for each in found)
    assert [("ratio" in each) for each in found[:3]] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--algorithm", "tree"], "'tree' is not one of 'auto', 'ring', 'star', 'mesh'"),
        (["--algorithm", "star"], "star is for tensors up to 4 MiB, and the largest has 64 MiB"),
        (["--quantize", "int7"], "'int7' is not one of 'none', 'uint8'"),
        (["--quantize", "int8", "--dtype", "int32"], "int32 cannot be quantized"),
        (["--quantize", "sparse", "--algorithm", "auto,ring"], "sparse travels from each peer to"),
        (["--quantize", "bfloat16", "--dtype", "float16"], "not shorter than float16"),
    ],
)
def test_options_are_checked_first(options: list[str], words: str) -> None:
    found = CliRunner().invoke(group, ["bench", *options])
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


def test_gloo_has_no_wire_formats() -> None:
    pytest.importorskip("torch")
    found = CliRunner().invoke(group, ["bench", "--against", "gloo", "--quantize", "int8"])
    assert found.exit_code == 2
    assert "add 'none' to --quantize" in found.output
