"""Serves the page in a thread of its own, so that it never delays the master.

The thread takes a bounded number of connections, one request each, and little time for a request:
strangers cannot use up the descriptors of the master's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pccl.observe.page.access import Access
from pccl.observe.page.app import make_app
from pccl.observe.page.feed import CLIENTS_MAX, Feed
from pccl.protocol.status_report import StatusReport
from pccl.telemetry.events import PeerReport
from pccl.transports.tcp_socket import set_options

CONNECTIONS_MAX = 4 * CLIENTS_MAX

REQUEST_S_MAX = 10.0
"""Time in which a request must be complete."""

CLOSE_S_MAX = 5.0

REQUEST_HEAD_BYTES_MAX = 16 << 10


class BoundedProtocol(H11Protocol):
    """HTTP for one connection, within the bounds of this module."""

    _patience: asyncio.TimerHandle | None = None
    _began_s: float = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the connection time for its request. If it is too many, end the oldest without one.

        The kernel ends a connection whose other side takes no data.
        """
        super().connection_made(transport)
        set_options(transport.get_extra_info("socket"))
        self._began_s = self.loop.time()
        self._patience = self.loop.call_later(REQUEST_S_MAX, self._expect_request)
        known = cast("set[BoundedProtocol]", self.connections)
        there = [one for one in known if not one.transport.is_closing()]
        if len(there) > CONNECTIONS_MAX:
            silent = (one for one in there if not one._has_request())
            min(silent, key=lambda one: one._began_s).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the time for the request."""
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def _has_request(self) -> bool:
        cycle: Any = self.cycle  # None before the head of the request has come; no route reads more
        return cycle is not None

    def _expect_request(self) -> None:
        if not self._has_request():
            self.transport.abort()


class _Uvicorn(uvicorn.Server):
    """A server that raises if its address cannot be used, instead of ending the program."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: Any = None) -> None:
        """Listen on the address.

        Raises:
            OSError: the address cannot be used.
        """
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            return BoundedProtocol(config, self.server_state, {})

        listener = await loop.create_server(protocol, config.host, config.port)
        self.servers = [listener]
        self.started = True
        self._on_started(listener.sockets[0].getsockname()[1])


class PageServer:
    """Serves the page of one run.

    Args:
        host: host to listen on.
        port: port to listen on; 0: a free one.
        status: returns the status of the run; it may block.
    """

    def __init__(self, host: str, port: int, status: Callable[[], StatusReport]) -> None:
        self._access = Access(host)
        self._feed = Feed(status)
        self._host, self._port = host, port
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._server: _Uvicorn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pccl-page", daemon=True)

    @property
    def url(self) -> str:
        """The address of the page, with the actual port once it runs, and with its code."""
        code = self._access.code
        return f"http://{self._host}:{self._port}/{f'?code={code}' if code else ''}"

    def put(self, event: PeerReport) -> None:
        """Add an event to the log of the page. Any thread may call this."""
        self._feed.put(event)

    def start(self) -> None:
        """Serve, and return at once.

        Raises:
            OSError: the address cannot be used.
        """
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._loop is not None:
            self._server.should_exit = True
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._feed.end)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S_MAX)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._ready.is_set():
                raise
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # strangers cannot fill the log
        config = uvicorn.Config(
            make_app(self._feed, self._access),
            self._host.strip("[]"),
            self._port,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
            headers=[("Connection", "close")],
            timeout_graceful_shutdown=1,
        )
        self._loop = asyncio.get_running_loop()
        self._server = _Uvicorn(config, self._started)
        asking = asyncio.create_task(self._feed.run())
        try:
            await self._server.serve()
        finally:
            asking.cancel()

    def _started(self, port: int) -> None:
        self._port = port
        self._ready.set()
