"""What a master keeps between its incarnations: its run, last term, own id, and the members.

That is little, and none of it is needed to take up a run: the members know everything. A master
that has it knows from the start that there was a run. It lets newcomers wait until the members are
back, and believes no other process that claims to be a member.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake import NO_RUN, RUN_BYTES
from pccl.protocol.limits import INCUMBENT_BYTES, TERM_MAX, TOKEN_DIGEST_BYTES
from pccl.protocol.types import PeerId

_VERSION = 3
_WITHOUT_MEMBERS = 2
"""The version before, which did not store the members of the run."""
_FILE = "master.state"


@dataclass(frozen=True, slots=True)
class Remembered:
    """One run, as its master has to know it after a restart."""

    run: bytes
    term: int
    incumbent: bytes
    coordinated: bool = True
    """Whether this master has coordinated it; a standby may only have learnt of it."""
    vouched: Vouched = NOT_TOLD
    """The members of the run."""


class MasterStore(Protocol):
    """Where it is kept."""

    def load(self) -> Remembered | None:
        """What was saved last; None if nothing ever was.

        Raises:
            LocalProtocolError: something is there, and it can't be read.
        """
        ...

    def save(self, remembered: Remembered) -> None:
        """Keep it; when this returns, it outlasts a crash."""
        ...

    def clear(self) -> None:
        """Keep nothing: the run is over."""
        ...


class DirectoryStore:
    """One small file in a directory.

    Args:
        directory: made if there is none.

    Raises:
        ValueError: this can't be the name of a directory.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            is_name = bool(os.fsencode(directory).strip())
        except UnicodeEncodeError:
            is_name = False
        if not is_name:
            raise ValueError(f"{directory!r} names no directory; choose one for the state")
        self._path = Path(directory) / _FILE

    def load(self) -> Remembered | None:
        """Read the file; None if there is none.

        Raises:
            LocalProtocolError: the file can't be read.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(self._path, error) from error
        return _decode(self._path, data)

    def save(self, remembered: Remembered) -> None:
        """Write the file anew, and flush it and its directory to the disk.

        Raises:
            LocalProtocolError: the directory can't be written.
        """
        vouched = remembered.vouched
        proofs = [[proof.peer, proof.digest] for proof in vouched.proofs()]
        run = [remembered.run, remembered.term, remembered.incumbent, remembered.coordinated]
        fields = [_VERSION, *run, vouched.version, proofs]
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
            LocalProtocolError: the directory can't be written.
        """
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(self._path, str(error)) from error


def _decode(path: Path, data: bytes) -> Remembered:
    try:
        value: Any = msgpack.unpackb(data)
        version, run, term, incumbent, coordinated, *members = value
        vouched = _members_of(*members) if version == _VERSION else NOT_TOLD
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise _unusable(path, "it is no state of a master") from error
    known = (type(run), type(term), type(incumbent)) == (bytes, int, bytes)
    known = known and type(coordinated) is bool
    sound = known and len(run) == RUN_BYTES and len(incumbent) == INCUMBENT_BYTES and run != NO_RUN
    known_version = version in (_VERSION, _WITHOUT_MEMBERS)
    if not known_version or not sound or not 1 <= term < TERM_MAX:
        raise _unusable(path, "it is no state of a master of this version")
    return Remembered(run, term, incumbent, coordinated, vouched)


def _members_of(version: Any, proofs: Any) -> Vouched:
    """The members of the run.

    Raises:
        ValueError: this is no list of members.
        TypeError: likewise.
    """
    if version is None:
        return NOT_TOLD
    digests = {PeerId(peer): digest for peer, digest in proofs}
    if type(version) is not int or version < 0 or not all(
        type(peer) is int and peer > 0 and type(digest) is bytes
        and len(digest) == TOKEN_DIGEST_BYTES
        for peer, digest in digests.items()
    ):  # fmt: skip
        raise ValueError("this is no list of members")
    return Vouched(version, digests)


def _unreachable(path: Path, error: OSError) -> LocalProtocolError:
    why = error.strerror or type(error).__name__
    reason = f"cannot keep the state in {path}: {why}; choose a directory that can be written"
    return LocalProtocolError(func="master", reason=reason)


def _unusable(path: Path, why: str) -> LocalProtocolError:
    reason = f"{path}: {why}; mend it, or move it away: the members of the run know everything"
    return LocalProtocolError(func="master", reason=reason)
