"""The scripts of docs/trainers.md run as they stand there; afterwards all peers are equal."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import LONG_LIMIT_S

if any(find_spec(name) is None for name in ("accelerate", "lightning", "transformers")):
    pytest.skip("pip install -e '.[trainers]'", allow_module_level=True)

PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")

SCRIPTS = re.findall(r"^## .*?```python\n(.*?)```", PAGE, re.M | re.S)


@pytest.mark.parametrize("script", SCRIPTS, ids=["hugging_face", "lightning", "accelerate"])
def test_a_script_of_the_page(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    launch = [sys.executable, "-m", "pccl.cli.main", "launch", "-n", "2"]
    command = [*launch, "--", sys.executable, "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_LIMIT_S
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    sums = re.findall(r"sum of the weights: (\S+)", said)
    assert len(sums) == 2, said
    assert len(set(sums)) == 1
