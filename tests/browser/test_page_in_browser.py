"""The page in a headless browser: what its script makes of a run, and of names that attack it.

``PCCL_TEST_BROWSER`` names a Chromium. ``--record`` also writes the picture for the documentation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from pccl.observe.events import RunChanged
from pccl.observe.page.server import PageServer
from pccl.protocol.status_report import StatusReport
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S, LONG_LIMIT_S
from tests.support.statuses import SAMPLE, ended, member

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")

EVIL = "<img src=x onerror=document.title='evil'>"

PICTURE = ROOT / "docs" / "images" / "page.png"


@pytest.fixture(scope="module")
def browser() -> str:
    found = os.environ.get("PCCL_TEST_BROWSER") or next(
        filter(None, map(shutil.which, BROWSERS)), ""
    )
    if not found:
        pytest.skip(f"no browser: install Chromium ({', '.join(BROWSERS)})")
    return found


@pytest.fixture
def serve() -> Generator[Callable[[Callable[[], StatusReport]], PageServer]]:
    servers: list[PageServer] = []

    def start(status: Callable[[], StatusReport]) -> PageServer:
        servers.append(PageServer("127.0.0.1", 0, status, None))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def browse(browser: str, url: str, profile: Path, *options: str, load_ms: int = 3000) -> str:
    """Open a page for a while; return what the browser prints."""
    command = (
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={profile}", f"--timeout={load_ms}", *options, url,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_LIMIT_S, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def document(browser: str, page: PageServer, profile: Path, wanted: str) -> str:
    """Return the document that the script has made, as soon as it has ``wanted``."""
    deadline_s = time.monotonic() + LIMIT_S
    load_ms = 2000
    while wanted not in (text := browse(browser, page.url, profile, "--dump-dom", load_ms=load_ms)):
        assert time.monotonic() < deadline_s, text
        load_ms *= 2
    return text


Serve = Callable[[Callable[[], StatusReport]], PageServer]


def test_the_page_shows_the_run(browser: str, serve: Serve, tmp_path: Path) -> None:
    page = serve(lambda: SAMPLE)
    page.put(RunChanged(what="admitted", peer_id=1, name="alice", group=0, reason="world size 4"))
    text = document(browser, page, tmp_path, "pccl: 4 members")
    for part in (
        'class="peer awaited"',
        "<b>2 bob</b><span>awaited 3.20 s</span>",
        "slowest: 2 (bob), last in 3 of 4 calls",
        "update_topology waits for 2 (bob), 4 (dave)",
        '<td class="bad">MEMBER_LOST</td>',
        'title="round trip 1.8 ms"',
        "INFO peer 1 (alice) of group 0 admitted: world size 4",
    ):
        assert part in text
    assert 'class="old"' not in text


def test_a_name_is_no_markup(browser: str, serve: Serve, tmp_path: Path) -> None:
    members = (member(1, EVIL, calls=EVIL, last_call=EVIL), *SAMPLE.members[1:])
    calls = (ended(what=EVIL), *SAMPLE.ended)
    page = serve(lambda: replace(SAMPLE, members=members, ended=calls, waits_for=EVIL))
    page.put(RunChanged(what="removed", peer_id=1, name=EVIL, group=0, reason=EVIL))
    text = document(browser, page, tmp_path, "pccl: 4 members")
    assert "<img" not in text
    assert text.count("&lt;img src=x") >= 5


def test_the_page_says_that_the_status_is_old(browser: str, serve: Serve, tmp_path: Path) -> None:
    answers = [SAMPLE]
    page = serve(lambda: answers.pop())
    text = document(browser, page, tmp_path, "no status: ")
    assert '<body class="old">' in text


def test_the_picture_of_the_documentation(
    browser: str, serve: Serve, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    began_s = time.monotonic()
    records = bool(request.config.getoption("--record"))

    def status() -> StatusReport:
        passed_s = time.monotonic() - began_s
        shift = 1 + int(3 * passed_s) % 2
        took = tuple(replace(call, took_us=call.took_us * shift) for call in SAMPLE.ended)
        return replace(SAMPLE, ended=took, ended_count=SAMPLE.ended_count + int(4 * passed_s))

    page = serve(status)
    for one in SAMPLE.members:
        page.put(
            RunChanged(
                what="admitted", peer_id=one.peer, name=one.name, group=0, reason="world size 4"
            )
        )
    target = tmp_path / "page.png"
    options = (f"--screenshot={target}", "--window-size=1100,900", "--hide-scrollbars")
    load_ms = 15_000 if records else 1000
    browse(browser, page.url, tmp_path / "profile", *options, load_ms=load_ms)
    assert target.read_bytes().startswith(b"\x89PNG")
    if records:
        shutil.copyfile(target, PICTURE)
    assert PICTURE.exists()
