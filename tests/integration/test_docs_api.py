"""The examples in docs/api.md do what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PAGE = ROOT / "docs" / "api.md"
LAUNCH = "from pccl.cli.main import main; main()"

PRINTED = [
    "[15. 15. 15. 15. 15.] from peers (1, 2)",
    "1.5 1.5 of 2",
    "[0.0, 2.0, 4.0, 6.0]",
    "1.5 of 2",
    "[2. 2. 2. 2. 2.] of 2",
]
"""What each of the two peers prints, example by example."""

EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_an_expectation_for_each() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_example(number: int, tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(EXAMPLES[number], encoding="utf-8")
    command = [sys.executable, "-W", "error", str(example)]
    ended = subprocess.run(
        [sys.executable, "-c", LAUNCH, "launch", "-n", "2", "--", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"[{n}] {PRINTED[number]}" for n in range(2)]
