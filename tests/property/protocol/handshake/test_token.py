"""The text of a token: there and back, and nothing malformed passes for one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.handshake.token import NUMBER_MAX, TOKEN_PREFIX, RunToken, parse_token

TOKENS = st.builds(
    RunToken,
    st.binary(min_size=32, max_size=32),
    st.integers(1, NUMBER_MAX),
    st.binary(min_size=16, max_size=16),
)


@given(TOKENS)
def test_there_and_back(token: RunToken) -> None:
    text = token.text()
    assert parse_token(text.encode()) == token
    assert len(text) == len("pccl1.") + 22 + 1 + 11 + 1 + 43
    assert text.isascii()
    assert token.secret.hex() not in repr(token)


@given(TOKENS, st.data())
def test_a_changed_text_is_another_token_or_none(token: RunToken, data: st.DataObject) -> None:
    text = bytearray(token.text().encode())
    at = data.draw(st.integers(len(TOKEN_PREFIX), len(text) - 1))
    text[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[at]))
    with suppress(ValueError):
        assert parse_token(bytes(text)) != token


@given(TOKENS, st.data())
def test_a_shorter_or_longer_text_is_none(token: RunToken, data: st.DataObject) -> None:
    text = token.text().encode()
    cut = data.draw(st.integers(len(TOKEN_PREFIX), len(text) - 1))
    for wrong in (text[:cut], text + b"A", text + b".", text + b"=", TOKEN_PREFIX + text):
        with pytest.raises(ValueError, match="malformed"):
            parse_token(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_plain_secret_or_refused(text: bytes) -> None:
    for each in (text, TOKEN_PREFIX + text):
        try:
            token = parse_token(each)
        except ValueError:
            assert each.startswith(TOKEN_PREFIX)
        else:
            assert token == RunToken(each) or token.text().encode() == each


def test_the_number_0_is_that_of_plain_secrets() -> None:
    text = RunToken(bytes(32), 0, bytes(16)).text()
    with pytest.raises(ValueError, match="malformed"):
        parse_token(text.encode())
