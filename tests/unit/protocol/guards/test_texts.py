"""Texts of others: printable, and not too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.ballots.ballot import Abort
from pccl.protocol.guards.texts import printable, shortened
from pccl.protocol.limits import REASON_BYTES_MAX
from pccl.protocol.types import AbortCause


@given(st.text(), st.integers(3, 60))
def test_a_shortened_text_is_a_beginning_and_fits(text: str, limit: int) -> None:
    short = shortened(text, limit)
    assert len(short.encode("utf-8", "replace")) <= limit
    assert short == text or (short.endswith("...") and text.startswith(short[:-3]))


@given(st.text())
def test_a_printable_text_is_one_line_of_as_many_characters(text: str) -> None:
    clean = printable(text)
    assert clean.isprintable()
    assert len(clean) == len(text)
    assert all(a == b or not a.isprintable() for a, b in zip(text, clean, strict=True))


def test_outcomes_that_quote_members_are_short() -> None:
    long = "peer 3 withdrew: " + 4000 * "x"
    told = Abort(AbortCause.WITHDRAWN, long).told_reason
    assert len(told) == REASON_BYTES_MAX
    assert told == long[: REASON_BYTES_MAX - 3] + "..."
    assert Abort(AbortCause.DESCRIPTOR_MISMATCH, long).told_reason == long
