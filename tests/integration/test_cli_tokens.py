"""``pccl token`` and ``pccl expel`` on a run of real processes, as its owner uses them."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import pccl
from pccl.errors import Evicted, NotAdmitted, PCCLError, RemoteProtocolError
from pccl.master_node import KeysFile
from pccl.protocol.handshake.token import RunToken, parse_token
from tests.integration.conftest import QUICK
from tests.support import commands
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S, patient
from tests.support.secret_files import keep
from tests.support.waiting import until

PLAIN = "the plain secret of these tests"
NO_TOKEN = "does not accept this token"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Only runs of one test are found; nothing comes from outside."""
    for name in ("PCCL_TOKEN", "PCCL_TOKEN_FILE", "PCCL_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def pccl_says(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(*PCCL, *arguments, env=environment_with(), limit_s=LIMIT_S)


def said(*arguments: str) -> str:
    """What a command prints; it succeeds."""
    done = pccl_says(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def master(*options: str, **environment: str) -> Generator[tuple[str, str]]:
    """A running master: its address, and the token in the line to paste; empty if there is none."""
    command = (*PCCL, "master", "--listen", "127.0.0.1:0", *options)
    with commands.running(*command, env=environment_with(**environment)) as process:
        assert process.stdout is not None
        words = ""
        while "Ctrl-C ends this master" not in words:
            line = process.stdout.readline()
            assert line, f"the master ended after saying {words!r}"
            words += line
        pasted = re.search(r"^ +(?:PCCL_TOKEN=(\S+) )?pccl join (\S+) -- ", words, re.MULTILINE)
        assert pasted is not None, words
        yield pasted[2], pasted[1] or ""
        process.terminate()
        assert process.wait(LIMIT_S) == 0


class Member:
    """A member that makes joint calls until it fails, so that others can join."""

    def __init__(self, comm: pccl.Communicator) -> None:
        self.comm = comm
        self.failure: PCCLError | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._ends.wait(0.02):  # it does not make calls as fast as it can
            try:
                self.comm.update_topology()
            except PCCLError as error:
                self.failure = error
                return

    def end(self) -> None:
        self._ends.set()
        self._thread.join(LIMIT_S)

    def has_failed(self) -> bool:
        return self.failure is not None


@contextmanager
def member(address: str, token: str | None, name: str) -> Generator[Member]:
    with pccl.Communicator(address, timing=QUICK, token=token, name=name) as comm:
        comm.connect(n_attempts=1)
        one = Member(comm)
        try:
            yield one
        finally:
            one.end()


def refused(address: str, token: str | None, words: str = NO_TOKEN) -> None:
    with pytest.raises(NotAdmitted, match=words), member(address, token, "late"):
        pass


def numbers(*arguments: str) -> dict[int, str]:
    """What ``pccl token list`` says, by number."""
    lines = (re.match(r" *(\d+)  (.*)", line) for line in said(*arguments).splitlines())
    return {int(line[1]): line[2] for line in lines if line is not None}


def test_expelled_with_a_token_that_others_share() -> None:
    with ExitStack() as stack:
        address, token = stack.enter_context(master("--token", "auto"))
        stack.enter_context(member(address, token, "alice"))
        bob = stack.enter_context(member(address, token, "bob"))
        listed = numbers("token", "list")
        assert re.fullmatch(
            r"token, valid, .* old; joined with it: 1 \(alice\), 2 \(bob\)", listed[1]
        )
        gone = pccl_says("expel", "bob")
        assert gone.returncode == 0, gone.stderr
        assert "expelled peer 2 (bob)" in gone.stderr
        assert "revoked token 1, with which it joined" in gone.stderr
        assert "others joined with this token, and stay: 1 (alice)" in gone.stderr
        new = gone.stdout.strip()
        until(bob.has_failed, patient(3.0))
        assert isinstance(bob.failure, Evicted)
        assert "(pccl expel) [EXPELLED]; this process may not come back" in bob.failure.reason
        with pytest.raises(NotAdmitted, match=NO_TOKEN):
            bob.comm.connect(n_attempts=1)  # the same key and the same token
        refused(address, token)  # another process of the same machine, with the old token
        with member(address, new, "carol"):
            status = pccl.master_status(address, token=new)
            assert {one.name for one in status.members} == {"alice", "carol"}
        listed = numbers("token", "list")
        assert listed[1].startswith("token, revoked")
        assert listed[1].endswith("joined with it: 1 (alice)")


def test_old_tokens_after_rotation() -> None:
    with master("--token", "auto") as (address, first), member(address, first, "alice") as alice:
        second = said("token", "rotate")
        until(lambda: _joins(address, second), patient(3.0))
        assert _joins(address, first)
        full = pccl_says("token", "make")
        assert full.returncode == 1
        assert "2 tokens are valid already; `pccl token rotate`" in full.stderr
        rotated = pccl_says("token", "rotate")
        assert rotated.stderr.strip() == "revoked token 1"
        third = rotated.stdout.strip()
        until(lambda: _joins(address, third), patient(3.0))
        refused(address, first)
        assert _joins(address, second)
        assert not alice.has_failed()


def _joins(address: str, token: str) -> bool:
    """Whether a master accepts a token from a process that is no member."""
    try:
        pccl.master_status(address, token=token, timeout_s=LIMIT_S)
    except RemoteProtocolError:
        return False
    return True


def test_a_ticket_lets_one_process_in() -> None:
    with master("--token", "auto") as (address, _):
        ticket = said("token", "ticket")
        until(lambda: _joins(address, ticket), patient(3.0))
        with member(address, ticket, "alice"):
            refused(address, ticket)
            assert numbers("token", "list")[2].startswith("ticket, spent")
        refused(address, ticket)


def test_another_master_gets_no_proof(home: Path) -> None:
    with master("--token", "auto") as (_, token):
        true = parse_token(token.encode())
    other = KeysFile(home / "other.keys")
    other.make(b"k" * 32)
    other.update(lambda tokens: tokens.make(true.secret, 0))
    with master("--keys", str(other.path)) as (address, pasted):
        assert pasted == ""
        refused(address, token, "another key than the token says")
        keys = other.read()
        with member(address, keys.text_of(keys.tokens.known[0]), "alice"):
            pass
        refused(
            address, RunToken(b"x" * 32, 1, keys.token_of(keys.tokens.known[0]).fingerprint).text()
        )


def test_a_restarted_master_keeps_its_tokens(home: Path) -> None:
    state = ("--state", str(home / "state"))
    with master(*state, "--token", "auto") as (address, first):
        said("token", "rotate")
        said("token", "rotate")
    with master(*state, "--token", "auto") as (address, newest):
        assert parse_token(newest.encode()).number == 3
        refused(address, first)
        with member(address, newest, "alice"):
            pass
    with master(*state) as (address, pasted):
        assert pasted == ""
        refused(address, None, "requires a token")
    listed = numbers("token", "list", "--keys", str(home / "state" / "run.keys"))
    assert [listed[number].split(",")[1].strip() for number in (2, 3)] == ["valid", "valid"]


def test_a_standby_with_a_copy_of_the_keys(home: Path) -> None:
    own, copied = home / "own.keys", home / "copied.keys"
    with (
        master("--keys", str(own), "--token", "auto") as (one, token),
        member(one, token, "alice"),
    ):
        run = pccl.master_status(one, token=token).run
        keep(copied, own.read_bytes())
        with master("--keys", str(copied), "--standby-of", one) as (both, _):
            two = both.split(",")[1]
            until(lambda: _follows(two, token, run), patient(5.0))  # it has proven its token


def _follows(standby: str, token: str, run: bytes) -> bool:
    status = pccl.master_status(standby, token=token)
    assert status.member_count == 0
    return run.hex()[:8] in status.waits_for or status.run == run


def test_a_plain_secret_is_revoked_too() -> None:
    with master(PCCL_TOKEN=PLAIN) as (address, _), member(address, PLAIN, "bob"):
        new = said("expel", "bob")
        refused(address, PLAIN)
        with member(address, new, "carol"):
            pass


def test_who_is_not_there() -> None:
    with master("--token", "auto") as (address, token), member(address, token, "bob"):
        unknown = pccl_says("expel", "carol")
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "the run has no peer 'carol'" in unknown.stderr
    for command in (("expel", "bob"), ("token", "make"), ("token", "list")):
        none = pccl_says(*command)
        assert none.returncode == 2
        assert "no live `pccl launch` or `pccl master`" in none.stderr


def test_a_token_from_standard_input(home: Path) -> None:
    with master("--token", "auto") as (address, token):
        done = subprocess.run(
            [*PCCL, "status", address, "--token", "-"],
            input=f"{token}\n", capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env=environment_with(XDG_RUNTIME_DIR=str(keep(home / "x", "").parent / "none")),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "0 members" in done.stdout


def test_nothing_is_left_behind(home: Path) -> None:
    with master("--token", "auto"):
        assert {path.suffix for path in (home / "pccl").iterdir()} == {".json", ".keys"}
    assert list((home / "pccl").iterdir()) == []
