"""Arguments of ``pccl launch`` and ``pccl join``: mistakes are one line that says what to do."""

import tomllib
from importlib import import_module
from pathlib import Path

import click
import pytest

from pccl.cli import main
from pccl.cli.command_line import Seconds
from tests.support.paths import ROOT
from tests.support.secret_files import keep

EXAMPLE = "for example: pccl launch -n 4 -- python train.py"


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line about mistaken arguments."""
    with pytest.raises(SystemExit) as caught:
        main.run(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("launch", f"put -- and then the command, {EXAMPLE}"),
        ("launch -n 4 python train.py --lr 1", f"put -- and then the command, {EXAMPLE}"),
        ("launch -n 4 --", f"name a command after --, {EXAMPLE}"),
        ("launch -n 0 -- true", "0 is not in the range 1<=x<=256"),
        ("launch -n 257 -- true", "257 is not in the range 1<=x<=256"),
        ("launch -n four -- true", "'four' is not a valid integer range"),
        ("launch 4 -- true", "unexpected extra argument (4)"),
        ("launch --port 0 -- true", "0 is not in the range 1<=x<=65535"),
        ("launch --port 1 --master host:1 -- true", "give --port or --master, not both"),
        ("launch --master host -- true", "'host' is not an address; write HOST:PORT"),
        ("launch --master host:0 -- true", "'host:0' has port 0"),
        ("launch --group -1 -- true", "-1 is not in the range"),
        ("launch --min-peers 0 -- true", "0 is not in the range"),
        ("launch --grace -1 -- true", "-1.0 is not in the range"),
        ("launch --lanes 1 -- true", "No such option"),
        ("join", "put -- and then the command, for example: pccl join host.example:48148 --"),
        ("join -- true", "Missing argument 'HOST:PORT'"),
        ("join host -- true", "'host' is not an address; write HOST:PORT"),
        ("join host:0 -- true", "'host:0' has port 0"),
        ("join host:1 --advertise :2-1 -- true", "':2-1' is not an address"),
        ("join host:1 --token no/such/file -- true", "cannot read 'no/such/file': No such file"),
        ("join host:1 --timeout 0 -- true", "0.0 is not in the range"),
        ("join host:1 --upload-max 10 -- true", "'--upload-max': the limit must be at least 64000"),
        ("master --upload-max 8Mbit", "'8Mbit' is not a size; write a number and a unit"),
        ("lunch", "No such command 'lunch'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in complaint(arguments.split(), capsys)


@pytest.mark.parametrize("command", ["launch", "join host:1"])
@pytest.mark.parametrize("variable", ["PCCL_PROGRESS", "PCCL_DRAIN", "PCCL_STACKS"])
def test_a_switch_that_is_wrong_is_refused_before_anything_starts(
    command: str, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "yes")
    line = complaint([*command.split(), "--", "true"], capsys)
    assert line.startswith(f"Error: {variable} must be 0 or 1, not 'yes' (see ")


@pytest.mark.parametrize("command", ["launch", "join host:1"])
def test_a_limit_in_the_environment_that_is_wrong(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_UPLOAD_MAX", "10")
    line = complaint([*command.split(), "--", "true"], capsys)
    assert "the limit must be at least 64000 bytes per second, or 0 for no limit, not 10" in line


def test_join_checks_the_token_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PCCL_TOKEN", "pccl1.half")
    line = complaint(["join", "host:1", "--", "true"], capsys)
    assert "it begins with pccl1. like a token, but is malformed; copy it again" in line


def test_a_token_file_without_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    keep(file, "short\n")
    line = complaint(["join", "host:1", "--token", str(file), "--", "true"], capsys)
    assert "--token" in line
    assert "too short" in line


@pytest.mark.parametrize("command", ["launch", "join"])
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run([command, "--help"])
    out, err = capsys.readouterr()
    assert caught.value.code == 0
    assert err == ""
    assert out.startswith(f"Usage: pccl {command} [OPTIONS]")
    assert out.splitlines()[0].endswith("-- COMMAND [ARGUMENT]...")
    assert "Example: pccl" in out


def test_nothing_shows_the_help_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.run([])
    assert caught.value.code == 0
    assert "Example: pccl launch -n 4 -- python train.py" in capsys.readouterr().out


def test_scripts_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(project["scripts"]) == ["pccl", "pccl_master"]
    for place in project["scripts"].values():
        module, _, name = place.partition(":")
        assert callable(getattr(import_module(module), name))


def test_pccl_master_is_pccl_master(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["pccl_master", "--help"])
    with pytest.raises(SystemExit) as caught:
        main.pccl_master()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: pccl master [OPTIONS]")


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon", "1e300"])
def test_a_time_must_be_a_number_of_seconds(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Seconds(0.0).convert(text, None, None)
    assert Seconds(0.0).convert("2.5", None, None) == 2.5
