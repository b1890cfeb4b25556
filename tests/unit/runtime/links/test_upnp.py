"""UPnP with a router on this machine, through the library; and without the library."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pccl.machines.port_mapper import AskUpnp, UpnpAnswered
from pccl.machines.router_path import RouterPath
from pccl.protocol.port_mapping.answers import PortGranted
from pccl.runtime.links.upnp import ANSWER_BYTES_MAX, UpnpRouter, load_library
from tests.support.igd import UpnpBox
from tests.support.patience import LIMIT_S

HOME = RouterPath("127.0.0.1", "8.8.8.8", "127.0.0.1", "127.0.0.1")
ASKED = AskUpnp(HOME, 48200, 48200, 1200, LIMIT_S)
GRANTED = PortGranted("8.8.4.4", 48200, 1200, 0)

installed = pytest.mark.skipif(load_library() is None, reason="needs async-upnp-client")


async def ask(box: UpnpBox, asked: AskUpnp = ASKED) -> UpnpAnswered:
    """What a router answers to one request."""
    with ThreadPoolExecutor(1) as executor:
        async with box.serving() as search_port:
            router = UpnpRouter(asyncio.get_running_loop(), executor, search_port=search_port)
            return await router.ask(asked)


async def test_without_the_library() -> None:
    with ThreadPoolExecutor(1) as executor:
        router = UpnpRouter(asyncio.get_running_loop(), executor, load=lambda: None)
        answer = await router.ask(ASKED)
    assert answer == UpnpAnswered(
        None, "not installed (pip install 'pccl[upnp]')", ASKED.lifetime_s
    )


@installed
async def test_a_port_is_mapped_renewed_and_deleted() -> None:
    box = UpnpBox()
    with ThreadPoolExecutor(1) as executor:
        async with box.serving() as search_port:
            router = UpnpRouter(asyncio.get_running_loop(), executor, search_port=search_port)
            assert await router.ask(ASKED) == UpnpAnswered(GRANTED, "", ASKED.lifetime_s)
            assert box.ports == {48200: ("127.0.0.1", 48200, 1200)}
            found = ["/device.xml", "/scpd.xml", "/control", "/control"]
            assert box.paths == found
            assert await router.ask(ASKED) == UpnpAnswered(GRANTED, "", ASKED.lifetime_s)
            assert box.paths == [*found, "/control", "/control"], "the service is known"
            assert await router.ask(replace(ASKED, lifetime_s=0)) == UpnpAnswered(None)
            assert box.ports == {}


@installed
@pytest.mark.parametrize("service", ["WANIPConnection:2", "WANPPPConnection:1"])
async def test_other_services_forward_ports_too(service: str) -> None:
    box = UpnpBox(service=f"urn:schemas-upnp-org:service:{service}")
    assert await ask(box) == UpnpAnswered(GRANTED, "", ASKED.lifetime_s)


@installed
@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (UpnpBox(error=725), "the router offers only mappings that never end"),
        (UpnpBox(error=718), "another machine uses this port of the router"),
        (UpnpBox(error=606), "the router refuses (error 606 Words)"),
        (UpnpBox(service="urn:schemas-upnp-org:service:Layer3Forwarding:1"), "forwards no ports"),
        (UpnpBox(padding=ANSWER_BYTES_MAX), "the router's answer is too long"),
        (UpnpBox(redirects=True), "HTTP status 302"),
        (UpnpBox(control="http://192.0.2.77/control"), "forwards no ports"),
        (UpnpBox(control="/nothing"), "HTTP status 404"),
    ],
)
async def test_a_refusal(box: UpnpBox, reason: str) -> None:
    answer = await ask(box)
    assert answer.granted is None
    assert reason in answer.reason
    assert 0 < len(answer.reason) <= 200
    assert box.ports == {}
    assert "/elsewhere.xml" not in box.paths


@installed
@pytest.mark.parametrize(
    "box",
    [
        UpnpBox(speaks=False),
        UpnpBox(location="http://192.0.2.77/device.xml"),  # another machine's
        UpnpBox(location="file:///etc/passwd"),
        UpnpBox(location="http://[127.0.0.1/device.xml"),
    ],
)
async def test_no_answer_of_the_router(box: UpnpBox) -> None:
    assert await ask(box, replace(ASKED, limit_s=0.2)) == UpnpAnswered(
        None, "no answer", ASKED.lifetime_s
    )
    assert box.paths == []


@installed
@pytest.mark.parametrize("host", ["", "nonsense", "0.0.0.0.0"])
async def test_an_address_that_is_none(host: str) -> None:
    assert await ask(UpnpBox(host=host)) == UpnpAnswered(
        replace(GRANTED, host=""), "", ASKED.lifetime_s
    )
