"""``python -m pccl.stress patience``: that it runs, and that it would see a removal."""

from __future__ import annotations

import json
import sys

import pytest

from pccl.stress.studies.patience import PatienceFindings
from tests.support.commands import run_to_end


def test_a_short_run_removes_nobody() -> None:
    options = ["--minutes", "0.02", "--peers", "2", "--busy", "1", "--json"]
    ended = run_to_end(sys.executable, "-m", "pccl.stress", "patience", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    told = json.loads(ended.stdout)
    assert (told["verdict"], told["removals"], told["errors"], told["hangs"]) == ("ok", [], [], 0)
    assert told["reduces"] > 0
    assert told["status_reports"] > 0


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (PatienceFindings(1.0, 2, 0, 0, reduces=1), "ok"),
        (PatienceFindings(1.0, 2, 0, 0), "failed"),
        (PatienceFindings(1.0, 2, 0, 0, reduces=1, removals=["peer 1: SILENT"]), "failed"),
        (PatienceFindings(1.0, 2, 0, 0, reduces=1, wrong_values=1), "failed"),
        (PatienceFindings(1.0, 2, 0, 0, reduces=1, hangs=1), "failed"),
        (PatienceFindings(1.0, 2, 0, 0, reduces=1, errors=["peer 0: exit code 1"]), "failed"),
    ],
)
def test_what_breaks_the_promise(found: PatienceFindings, verdict: str) -> None:
    assert found.verdict()["verdict"] == verdict
