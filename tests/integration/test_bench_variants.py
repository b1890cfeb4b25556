"""``pccl bench`` with algorithms, wire formats and several tensors: real processes, tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from pccl.cli.bench.command import bench
from tests.support.commands import PCCL, environment_with, printed_objects

ONCE = ("--rounds", "1", "--warmup", "1", "--no-floor")


def measure(*options: str) -> list[dict[str, Any]]:
    """The objects that a benchmark prints."""
    return printed_objects(*PCCL, "bench", "--json", *options, env=environment_with())


def test_eight_bits_through_a_mesh() -> None:
    # More values than a period has, so that the tight bound is the one that holds.
    [result] = measure("--size", "512KiB", "--quantize", "int8", "--algorithm", "mesh", *ONCE)
    assert result["algorithm"] == result["algorithm_asked"] == "mesh"
    assert (result["quantize"], result["block"], result["stochastic"]) == ("int8", 32, False)
    assert result["values_ok"] is True
    assert 0.005 < result["error"] < 0.009
    assert result["wire_bytes_per_value"] == pytest.approx(1 + 2 / 32, abs=1e-3)
    assert result["conditions"]["data"] == "normal"


def test_ways_take_turns_in_one_run() -> None:
    found = measure(
        *("--size", "64KiB", "--algorithm", "ring,mesh", "--algorithm", "star", *ONCE),
        *("--quantize", "none,companded8", "--tensors", "1,3", "--data", "outliers"),
    )
    assert [(each["algorithm"], each["quantize"], each["tensors"]) for each in found] == [
        (algorithm, wire, tensors)
        for algorithm in ("ring", "mesh", "star")
        for wire in ("none", "companded8")
        for tensors in (1, 3)
    ]
    for each in found:
        assert each["values_ok"] is True
        exact = each["quantize"] == "none"
        assert (each["error"] == 0) is exact
        assert each["wire_bytes_per_value"] == pytest.approx(4.0 if exact else 1.0625, abs=0.01)


def test_one_list_beside_many_calls() -> None:
    found = measure(
        *("--size", "64KiB", "--algorithm", "mesh", "--quantize", "none,int8", *ONCE),
        *("--tensors", "1,5", "--many", "5"),
    )
    assert [(each["quantize"], each["tensors"], each["many"]) for each in found] == [
        (wire, tensors, many)
        for wire in ("none", "int8")
        for tensors, many in ((1, False), (5, False), (5, True))
    ]
    assert all(each["values_ok"] for each in found)
    exact, _, _, whole, apart, joint = found
    # Blocks are those of the concatenation.
    assert joint["wire_bytes_per_value"] == whole["wire_bytes_per_value"]
    assert joint["wire_bytes_per_value"] < apart["wire_bytes_per_value"]
    assert exact["wire_bytes_per_value"] == 4.0


@pytest.mark.parametrize("wire", ["uint8", "int4", "float16", "bfloat16", "uint16"])
def test_every_format(wire: str) -> None:
    options = ("--size", "512KiB", "--quantize", wire, "--stochastic", "--in-place", *ONCE)
    [result] = measure(*options)
    assert result["values_ok"] is True
    assert result["stochastic"] is True
    assert 0 < result["error"] < {"int4": 0.25, "uint16": 1e-4, "bfloat16": 0.01}.get(wire, 0.02)
    assert result["algorithm_asked"] == "auto"
    assert result["algorithm"] in {"ring", "star", "mesh"}


def test_other_steps_are_other_errors() -> None:
    options = ("--size", "512KiB", "--algorithm", "mesh", "--quantize", "int8", *ONCE)
    [fine], [coarse] = (measure(*options, "--block", block) for block in ("8", "4096"))
    assert fine["error"] < 0.6 * coarse["error"]
    assert fine["wire_bytes_per_value"] > 1.2 > coarse["wire_bytes_per_value"]


def test_beside_gloo_and_the_floor() -> None:
    pytest.importorskip("torch")
    found = measure(
        *("--size", "64KiB", "--quantize", "none,int8", "--rounds", "1", "--against", "gloo")
    )
    plain, quantized = found[:2]
    assert plain["against_values_ok"] is True
    assert "against" not in quantized
    assert [each["way"] for each in found if each.get("floor") == "case"] == ["auto"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--algorithm", "tree"], "'tree' is not one of 'auto', 'ring', 'star', 'mesh'"),
        (["--algorithm", "star"], "star is for tensors up to 4 MiB, and these have 64 MiB"),
        (["--quantize", "int7"], "'int7' is not one of 'none', 'uint8'"),
        (["--quantize", "int8", "--dtype", "int32"], "int32 cannot be quantized"),
        (["--quantize", "bfloat16", "--dtype", "float16"], "not shorter than float16"),
        (["--quantize", "int8", "--block", "7"], "7 is not in the range 8<=x<=65536"),
        (["--block", "64"], "--block is of wire formats; name one with --quantize"),
        (["--stochastic"], "--stochastic is of wire formats"),
        (["--data", "outliers"], "--data is of wire formats"),
        (["--tensors", "0"], "0 is not in the range 1<=x<=4096"),
        (["--size", "4KiB", "--tensors", "1025"], "4 KiB are fewer elements than 1025 tensors"),
        (["--size", "4KiB", "--many", "1025"], "take a larger size or fewer --many"),
        (["--many", "0"], "0 is not in the range 1<=x<=4096"),
        (["--algorithm", "star", "--many", "512"], "and these have 64 MiB"),
    ],
)
def test_options_are_checked_first(options: list[str], words: str) -> None:
    found = CliRunner().invoke(bench, options)
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


def test_gloo_has_no_wire_formats() -> None:
    pytest.importorskip("torch")
    found = CliRunner().invoke(bench, ["--against", "gloo", "--quantize", "int8"])
    assert found.exit_code == 2
    assert "add none to --quantize" in found.output
