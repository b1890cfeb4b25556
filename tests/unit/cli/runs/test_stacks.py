"""The folder of a launch for stacks, and what killed launches leave behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pccl.cli.runs.stacks import NEW_S, PREFIX, stacks_folder


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Path]:
    """Make a folder that has not changed for long, with a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(name: str, mode: int) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "1.stacks").write_text("p0\n")
        path.chmod(mode)
        age(path)
        return path

    return make


def age(path: Path) -> None:
    then_s = path.stat().st_mtime - 2 * NEW_S
    os.utime(path, (then_s, then_s))


def test_the_next_launch_removes_what_a_killed_one_left(old: Callable[[str, int], Path]) -> None:
    stale = old(f"{PREFIX}stale", 0o700)
    kept = [old("pccl-mine", 0o700), old(f"{PREFIX}shared", 0o755)]
    link = stale.with_name(f"{PREFIX}link")
    link.symlink_to(kept[0])
    file = stale.with_name(f"{PREFIX}file")
    file.touch()
    with stacks_folder() as made:
        assert os.stat(made).st_mode & 0o777 == 0o700
        assert not stale.exists()
        for path in (*kept, link, file):
            assert path.exists()
    assert not os.path.exists(made)


def test_a_launch_that_lives_keeps_its_folder(old: Callable[[str, int], Path]) -> None:
    with stacks_folder() as first:
        age(Path(first))
        with stacks_folder() as second:
            assert os.path.isdir(first)
            assert first != second


def test_a_folder_that_is_new_may_not_be_locked_yet(old: Callable[[str, int], Path]) -> None:
    new = old(f"{PREFIX}new", 0o700)
    os.utime(new)
    with stacks_folder():
        assert new.exists()
