"""``KeysFile``: the keys of a run, in a file that only one user can read.

The file holds the secret of the run's key, the tokens, and which keys are expelled. Commands change
it under a lock; the master of the run sees its new time of change. A copy of the file makes any
master one of the run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

from pccl.machines.master.tokens import EXPELLED_MAX, OPEN, TICKETS_MAX, TOKENS_MAX, Token, Tokens
from pccl.protocol.errors import LocalProtocolError
from pccl.protocol.handshake.keys import CURVE25519, FINGERPRINT_BYTES, SECRET_BYTES, fingerprint_of
from pccl.protocol.handshake.token import NUMBER_MAX, TOKEN_SECRET_BYTES, RunToken
from pccl.protocol.limits import PEERS_MAX

KEYS_FILE = "run.keys"
"""Name of the file in the directory of a master's state."""

VERSION = 1

FILE_BYTES_MAX = 4 << 20

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
        self._secret = b""
        """The secret of the run's key, once this object has read it."""
        self._seen: tuple[int, ...] = ()
        """What the system said of the file when this object read it last."""

    def make(self, secret: bytes, tokens: Tokens = OPEN) -> None:
        """Make the file, with its folder, unless it exists.

        Args:
            secret: the secret of the run's key, 32 bytes that nobody can predict.
            tokens: the tokens of the run.

        Raises:
            LocalProtocolError: it cannot be written.
        """
        with self._errors():
            if os.path.lexists(self.path):
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made_meanwhile = contextlib.suppress(FileExistsError, FileNotFoundError)
            with self._draft_of(RunKeys(secret, tokens)) as draft, made_meanwhile:
                os.link(draft, self.path)  # not found: the other process has removed the draft

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
                self._remove_drafts()
                with self._draft_of(after) as draft:
                    draft.replace(self.path)
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
            if error.errno == errno.EBUSY:
                why = f"{why}; mount the folder that holds it, not the file"
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

    @contextlib.contextmanager
    def _draft_of(self, keys: RunKeys) -> Generator[Path, None, None]:
        """Write another file of the folder, flush it to the disk, and remove it in the end."""
        draft = self.path.with_name(f".{self.path.name}-{os.getpid()}-{os.urandom(4).hex()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(draft, flags, 0o600), "wb") as file:
                file.write(_encode(keys))
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:  # also after Ctrl-C: it holds secrets
            draft.unlink(missing_ok=True)

    def _remove_drafts(self) -> None:
        """Remove drafts of processes that were killed; only the owner of the lock may do so."""
        name = re.compile(rf"\.{re.escape(self.path.name)}-\d+-[0-9a-f]{{8}}")
        for path in self.path.parent.iterdir():
            if name.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _checked(self, found: os.stat_result, content: bytes) -> RunKeys:
        if not stat.S_ISREG(found.st_mode):
            raise self._error("this is not a file")
        if found.st_uid != os.geteuid():
            raise self._error(f"it belongs to user {found.st_uid}; run this command as that user")
        if found.st_mode & 0o077:
            path, mode = self.path, stat.S_IMODE(found.st_mode)
            raise self._error(
                f"other users may read or change it (mode {mode:o}); chmod 600 {path}, and if they "
                "may have read it, start a new run with new keys"
            )
        try:
            keys = decode(content)
        except ValueError as error:
            raise self._error(f"{error}; copy it again, or start a new run with new keys") from None
        if keys.secret != (self._secret or keys.secret):
            raise self._error("it has another run's key now; put the file of this run back")
        self._secret = keys.secret
        return keys


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


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
                "revoked": token.revoked,
                "owners": [owner.hex() for owner in token.owners],
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
    out = _fingerprints(expelled)
    numbers = [token.number for token in tokens]
    if not max(numbers, default=0) <= last < NUMBER_MAX or len(set(numbers)) < len(numbers):
        raise ValueError("the numbers of its tokens are wrong")
    tickets = sum(token.is_ticket for token in tokens)
    too_many = tickets > TICKETS_MAX or len(tokens) - tickets > TOKENS_MAX
    if too_many or len(out) > EXPELLED_MAX:
        raise ValueError("it has too many tokens, tickets or expelled keys")
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
            "revoked": bool(revoked),
            "owners": list(),
        } if 0 <= number < NUMBER_MAX and 0 <= made_s < 1 << 40 and (number or not is_ticket):
            longest = TOKEN_SECRET_BYTES if number else PLAIN_BYTES_MAX
            known = _bytes(secret, TOKEN_SECRET_BYTES if number else 1, longest)
            owners = _fingerprints(fields["owners"])
            if len(owners) > (1 if is_ticket else PEERS_MAX if revoked else 0):
                raise ValueError("a token has too many owners")
            return Token(number, known, made_s, is_ticket, revoked, owners)
        case _:
            raise ValueError("a token lacks a field, or has a wrong one")


def _fingerprints(texts: list[Any]) -> tuple[bytes, ...]:
    return tuple(_bytes(text, FINGERPRINT_BYTES, FINGERPRINT_BYTES) for text in texts)


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
