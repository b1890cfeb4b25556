"""The example in docs/shared-state.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import launch_example
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "shared-state.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_a_test_for_each() -> None:
    assert len(EXAMPLES) == 1


def test_first_example(tmp_path: Path) -> None:
    printed_lines = launch_example(EXAMPLES[0], tmp_path).stdout.splitlines()
    lines = [line.partition("] ")[2] for line in printed_lines]
    assert sorted(lines) == [
        "rank 0: 103, -1.0, received 0 bytes",
        "rank 1: 103, -1.0, received 4000000 bytes",
    ]
    printed = TEXT[TEXT.index(EXAMPLES[0]) :].split("```")[2]
    assert [line.partition("] ")[2] for line in printed.split("\n")[1:-1]] == sorted(lines)
