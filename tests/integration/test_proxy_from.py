"""A master behind a TCP proxy that names the source of each connection."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

import pccl
from pccl.addresses import parse_address
from pccl.inquiry import examine_master
from pccl.protocol.handshake.opening import Channel, Opening
from tests.integration.conftest import QUICK
from tests.support.insides import machine_of
from tests.support.patience import LIMIT_S
from tests.support.proxy_headers import proxied
from tests.support.secrets import as_sent
from tests.support.strangers import is_closed, send
from tests.support.waiting import until
from tests.support.wiretap import Meddle, Wiretap

TOKEN = "9f3c1e5b7a2d4860b1c8e0f7"
NAME = "alice-of-berlin"
SOURCE, OTHER, REMOTE = "127.0.0.7", "127.0.0.8", "192.0.2.7"
"""Two addresses at which a peer of these tests can be dialled, and one of another machine."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loopback has only one address")


def naming(source: str) -> Meddle:
    """Send a header with ``source`` in front of each connection."""
    begun = set[int]()

    def meddle(number: int, is_diallers: bool, data: bytes) -> bytes:
        if not is_diallers or number in begun:
            return data
        begun.add(number)
        return proxied(source) + data

    return meddle


def connected(address: str, source: str) -> socket.socket:
    """A connection to ``address`` that comes from ``source``."""
    there = parse_address(address)
    return socket.create_connection((there.host, there.port), LIMIT_S, (source, 0))


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK, token=TOKEN, proxy_from="127.0.0.1") as node:
        yield node


def reduced(comm: pccl.Communicator) -> float:
    comm.connect(min_peers=2, timeout_s=LIMIT_S)
    x = np.ones(3, np.float32)
    comm.all_reduce(x)
    return float(x.sum())


def test_peers_join_through_a_proxy_and_are_seen_where_they_are(master: pccl.MasterNode) -> None:
    """They dial each other there."""
    with (
        Wiretap(master.address, naming(SOURCE)) as door,
        Wiretap(master.address, naming(OTHER)) as other_door,
        pccl.Communicator(door.address, token=TOKEN, listen=SOURCE, timing=QUICK) as one,
        pccl.Communicator(other_door.address, token=TOKEN, listen=OTHER, timing=QUICK) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        assert list(threads.map(reduced, (one, other))) == [6.0, 6.0]
        peers = machine_of(master).membership.peers.values()
        assert sorted(peer.seen for peer in peers) == [SOURCE, OTHER]
        assert sorted(member.host for member in one.members()) == [SOURCE, OTHER]
        assert {member.host for member in master.status().members} == {SOURCE, OTHER}


@pytest.mark.parametrize(("source", "is_encrypted"), [(REMOTE, True), (SOURCE, False)])
def test_what_comes_from_elsewhere_is_encrypted_also_from_a_proxy_here(
    master: pccl.MasterNode, source: str, *, is_encrypted: bool
) -> None:
    """Neither the master nor the peer has a connection that leaves this machine."""
    with (
        Wiretap(master.address, naming(SOURCE)) as door,
        Wiretap(master.address, naming(source)) as asked,
        pccl.Communicator(door.address, token=TOKEN, name=NAME, timing=QUICK) as comm,
    ):
        comm.connect(timeout_s=LIMIT_S)
        status = pccl.master_status(asked.address, token=TOKEN, timeout_s=LIMIT_S)
        assert [member.name for member in status.members] == [NAME]
        assert (NAME.encode() in asked.heard) is not is_encrypted


def test_nobody_else_may_name_a_source(
    master: pccl.MasterNode, caplog: pytest.LogCaptureFixture
) -> None:
    opening = as_sent(Opening(Channel.CONTROL))
    attempts = {
        "127.0.0.2": (proxied(REMOTE) + opening, "it sent a PROXY header. A master accepts one"),
        "127.0.0.1": (opening, "it sent no PROXY header: let it send version 2, or remove it"),
    }
    for source, (data, _) in attempts.items():
        with closing(connected(master.address, source)) as sock:
            send(sock, data)
            assert is_closed(sock)
    until(lambda: caplog.text.count("closed a connection from") == len(attempts))
    for source, (_, reason) in attempts.items():
        (line,) = [text for text in caplog.messages if f"from {source}:" in text]
        assert reason in line
    assert REMOTE not in caplog.text
    with Wiretap(master.address, naming(SOURCE)) as door:
        examined = examine_master(door.address, token=TOKEN, timeout_s=LIMIT_S)
    assert examined.seen == SOURCE
