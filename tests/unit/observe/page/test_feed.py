"""The messages for browsers: the past, pictures, the log, and their bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pccl.observe.events import RunChanged
from pccl.observe.page import feed as module
from pccl.observe.page.feed import CLIENTS_MAX, LOG_MAX, Feed
from pccl.protocol.status_report import StatusReport
from tests.support.patience import LIMIT_S
from tests.support.statuses import SAMPLE

EVIL = "</script>\nevent: log\ndata: {}\n\n<b>"


def event(number: int, name: str = "alice") -> RunChanged:
    return RunChanged(
        what="removed", peer_id=number, name=name, group=0, cause="", reason="it left"
    )


def parsed(text: str) -> tuple[str, int | None, Any]:
    """The kind, the id and the data of one server-sent event."""
    assert text.endswith("\n\n")
    fields = dict(line.split(": ", 1) for line in text.rstrip("\n").split("\n"))
    number = int(fields["id"]) if "id" in fields else None
    return fields["event"], number, json.loads(fields["data"])


async def next_of(kind: str, messages: AsyncIterator[str]) -> tuple[int | None, Any]:
    async with asyncio.timeout(LIMIT_S):
        async for text in messages:
            if text.startswith("retry: "):
                continue
            found, number, data = parsed(text)
            if found == kind:
                return number, data
    raise AssertionError(f"the messages ended without {kind}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(module, "PERIOD_S", 0.01)
    monkeypatch.setattr(module, "IDLE_PERIOD_S", 0.01)


async def test_a_browser_gets_the_past_and_then_each_change() -> None:
    feed = Feed(lambda: SAMPLE)
    feed.put(event(1))
    asking = asyncio.create_task(feed.run())
    messages = feed.messages(0)
    assert (await next_of("past", messages))[1] is not None
    number, line = await next_of("log", messages)
    assert (number, line["level"]) == (1, "INFO")
    assert line["text"] == "peer 1 (alice) of group 0 removed: it left"
    _, shown = await next_of("picture", messages)
    while shown["point"] is None:
        _, shown = await next_of("picture", messages)
    assert (shown["trouble"], shown["run"]["member_count"]) == ("", 4)
    assert shown["point"]["calls_per_s"] == 0.0
    feed.put(event(2))
    assert (await next_of("log", messages))[0] == 2
    assert (await next_of("past", feed.messages(0)))[1]
    asking.cancel()


async def test_a_browser_that_returns_gets_what_it_missed() -> None:
    feed = Feed(lambda: SAMPLE)
    for number in range(1, LOG_MAX + 11):
        feed.put(event(number))
    assert (await next_of("log", feed.messages(0)))[0] == 11
    assert (await next_of("log", feed.messages(LOG_MAX)))[0] == LOG_MAX + 1


async def test_trouble_is_told_and_the_last_picture_stays() -> None:
    answers: list[StatusReport] = [SAMPLE]

    def status() -> StatusReport:
        if not answers:
            raise RuntimeError("the master has ended")
        return answers.pop()

    feed = Feed(status)
    asking = asyncio.create_task(feed.run())
    messages = feed.messages(0)
    _, shown = await next_of("picture", messages)
    while not shown["trouble"]:
        _, shown = await next_of("picture", messages)
    assert shown["trouble"] == "no status: the master has ended"
    assert shown["run"]["member_count"] == 4
    asking.cancel()


async def test_texts_of_peers_cannot_forge_messages() -> None:
    feed = Feed(lambda: SAMPLE)
    feed.put(event(1, EVIL))
    _, line = await next_of("log", feed.messages(0))
    assert line["text"] == f"peer 1 ({EVIL}) of group 0 removed: it left"


async def test_browsers_are_bounded_and_leave() -> None:
    feed = Feed(lambda: SAMPLE)
    watching = [feed.messages(0) for _ in range(CLIENTS_MAX)]
    for messages in watching:
        await anext(messages)
    assert feed.clients == CLIENTS_MAX
    assert [text async for text in feed.messages(0)] == []
    feed.end()
    for messages in watching:
        async for _ in messages:
            pass
    assert feed.clients == 0
