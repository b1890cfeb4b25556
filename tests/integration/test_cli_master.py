"""``pccl master`` as users run it, and the group of commands around it."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import pccl
from pccl.errors import NotAdmitted
from pccl.protocol.handshake.token import parse_token
from tests.support import commands
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S
from tests.support.secret_files import keep

TOKEN = "the token of these tests"


@pytest.fixture(autouse=True)
def commands_are_forks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, ready_pccl: tuple[str, ...]
) -> None:
    """All but those that get a signal while they serve, and the shortest."""
    if request.function not in (test_master_ends_on_a_signal, test_version):
        monkeypatch.setattr(f"{__name__}.PCCL", ready_pccl)


def run_pccl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(*PCCL, *arguments, env=environment_with(**environment), limit_s=LIMIT_S)


def read_greeting(master: subprocess.Popen[str]) -> tuple[str, str]:
    """Read all that a master says when it starts; the address that it names, and the words."""
    assert master.stdout is not None
    words = ""
    while "Ctrl-C ends this master" not in words:
        line = master.stdout.readline()
        assert line, f"the master ended after saying {words!r}"
        words += line
    found = re.match(r"master listening on (\S+:\d+)\n", words)
    assert found is not None, words
    return found[1], words


def running(*options: str, **environment: str) -> AbstractContextManager[subprocess.Popen[str]]:
    return commands.running(*PCCL, "master", *options, env=environment_with(**environment))


@pytest.fixture
def master() -> Iterator[subprocess.Popen[str]]:
    with running("--listen", "127.0.0.1:0") as process:
        yield process


def ended_log(master: subprocess.Popen[str]) -> str:
    """What a master has logged, after SIGTERM."""
    master.send_signal(signal.SIGTERM)
    _, log = master.communicate(timeout=LIMIT_S)
    assert master.returncode == 0, log
    return log


def join(address: str, token: str | None) -> None:
    with pccl.Communicator(address, token=token) as comm:
        comm.connect()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_master_ends_on_a_signal(master: subprocess.Popen[str], signum: signal.Signals) -> None:
    address, said = read_greeting(master)
    assert "this machine only" in said
    assert f'pccl.Communicator("{address}")' in said
    master.send_signal(signum)
    _, complained = master.communicate(timeout=LIMIT_S)
    assert master.returncode == 0, complained
    assert "Traceback" not in complained


def test_port_in_use_is_said_in_a_sentence(master: subprocess.Popen[str]) -> None:
    address, _ = read_greeting(master)
    second = run_pccl("master", "--listen", address)
    assert second.returncode == 1
    assert second.stdout == ""
    (line,) = second.stderr.strip().splitlines()
    assert line.startswith(f"Error: cannot listen on {address}: address already in use; choose")


@pytest.mark.parametrize("option", ["--standby", "--standby-of"])
def test_a_standby_is_another_master(option: str) -> None:
    run = run_pccl("master", "--listen", "127.0.0.1:48200", option, "127.0.0.1:48200")
    assert run.returncode == 2
    assert "127.0.0.1:48200 is this master itself; name another master" in run.stderr
    run = run_pccl("master", option, "nowhere")
    assert run.returncode == 2
    assert f"Invalid value for '{option}': 'nowhere' is not an address" in run.stderr


def test_a_state_that_cannot_be_kept_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    run = run_pccl("master", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "file"))
    assert run.returncode == 2
    assert "is a file" in run.stderr
    run = run_pccl("master", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "file" / "in"))
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert line.endswith(
        f"of the run, {tmp_path}/file/in/run.keys: cannot be used: Not a directory"
    )
    (tmp_path / "master.state").write_text("not mine")
    run = run_pccl("master", "--listen", "127.0.0.1:0", "--state", str(tmp_path))
    assert run.returncode == 1
    (line,) = run.stderr.strip().splitlines()
    assert "the file holds no state of a master; repair it, or move it away" in line


def test_a_standby_says_what_it_is() -> None:
    with running("--listen", "127.0.0.1:0", "--standby-of", "127.0.0.1:48201") as process:
        address, said = read_greeting(process)
        assert "a standby: it begins no run" in said
        assert f"pccl join 127.0.0.1:48201,{address} --" in said


@pytest.mark.parametrize("address", ["48148", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    run = run_pccl("master", "--listen", address)
    assert run.returncode == 2
    assert "is not an address; write HOST:PORT" in run.stderr


# -- the token ---------------------------------------------------------------------------------


def test_a_token_that_the_master_makes() -> None:
    with running("--listen", "127.0.0.1:0", "--token", "auto") as master:
        address, said = read_greeting(master)
        (token,) = re.findall(rf"^    PCCL_TOKEN=(\S+) pccl join {address} --", said, re.MULTILINE)
        assert parse_token(token.encode()).number == 1
        join(address, token)
        with pytest.raises(NotAdmitted, match="requires a token"):
            join(address, None)
        log = ended_log(master)
    assert token not in log
    assert log.count("it has no token") == 1


@pytest.mark.parametrize("way", ["option", "PCCL_TOKEN", "PCCL_TOKEN_FILE"])
def test_a_token_that_there_is(way: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    keep(file, f"  {TOKEN}\n")
    options: tuple[str, ...] = ()
    environment = {"PCCL_TOKEN": TOKEN}
    if way == "option":
        options, environment = ("--token", str(file)), {"PCCL_TOKEN": "the option comes first"}
    elif way == "PCCL_TOKEN_FILE":
        environment = {way: str(file)}
    with running("--listen", "127.0.0.1:0", *options, **environment) as master:
        address, said = read_greeting(master)
        assert "set PCCL_TOKEN, or PCCL_TOKEN_FILE, to a token of this run" in said
        assert TOKEN not in said
        join(address, TOKEN)
        with pytest.raises(NotAdmitted, match="does not accept this token"):
            join(address, "another token for the run")
        assert TOKEN not in ended_log(master)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty: set it to the token of the run"),
        (" \n", "is empty: set it to the token of the run"),
        ("fifteen bytes !", "a secret of 15 bytes is too short"),
        (None, "cannot read"),
    ],
)
@pytest.mark.parametrize("way", ["option", "PCCL_TOKEN_FILE"])
def test_what_is_no_secret_is_refused(
    way: str, content: str | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        keep(file, content)
    if way == "option":
        run = run_pccl("master", "--listen", "127.0.0.1:0", "--token", str(file))
    else:
        run = run_pccl("master", "--listen", "127.0.0.1:0", PCCL_TOKEN_FILE=str(file))
    assert (run.returncode, run.stdout) == (2, "")
    assert words in run.stderr
    assert str(file) in run.stderr


def test_without_a_token_it_is_not_open_to_others() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.7:48148", "example.invalid:48148"):
        run = run_pccl("master", "--listen-address", address)
        assert (run.returncode, run.stdout) == (2, "")
        assert f"any process that reaches {address} could join the run" in run.stderr
        assert "--token auto" in run.stderr
        assert "--insecure" in run.stderr


def test_open_to_others_on_purpose() -> None:
    with running("--listen", "0.0.0.0:0", "--insecure") as master:
        _, said = read_greeting(master)
        assert "pccl join HOST:" in said
        log = ended_log(master)
    assert log.count("no token: any process that reaches 0.0.0.0:") == 1
    assert log.count("WARNING") == 1


def test_open_to_others_with_a_token() -> None:
    with running("--listen", "0.0.0.0:0", PCCL_TOKEN=TOKEN) as master:
        address, said = read_greeting(master)
        assert "reachable from other machines" in said
        join(f"127.0.0.1:{address.rpartition(':')[2]}", TOKEN)
        assert "WARNING" not in ended_log(master)


def test_the_environment_sets_options() -> None:
    run = run_pccl("master", PCCL_MASTER_LISTEN="nonsense")
    assert run.returncode == 2
    assert "'nonsense' is not an address" in run.stderr


def test_help_names_every_command_and_imports_none() -> None:
    probe = (
        "import sys, json, pccl.cli.main as main\n"
        "try: main.main()\n"
        "finally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    run = run_to_end(sys.executable, "-c", probe, "--help", limit_s=LIMIT_S)
    assert run.returncode == 0
    assert {"demo", "master"} <= set(re.findall(r"^  (\w+) ", run.stdout, re.MULTILINE))
    loaded = set(json.loads(run.stderr))
    assert loaded.isdisjoint({"torch", "rich", "sklearn", "matplotlib", "pccl.cli.demo.command"})


def test_version() -> None:
    run = run_pccl("--version")
    assert run.returncode == 0
    assert re.fullmatch(r"pccl \d+\.\d+\S*\n", run.stdout)
