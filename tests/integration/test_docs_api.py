"""The example in docs/api.md does what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.commands import launch_example
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PAGE = ROOT / "docs" / "api.md"


def test_example(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ended = launch_example(example, tmp_path, LIMIT_S)
    printed = "[2. 2. 2. 2. 2.] of 2"
    assert sorted(ended.stdout.splitlines()) == [f"[p{n}] {printed}" for n in range(2)]
