"""The example in docs/publishing.md does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.commands import environment_with, run_to_end
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)


def test_the_example(tmp_path: Path) -> None:
    ((program, printed),) = EXAMPLES
    script = tmp_path / "example.py"
    script.write_text(program)
    done = run_to_end(sys.executable, str(script), env=environment_with())
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
