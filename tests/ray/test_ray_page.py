"""The script of docs/ray.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from tests.ray.conftest import RayCluster
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PAGE = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")


def test_the_script(cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = re.findall(r"^sums of the weights: (.*)", done.stdout, re.M)
    sums = literal_eval(said)
    assert len(sums) == 2
    assert len(set(sums)) == 1
