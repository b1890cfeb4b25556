"""Which file a command stands for, and what is said when there is none."""

import sys
from pathlib import Path

import click
import pytest

from pccl.cli.processes.programs import NotExecutable, NotFound, find_program


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder along PATH, and where we are."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_along_path_and_by_path(folder: Path) -> None:
    program = folder / "tool"
    program.touch(mode=0o755)
    assert find_program("tool") == str(program)
    assert find_program("./tool") == "./tool"
    assert find_program(sys.executable) == sys.executable


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", ""])
def test_not_found(name: str, folder: Path) -> None:
    with pytest.raises(NotFound, match=f"command not found: {name}") as caught:
        find_program(name)
    assert caught.value.exit_code == 127


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./plain", "chmod \\+x plain"),
        ("plain", "chmod \\+x /.*/plain"),
        ("train.py", "write: python train.py"),
        ("./train.py", "write: python ./train.py"),
        ("./sub", "is a folder"),
    ],
)
def test_not_executable(name: str, words: str, folder: Path) -> None:
    (folder / "plain").touch(mode=0o644)
    (folder / "train.py").touch(mode=0o644)
    (folder / "sub").mkdir()
    with pytest.raises(NotExecutable, match=words) as caught:
        find_program(name)
    assert caught.value.exit_code == 126
    assert isinstance(caught.value, click.ClickException)
