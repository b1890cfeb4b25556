"""The page over HTTP: headers, the code, hosts, the stream of events, bounds, and its commands."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import pccl
from pccl.observe.page import server as server_module
from pccl.observe.page.app import HEADERS
from pccl.observe.page.feed import CLIENTS_MAX
from pccl.observe.page.server import CONNECTIONS_MAX, PageServer
from pccl.transports import tcp_socket
from tests.support.commands import PCCL, environment_with, run_to_end, running
from tests.support.patience import LIMIT_S
from tests.support.statuses import SAMPLE
from tests.support.waiting import until


class Answer:
    """An answer to one request."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()


def port_of(page: PageServer) -> int:
    return int(re.findall(r":(\d+)/", page.url)[0])


def ask(page: PageServer, path: str, method: str = "GET", body: str = "", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(page), timeout=LIMIT_S)
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    with contextlib.closing(connection):
        connection.request(method, path, body.encode() or None, named)
        return Answer(connection.getresponse())


@contextlib.contextmanager
def watching(port: int, **headers: str) -> Generator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    with contextlib.closing(connection):
        connection.request("GET", "/events", headers=named)
        with connection.getresponse() as response:
            yield response


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in response:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)


@pytest.fixture
def page() -> Generator[PageServer]:
    server = PageServer("127.0.0.1", 0, lambda: SAMPLE)
    server.start()
    yield server
    server.close()


@pytest.fixture
def guarded() -> Generator[PageServer]:
    """A page that other machines can reach."""
    server = PageServer("0.0.0.0", 0, lambda: SAMPLE)
    server.start()
    yield server
    server.close()


# -- on loopback -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js", "/nothing"])
def test_every_answer_has_the_strict_headers(page: PageServer, path: str) -> None:
    answer = ask(page, path)
    assert answer.status == (404 if path == "/nothing" else 200)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert answer.headers["connection"] == "close"
    assert answer.headers["server"] is None


def test_the_files_load_nothing_from_elsewhere_and_make_no_markup(page: PageServer) -> None:
    html, script = ask(page, "/").text, ask(page, "/page.js").text
    assert "//" not in re.sub(r"<!.*?>", "", html)
    assert not re.findall(r"<script(?! src=\"page\.js\" defer>)|\son\w+=|style=", html)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|http", script)


def test_the_stream_shows_the_run(page: PageServer) -> None:
    with watching(port_of(page)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        shown = next(data for kind, data in events(response) if kind == "picture" and data["run"])
    assert [member["who"] for member in shown["run"]["members"]] == [
        "1 (alice)", "2 (bob)", "3 (carol)", "4 (dave)",
    ]  # fmt: skip


def test_another_host_name_gets_nothing(page: PageServer) -> None:
    for path in ("/", "/events", "/page.js"):
        answer = ask(page, path, Host="evil.example")
        assert (answer.status, answer.headers["x-frame-options"]) == (421, "DENY")
    assert ask(page, "/", Host=f"localhost:{port_of(page)}").status == 200


def test_another_site_cannot_take_the_places_of_browsers(page: PageServer) -> None:
    assert ask(page, "/events", Sec_Fetch_Site="cross-site").status == 403
    assert ask(page, "/", Sec_Fetch_Site="cross-site").status == 200


def test_browsers_are_bounded(page: PageServer) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(watching(port_of(page))) for _ in range(CLIENTS_MAX)]
        for stream in streams:
            assert stream.readline() == b"retry: 2000\n"
        assert ask(page, "/events").status == 503
        assert ask(page, "/").status == 200
    until(lambda: ask(page, "/events", "HEAD").status == 200)


def test_browsers_that_hang_lose_their_places(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_socket, "SILENCE_MAX_S", 1)
    with contextlib.ExitStack() as stack:
        for _ in range(CLIENTS_MAX):
            hanging = stack.enter_context(socket.socket())
            hanging.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # full after few messages
            hanging.connect(("127.0.0.1", port_of(page)))
            hanging.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert hanging.recv(1) == b"H"
        until(lambda: ask(page, "/events", "HEAD").status == 200)


def test_strangers_that_say_nothing_are_bounded(
    page: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S_MAX", 2 * LIMIT_S)
    with contextlib.ExitStack() as stack:

        def stranger() -> socket.socket:
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", port_of(page)), LIMIT_S)
            )

        silent = [stranger() for _ in range(CONNECTIONS_MAX)]
        silent[0].sendall(b"GET / HTTP/1.1\r\n")
        assert ask(page, "/").status == 200
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest one"
        monkeypatch.setattr(server_module, "REQUEST_S_MAX", 0.5)
        silent = [stranger() for _ in range(CONNECTIONS_MAX)]
        for one in silent:
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
    assert ask(page, "/").status == 200


def test_an_address_in_use_is_an_error(page: PageServer) -> None:
    second = PageServer("127.0.0.1", port_of(page), lambda: SAMPLE)
    with pytest.raises(OSError, match="in use"):
        second.start()
    second.close()


# -- beyond loopback -------------------------------------------------------------------------------


def cookie_of(answer: Answer) -> str:
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    cookie, *attributes = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(attributes)
    return cookie


def test_without_the_code_there_is_nothing(guarded: PageServer) -> None:
    for path in ("/", "/?code=", "/?code=wrong", "/events"):
        answer = ask(guarded, path, Cookie="pccl_page=x")
        assert (answer.status, answer.headers["set-cookie"]) == (403, None)
        assert "?code=" in answer.text


def test_the_code_is_exchanged_for_a_cookie(guarded: PageServer) -> None:
    code = guarded.url.partition("/?code=")[2]
    assert len(code) >= 43
    cookie = cookie_of(ask(guarded, f"/?code={code}"))
    assert ask(guarded, "/", Cookie=cookie).status == 200
    with watching(port_of(guarded), Cookie=cookie) as response:
        assert response.status == 200
        assert next(events(response))[0] == "past"


# -- commands --------------------------------------------------------------------------------------


def test_the_page_of_a_master_shows_its_log_and_ends_with_it() -> None:
    command = (*PCCL, "master", "--listen", "127.0.0.1:0", "--http", "auto")
    with running(*command, env=environment_with()) as process:
        assert process.stdout is not None
        told = ""
        while "page at" not in told:
            told += process.stdout.readline()
        master = re.findall(r"listening on (\S+)", told)[0]
        port = int(re.findall(r"page at http://127\.0\.0\.1:(\d+)/\n", told)[0])
        with watching(port) as response, pccl.Communicator(master, name="alice") as comm:
            comm.connect()
            log = (data["text"] for kind, data in events(response) if kind == "log")
            assert next(log).startswith("peer 1 (alice) of group 0 registered")
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0


def test_launch_says_where_the_page_is(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("print('done')")
    command = (*PCCL, "launch", "-n", "1", "--http", "0.0.0.0:0", "--", sys.executable, str(script))
    done = run_to_end(*command, env=environment_with(), limit_s=LIMIT_S)
    assert done.returncode == 0
    assert re.search(r"^page at http://0\.0\.0\.0:\d+/\?code=\S{43}$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--http", "nowhere"], 2, "is not an address"),
        (["--http", "0.0.0.0:0"], 2, "so the run needs a token"),
        (["--http", "192.0.2.1:80"], 2, "so the run needs a token"),
    ],
)
def test_wrong_addresses_of_the_page(
    arguments: list[str], status: int, says: str, ready_pccl: tuple[str, ...]
) -> None:
    command = (*ready_pccl, "master", "--listen", "127.0.0.1:0", *arguments)
    done = run_to_end(*command, env=environment_with(), limit_s=LIMIT_S)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr


def test_an_address_of_the_page_that_is_in_use(
    page: PageServer, ready_pccl: tuple[str, ...]
) -> None:
    command = (*ready_pccl, "master", "--listen", "127.0.0.1:0", "--http", str(port_of(page)))
    done = run_to_end(*command, env=environment_with(), limit_s=LIMIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot use 127.0.0.1:{port_of(page)}" in done.stderr


def test_without_the_extra_the_error_names_it(tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ImportError('no starlette')")
    environment = environment_with(PYTHONPATH=str(tmp_path))
    command = (*PCCL, "master", "--listen", "127.0.0.1:0", "--http", "auto")
    done = run_to_end(*command, env=environment, limit_s=LIMIT_S)
    assert done.returncode == 1
    assert "pip install 'pccl[page]'" in done.stderr
