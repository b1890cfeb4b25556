"""The examples in docs/shared-state.md do what the page says, and its rules are the election's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pccl.state import election
from tests.support.commands import launch_example
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "shared-state.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_a_test_for_each() -> None:
    assert len(EXAMPLES) == 3


def lines_of(number: int, tmp_path: Path) -> list[str]:
    """What the two peers print, in order of the processes."""
    return sorted(launch_example(EXAMPLES[number], tmp_path).stdout.splitlines())


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
