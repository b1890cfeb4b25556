"""What the environment says where an argument is not given: read in one place, and checked.

| variable | stands for |
| --- | --- |
| ``PCCL_MASTER`` | the master, ``HOST:PORT`` |
| ``PCCL_GROUP`` | ``peer_group`` |
| ``PCCL_LANES`` | ``lanes``, ``p2p_connection_pool_size`` |
| ``PCCL_MIN_PEERS`` | ``min_peers`` of ``connect`` |
| ``PCCL_ADVERTISE`` | ``advertise`` |
| ``PCCL_LISTEN`` | ``listen`` |
| ``PCCL_TOKEN`` | ``token``: the secret itself |
| ``PCCL_TOKEN_FILE`` | a file that holds it; ``PCCL_TOKEN`` comes first |
| ``PCCL_DRAIN`` | 1: SIGTERM leaves the run before it ends the program (``draining``) |
| ``PCCL_PROGRESS`` | 1: a fetch of shared state that takes long is shown (:mod:`pccl.progress`) |

An argument comes before its variable, also if it is 0. Apart from ``PCCL_TOKEN``, a variable that
is empty counts as not set. Every mistake raises ValueError or TypeError and names the argument or
the variable.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pccl.addresses import Advertised, parse_advertised, parse_masters
from pccl.checks import LANES_MAX, MIN_PEERS_MAX, PEER_GROUP_MAX, check_range
from pccl.protocol.guards.guessing import GUESS_BITS_MIN, guess_bits
from pccl.transports.base import Address

MASTER = "PCCL_MASTER"
GROUP = "PCCL_GROUP"
LANES = "PCCL_LANES"
MIN_PEERS = "PCCL_MIN_PEERS"
ADVERTISE = "PCCL_ADVERTISE"
LISTEN = "PCCL_LISTEN"
TOKEN = "PCCL_TOKEN"
TOKEN_FILE = "PCCL_TOKEN_FILE"
DRAIN = "PCCL_DRAIN"
PROGRESS = "PCCL_PROGRESS"

SECRET_BYTES_MIN = 16
"""Shorter ones are too easy to guess, whatever they are made of (``guessing``)."""

SECRET_BYTES_MAX = 4096
"""No secret is longer: a longer file is the wrong file."""


def resolve_masters(address: str | None) -> tuple[Address, ...]:
    """The master's address, and those of its standbys.

    Raises:
        TypeError, ValueError: not an address, or none given at all.
    """
    if address is not None:
        return parse_masters(address)
    text = os.environ.get(MASTER)
    if not text:
        raise ValueError(
            f"no master: give its address, as in Communicator('HOST:PORT'), or set {MASTER}; "
            "`pccl launch` and `pccl join` set it"
        )
    try:
        return parse_masters(text)
    except ValueError as error:
        raise ValueError(f"{MASTER}: {error}") from None


def resolve_group(peer_group: int | None) -> int:
    """The peer group; 0 by default."""
    return _resolve_number("peer_group", peer_group, GROUP, 0, PEER_GROUP_MAX, default=0)


def resolve_lanes(pool_size: int | None, lanes: int | None) -> int:
    """Connections per link, by either name; 0 (chosen by the library) by default."""
    if pool_size is not None and lanes is not None:
        raise ValueError("lanes and p2p_connection_pool_size are two names of one thing; give one")
    name = "p2p_connection_pool_size" if lanes is None else "lanes"
    given = pool_size if lanes is None else lanes
    return _resolve_number(name, given, LANES, 0, LANES_MAX, default=0)


def resolve_min_peers(min_peers: int | None) -> int:
    """How many members ``connect`` waits for, this one included; 1 by default."""
    return _resolve_number("min_peers", min_peers, MIN_PEERS, 1, MIN_PEERS_MAX, default=1)


def resolve_advertise(advertise: str | None) -> Advertised:
    """Address at which other peers reach this one."""
    if advertise is not None:
        return parse_advertised(advertise, "advertise")
    text = os.environ.get(ADVERTISE)
    return parse_advertised(text, ADVERTISE) if text else Advertised()


def resolve_listen(listen: str | None) -> Advertised | None:
    """Address that this peer binds; None: the port that it advertises."""
    if listen is not None:
        return parse_advertised(listen, "listen")
    text = os.environ.get(LISTEN)
    return parse_advertised(text, LISTEN) if text else None


def resolve_drain() -> bool:
    """Whether SIGTERM leaves the run before it ends the program; False by default.

    Raises:
        ValueError: neither 0 nor 1.
    """
    return _switched_on(DRAIN)


def resolve_progress() -> bool:
    """Whether fetches without a listener show a progress bar; False by default.

    Raises:
        ValueError: neither 0 nor 1.
    """
    return _switched_on(PROGRESS)


def _switched_on(variable: str) -> bool:
    text = os.environ.get(variable) or "0"
    if text.strip() not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {text!r}")
    return text.strip() == "1"


def resolve_token(token: str | bytes | None) -> bytes | None:
    """The secret that all processes of a run share; None: there is none.

    White space around it does not count, so that a file may end with a line break.

    Raises:
        TypeError: neither str nor bytes.
        ValueError: too short, too long, easy to guess, or a file that cannot be read, or that other
            users of the machine can read.
    """
    if token is not None:
        return _secret("token", token)
    text = os.environ.get(TOKEN)
    if text is not None:
        return _secret(TOKEN, text)
    path = os.environ.get(TOKEN_FILE)
    return read_token_file(path, TOKEN_FILE) if path else None


def read_token_file(path: str | os.PathLike[str], name: str = "token file") -> bytes:
    """The secret in a file.

    Args:
        path: path of the file.
        name: argument or variable that errors name.

    Raises:
        ValueError: it cannot be read, holds no good secret, or other users may read or change it.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ValueError(f"{name}: cannot read {os.fspath(path)!r}: {error.strerror}") from error
    if os.name == "posix" and stat.S_ISREG(mode) and mode & 0o077:
        raise ValueError(
            f"{name}: other users may read or change {os.fspath(path)!r} (mode "
            f"{stat.S_IMODE(mode):o}); chmod 600 {os.fspath(path)}, and if they may have read it, "
            "make another secret"
        )
    return _secret(f"{name} {os.fspath(path)!r}", content)


def _secret(name: str, token: str | bytes) -> bytes:
    if not isinstance(token, str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name} must be str or bytes, not {type(token).__name__}")
    try:
        secret = (token.encode() if isinstance(token, str) else token).strip()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name}: a str with half a character (a lone surrogate) has no UTF-8; pass the secret "
            "as bytes, or make a new one with `pccl master --token auto`"
        ) from None
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(
            f"{name}: a secret of {len(secret)} characters is too short; {SECRET_BYTES_MIN} or "
            "more are needed; `pccl master --token auto` makes one"
        )
    if len(secret) > SECRET_BYTES_MAX:
        raise ValueError(f"{name}: longer than {SECRET_BYTES_MAX} bytes; is it the right one?")
    if guess_bits(secret) < GUESS_BITS_MIN:
        raise ValueError(
            f"{name}: this secret is too easy to guess from what anybody on the way can hear; "
            "`pccl master --token auto` makes a good one, and six random words are one, too"
        )
    return secret


def _resolve_number(
    name: str, value: int | None, variable: str, lowest: int, highest: int, *, default: int
) -> int:
    if value is not None:
        return check_range(name, value, lowest, highest)
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{variable} must be a whole number, not {text!r}") from None
    return check_range(variable, number, lowest, highest)
