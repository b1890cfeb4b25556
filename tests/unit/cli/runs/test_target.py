"""Which master and token a command takes: arguments, then the environment, then a run file."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from pccl.cli.runs import target
from pccl.cli.runs.run_file import Found, RunFile
from pccl.cli.runs.target import NoRun, SeveralRuns, Target, find_target
from tests.support.secret_files import keep

SECRET = "b7Qz-Tr4k_Wm9x-Jp2v"
FIRST = RunFile(5, "127.0.0.1:4000", b"first", "python a.py", 1e9)
SECOND = RunFile(6, "127.0.0.1:5000", b"second", "python b.py", 2e9)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PCCL_MASTER", "PCCL_TOKEN", "PCCL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def live(monkeypatch: pytest.MonkeyPatch, *runs: RunFile, ignored: tuple[str, ...] = ()) -> None:
    monkeypatch.setattr(target, "find_runs", lambda: Found(runs, ignored))


def test_the_only_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    live(monkeypatch, FIRST)
    assert find_target(None, None) == Target("127.0.0.1:4000", b"first")
    monkeypatch.setenv("PCCL_TOKEN", SECRET)  # of another run
    assert find_target(None, None) == Target("127.0.0.1:4000", b"first")
    keep(tmp_path / "secret", SECRET)
    assert find_target(None, str(tmp_path / "secret")) == Target("127.0.0.1:4000", SECRET.encode())


def test_an_address_takes_the_token_of_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, FIRST, SECOND)
    assert find_target("localhost:5000", None) == Target("localhost:5000", b"second")
    assert find_target("127.0.0.1:5001", None) == Target("127.0.0.1:5001", None)
    monkeypatch.setenv("PCCL_MASTER", "127.0.0.1:4000")
    assert find_target(None, None) == Target("127.0.0.1:4000", b"first")
    assert find_target("127.0.0.1:5000", None) == Target("127.0.0.1:5000", b"second")
    monkeypatch.setenv("PCCL_TOKEN", SECRET)
    assert find_target(None, None) == Target("127.0.0.1:4000", SECRET.encode())


def test_several_runs_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, FIRST, SECOND)
    with pytest.raises(SeveralRuns) as caught:
        find_target(None, None)
    first, *listed = caught.value.message.splitlines()
    assert first == "several runs are live; choose one by its address:"
    since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"  127\.0\.0\.1:4000  \(process 5, {since}: python a\.py\)", listed[0])
    assert re.fullmatch(rf"  127\.0\.0\.1:5000  \(process 6, {since}: python b\.py\)", listed[1])
    assert caught.value.exit_code == 2


def test_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, ignored=("x.json is not JSON",))
    with pytest.raises(NoRun, match="no live `pccl launch`") as caught:
        find_target(None, None)
    assert caught.value.message.endswith("\n  ignored: x.json is not JSON")


def test_a_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    live(monkeypatch, FIRST)
    monkeypatch.setenv("PCCL_MASTER", "nowhere")
    with pytest.raises(click.BadParameter, match="PCCL_MASTER: 'nowhere' is not an address"):
        find_target(None, None)
