"""The example in docs/data-parallel.md runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import launch_example
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "data-parallel.md"


def test_example(tmp_path: Path, ready_python: tuple[str, ...]) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    weights = "print(averager.steps, model.bias.item().hex(), model.weight.sum().item().hex())\n"
    ended = launch_example(script + weights, tmp_path, python=ready_python)
    first, second = (line.split("] ")[1] for line in ended.stdout.splitlines())
    assert first == second
    assert first.startswith("100 ")
