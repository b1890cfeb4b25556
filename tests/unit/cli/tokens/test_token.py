"""What ``pccl token list`` shows: everything but secrets."""

from __future__ import annotations

from pccl.cli.tokens.token import lines_of
from pccl.machines.master.tokens import OPEN

SECRET = b"s" * 32


def test_every_kind_and_state() -> None:
    tokens = OPEN.with_plain(b"a plain secret", 0).make(SECRET, 10).make(SECRET, 90, is_ticket=True)
    tokens = tokens.make(SECRET, 90, is_ticket=True).spend(2, b"w" * 16).revoke(0).expel(b"x" * 16)
    lines = list(lines_of(tokens, {1: ["1 (alice)", "2 (bob)"]}, 100 + 2 * 86400))
    assert lines == [
        "   0  plain secret, revoked; present with it: nobody",
        "   1  token, valid, 2 days old; present with it: 1 (alice), 2 (bob)",
        "   2  ticket, spent, 2 days old; present with it: nobody",
        "   3  ticket, valid, 2 days old; present with it: nobody",
        "1 expelled key",
    ]


def test_ages() -> None:
    for age_s, words in ((0, "0 seconds"), (61, "1 minute"), (7200, "2 hours")):
        (line,) = lines_of(OPEN.make(SECRET, 10), {}, 10 + age_s)
        assert line == f"   1  token, valid, {words} old; present with it: nobody"


def test_an_open_run() -> None:
    assert list(lines_of(OPEN, {}, 0)) == ["the run has no token: any process may join"]
