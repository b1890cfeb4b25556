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
from pccl.master_node import KeysFile, ensure_token
from pccl.protocol.handshake.token import RunToken, parse_token
from tests.integration.conftest import QUICK
from tests.support import commands
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S, patient
from tests.support.ports import free_address
from tests.support.secret_files import keep
from tests.support.waiting import until

PLAIN = "the plain secret of these tests"
NO_TOKEN = "does not accept this token"
REVOKED = "its token was revoked; ask the operator of the master for a new one"
SPENT = "its ticket is spent: another process has joined with it"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready_pccl: tuple[str, ...]) -> Path:
    """Only runs of one test are found; nothing comes from outside. Commands are forks."""
    monkeypatch.setattr(f"{__name__}.PCCL", ready_pccl)
    for name in ("PCCL_TOKEN", "PCCL_TOKEN_FILE", "PCCL_MASTER"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("XDG_RUNTIME_DIR", "TMPDIR"):  # a run of another test has its file in the second
        monkeypatch.setenv(folder, str(tmp_path))
    return tmp_path


def pccl_says(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(*PCCL, *arguments, env=environment_with(), limit_s=LIMIT_S)


def said(*arguments: str) -> str:
    """What a command prints; it succeeds."""
    done = pccl_says(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def master(
    *options: str, listen: str = "127.0.0.1:0", **environment: str
) -> Generator[tuple[str, str]]:
    """A running master: its address, and the token in the line to paste; empty if there is none."""
    command = (*PCCL, "master", "--listen", listen, *options)
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

    def __init__(self, comm: pccl.Communicator, min_peers: int = 0) -> None:
        self.comm = comm
        self._min_peers = min_peers
        self.failure: PCCLError | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            if self._min_peers:
                self.comm.connect(n_attempts=1, min_peers=self._min_peers)
            while not self._ends.wait(0.02):  # it does not make calls as fast as it can
                self.comm.update_topology()
        except PCCLError as error:
            self.failure = error

    def end(self) -> None:
        self._ends.set()
        self._thread.join(LIMIT_S)

    def has_failed(self) -> bool:
        return self.failure is not None


@contextmanager
def member(address: str, token: str | None, name: str, min_peers: int = 0) -> Generator[Member]:
    """A member; if it waits for other peers, it may still be a newcomer."""
    with pccl.Communicator(address, timing=QUICK, token=token, name=name) as comm:
        if not min_peers:
            comm.connect(n_attempts=1)
        one = Member(comm, min_peers)
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
            r"token, valid, .* old; present with it: 1 \(alice\), 2 \(bob\)", listed[1]
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
        with pytest.raises(NotAdmitted, match="was expelled from the run, and may not come back"):
            bob.comm.connect(n_attempts=1)  # the same key and the same token
        refused(address, token, REVOKED)  # another process of the same machine, with the old token
        with member(address, new, "carol"):
            status = pccl.master_status(address, token=new)
            assert {one.name for one in status.members} == {"alice", "carol"}
        listed = numbers("token", "list")
        assert listed[1].startswith("token, revoked")
        assert listed[1].endswith("present with it: 1 (alice)")


def test_old_tokens_after_rotation() -> None:
    with master("--token", "auto") as (address, first), member(address, first, "alice") as alice:
        second = said("token", "rotate")
        until(lambda: _joins(address, second), patient(3.0))
        assert _joins(address, first)
        full = pccl_says("token", "make")
        assert full.returncode == 1
        assert "2 tokens are valid already; `pccl token rotate`" in full.stderr
        rotated = pccl_says("token", "rotate")
        assert rotated.stderr.splitlines() == ["this is token 3", "revoked token 1"]
        third = rotated.stdout.strip()
        until(lambda: _joins(address, third), patient(3.0))
        refused(address, first, REVOKED)
        assert _joins(address, second)
        assert not alice.has_failed()


def _joins(address: str, token: str) -> bool:
    """Whether a master accepts a token from a process that is no member."""
    try:
        pccl.master_status(address, token=token, timeout_s=LIMIT_S)
    except (RemoteProtocolError, NotAdmitted):
        return False
    return True


def test_a_ticket_lets_one_process_in() -> None:
    with master("--token", "auto") as (address, _):
        ticket = said("token", "ticket")
        until(lambda: _joins(address, ticket), patient(3.0))
        with member(address, ticket, "alice"):
            refused(address, ticket, SPENT)
            assert numbers("token", "list")[2].startswith("ticket, spent")
        refused(address, ticket, SPENT)
        unspent = said("token", "ticket")
        until(lambda: _joins(address, unspent), patient(3.0))
        said("token", "revoke", "3")
        until(lambda: not _joins(address, unspent), patient(3.0))
        wrong = pccl_says("token", "revoke", "9")
        assert (wrong.returncode, "the run has no token 9" in wrong.stderr) == (1, True)
        last = pccl_says("token", "revoke", "1")
        assert (last.returncode, "the only valid token" in last.stderr) == (1, True)


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
        refused(address, first, REVOKED)
        with member(address, newest, "alice"):
            pass
    with master(*state) as (address, pasted):
        assert pasted == ""
        refused(address, None, "requires a token")
    listed = numbers("token", "list", "--keys", str(home / "state" / "run.keys"))
    assert [listed[number].split(",")[1].strip() for number in (2, 3)] == ["valid", "valid"]


def test_members_with_a_revoked_token_return_to_a_restarted_master(home: Path) -> None:
    """One without a state: the file says who has joined with the token."""
    address, keys = free_address(), ("--keys", str(home / "run.keys"))
    with ExitStack() as stack:
        with master(*keys, "--token", "auto", listen=address) as (_, token):
            alice = stack.enter_context(member(address, token, "alice"))
            newest = [said("token", "rotate") for _ in range(2)][-1]
            stored = KeysFile(home / "run.keys")
            until(lambda: bool(stored.read().tokens.known[0].owners), patient(10.0))
        with master(*keys, listen=address):
            until(lambda: _names(address, newest) == ["alice"], patient(10.0))
            assert not alice.has_failed()
            refused(address, token, REVOKED)
            alice.end()  # before its master


def _names(address: str, token: str) -> list[str]:
    return [one.name for one in pccl.master_status(address, token=token).members]


def test_a_state_needs_the_keys_of_its_run(home: Path) -> None:
    state = ("--state", str(home / "state"))
    with master(*state, "--keys", str(home / "run.keys"), "--token", "auto"):
        pass
    wrong = pccl_says("master", "--listen", free_address(), *state, "--keys", str(home / "other"))
    assert wrong.returncode == 1
    assert (
        "the stored state is of a run with another key: give the keys of that run" in wrong.stderr
    )
    with master(*state, "--keys", str(home / "run.keys")):
        pass


def test_whom_a_name_means() -> None:
    """An id comes before a name, and a newcomer has one, too."""
    with ExitStack() as stack:
        address, token = stack.enter_context(master("--token", "auto"))
        one = stack.enter_context(member(address, token, "2"))
        two = stack.enter_context(member(address, token, "1"))
        newcomer = stack.enter_context(member(address, token, "carol", min_peers=9))
        until(lambda: len(pccl_says("status").stdout.split("(carol)")) > 1, patient(5.0))
        assert "expelled peer 3 (carol)" in pccl_says("expel", "carol").stderr
        until(newcomer.has_failed, patient(3.0))
        assert "expelled peer 2 (1)" in pccl_says("expel", "2").stderr
        until(two.has_failed, patient(3.0))
        assert not one.has_failed()


def test_the_keys_of_another_run_expel_nobody(home: Path) -> None:
    other = KeysFile(home / "other.keys")
    ensure_token(other)
    before = other.read()
    with master("--token", "auto") as (address, token), member(address, token, "alice"):
        wrong = pccl_says("expel", "alice", "--keys", str(other.path))
        assert wrong.returncode == 1
        assert "another key than the token says" in wrong.stderr
        assert _names(address, token) == ["alice"]
    assert other.read() == before


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
        gone = pccl_says("expel", "bob")
        assert "start it with another PCCL_TOKEN then" in gone.stderr
        new = gone.stdout.strip()
        refused(address, PLAIN, REVOKED)
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
