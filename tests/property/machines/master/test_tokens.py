"""Whatever is done with the tokens of a run, at most two are reusable, and it stays closed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master import tokens as module
from pccl.machines.master.tokens import (
    EXPELLED_MAX,
    OPEN,
    REUSABLE_MAX,
    TICKETS_MAX,
    TOKENS_MAX,
    Tokens,
)

SECRET = b"s" * 32
KEYS = [bytes([who]) * 16 for who in range(3)]

_MAKE = st.tuples(st.just("make"), st.booleans())
_PLAIN = st.tuples(st.just("plain"), st.sampled_from([b"one", b"two"]))
_REVOKE = st.tuples(st.just("revoke"), st.integers(0, 6))
_SPEND = st.tuples(st.just("spend"), st.tuples(st.integers(0, 6), st.sampled_from(KEYS)))
_EXPEL = st.tuples(st.just("expel"), st.sampled_from(KEYS))
_USE = st.tuples(
    st.just("use"), st.dictionaries(st.integers(0, 6), st.lists(st.sampled_from(KEYS), max_size=2))
)
STEPS = st.lists(st.one_of(_MAKE, _PLAIN, _REVOKE, _SPEND, _EXPEL, _USE), max_size=20)


def after(tokens: Tokens, step: tuple[str, Any], now_s: int) -> Tokens:
    match step:
        case ("make", bool(is_ticket)):
            return tokens.make(SECRET, now_s, is_ticket=is_ticket)
        case ("plain", bytes(secret)):
            return tokens.with_plain(secret, now_s)
        case ("revoke", int(number)):
            try:
                return tokens.revoke(number)
            except ValueError:
                assert [token.number for token in tokens.reusable()] == [number]
                return tokens
        case ("spend", (int(number), bytes(key))):
            return tokens.spend(number, key)
        case ("expel", bytes(key)):
            return tokens.expel(key)
        case ("use", owners):
            tickets = {token.number: token.owners for token in tokens.known if token.is_spent}
            return tokens.used_by({**owners, **{n: o for n, o in tickets.items() if n in owners}})
        case _:
            raise AssertionError(step)


@given(STEPS)
def test_what_always_holds(steps: list[tuple[str, Any]]) -> None:
    tokens = OPEN.make(SECRET, 0)
    revoked: set[int] = set()
    spent: dict[int, bytes] = {}
    for now_s, step in enumerate(steps):
        tokens = after(tokens, step, now_s)
        numbers = [token.number for token in tokens.known]
        assert len(set(numbers)) == len(numbers)
        assert max(numbers) <= tokens.last_number
        assert 1 <= len(tokens.reusable()) <= REUSABLE_MAX
        for token in tokens.known:
            if token.number in revoked:
                assert token.revoked
            if token.is_spent:
                (spender,) = token.owners
                assert spent.setdefault(token.number, spender) == spender
            elif token.owners:
                assert token.revoked
            if token.revoked and token.number:  # another plain secret may take the place of one
                revoked.add(token.number)
        for number in range(7):
            found = tokens.get(number)
            owners = () if found is None else found.owners
            for key in KEYS:
                if number in revoked or spent.get(number, key) != key:
                    assert bool(tokens.flaw(number, key)) is (key not in owners)
        if step[0] == "expel":
            assert step[1] in tokens.expelled


def test_two_rotations_revoke_a_token() -> None:
    first = OPEN.make(SECRET, 0)
    second = first.make(SECRET, 1)
    assert not second.flaw(1, KEYS[0])
    third = second.make(SECRET, 2)
    assert "revoked" in third.flaw(1, KEYS[0])
    assert not third.flaw(2, KEYS[0])
    assert not third.flaw(3, KEYS[0])
    newest = third.newest()
    assert newest is not None
    assert newest.number == 3


def test_a_ticket_is_for_one_process() -> None:
    tokens = OPEN.make(SECRET, 0).make(SECRET, 0, is_ticket=True)
    spent = tokens.spend(2, KEYS[0])
    assert not spent.flaw(2, KEYS[0])
    assert "another process has joined with it" in spent.flaw(2, KEYS[1])
    assert spent.spend(2, KEYS[1]) is spent
    assert tokens.spend(1, KEYS[0]) is tokens, "a reusable token is never spent"
    assert tokens.spend_like(spent) == spent


def test_an_open_run_asks_for_nothing() -> None:
    assert not OPEN.flaw(0, KEYS[0])
    assert not OPEN.flaw(9, KEYS[0])
    assert OPEN.newest() is None


def test_a_plain_secret_that_was_revoked_stays_revoked() -> None:
    tokens = OPEN.with_plain(b"plain", 0).make(SECRET, 1).revoke(0).used_by({})
    again = tokens.with_plain(b"plain", 2)
    assert again is tokens
    assert "revoked" in again.flaw(0, KEYS[0])
    assert not tokens.with_plain(b"another", 2).flaw(0, KEYS[0])


def test_members_need_revoked_tokens() -> None:
    tokens = OPEN.make(SECRET, 0).make(SECRET, 1).revoke(1)
    used = tokens.used_by({1: [KEYS[0]], 2: [KEYS[1]]})
    assert [token.owners for token in used.known] == [(KEYS[0],), ()]
    assert not used.flaw(1, KEYS[0])
    assert "revoked" in used.flaw(1, KEYS[1])
    assert [token.number for token in used.used_by({}).known] == [2]


def test_the_order_of_tokens_is_that_in_which_they_were_made() -> None:
    """Whatever the clock of the machine says."""
    tokens = OPEN.make(SECRET, 90).make(SECRET, 90).make(SECRET, 5)
    assert [token.number for token in tokens.reusable()] == [2, 3]
    newest = tokens.newest()
    assert newest is not None
    assert newest.number == 3


def test_there_are_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (TOKENS_MAX, TICKETS_MAX, EXPELLED_MAX) == (1024, 4096, 4096)
    monkeypatch.setattr(module, "TOKENS_MAX", 2)
    monkeypatch.setattr(module, "TICKETS_MAX", 1)
    monkeypatch.setattr(module, "EXPELLED_MAX", 1)
    tokens = OPEN.make(SECRET, 0).make(SECRET, 0, is_ticket=True)
    with pytest.raises(ValueError, match="has 1 tickets; revoke some: pccl token revoke NUMBER"):
        tokens.make(SECRET, 0, is_ticket=True)
    with pytest.raises(ValueError, match="has 2 tokens; revoke some"):
        tokens.make(SECRET, 0).make(SECRET, 0)
    expelled = tokens.expel(KEYS[0])
    assert expelled.expel(KEYS[0]) is expelled
    with pytest.raises(ValueError, match="has expelled 1 processes"):
        expelled.expel(KEYS[1])


def test_no_secret_is_shown() -> None:
    tokens = replace(OPEN).make(b"a secret of a run" + bytes(15), 0)
    assert "a secret" not in repr(tokens)
