"""What a master keeps on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgpack
import pytest

from pccl.errors import LocalProtocolError
from pccl.machines.master.succession.vouched import Vouched
from pccl.protocol.types import KEY_BYTES, PeerId
from pccl.runtime.master_store import DirectoryStore, Remembered

FIRST = Remembered(b"the run of these", 1, b"master A")
MEMBERS = Vouched(9, {PeerId(4): b"4" * KEY_BYTES, PeerId(1 << 33): b"33" * (KEY_BYTES // 2)})
LATER = Remembered(b"the run of these", 7, b"master B", False, MEMBERS, b"a fingerprint")


def test_nothing_was_kept(tmp_path: Path) -> None:
    assert DirectoryStore(tmp_path).load() is None
    assert DirectoryStore(tmp_path / "not" / "there").load() is None


def test_what_was_kept_last_comes_back(tmp_path: Path) -> None:
    place = tmp_path / "made" / "by it"
    store = DirectoryStore(place)
    store.save(FIRST)
    assert DirectoryStore(place).load() == FIRST
    store.save(LATER)
    assert DirectoryStore(str(place)).load() == LATER
    assert [path.name for path in place.iterdir()] == ["master.state"]


def test_a_crash_before_the_rename_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path)
    store.save(FIRST)

    def die(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            store.save(LATER)
    assert DirectoryStore(tmp_path).load() == FIRST
    store.save(LATER)  # what lies about does not disturb
    assert DirectoryStore(tmp_path).load() == LATER


def test_it_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        steps.append("fsync")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    DirectoryStore(tmp_path).save(FIRST)
    assert steps == ["fsync", "rename", "fsync"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xc1",
        msgpack.packb([1, FIRST.run, 1]),
        msgpack.packb([2, FIRST.run, 1, FIRST.incumbent]),
        msgpack.packb([1, b"short", 1, FIRST.incumbent]),
        msgpack.packb([1, FIRST.run, 0, FIRST.incumbent]),
        msgpack.packb([1, FIRST.run, True, FIRST.incumbent]),
        msgpack.packb([1, FIRST.run, "1", FIRST.incumbent]),
        msgpack.packb([1, FIRST.run, 1, "text"]),
        msgpack.packb(7),
        msgpack.packb({"run": 1, "term": 2, "a": 3, "b": 4}),
        msgpack.packb([1, FIRST.run, 1, FIRST.incumbent]) + b"more",
        msgpack.packb([[1], FIRST.run, 1, FIRST.incumbent])[:-3],
    ],
)
def test_what_is_no_state_is_said_with_a_remedy(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "master.state"
    path.write_bytes(data)
    with pytest.raises(LocalProtocolError) as raised:
        DirectoryStore(tmp_path).load()
    assert raised.value.reason.startswith(f"{path}: the file holds no state of a master")
    assert raised.value.reason.endswith("let the members report the run")
    assert path.read_bytes() == data


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    store = DirectoryStore(file)
    with pytest.raises(LocalProtocolError, match="Not a directory"):
        store.load()
    with pytest.raises(LocalProtocolError, match=r"exists|Not a directory"):
        store.save(FIRST)
    assert file.read_text() == "mine"


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    store.save(FIRST)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LocalProtocolError, match="No space left on device"):
        store.save(LATER)
    assert DirectoryStore(tmp_path).load() == FIRST


@pytest.mark.parametrize("name", ["", " ", "\ud800"])
def test_what_names_no_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a directory name; choose"):
        DirectoryStore(name)


@pytest.mark.parametrize(
    ("version", "proofs"),
    [
        (-1, []),
        (True, []),
        (9, [[0, bytes(KEY_BYTES)]]),
        (9, [[1, b"short"]]),
        (9, [[1, bytes(16)]]),
        (9, [["1", bytes(KEY_BYTES)]]),
        (9, 3),
    ],
)
def test_members_that_no_master_has_kept_are_refused(
    tmp_path: Path, version: int, proofs: object
) -> None:
    fields = [4, FIRST.run, FIRST.term, FIRST.incumbent, True, b"", version, proofs]
    (tmp_path / "master.state").write_bytes(msgpack.packb(fields))
    with pytest.raises(LocalProtocolError, match="the file holds no state of a master"):
        DirectoryStore(tmp_path).load()


@pytest.mark.parametrize("rest", [(2, ()), (3, (9, [[4, b"a digest of this"]]))])
def test_what_earlier_versions_have_kept_is_read_without_members(
    tmp_path: Path, rest: tuple[int, tuple[object, ...]]
) -> None:
    version, members = rest
    fields = [version, FIRST.run, FIRST.term, FIRST.incumbent, True, *members]
    (tmp_path / "master.state").write_bytes(msgpack.packb(fields))
    assert DirectoryStore(tmp_path).load() == FIRST
