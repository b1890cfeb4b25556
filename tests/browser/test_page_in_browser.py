"""The page in a headless browser: what its script makes of a run, and of names that attack it.

``PCCL_TEST_BROWSER`` names a Chromium. ``--record`` also writes the picture for the documentation.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from pccl.observe.events import RunChanged
from pccl.observe.page.server import PageServer
from pccl.protocol.status_report import StatusReport
from tests.support.browser import Browser
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.statuses import SAMPLE, ended, member
from tests.support.waiting import until

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")

EVIL = "<img src=x onerror=document.title='evil'>"

PICTURE = ROOT / "docs" / "images" / "page.png"

RECORD_S = 20.0
"""Time that the charts of the picture show."""

Serve = Callable[[Callable[[], StatusReport]], PageServer]


@pytest.fixture
def browser(tmp_path: Path) -> Generator[Browser]:
    path = os.environ.get("PCCL_TEST_BROWSER") or next(
        filter(None, map(shutil.which, BROWSERS)), ""
    )
    if not path:
        pytest.skip(f"no browser: install Chromium ({', '.join(BROWSERS)})")
    found = Browser(path, tmp_path / "profile")
    yield found
    found.close()
    assert not found.complaints


@pytest.fixture
def serve() -> Generator[Serve]:
    servers: list[PageServer] = []

    def start(status: Callable[[], StatusReport]) -> PageServer:
        servers.append(PageServer("127.0.0.1", 0, status))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_the_page_shows_the_run(browser: Browser, serve: Serve) -> None:
    page = serve(lambda: SAMPLE)
    page.put(
        RunChanged(
            what="admitted", peer_id=1, name="alice", group=0, cause="", reason="world size 4"
        )
    )
    browser.open(page.url)
    browser.until("INFO peer 1 (alice) of group 0 admitted: world size 4")
    text = browser.until("pccl: 4 members")
    for part in (
        'class="peer awaited"',
        "<b>2 (bob)</b><span>awaited 3.20 s</span>",
        "slowest: 2 (bob), last in 3 of 4 calls",
        "update_topology waits for 2 (bob), 4 (dave)",
        '<td class="bad">MEMBER_LOST</td>',
        'title="round trip 1.8 ms\nrelayed by peer 3 (carol)\nneither peer 1 (alice) nor peer 2',
        "98.1<br><small>relayed</small>",
        'title="round trip 2.7 ms\ndirect"',
    ):
        assert part in text
    page.put(RunChanged(what="removed", peer_id=4, name="dave", group=0, cause="", reason="silent"))
    browser.until("INFO peer 4 (dave) of group 0 removed: silent")


def test_the_losses_that_programs_report_are_curves(browser: Browser, serve: Serve) -> None:
    greens = """[...at("loss").getContext("2d").getImageData(0, 0, 999, 999).data]
        .filter((_, i, all) => i % 4 == 1 && all[i] > 150 && all[i - 1] < 120).length"""
    losses = itertools.count(2.0, -0.1)

    def status() -> StatusReport:
        return replace(SAMPLE, members=(member(1, "alice", loss=next(losses)),))

    browser.open(serve(status).url)
    browser.until("loss 1.8")
    until(lambda: browser.evaluate(greens) > 100, LIMIT_S)  # the colour of peer 1


def test_no_chart_without_losses(browser: Browser, serve: Serve) -> None:
    page = serve(lambda: replace(SAMPLE, members=(member(1, "alice", loss=None),)))
    browser.open(page.url)
    browser.until("step 1200, 2.5 steps/s")
    assert browser.evaluate("at('losses').hidden")


def test_a_name_is_no_markup(browser: Browser, serve: Serve) -> None:
    members = (member(1, EVIL, calls=EVIL, last_call=EVIL), *SAMPLE.members[1:])
    calls = (ended(what=EVIL), *SAMPLE.ended)
    page = serve(lambda: replace(SAMPLE, members=members, ended=calls, waits_for=EVIL))
    page.put(RunChanged(what="removed", peer_id=1, name=EVIL, group=0, cause="", reason=EVIL))
    browser.open(page.url)
    browser.until("of group 0 removed")
    text = browser.until("pccl: 4 members")
    assert browser.evaluate("document.images.length") == 0
    assert text.count("&lt;img src=x") >= 5


def test_the_page_says_that_the_status_is_old(browser: Browser, serve: Serve) -> None:
    answers = [SAMPLE]
    page = serve(lambda: answers.pop())
    browser.open(page.url)
    assert '<body class="old">' in browser.until("no status: pop from empty list")
    page.close()
    browser.until("no connection to the master's process")
    browser.complaints.clear()  # the browser reports the lost connection


def test_the_code_leaves_the_address_at_once(browser: Browser) -> None:
    page = PageServer("0.0.0.0", 0, lambda: SAMPLE)
    page.start()
    try:
        browser.open(page.url.replace("0.0.0.0", "127.0.0.1"))
        browser.until("pccl: 4 members")
        assert "code" not in browser.evaluate("location.href")
        assert browser.evaluate("history.length") <= 2, "the blank page, and the page"
        assert browser.evaluate("document.cookie") == "", "scripts cannot read it"
    finally:
        page.close()


def test_the_picture_of_the_documentation(
    browser: Browser, serve: Serve, request: pytest.FixtureRequest
) -> None:
    records = bool(request.config.getoption("--record"))
    began_s = time.monotonic()

    def status() -> StatusReport:
        turns = int(4 * (time.monotonic() - began_s))
        took = (replace(call, took_us=call.took_us + turns % 7 * 1000) for call in SAMPLE.ended)
        members = tuple(
            replace(one, loss=one.loss and 2 + (2 + one.rank) / (1 + turns / 8))
            for one in SAMPLE.members
        )
        return replace(SAMPLE, members=members, ended=tuple(took), ended_count=1281 + turns)

    page = serve(status)
    for one in SAMPLE.members:
        page.put(
            RunChanged(
                what="admitted",
                peer_id=one.peer,
                name=one.name,
                group=0,
                cause="",
                reason="world size 4",
            )
        )
    browser.open(page.url)
    browser.until("pccl: 4 members")
    until(lambda: not records or time.monotonic() > began_s + RECORD_S, 2 * RECORD_S)
    picture = browser.picture()
    assert picture.startswith(b"\x89PNG")
    if records:
        PICTURE.write_bytes(picture)
    assert PICTURE.exists()
