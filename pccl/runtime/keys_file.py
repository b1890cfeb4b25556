"""``KeysFile``: the keys of a run, in a file that only one user can read.

The file holds the secret of the run's key, the tokens, and which keys are expelled. Commands change
it under a lock; the master of the run sees its new time of change. A copy of the file makes any
master one of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

from pccl.machines.master.tokens import EXPELLED_MAX, OPEN, TOKENS_MAX, Token, Tokens
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.keys import CURVE25519, FINGERPRINT_BYTES, SECRET_BYTES, fingerprint_of
from pccl.protocol.handshake.token import NUMBER_MAX, TOKEN_SECRET_BYTES, RunToken

KEYS_FILE = "run.keys"
"""Name of the file in the directory of a master's state."""

VERSION = 1

FILE_BYTES_MAX = 1 << 20

PLAIN_BYTES_MAX = 4096


class RunKeys(NamedTuple):
    """What a file holds: the secret of the run's key, and the tokens. ``repr`` shows no secret."""

    secret: bytes
    tokens: Tokens

    def __repr__(self) -> str:
        return f"<RunKeys: {self.tokens!r}>"

    def token_of(self, token: Token) -> RunToken:
        """Return what a process must know to join with this token."""
        if token.number == 0:
            return RunToken(token.secret)
        key = CURVE25519.signer(self.secret).key
        return RunToken(token.secret, token.number, fingerprint_of(key))

    def text_of(self, token: Token) -> str:
        """Return the text of this token, as ``PCCL_TOKEN`` takes it."""
        known = self.token_of(token)
        return known.text() if known.fingerprint else os.fsdecode(known.secret)


class KeysFile:
    """The file with the keys of a run.

    Args:
        path: path of the file, or of a link to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        """The file itself: a change replaces it, and must not replace a link to it."""
        self._seen: tuple[int, ...] = ()
        """What the system said of the file when this object read it last."""

    def make(self, secret: bytes) -> None:
        """Make the file, with its folder, unless it exists.

        Args:
            secret: the secret of the run's key, 32 bytes that nobody can predict.

        Raises:
            LocalProtocolError: it cannot be written.
        """
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            draft = self._write_draft(RunKeys(secret, OPEN))
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(draft, self.path)
            finally:
                draft.unlink()

    def read(self) -> RunKeys:
        """Return what the file holds.

        Raises:
            LocalProtocolError: it cannot be read, other users can read it, or its content is wrong.
        """
        with self._errors(), self._opened() as file:
            found = os.fstat(file)
            content = os.read(file, min(found.st_size, FILE_BYTES_MAX) + 1)
        self._seen = _signature(found)
        return self._checked(found, content)

    def has_changed(self) -> bool:
        """Whether the file is another one than when this object read it last.

        Raises:
            LocalProtocolError: there is no such file.
        """
        with self._errors():
            return _signature(os.stat(self.path)) != self._seen

    def update(self, change: Callable[[Tokens], Tokens], *, waits: bool = True) -> RunKeys:
        """Change the tokens, and return what the file holds now.

        When this returns, the change survives a crash. Only one process changes the file at a time.

        Args:
            change: returns the new tokens.
            waits: whether to wait while another process changes the file, else raise.

        Raises:
            LocalProtocolError: as for ``read``, or the file cannot be written.
            ValueError: ``change`` has raised it.
        """
        with self._errors(), self._locked(waits=waits) as file:
            found = os.fstat(file)
            content = os.read(file, min(found.st_size, FILE_BYTES_MAX) + 1)
            before = self._checked(found, content)
            after = RunKeys(before.secret, change(before.tokens))
            if after != before:
                self._write_draft(after).replace(self.path)
                directory = os.open(self.path.parent, os.O_RDONLY)
                try:
                    os.fsync(directory)  # the new name, too
                finally:
                    os.close(directory)
        return after

    # -- the file ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _errors(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise self._error(f"cannot be used: {why}") from error

    def _error(self, why: str) -> LocalProtocolError:
        return LocalProtocolError(func="keys", reason=f"the keys of the run, {self.path}: {why}")

    @contextlib.contextmanager
    def _opened(self) -> Generator[int, None, None]:
        file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    @contextlib.contextmanager
    def _locked(self, *, waits: bool) -> Generator[int, None, None]:
        """Open and lock the file that has the name; another process may replace it meanwhile."""
        while True:
            with self._opened() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise self._error("another process is changing it") from None
                if os.path.samestat(os.fstat(file), os.stat(self.path)):
                    yield file
                    return

    def _write_draft(self, keys: RunKeys) -> Path:
        """Write another file of the folder, flush it to the disk, and return its path."""
        draft = self.path.with_name(f".{self.path.name}-{os.getpid()}-{os.urandom(4).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o600), "wb") as file:
            try:
                file.write(_encode(keys))
                file.flush()
                os.fsync(file.fileno())
            except BaseException:  # also Ctrl-C: it holds secrets
                draft.unlink()
                raise
        return draft

    def _checked(self, found: os.stat_result, content: bytes) -> RunKeys:
        if not stat.S_ISREG(found.st_mode):
            raise self._error("this is not a file")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            path, mode = self.path, stat.S_IMODE(found.st_mode)
            raise self._error(
                f"other users may read or change it (mode {mode:o}); chmod 600 {path}, and if they "
                "may have read it, start a new run with new keys"
            )
        try:
            return decode(content)
        except ValueError as error:
            raise self._error(f"{error}; copy it again, or start a new run with new keys") from None


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


# -- its content -----------------------------------------------------------------------------------


def _encode(keys: RunKeys) -> bytes:
    tokens = keys.tokens
    words = {
        "version": VERSION,
        "secret": keys.secret.hex(),
        "last_number": tokens.last_number,
        "tokens": [
            {
                "number": token.number,
                "secret": token.secret.hex(),
                "made_s": token.made_s,
                "is_ticket": token.is_ticket,
                "spent_by": token.spent_by.hex(),
                "revoked": token.revoked,
            }
            for token in tokens.known
        ],
        "expelled": [fingerprint.hex() for fingerprint in tokens.expelled],
    }
    return json.dumps(words, indent=1).encode()


def decode(content: bytes) -> RunKeys:
    """Return the keys that the content of a file stands for.

    Raises:
        ValueError: the content is not valid; the text says why, and shows nothing of it.
    """
    if len(content) > FILE_BYTES_MAX:
        raise ValueError("it is too long")
    try:
        words: Any = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    match words:
        case {
            "version": int(version),
            "secret": str(secret),
            "last_number": int(last),
            "tokens": list(),
            "expelled": list(),
        } if version == VERSION:
            known: list[Any] = words["tokens"]
            expelled: list[Any] = words["expelled"]
        case {"version": int(version)} if version != VERSION:
            raise ValueError(f"it has version {version}; this pccl reads version {VERSION}")
        case _:
            raise ValueError("it lacks a field")
    tokens = tuple(_token(fields) for fields in known)
    out = tuple(_bytes(text, FINGERPRINT_BYTES, FINGERPRINT_BYTES) for text in expelled)
    numbers = [token.number for token in tokens]
    if not max(numbers, default=0) <= last < NUMBER_MAX or len(set(numbers)) < len(numbers):
        raise ValueError("the numbers of its tokens are wrong")
    if len(tokens) > TOKENS_MAX or len(out) > EXPELLED_MAX:
        raise ValueError("it has too many tokens or expelled keys")
    kept = Tokens(tokens, out, last)
    if tokens and not kept.reusable():
        raise ValueError("it has no valid token")
    return RunKeys(_bytes(secret, SECRET_BYTES, SECRET_BYTES), kept)


def _token(fields: Any) -> Token:
    match fields:
        case {
            "number": int(number),
            "secret": str(secret),
            "made_s": int(made_s),
            "is_ticket": bool(is_ticket),
            "spent_by": str(spent_by),
            "revoked": bool(revoked),
        } if 0 <= number < NUMBER_MAX and 0 <= made_s < 1 << 40 and (number or not is_ticket):
            longest = TOKEN_SECRET_BYTES if number else PLAIN_BYTES_MAX
            spender = _bytes(spent_by, FINGERPRINT_BYTES, FINGERPRINT_BYTES) if spent_by else b""
            if spender and not is_ticket:
                raise ValueError("a token is spent that is no ticket")
            known = _bytes(secret, TOKEN_SECRET_BYTES if number else 1, longest)
            return Token(number, known, made_s, is_ticket, spender, revoked)
        case _:
            raise ValueError("a token lacks a field, or has a wrong one")


def _bytes(text: Any, shortest: int, longest: int) -> bytes:
    if type(text) is not str or not 2 * shortest <= len(text) <= 2 * longest:
        raise ValueError("a key, a secret or a fingerprint has a wrong length")
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if value.hex() != text:
        raise ValueError("a key, a secret or a fingerprint is not in hex")
    return value
