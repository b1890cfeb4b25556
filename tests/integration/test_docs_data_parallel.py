"""The example in docs/data-parallel.md runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import LONG_LIMIT_S

pytest.importorskip("torch")

PAGE = ROOT / "docs" / "data-parallel.md"
LAUNCH = "from pccl.cli.main import main; main()"


def test_example(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = tmp_path / "example.py"
    weights = "print(averager.steps, model.bias.item().hex(), model.weight.sum().item().hex())\n"
    example.write_text(script + weights, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(example)]
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH, "launch", "-n", "2", "--", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (line.split("] ")[1] for line in ended.stdout.splitlines())
    assert first == second
    assert first.startswith("100 ")
