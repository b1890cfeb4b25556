"""The examples in docs/api.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.commands import launch_example
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PAGE = ROOT / "docs" / "api.md"

PRINTED = [
    "[2. 2. 2. 2. 2.] of 2",
]
"""What each of the two peers prints, example by example."""

EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_an_expectation_for_each() -> None:
    assert len(EXAMPLES) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_example(number: int, tmp_path: Path) -> None:
    ended = launch_example(EXAMPLES[number], tmp_path, LIMIT_S)
    assert sorted(ended.stdout.splitlines()) == [f"[p{n}] {PRINTED[number]}" for n in range(2)]
