"""State that a master stores across restarts: its run, last term, own id, and the members.

A restarted master can recover its run without this state, because the members know everything.
With this state, the master knows from the start that there was a run. It lets newcomers
wait until the members have returned, and rejects other processes that claim to be members.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.opening import NO_RUN, RUN_BYTES
from pccl.protocol.limits import INCUMBENT_BYTES, TERM_MAX
from pccl.protocol.types import KEY_BYTES, PeerId

_log = logging.getLogger("pccl.master")

_VERSION = 4
_WITHOUT_KEYS = (2, 3)
"""Earlier versions, which did not store the keys of members."""
_FILE = "master.state"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a master must know of its run after a restart."""

    run: bytes
    term: int
    incumbent: bytes
    coordinated: bool = True
    """Whether this master has coordinated the run; False: a standby that only knows of it."""
    vouched: Vouched = NOT_TOLD
    """The members of the run."""
    fingerprint: bytes = b""
    """Hash of the run's key, 16 bytes; empty: no file has the key."""

    def check_key(self, fingerprint: bytes) -> None:
        """Check that the run has the key with this fingerprint, if both are known.

        Raises:
            LocalProtocolError: it has another key.
        """
        if fingerprint and self.fingerprint not in (b"", fingerprint):
            raise LocalProtocolError(
                func="master",
                reason="the stored state is of a run with another key: give the keys of that run "
                "(--keys), or another directory for the state",
            )


class MasterStore(Protocol):
    """Stores the state of a master."""

    def load(self) -> Remembered | None:
        """Return the state that was saved last; None if there is none.

        Raises:
            LocalProtocolError: the stored state cannot be read.
        """
        ...

    def save(self, remembered: Remembered) -> None:
        """Store the state. When this returns, the state survives a crash."""
        ...

    def clear(self) -> None:
        """Delete the stored state, because the run is over."""
        ...


class StoredState:
    """What a master stores: the wanted state, and whether the store holds it.

    Args:
        store: where the state is stored; None: nowhere.

    Raises:
        LocalProtocolError: the stored state cannot be read.
    """

    def __init__(self, store: MasterStore | None) -> None:
        self._store = store
        self.wanted: Remembered | None = None
        """State that the store should hold."""
        self._stored: Remembered | None = None
        """State that this process has written to the store."""
        self._trouble = ""
        """Error of the last attempt to write; empty if it succeeded."""
        self.found = store.load() if store is not None else None
        """The state that an earlier process has stored."""

    @property
    def is_kept(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def begin(self, wanted: Remembered) -> None:
        """Store the state with which this master begins.

        Raises:
            LocalProtocolError: it cannot be written.
        """
        self.wanted = wanted
        if self._store is not None:
            self._store.save(wanted)
            self._stored = wanted

    def keep(self, wanted: Remembered | None) -> None:
        """Store ``wanted``; None clears the store. After a failure, call it again later."""
        self.wanted = wanted
        if self._store is None or wanted == self._stored:
            return
        try:
            if wanted is None:
                self._store.clear()
            else:
                self._store.save(wanted)
        except LocalProtocolError as error:
            if error.reason != self._trouble:
                _log.warning("the stored state of this master is out of date: %s", error.reason)
            self._trouble = error.reason
        else:
            self._stored, self._trouble = wanted, ""


class DirectoryStore:
    """Stores the state of a master in one small file of a directory.

    Args:
        directory: path of the directory; ``save`` makes it if it is missing.

    Raises:
        ValueError: ``directory`` cannot be the name of a directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            is_name = bool(os.fsencode(directory).strip())
        except UnicodeEncodeError:
            is_name = False
        if not is_name:
            raise ValueError(f"{directory!r} cannot be a directory name; choose another one")
        self._path = Path(directory) / _FILE

    def load(self) -> Remembered | None:
        """Read the file; return None if there is none.

        Raises:
            LocalProtocolError: the file cannot be read, or holds no state of a master.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(self._path, error) from error
        return _decode(self._path, data)

    def save(self, remembered: Remembered) -> None:
        """Replace the file, and flush it and its directory to the disk.

        Raises:
            LocalProtocolError: the directory cannot be written.
        """
        vouched = remembered.vouched
        proofs = [[proof.peer, proof.key] for proof in vouched.proofs()]
        run = [remembered.run, remembered.term, remembered.incumbent, remembered.coordinated]
        fields = [_VERSION, *run, remembered.fingerprint, vouched.version, proofs]
        written = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written.open("wb") as file:
                file.write(msgpack.packb(fields))
                file.flush()
                os.fsync(file.fileno())
            written.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)  # the new name, too
            finally:
                os.close(directory)
        except OSError as error:
            raise _unreachable(self._path, error) from error

    def clear(self) -> None:
        """Delete the file, if there is one.

        Raises:
            LocalProtocolError: the directory cannot be written.
        """
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self._path, str(error)) from error


def _decode(path: Path, data: bytes) -> Remembered:
    try:
        value: Any = msgpack.unpackb(data)
        version, run, term, incumbent, coordinated, *rest = value
        fingerprint, *members = rest if version == _VERSION else [b""]
        vouched = _members_of(*members) if version == _VERSION else NOT_TOLD
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise _unusable(path, "the file holds no state of a master") from error
    known = (type(run), type(term), type(incumbent)) == (bytes, int, bytes)
    known = known and type(coordinated) is bool and type(fingerprint) is bytes
    sound = known and len(run) == RUN_BYTES and len(incumbent) == INCUMBENT_BYTES and run != NO_RUN
    known_version = version in (_VERSION, *_WITHOUT_KEYS)
    if not known_version or not sound or not 1 <= term < TERM_MAX:
        raise _unusable(path, "the file holds no state of a master of this version")
    return Remembered(run, term, incumbent, coordinated, vouched, fingerprint)


def _members_of(version: Any, proofs: Any) -> Vouched:
    """Return the members of the run from their stored form.

    Raises:
        ValueError: the stored form is not a list of members.
        TypeError: likewise.
    """
    if version is None:
        return NOT_TOLD
    keys = {PeerId(peer): key for peer, key in proofs}
    if type(version) is not int or version < 0 or not all(
        type(peer) is int and peer > 0 and type(key) is bytes and len(key) == KEY_BYTES
        for peer, key in keys.items()
    ):  # fmt: skip
        raise ValueError("this is not a list of members")
    return Vouched(version, keys)


def _unreachable(path: Path, error: OSError) -> LocalProtocolError:
    why = error.strerror or type(error).__name__
    reason = f"cannot use {path} for the master's state: {why}; choose a writable directory"
    return LocalProtocolError(func="master", reason=reason)


def _unusable(path: Path, why: str) -> LocalProtocolError:
    reason = f"{path}: {why}; repair it, or move it away and let the members report the run"
    return LocalProtocolError(func="master", reason=reason)
