from __future__ import annotations

from pathlib import Path

import pytest

from pccl.stress.studies.quality import results
from pccl.stress.studies.quality.results import FinishedRun


def finished(seed: int) -> FinishedRun:
    return FinishedRun(
        name="sync", seed=seed, loss=2.5, digest="ab", cpu_s=1.5, settings={"lr": 0.25}
    )


def test_a_line_that_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert results.read(path) == []
    results.append(path, [finished(0), finished(1)])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"name": "sy')
    assert results.read(path) == [finished(0), finished(1)]
    results.append(path, [finished(2)])
    assert results.read(path) == [finished(0), finished(1), finished(2)]
    assert path.read_bytes().startswith(whole)


@pytest.mark.parametrize("line", ["{}\n", "no json\n", "[]\n"])
def test_another_file_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "notes"
    path.write_text(line)
    with pytest.raises(ValueError, match="something other than runs"):
        results.read(path)


def test_a_key_does_not_depend_on_the_order_of_settings() -> None:
    assert results.key(1, {"a": 1, "b": 2}) == results.key(1, {"b": 2, "a": 1})
    assert results.key(1, {"a": 1}) != results.key(2, {"a": 1})
