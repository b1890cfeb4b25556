"""``pccl checkpoint``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from pccl import SharedState, TensorInfo
from pccl.cli.main import COMMANDS, group
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import OperationId


def run(*arguments: object) -> Result:
    return CliRunner().invoke(group, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = SharedState(
        [
            TensorInfo.from_numpy(np.ones((2, 3), np.float32), "w"),
            TensorInfo.from_numpy(np.array(4), "seed", allow_content_inequality=True),
        ]
    )
    state.synchronized(8, Lineage(b"\x12\xab", OperationId(1, 2, 3, 4, 5)))
    state.save(tmp_path / "c.safetensors")
    return tmp_path / "c.safetensors"


def test_lines(saved: Path) -> None:
    shown = run(saved)
    assert (shown.exit_code, shown.stderr) == (0, "")
    head, origin, contents, weights, seed = shown.stdout.splitlines()
    assert head == f"{saved} is complete: revision 8, 2 tensors, 32 bytes"
    assert origin == "  of run 12ab, synchronized in t1/g2/v3/tag4#5"
    told = json.loads(run(saved, "--json").stdout)
    assert contents == f"  contents {told['digest']}"
    digests = [one["digest"] for one in told["tensors"]]
    assert weights == f"  {digests[0][:16]} 'w': 2x3 float32, 24 bytes"
    assert seed == f"  {digests[1][:16]} 'seed': scalar int64, 8 bytes, members may differ"


def test_json(saved: Path) -> None:
    shown = run("--json", saved)
    assert (shown.exit_code, shown.stderr) == (0, "")
    told = json.loads(shown.stdout)
    tensors = told.pop("tensors")
    assert len(told.pop("digest")) == 64
    assert told == {
        "file": str(saved), "revision": 8, "run": "12ab", "operation": "t1/g2/v3/tag4#5",
        "bytes": 32,
    }  # fmt: skip
    assert [len(one.pop("digest")) for one in tensors] == [64, 64]
    assert tensors == [
        {"name": "w", "dtype": "float32", "shape": [2, 3], "bytes": 24,
         "allow_content_inequality": False},
        {"name": "seed", "dtype": "int64", "shape": [], "bytes": 8,
         "allow_content_inequality": True},
    ]  # fmt: skip


def test_a_state_that_was_never_synchronized(tmp_path: Path) -> None:
    SharedState([TensorInfo.from_numpy(np.ones(1), "w")]).save(tmp_path / "c")
    assert run(tmp_path / "c").stdout.splitlines()[:2] == [
        f"{tmp_path / 'c'} is complete: revision 0, 1 tensor, 8 bytes", "  never synchronized",
    ]  # fmt: skip
    assert json.loads(run("--json", tmp_path / "c").stdout)["run"] is None


def test_refusals_are_one_line(saved: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    missing = saved.parent / "none"
    for path, words in (
        (saved, f"Error: {saved} is not a valid checkpoint: tensor 'w' was altered since"),
        (missing, f"Error: cannot read {missing}: No such file or directory"),
        (saved.parent, f"Error: cannot read {saved.parent}: Is a directory"),
    ):
        shown = run(path, "--json")
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert shown.stderr.startswith(words)
        assert len(shown.stderr.splitlines()) == 1
    assert run().exit_code == 2


def test_it_is_one_of_the_commands() -> None:
    assert "checkpoint" in COMMANDS
    assert "Verify a checkpoint of shared state" in CliRunner().invoke(group, ["--help"]).stdout
