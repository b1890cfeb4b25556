"""The file with the keys of a run: who may read it, what is believed, and two writers at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.tokens import OPEN, Tokens
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.keys import CURVE25519, fingerprint_of
from pccl.protocol.handshake.token import RunToken, parse_token
from pccl.runtime.keys_file import FILE_BYTES_MAX, KeysFile, RunKeys, decode
from pccl.runtime.run_tokens import ensure_token, expel_key, make_token

KEY, SECRET = bytes(range(32)), b"s" * 32
TOKEN: dict[str, Any] = {
    "number": 1,
    "secret": SECRET.hex(),
    "made_s": 5,
    "is_ticket": False,
    "owners": [],
    "revoked": False,
}
GOOD: dict[str, Any] = {
    "version": 1,
    "secret": KEY.hex(),
    "last_number": 2,
    "tokens": [TOKEN],
    "expelled": ["ab" * 16],
}
WHO = b"w" * 16


@pytest.fixture
def file(tmp_path: Path) -> KeysFile:
    made = KeysFile(tmp_path / "state" / "run.keys")
    made.make(KEY)
    return made


def test_a_file_that_is_made(file: KeysFile) -> None:
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert file.read() == RunKeys(KEY, OPEN)
    file.make(SECRET)
    assert file.read().secret == KEY, "it exists already"
    assert [path.name for path in file.path.parent.iterdir()] == ["run.keys"]


def test_a_change_through_a_link_reaches_the_file(file: KeysFile, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file.path)
    linked = KeysFile(link)
    linked.make(SECRET)
    linked.update(lambda tokens: tokens.make(SECRET, 5))
    assert link.is_symlink()
    assert file.read().tokens == OPEN.make(SECRET, 5), "the master of the file sees the change"


def test_changes_are_seen(file: KeysFile) -> None:
    other = KeysFile(file.path)
    other.read()
    assert not other.has_changed()
    tokens = OPEN.make(SECRET, 5).with_plain(b"a plain secret", 6).make(SECRET, 7, is_ticket=True)
    tokens = tokens.spend(2, WHO).revoke(0).expel(WHO)
    assert file.update(lambda _: tokens) == RunKeys(KEY, tokens)
    assert other.has_changed()
    assert other.read() == RunKeys(KEY, tokens)
    assert not other.has_changed()
    file.update(lambda same: same)
    assert not other.has_changed(), "nothing was written"
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_writers_at_once_lose_nothing(file: KeysFile) -> None:
    def write() -> None:
        for _ in range(10):
            KeysFile(file.path).update(lambda tokens: tokens.make(SECRET, 0, is_ticket=True))

    file.update(lambda tokens: tokens.make(SECRET, 0))
    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [token.number for token in file.read().tokens.known] == list(range(1, 42))
    assert [path.name for path in file.path.parent.iterdir()] == ["run.keys"]


def test_drafts_of_killed_processes_are_removed(file: KeysFile) -> None:
    folder = file.path.parent
    draft, others = ".run.keys-123-0123abcd", [".run.keys-backup", "run.keys-123-0123abcd"]
    for name in (draft, *others):
        (folder / name).touch()
    file.make(SECRET)
    file.update(lambda tokens: tokens.make(SECRET, 0))
    assert {path.name for path in folder.iterdir()} == {"run.keys", *others}


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "busy"), KeyboardInterrupt()])
def test_no_draft_stays_if_the_file_cannot_be_replaced(
    error: BaseException, file: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises((LocalProtocolError, KeyboardInterrupt)) as raised:
        file.update(lambda tokens: tokens.make(SECRET, 0))
    assert [path.name for path in file.path.parent.iterdir()] == ["run.keys"]
    assert file.read() == RunKeys(KEY, OPEN)
    if isinstance(error, OSError):
        assert "busy; mount the folder that holds it, not the file" in str(raised.value)


def test_a_file_that_exists_needs_no_room_on_the_disk(
    file: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    KeysFile(file.path).make(SECRET)
    with pytest.raises(LocalProtocolError, match="no space left"):
        KeysFile(file.path.parent / "other.keys").make(SECRET)
    assert [path.name for path in file.path.parent.iterdir()] == ["run.keys"]


def test_a_file_of_another_user(file: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = file.path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LocalProtocolError, match=f"it belongs to user {owner}; run this command"):
        file.read()


def test_a_master_does_not_wait_for_who_changes_the_file(file: KeysFile) -> None:
    file.update(lambda tokens: tokens.make(SECRET, 5))
    before = file.read()
    with file.path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LocalProtocolError, match="another process is changing it"):
            file.update(lambda tokens: OPEN, waits=False)
    assert file.read() == before


def test_a_change_that_fails_changes_nothing(file: KeysFile) -> None:
    def fail(tokens: Tokens) -> Tokens:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        file.update(fail)
    assert file.read() == RunKeys(KEY, OPEN)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read(mode: int, file: KeysFile) -> None:
    file.path.chmod(mode)
    for use in (file.read, lambda: file.update(lambda tokens: tokens)):
        with pytest.raises(LocalProtocolError, match=rf"\(mode {mode:o}\); chmod 600 {file.path}"):
            use()


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(LocalProtocolError, match="No such file"):
        KeysFile(tmp_path / "none").read()
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(LocalProtocolError, match="not a file"):
        KeysFile(tmp_path / "pipe").read()
    (tmp_path / "file").touch()
    with pytest.raises(LocalProtocolError, match="cannot be used: File exists"):
        KeysFile(tmp_path / "file" / "run.keys").make(KEY)


def test_the_good_content() -> None:
    keys = decode(json.dumps(GOOD).encode())
    assert keys.secret == KEY
    assert [token.number for token in keys.tokens.known] == [1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "it has version 2; this pccl reads version 1"),
    ({"version": "1"}, "it lacks a field"),
    ({"secret": KEY.hex()[2:]}, "wrong length"),
    ({"secret": KEY.hex().upper()}, "not in hex"),
    ({"secret": "zz" * 32}, "not in hex"),
    ({"last_number": 0}, "numbers of its tokens"),
    ({"last_number": 1 << 64}, "numbers of its tokens"),
    ({"tokens": [TOKEN, TOKEN]}, "numbers of its tokens"),
    ({"tokens": [TOKEN | {"number": -1}]}, "a token lacks a field"),
    ({"tokens": [TOKEN | {"number": 1.0}]}, "a token lacks a field"),
    ({"tokens": [TOKEN | {"secret": "aa"}]}, "wrong length"),
    ({"tokens": [TOKEN | {"owners": ["ab" * 16]}]}, "too many owners"),
    (
        {"tokens": [TOKEN, TOKEN | {"number": 2, "is_ticket": True, "owners": ["ab" * 16] * 2}]},
        "too many owners",
    ),
    ({"tokens": [TOKEN | {"owners": ["ab"]}]}, "wrong length"),
    ({"tokens": [TOKEN | {"revoked": True}]}, "no valid token"),
    ({"tokens": [TOKEN | {"number": 0, "is_ticket": True}]}, "a token lacks a field"),
    ({"tokens": [[]]}, "a token lacks a field"),
    ({"tokens": [TOKEN | {"number": n} for n in range(1, 1026)], "last_number": 2000}, "many"),
    ({"expelled": ["ab"]}, "wrong length"),
    ({"expelled": [7]}, "wrong length"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_no_content_is_believed(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        decode(json.dumps(GOOD | changes).encode())
    assert KEY.hex()[4:] not in str(caught.value)


@given(st.binary(max_size=100))
def test_garbage(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not JSON|it lacks a field"):
        decode(content)


def test_content_that_is_too_long_or_deep() -> None:
    with pytest.raises(ValueError, match="too long"):
        decode(b" " * (FILE_BYTES_MAX + 1))
    with pytest.raises(ValueError, match="not JSON"):
        decode(b"[" * 100_000)


def test_a_bad_file_says_what_to_do(file: KeysFile) -> None:
    file.path.write_bytes(b"x")
    with pytest.raises(LocalProtocolError, match="it is not JSON; copy it again, or start a new"):
        file.read()


# -- run_tokens ------------------------------------------------------------------------------------


def test_tokens_name_the_run(tmp_path: Path) -> None:
    file = KeysFile(tmp_path / "run.keys")
    text = ensure_token(file)
    assert ensure_token(file) == text, "the run has one"
    token = parse_token(text.encode())
    keys = file.read()
    assert token.fingerprint == fingerprint_of(CURVE25519.signer(keys.secret).key)
    assert token.number == 1
    made = make_token(file, is_ticket=True)
    assert (parse_token(made.text.encode()).number, made.number, made.revoked) == (2, 2, ())
    assert repr(made) == "<MadeToken 2>"
    assert [one.is_ticket for one in file.read().tokens.known] == [False, True]
    assert ensure_token(file) == text


def test_only_a_rotation_revokes(tmp_path: Path) -> None:
    file = KeysFile(tmp_path / "run.keys")
    ensure_token(file)
    assert make_token(file).revoked == ()
    before = file.read()
    with pytest.raises(ValueError, match="2 tokens are valid already; `pccl token rotate`"):
        make_token(file)
    assert file.read() == before
    assert make_token(file, revokes=True).revoked == (1,)
    assert make_token(file, is_ticket=True).revoked == ()
    assert [token.number for token in file.read().tokens.reusable()] == [2, 3]


def test_an_open_run_gets_no_token(file: KeysFile) -> None:
    with pytest.raises(ValueError, match="start its master with --token auto"):
        make_token(file)


def test_a_plain_secret_is_its_own_text(file: KeysFile) -> None:
    keys = file.update(lambda tokens: tokens.with_plain(b"a plain secret", 0))
    assert keys.text_of(keys.tokens.known[0]) == "a plain secret"
    assert keys.token_of(keys.tokens.known[0]) == RunToken(b"a plain secret")
    assert parse_token(ensure_token(file).encode()).number == 1


@pytest.mark.parametrize(
    ("shared", "others", "made"), [(False, 0, True), (True, 0, True), (False, 1, False)]
)
def test_the_token_of_an_expelled_member(
    shared: bool, others: int, made: bool, file: KeysFile
) -> None:
    ensure_token(file)
    for _ in range(others):
        make_token(file)
    text, keys = expel_key(file, WHO, 1, shared=shared)
    assert keys.tokens.expelled == (WHO,)
    assert "revoked" in keys.tokens.flaw(1, b"x" * 16)
    assert bool(text) == made
    assert len(keys.tokens.reusable()) == 1
    again, same = expel_key(file, WHO, 1, shared=True)
    assert (again, same) == ("", keys)


def test_in_an_open_run_only_the_key_is_expelled(file: KeysFile) -> None:
    text, keys = expel_key(file, WHO, 0, shared=True)
    assert (text, keys.tokens) == ("", OPEN.expel(WHO))
