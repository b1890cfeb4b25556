"""Questions to the kernel, on the loopback of this machine."""

from __future__ import annotations

import socket
import sys

import pytest

from pccl.cli.doctor import network
from tests.support.patience import LIMIT_S
from tests.support.ports import free_port

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=network.CONNECTS) as server:
        found = network.connect(host, server.getsockname()[1], LIMIT_S)
    assert (found.host, found.local) == (host, host)
    assert len(found.round_trips_s) == network.CONNECTS
    assert min(found.round_trips_s) > 0
    assert found.segment_bytes is not None
    if sys.platform == "linux":
        assert found.path_mtu is not None
        assert found.path_mtu > found.segment_bytes
        assert found.congestion


def test_no_connection() -> None:
    with pytest.raises(ConnectionRefusedError):
        network.connect("127.0.0.1", free_port(), LIMIT_S)


def test_names() -> None:
    assert network.resolve("127.0.0.1", 1, LIMIT_S) == ["127.0.0.1"]
    with pytest.raises(OSError, match=r"\S"):
        network.resolve("no.such.host.invalid", 1, LIMIT_S)


@LINUX
def test_the_packets_of_an_interface() -> None:
    mtu = network.mtu_of("lo")
    assert mtu is not None
    assert mtu >= 1280
    assert network.mtu_of("no-such-interface") is None
    assert network.mtu_of("../x") is None


@LINUX
def test_a_connection_through_an_interface() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=network.CONNECTS) as server:
        port = server.getsockname()[1]
        assert network.connect("127.0.0.1", port, LIMIT_S, "lo").local == "127.0.0.1"
    assert network.outward("no-such-interface") == ""
