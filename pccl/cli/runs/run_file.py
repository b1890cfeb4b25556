"""The file in which ``pccl launch`` and ``pccl master`` name their master, for the same user.

The file lies in ``$XDG_RUNTIME_DIR/pccl``, or else in ``pccl-UID`` of the folder for temporary
files. Its name is the process id of the launch or master. It holds a token, so its mode is 0600.
The keys of the run lie beside it, until the run ends, unless the master keeps them elsewhere.

The process holds a lock on its file. The system releases the lock when the process ends, whatever
ends it. So a file without a lock is stale, also if another process has its id by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import stat
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pccl import config
from pccl.addresses import parse_masters
from pccl.errors import LocalProtocolError
from pccl.master_node import KeysFile

VERSION = 2

FILE_BYTES_MAX = 16384

COMMAND_CHARACTERS_MAX = 200

_OWN_KEYS = re.compile(r"\d{1,10}-[0-9a-f]{8}\.keys")
"""Names of keys that end with their run. Process ids repeat, also at the same time: containers."""

FILES_MAX = 1000
"""Number of files of a folder that are read."""


class Unusable(Exception):
    """A folder or a file is not safe or not valid; the text says which and why."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """One run whose master is on this machine.

    Attributes:
        pid: process id of the launch or master.
        master: address of its master, ``host:port``.
        token: a token of the run; None: it has none.
        command: the command of the peers, for people; without unprintable characters.
        since_s: when the run began, in seconds since the epoch.
        keys: path of the file with its keys; empty: there is none.
    """

    pid: int
    master: str
    token: bytes | None = field(repr=False)
    command: str
    since_s: float
    keys: str = ""


class Found(NamedTuple):
    """What a search has found: the live runs, and why other files were ignored."""

    runs: tuple[RunFile, ...]
    ignored: tuple[str, ...]


@contextlib.contextmanager
def run_file(
    master: str, token: str | None, command: Sequence[str], keys: str = ""
) -> Generator[None, None, None]:
    """Keep the run file of this process for the length of the block.

    Args:
        master: address of the master, ``host:port``.
        token: a token of the run; None: it has none.
        command: the command of the peers.
        keys: path of the file with the keys of the run; empty: there is none.

    Raises:
        Unusable: no folder is safe, or the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_opened(private_folder()))
        words = {
            "version": VERSION,
            "pid": os.getpid(),
            "master": master,
            "token": token,
            "command": shlex.join(command)[:COMMAND_CHARACTERS_MAX],
            "since_s": time.time(),
            "keys": keys,
        }
        name = f"{os.getpid()}.json"
        try:
            file = _locked_file(folder, name, json.dumps(words).encode())
        except OSError as error:
            raise Unusable(f"cannot write a run file: {error.strerror}") from error
        stack.callback(os.close, file)
        stack.callback(_remove, folder, name)
        yield


@contextlib.contextmanager
def own_keys_file() -> Generator[str, None, None]:
    """Yield the path for the keys of a run of this process; delete the file at the end.

    Raises:
        Unusable: no folder is safe.
    """
    path = private_folder() / f"{os.getpid()}-{secrets.token_hex(4)}.keys"
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def end_with_run(keys: str) -> bool:
    """Whether keys are those of ``own_keys_file``, of this process or of another one."""
    path = Path(keys)
    return path.parent in _folders() and _OWN_KEYS.fullmatch(path.name) is not None


def find_runs() -> Found:
    """Return the live runs of this user, the oldest first; remove stale files."""
    runs: dict[int, RunFile] = {}
    ignored: list[str] = []
    for path in _folders():
        try:
            with _opened(path) as folder:
                for name in _names(folder):
                    try:
                        run = _read(folder, name)
                    except Unusable as error:
                        ignored.append(f"{path / name} {error}")
                    else:
                        if run is not None:
                            runs[run.pid] = run
        except FileNotFoundError:
            continue
        except Unusable as error:
            ignored.append(str(error))
    return Found(tuple(sorted(runs.values(), key=lambda run: run.since_s)), tuple(ignored))


# -- folders ---------------------------------------------------------------------------------------


def _folders() -> Iterator[Path]:
    """Yield the folders that may hold run files; the first that can be written gets new ones."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        yield Path(runtime, "pccl")
    yield Path(tempfile.gettempdir(), f"pccl-{os.geteuid()}")


def private_folder() -> Path:
    """Return the first folder for files of this user that works; make it if it does not exist.

    Raises:
        Unusable: no folder is safe.
    """
    reasons: list[str] = []
    for path in _folders():
        try:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            with _opened(path):
                return path
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
        except Unusable as error:
            reasons.append(str(error))
    raise Unusable("; ".join(reasons))


@contextlib.contextmanager
def _opened(path: Path) -> Generator[int, None, None]:
    """Open a folder that only this user may use; yield its descriptor.

    Raises:
        FileNotFoundError: there is no such folder.
        Unusable: it is a symbolic link, or other users may use it.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unusable(f"{path} is not a private folder: {error.strerror}") from error
    try:
        if objection := objection_to(os.fstat(folder), os.geteuid()):
            raise Unusable(f"{path} {objection}")
        yield folder
    finally:
        os.close(folder)


def objection_to(found: os.stat_result, user: int) -> str:
    """Return why a file or folder is not private to ``user``; empty if it is."""
    if found.st_uid != user:
        return f"belongs to another user (id {found.st_uid})"
    if found.st_mode & 0o077:
        return f"can be used by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


# -- files -----------------------------------------------------------------------------------------


def _names(folder: int) -> list[str]:
    return sorted(name for name in os.listdir(folder) if re.fullmatch(r"\d{1,10}\.json", name))[
        :FILES_MAX
    ]


def _locked_file(folder: int, name: str, content: bytes) -> int:
    """Write a file and lock it, and only then give it its name; return its descriptor."""
    draft = f".{name}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(draft, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        with open(file, "wb", closefd=False) as stream:
            stream.write(content)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.close(file)
        _remove(folder, draft)
        raise
    return file


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def _read(folder: int, name: str) -> RunFile | None:
    """Read one file; None: it was stale, and is removed.

    Raises:
        Unusable: the file is not private, or its content is not valid.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:  # its launch has ended
        return None
    except OSError as error:
        raise Unusable(f"cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise Unusable("is not a file")
        if objection := objection_to(found, os.geteuid()):
            raise Unusable(objection)
        content = os.read(file, FILE_BYTES_MAX + 1)
        if not _is_locked(file):
            _remove(folder, name)
            with contextlib.suppress(Unusable):
                if end_with_run(keys := parse_run(content).keys):
                    _remove(folder, Path(keys).name)
            return None
        run = parse_run(content)
    finally:
        os.close(file)
    if name != f"{run.pid}.json":
        raise Unusable(f"names another process ({run.pid})")
    return run


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise Unusable(f"cannot be locked: {error.strerror}") from error
    return False


def parse_run(content: bytes) -> RunFile:
    """Return the run that a file's content names.

    Raises:
        Unusable: the content is not valid; the text says why.
    """
    if len(content) > FILE_BYTES_MAX:
        raise Unusable("is too long for a run file")
    try:
        words: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise Unusable("is not JSON") from None
    match words:
        case {
            "version": int(version),
            "pid": int(pid),
            "master": str(master),
            "token": (str() | None) as token,
            "command": str(command),
            "since_s": float(since_s),
            "keys": str(keys),
        } if version == VERSION:
            shown = command[:COMMAND_CHARACTERS_MAX]
            printable = "".join(c if c.isprintable() else "?" for c in shown)
        case {"version": int(version)} if version != VERSION:
            raise Unusable(f"has version {version}; this pccl reads version {VERSION}")
        case _:
            raise Unusable("lacks a field of a run file")
    try:
        parse_masters(master)
        secret = None if token is None else config.resolve_token(token)
        time.localtime(since_s)
    except (ValueError, OverflowError, OSError) as error:
        raise Unusable(f"is not valid: {error}") from None
    return RunFile(pid, master, _token_in(keys) or secret, printable, since_s, keys)


def _token_in(path: str) -> bytes | None:
    """Return the oldest valid token in a file of keys; None: there is none."""
    try:
        keys = KeysFile(path).read() if path else None
    except (LocalProtocolError, ValueError):  # ValueError: this cannot be a path
        keys = None
    if keys is None:
        return None
    valid = keys.tokens.reusable()
    return os.fsencode(keys.text_of(valid[0])) if valid else None
