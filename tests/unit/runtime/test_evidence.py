"""Evidence: whatever happens while it is gathered, there is an answer of bounded length."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pccl.protocol.limits import EVIDENCE_BYTES_MAX
from pccl.runtime.evidence import REASON_BYTES_MAX, gathered


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


async def give(found: tuple[bytes, str] | BaseException) -> tuple[bytes, str]:
    if isinstance(found, BaseException):
        raise found
    return found


def answer(work: Coroutine[Any, Any, tuple[bytes, str]]) -> tuple[tuple[bytes, str], list[Any]]:
    """The answer, and what the handler of the loop has got."""
    seen: list[Any] = []

    async def ask() -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
        return await gathered(work)

    return asyncio.run(ask()), seen


@pytest.mark.parametrize(
    "found", [(b"data", ""), (b"", "not now"), (bytes(EVIDENCE_BYTES_MAX), "")]
)
def test_an_answer_stays_as_it_is(found: tuple[bytes, str]) -> None:
    assert answer(give(found)) == (found, [])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyError("links"), "KeyError: 'links'"),
        (Unspeakable(), "<exception str() failed>"),
        (
            OSError("a\x1b[31m\nb"),
            "OSError: a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b",
        ),
    ],
)
def test_an_error_becomes_a_reason_and_is_reported(error: Exception, reason: str) -> None:
    (data, refusal), seen = answer(give(error))
    assert data == b""
    assert refusal.startswith("gathering evidence failed: ")
    assert refusal.endswith(reason)
    assert seen == [error]


def test_a_reason_has_a_bounded_length() -> None:
    (_, refusal), _ = answer(give(ValueError("\N{BLACK SQUARE}" * 10_000)))
    assert len(refusal.encode()) <= REASON_BYTES_MAX


def test_evidence_that_is_too_long_is_not_sent() -> None:
    (data, refusal), _ = answer(give((bytes(EVIDENCE_BYTES_MAX + 1), "")))
    assert data == b""
    assert refusal == "the evidence has 262145 bytes, and at most 262144 are sent"


def test_the_end_of_the_task_is_no_error() -> None:
    with pytest.raises(asyncio.CancelledError):
        answer(give(asyncio.CancelledError()))
