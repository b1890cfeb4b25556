"""Files that name runs: who may read them, which are stale, and what is never believed."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pccl.cli.runs import run_file
from pccl.cli.runs.run_file import Unusable, find_runs

MASTER = "127.0.0.1:4000"
TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"
GOOD: dict[str, Any] = {
    "version": 2,
    "pid": 77,
    "master": MASTER,
    "token": TOKEN,
    "command": "python train.py",
    "since_s": 1e9,
    "keys": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of run files; it is not there yet."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return runtime / "pccl"


@contextmanager
def locked(folder: Path, content: bytes | dict[str, Any], name: str = "77.json") -> Generator[Path]:
    """A file of a launch that lives."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / name
    path.touch(mode=0o600)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def test_a_file_lives_as_long_as_its_block(folder: Path) -> None:
    with run_file.run_file(MASTER, TOKEN, ["python", "my train.py", "\x1b[1m"]):
        (path,) = folder.iterdir()
        assert path.name == f"{os.getpid()}.json"
        assert (path.stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o600, 0o700)
        (run,), ignored = find_runs()
        assert ignored == ()
        assert (run.pid, run.master, run.token) == (os.getpid(), MASTER, TOKEN.encode())
        assert run.command == "python 'my train.py' '?[1m'"
        assert TOKEN not in repr(run)
    assert list(folder.iterdir()) == []
    assert find_runs() == ((), ())


def test_without_a_runtime_folder_it_lies_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with run_file.run_file(MASTER, TOKEN, ["true"]):
        assert (tmp_path / f"pccl-{os.geteuid()}" / f"{os.getpid()}.json").is_file()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))  # as in another session
        assert len(find_runs().runs) == 1


def test_a_file_without_a_lock_is_stale_whoever_has_its_id_now(folder: Path) -> None:
    with locked(folder, GOOD | {"pid": os.getpid()}, f"{os.getpid()}.json") as path:
        assert len(find_runs().runs) == 1
    assert path.exists()
    assert find_runs() == ((), ())
    assert not path.exists()


def test_the_oldest_run_is_first(folder: Path) -> None:
    with (
        locked(folder, GOOD | {"pid": 5, "since_s": 2e9}, "5.json"),
        locked(folder, GOOD | {"pid": 6, "since_s": 1e9}, "6.json"),
    ):
        assert [run.pid for run in find_runs().runs] == [6, 5]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"x" * (run_file.FILE_BYTES_MAX + 1), "is too long"),
        (b"\xff", "is not JSON"),
        (b"[" * 10_000, "is not JSON"),
        (b"[]", "lacks a field"),
        (GOOD | {"version": 3}, "has version 3; this pccl reads version 2"),
        (GOOD | {"pid": "77"}, "lacks a field"),
        (GOOD | {"pid": 78}, "names another process (78)"),
        (GOOD | {"master": "nowhere"}, "is not valid: 'nowhere' is not an address"),
        (GOOD | {"token": "short"}, "is not valid: token"),
        (GOOD | {"since_s": 1e300}, "is not valid"),
        (json.dumps(GOOD | {"since_s": float("nan")}).encode(), "is not valid"),
    ],
)
def test_no_content_is_believed(content: bytes | dict[str, Any], reason: str, folder: Path) -> None:
    with locked(folder, content) as path:
        runs, (ignored,) = find_runs()
    assert runs == ()
    assert ignored.startswith(f"{path} {reason}")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_may_use(mode: int, folder: Path) -> None:
    with locked(folder, GOOD) as path:
        path.chmod(mode)
        reason = f"{path} can be used by other users (mode {mode:o})"
        assert find_runs() == ((), (reason,))


def test_a_link_and_a_pipe(folder: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "elsewhere", GOOD) as path:
        folder.mkdir(mode=0o700)
        (folder / "77.json").symlink_to(path)
        os.mkfifo(folder / "78.json", 0o600)
        runs, ignored = find_runs()
    assert runs == ()
    assert [reason.split(" ", 1)[1] for reason in ignored] == [
        "cannot be opened: Too many levels of symbolic links",
        "is not a file",
    ]


def test_a_folder_that_others_may_use(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(folder, GOOD):
        folder.chmod(0o755)
        reason = f"{folder} can be used by other users (mode 755)"
        assert find_runs() == ((), (reason,))
        with run_file.run_file(MASTER, TOKEN, ["true"]):  # the next folder is good
            assert [run.pid for run in find_runs().runs] == [os.getpid()]
        (tmp_path / f"pccl-{os.geteuid()}").chmod(0o701)
        with pytest.raises(Unusable, match=r"mode 755\); .*mode 701\)"):
            run_file.run_file(MASTER, TOKEN, ["true"]).__enter__()


def test_a_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with run_file.run_file(MASTER, TOKEN, ["true"]):
        assert list((tmp_path / "elsewhere").iterdir()) == []
        runs, (ignored,) = find_runs()
    assert len(runs) == 1
    assert ignored.startswith(f"{folder} is not a private folder")


def test_another_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(folder, GOOD):
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        reason = f"{folder} belongs to another user (id {owner})"
        assert find_runs() == ((), (reason,))
        with pytest.raises(Unusable, match="belongs to another user"):
            run_file.run_file(MASTER, TOKEN, ["true"]).__enter__()
