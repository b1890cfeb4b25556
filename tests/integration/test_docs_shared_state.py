"""The examples in docs/shared-state.md do what the page says, and its rules are the election's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pccl.state import election
from tests.support.paths import ROOT
from tests.support.patience import LONG_LIMIT_S

PAGE = ROOT / "docs" / "shared-state.md"
TEXT = PAGE.read_text(encoding="utf-8")
LAUNCH = "from pccl.cli.main import main; main()"
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_a_test_for_each() -> None:
    assert len(EXAMPLES) == 3


def lines_of(number: int, tmp_path: Path) -> list[str]:
    """What the two peers print, in order of the processes."""
    example = tmp_path / "example.py"
    example.write_text(EXAMPLES[number], encoding="utf-8")
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
    return sorted(ended.stdout.splitlines())


def test_first_example(tmp_path: Path) -> None:
    lines = [line.partition("] ")[2] for line in lines_of(0, tmp_path)]
    assert sorted(lines) == [
        "rank 0: 103, -1.0, received 0 bytes",
        "rank 1: 103, -1.0, received 4000000 bytes",
    ]
    printed = TEXT[TEXT.index(EXAMPLES[0]) :].split("```")[2]
    assert [line.partition("] ")[2] for line in printed.split("\n")[1:-1]] == sorted(lines)


@pytest.mark.parametrize("number", [1, 2])
def test_diloco(number: int, tmp_path: Path) -> None:
    """Ten outer steps, after which both have the same weights."""
    pytest.importorskip("torch")
    (first, mine), (second, theirs) = (line.split("] ", 1) for line in lines_of(number, tmp_path))
    assert (first, second) == ("[0", "[1")
    assert re.match(r"10 tensor\(\[ ?-?\d", mine)
    assert mine == theirs


def test_the_rules_are_quoted() -> None:
    assert election.__doc__ is not None
    rules = election.__doc__[election.__doc__.index("1. **Layout.**") :].strip()
    assert rules in TEXT
