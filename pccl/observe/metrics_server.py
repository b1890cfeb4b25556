"""Serves the metrics of this process to Prometheus, over HTTP at ``/metrics``.

One server at one address shows all peers and masters of the process. It ends with the last of
them. It needs the package ``prometheus_client``, which is imported with the first server.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from pccl.errors import NotConnected
from pccl.observe.metrics import BUCKETS_S, METRICS, Durations, Reading, Readings
from pccl.runtime.io_thread import IOThread
from pccl.transports.base import Address

if TYPE_CHECKING:
    from prometheus_client import Metric

SCRAPE_S_MAX = 5.0
"""How long a scrape waits for the I/O thread. After that it omits that peer or master."""

SHUT_BOTH = 2
"""SHUT_RDWR of :mod:`socket`."""

_log = logging.getLogger("pccl.metrics")

_lock = threading.RLock()  # the finalizer of a communicator may run inside of any other call
_sources: dict[str, Callable[[], list[Reading]]] = {}
"""The values of each peer and master of this process, by the label ``name``."""
_servers: dict[Address, MetricsServer] = {}
"""The servers of this process, by the addresses that the program gave."""


class Served:
    """The metrics of one peer or master, from now until :meth:`end`.

    Args:
        address: where to serve them; port 0: a free port, which the log tells.
        name: label of all of them; another peer of this process with this name gets a number, too.
        io: the thread that may call ``read``.
        read: returns all values.

    Attributes:
        url: where a scraper finds them.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: the address cannot be used.
    """

    def __init__(
        self, address: Address, name: str, io: IOThread, read: Callable[[], Readings]
    ) -> None:
        async def look() -> list[Reading]:
            return list(read())

        with _lock:
            server = _servers.get(address)
            if server is None:
                server = _servers[address] = MetricsServer(address)
            self.url = server.url
            self._server = server
            names = (name, *(f"{name}#{number}" for number in range(2, len(_sources) + 3)))
            self._name = next(one for one in names if one not in _sources)
            _sources[self._name] = lambda: io.submit(look).start().finished.result(SCRAPE_S_MAX)
            server.users.add(self)

    def end_before(self, leave: Callable[[], None]) -> None:
        """Stop serving them, then call ``leave``."""
        try:
            self.end()
        finally:
            leave()

    def end(self) -> None:
        """Stop serving them; the last one at an address ends the server. Idempotent."""
        with _lock:
            if self not in self._server.users:
                return
            self._server.users.discard(self)
            del _sources[self._name]
            if self._server.users:
                return
            del _servers[self._server.address]
            self._server.close()


class MetricsServer:
    """An HTTP server in a thread of its own.

    Args:
        address: where to serve.

    Attributes:
        address: the same.
        url: the URL of the metrics, with the actual port.
        users: peers and masters that asked for this server.
    """

    def __init__(self, address: Address) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "metrics need prometheus_client: pip install 'pccl[metrics]'"
            ) from error
        registry = prometheus_client.CollectorRegistry()
        collector: Any = _Collector()
        registry.register(collector)
        try:
            self._http, self._thread = prometheus_client.start_http_server(
                address.port, address.host, registry
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot serve metrics at {address}: {error.strerror or error}; choose another "
                "port, or `auto` for a free one",
            ) from error
        self.address = address
        self.users: set[Served] = set()
        self._ending = threading.Event()
        # It exists from the start: the interpreter may not start a thread any more when it ends.
        threading.Thread(target=self._stop, name="pccl-metrics-end", daemon=True).start()
        self.url = f"http://{Address(address.host, self._http.server_port)}/metrics"
        _log.info("metrics: %s", self.url)

    def close(self) -> None:
        """Stop, and free the port."""
        self._ending.set()
        with suppress(OSError):
            self._http.socket.shutdown(SHUT_BOTH)  # wakes the server at once
        self._thread.join()
        self._http.server_close()

    def abandon(self) -> None:
        """Close the copy of the port that a forked child has; no thread serves it there."""
        self._http.socket.close()

    def _stop(self) -> None:
        self._ending.wait()
        self._http.shutdown()


class _Collector:
    """Reads all values of this process, in the form of ``prometheus_client``."""

    def collect(self) -> Iterator[Metric]:
        """Yield each metric that has values."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        kinds: dict[str, Any] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        families: dict[str, Any] = {}
        for name, read in list(_sources.items()):
            # Closed just now, or its thread is busy: the others still show.
            with suppress(NotConnected, RuntimeError, concurrent.futures.TimeoutError):
                for metric, labels, value in read():
                    family = families.get(metric)
                    if family is None:
                        described = METRICS[metric]
                        names = ("name", *described.labels)
                        kind = kinds[described.kind]
                        family = families[metric] = kind(metric, described.help, labels=names)
                    if isinstance(value, Durations):
                        family.add_metric((name, *labels), _buckets(value), value.sum_s)
                    else:
                        family.add_metric((name, *labels), value)
        yield from families.values()


def _buckets(durations: Durations) -> list[tuple[str, int]]:
    """Return the upper bounds of the buckets, and how many durations are up to each."""
    bounds = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
    return list(zip(bounds, accumulate(durations.counts), strict=True))


def _abandon() -> None:
    """Drop the servers of the parent in a forked child."""
    global _lock
    _lock = threading.RLock()  # some thread of the parent may have held it
    for server in _servers.values():
        server.abandon()
    _servers.clear()
    _sources.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon)
