"""``UpnpRouter``: asks the router for a port in UPnP (the Internet Gateway Device profile).

The package ``async-upnp-client`` does the work; ``pip install 'pccl[upnp]'`` installs it. It is
loaded when PCP and NAT-PMP have failed, on a thread, because that takes some 0.3 s.

Every device of the network can answer a search. Only the answers of the router count: all requests
go to its address, follow no redirection, and read ``ANSWER_BYTES_MAX`` at most.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import urlsplit

from pccl.machines.port_mapper import AskUpnp, UpnpAnswered
from pccl.protocol.guards.texts import printable
from pccl.protocol.port_mapping.answers import PortGranted

NOT_INSTALLED = "not installed (pip install 'pccl[upnp]')"

SEARCH_PORT = 1900
"""UDP port at which devices answer searches."""

GROUP = "239.255.255.250"
"""The multicast address of searches. Some routers answer there only, some at their own address."""

ROUTERS = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
"""What is searched for. A newer device also answers for this version."""

SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""Services that forward ports, the first choice first."""

DESCRIPTION = "pccl"
"""What the router's pages show for the mapping."""

ANSWER_BYTES_MAX = 256 << 10
"""Longest answer to one request."""

SEARCH_WAIT_S = 1
"""How long a device may wait before it answers a search by multicast."""


class UpnpRefusal(Exception):
    """The router cannot be asked, or it refuses; the text says why."""


@dataclass(frozen=True, slots=True)
class UpnpLibrary:
    """The modules of the library that this module uses."""

    search: Any
    factory: Any
    const: Any
    aiohttp: Any


def load_library() -> UpnpLibrary | None:
    """Return the library; None: it is not installed."""
    try:
        return UpnpLibrary(
            search=importlib.import_module("async_upnp_client.search"),
            factory=importlib.import_module("async_upnp_client.client_factory"),
            const=importlib.import_module("async_upnp_client.const"),
            aiohttp=importlib.import_module("aiohttp"),
        )
    except ImportError:
        return None


class BoundedRequester:
    """Makes the HTTP requests of the library, to one host, with bounded answers.

    Args:
        library: the library.
        host: the only host that requests may go to.
    """

    def __init__(self, library: UpnpLibrary, host: str) -> None:
        self._library = library
        self._host = host

    async def async_http_request(self, http_request: Any) -> Any:
        """Make a request; the library calls this."""
        if urlsplit(str(http_request.url)).hostname != self._host:
            raise UpnpRefusal("the router names an address that is not its own")
        async with (
            self._library.aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                http_request.method,
                http_request.url,
                headers=http_request.headers,
                data=http_request.body,
                allow_redirects=False,
            ) as response,
        ):
            body = bytearray()
            async for data in response.content.iter_any():
                body += data
                if len(body) > ANSWER_BYTES_MAX:
                    raise UpnpRefusal("the router's answer is too long")
            return self._library.const.HttpResponse(
                response.status, dict(response.headers), body.decode("utf-8", "replace")
            )


class UpnpRouter:
    """Asks routers in UPnP.

    Args:
        loop: runs the requests.
        executor: loads the library.
        load: returns the library, or None.
        search_port: port at which routers answer searches.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        load: Callable[[], UpnpLibrary | None] = load_library,
        search_port: int = SEARCH_PORT,
    ) -> None:
        self._loop = loop
        self._executor = executor
        self._load = load
        self._search_port = search_port
        self._service: Any = None
        """The service that has forwarded a port; None: search for one."""

    async def ask(self, asked: AskUpnp) -> UpnpAnswered:
        """Ask a router to forward a port or to stop that; never raises, and takes ``limit_s``."""
        try:
            async with asyncio.timeout(asked.limit_s):
                library = await self._loop.run_in_executor(self._executor, self._load)
                if library is None:
                    return UpnpAnswered(None, NOT_INSTALLED, asked.lifetime_s)
                return UpnpAnswered(await self._ask(library, asked), "", asked.lifetime_s)
        except TimeoutError:
            reason = "no answer"
        except UpnpRefusal as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - what a device answers may break the library
            reason = _words(error)
        self._service = None
        return UpnpAnswered(None, printable(reason)[:200], asked.lifetime_s)

    async def _ask(self, library: UpnpLibrary, asked: AskUpnp) -> PortGranted | None:
        router, own = asked.path.router, asked.path.own_inside
        service = self._service
        if service is None:
            location = await self._search(library, router, own)
            factory = library.factory.UpnpFactory(
                BoundedRequester(library, router), non_strict=True
            )
            service = _forwarder(await factory.async_create_device(location))
        which = {"NewRemoteHost": "", "NewExternalPort": asked.outer, "NewProtocol": "TCP"}
        if not asked.lifetime_s:
            await service.action("DeletePortMapping").async_call(**which)
            return None
        found = await service.action("GetExternalIPAddress").async_call()
        await service.action("AddPortMapping").async_call(
            **which,
            NewInternalPort=asked.port,
            NewInternalClient=own,
            NewEnabled=True,
            NewPortMappingDescription=DESCRIPTION,
            NewLeaseDuration=asked.lifetime_s,
        )
        self._service = service
        host = _host(found.get("NewExternalIPAddress"))
        return PortGranted(host, asked.outer, asked.lifetime_s, 0)

    async def _search(self, library: UpnpLibrary, router: str, own: str) -> str:
        """Return where the router describes itself; wait for it as long as the caller waits."""
        answered: asyncio.Future[str] = self._loop.create_future()

        def take(headers: Any) -> None:
            location = str(headers.get("location") or "")
            if _is_at(location, router) and not answered.done():
                answered.set_result(location)

        listener = library.search.SsdpSearchListener(
            callback=take,
            loop=self._loop,
            source=(own, 0),
            target=(GROUP, self._search_port),
            timeout=SEARCH_WAIT_S,
            search_target=ROUTERS,
        )
        await listener.async_start()
        try:
            for target in ((router, self._search_port), None):
                with suppress(OSError):
                    listener.async_search(target)
            return await answered
        finally:
            listener.async_stop()


def _is_at(location: str, router: str) -> bool:
    """Whether a device describes itself at the router's address."""
    try:
        parts = urlsplit(location)
        return parts.scheme == "http" and parts.hostname == router
    except ValueError:
        return False


def _host(value: object) -> str:
    """Return an IPv4 address that a router gives as its own; empty: it gives none."""
    try:
        return str(IPv4Address(str(value)))
    except ValueError:
        return ""


def _forwarder(device: Any) -> Any:
    """Return the service of a router that forwards ports."""
    services = {one.service_type: one for one in device.all_services}
    for name in SERVICES:
        if name in services and services[name].has_action("AddPortMapping"):
            return services[name]
    raise UpnpRefusal("the router forwards no ports")


def _words(error: Exception) -> str:
    """Return why a request has failed, in a few words."""
    code = getattr(error, "error_code", None)
    if code == 725:
        return "the router offers only mappings that never end"
    if code == 718:
        return "another machine uses this port of the router"
    if code is not None:
        return f"the router refuses (error {code} {getattr(error, 'error_desc', '')})"
    if (status := getattr(error, "status", None)) is not None:
        return f"the router answers with HTTP status {status}"
    return str(error) or type(error).__name__
