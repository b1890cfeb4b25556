"""The study of plans over an emulated network, from its file to its figures: values, no times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import environment_with, run_to_end

MATRIX = """
sites = ["a", "b", "c"]
link = "rate=200mbit,rtt=4ms"
[ports]
c = "up=100mbit"
"""
WAN = (sys.executable, "-m", "pccl.stress", "wan")


def test_peers_at_three_sites_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    path.write_text(MATRIX)
    options = ("--scale", "2", "--size", "256KiB", "--rounds", "2", "--optimize", "1", "--json")
    ended = run_to_end(*WAN, str(path), *options, env=environment_with())
    if "needs Linux, root and /dev/net/tun" in ended.stderr:
        pytest.skip("this system does not let tests make a namespace with an interface")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    assert (found["matrix"], found["sites"]) == ("three", ["a", "b", "c"])
    figures = found["figures"]
    plans = [(each["phase"], each["algorithm_asked"], each["quantize"]) for each in figures]
    assert plans == [
        *[(0, how, wire) for wire in ("none", "int8") for how in ("ring", "mesh", "auto")],
        *[(1, "auto", wire) for wire in ("none", "int8")],
    ]
    assert all(each["values_ok"] and each["peers"] == 3 for each in figures)
    assert all(len(each["span"]) == 2 for each in figures)
    # No round is quicker than its bytes: 4/3 of the tensor through the port of c, 50 Mbit/s.
    assert figures[0]["span_min"] >= found["bounds_s_per_byte"]["ring"] * (256 << 10)
    assert [each["after"] for each in found["plans"]] == ["start", "optimized 1"]
    assert found["plans"][0]["s_per_byte"] == found["bounds_s_per_byte"]["mesh"]
    assert "dropped" in found["router"]


def test_a_matrix_that_is_none() -> None:
    ended = run_to_end(*WAN, "aws11", env=environment_with())
    assert ended.returncode == 2
    assert "aws11: No such file or directory; name a file, or aws10, gcp12, home8" in ended.stderr
