"""Makes and revokes tokens in the file of a run's keys, for programs and commands.

A master that was started with the file takes up changes within a second.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from pccl.machines.master.tokens import REUSABLE_MAX, Tokens
from pccl.protocol.handshake.keys import SECRET_BYTES
from pccl.protocol.handshake.token import TOKEN_SECRET_BYTES
from pccl.runtime.keys_file import KeysFile, RunKeys


class MadeToken(NamedTuple):
    """A new token: its text and number, and the numbers of the tokens that it has revoked."""

    text: str
    number: int
    revoked: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<MadeToken {self.number}>"


def make_token(file: KeysFile, *, is_ticket: bool = False, revokes: bool = False) -> MadeToken:
    """Add a token to a run.

    Args:
        file: the file of the run's keys.
        is_ticket: whether only one process may join with it.
        revokes: whether it may revoke another one, because ``REUSABLE_MAX`` are valid at a time.

    Raises:
        LocalProtocolError: the file cannot be used.
        ValueError: the run has too many tokens, or none at all, so that any process may join.
    """
    secret, now_s = os.urandom(TOKEN_SECRET_BYTES), int(time.time())
    revoked: list[int] = []

    def add(tokens: Tokens) -> Tokens:
        if not tokens.known:
            raise ValueError("the run has no token: start its master with --token auto")
        after = tokens.make(secret, now_s, is_ticket=is_ticket)
        valid = {token.number for token in after.reusable()}
        revoked[:] = (one.number for one in tokens.reusable() if one.number not in valid)
        if revoked and not revokes:
            raise ValueError(
                f"{REUSABLE_MAX} tokens are valid already; `pccl token rotate` makes one and "
                "revokes the oldest"
            )
        return after

    keys = file.update(add)
    return MadeToken(_text_of_newest(keys), keys.tokens.last_number, tuple(revoked))


def revoke_token(file: KeysFile, number: int) -> None:
    """Revoke a token or a ticket; members that have joined with it stay.

    Raises:
        LocalProtocolError: the file cannot be used.
        ValueError: there is no such token, or it is the only valid one.
    """

    def revoke(tokens: Tokens) -> Tokens:
        if tokens.get(number) is None:
            raise ValueError(f"the run has no token {number}; see pccl token list")
        return tokens.revoke(number)

    file.update(revoke)


def ensure_token(file: KeysFile) -> str:
    """Return the text of the newest numbered token of a run; make the file and a token if needed.

    Raises:
        LocalProtocolError: the file cannot be used.
        ValueError: the run has too many tokens.
    """
    secret, now_s = os.urandom(TOKEN_SECRET_BYTES), int(time.time())
    file.make(os.urandom(SECRET_BYTES))

    def add(tokens: Tokens) -> Tokens:
        newest = tokens.newest()
        return tokens if newest is not None and newest.number else tokens.make(secret, now_s)

    keys = file.update(add)
    newest = keys.tokens.newest()
    assert newest is not None
    return keys.text_of(newest)


def expel_key(
    file: KeysFile, fingerprint: bytes, number: int, *, shared: bool
) -> tuple[str, RunKeys]:
    """Never let the owner of a key join again, and revoke the token with which it joined.

    If other members share the token, or no other token is valid, the run gets a new one.

    Args:
        file: the file of the run's keys.
        fingerprint: hash of the key, 16 bytes (``MemberStatus.fingerprint``).
        number: number of the token.
        shared: whether other members have joined with it.

    Returns:
        The text of the new token, empty if there is none, and what the file holds now.

    Raises:
        LocalProtocolError: the file cannot be used.
        ValueError: the run has too many tokens or expelled keys.
    """
    secret, now_s = os.urandom(TOKEN_SECRET_BYTES), int(time.time())
    made = False

    def change(tokens: Tokens) -> Tokens:
        nonlocal made
        tokens = tokens.expel(fingerprint)
        token = tokens.get(number)
        if token is None or token.revoked:
            return tokens
        if tokens.reusable() == [token]:
            made = True
            return tokens.make(secret, now_s).revoke(number)
        made = shared
        tokens = tokens.revoke(number)
        return tokens.make(secret, now_s) if shared else tokens

    keys = file.update(change)
    return _text_of_newest(keys) if made else "", keys


def _text_of_newest(keys: RunKeys) -> str:
    made = keys.tokens.get(keys.tokens.last_number)
    assert made is not None
    return keys.text_of(made)
