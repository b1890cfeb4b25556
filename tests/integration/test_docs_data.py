"""The example in docs/data.md runs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import launch_example
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "data.md"


def test_example(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    more = "print(sampler.done, sampler.epoch, model.bias.item().hex())\n"
    ended = launch_example(script + more, tmp_path)
    first, second = (line.split("] ")[1] for line in ended.stdout.splitlines())
    assert first == second
    assert first.startswith("12000 2.0 ")
