"""Four peers behind NATs of all kinds, over real connections on loopback."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import pytest

import pccl
from pccl.protocol.limits import LANES_BETWEEN_MACHINES
from pccl.runtime.io_thread import IOThread
from pccl.stress.emulator.nat import V6_HOST, LoopbackNetwork, NatTransport
from tests.support.diloco_work import reduce, share, train
from tests.support.insides import engine_of, machine_of
from tests.support.nat_table import TABLE, Place, paths_of, places_of, widths_of
from tests.support.patience import LIMIT_S
from tests.support.ports import free_port
from tests.support.waiting import until

QUICK = pccl.Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, dial_s=0.5, resume_s=0.4)
NET = f"127.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
"""Addresses of this process: the master has .1, the peers .2 to .5, their NATs .12 to .15."""
MASTER = f"{NET}.1"
T = TypeVar("T")


class Peers:
    """A master and four peers in the places of a cell, with threads to call from."""

    def __init__(self, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._user = object()
        self._io = IOThread.acquire(self._user)
        self._monkeypatch = monkeypatch
        self._network = LoopbackNetwork()
        self._threads = ThreadPoolExecutor(4)
        self.comms: list[pccl.Communicator] = []
        self._inner = self._io.transport
        self.port = free_port()
        self._use(MASTER)
        self.master = pccl.MasterNode(f"[::]:{self.port}", timing=QUICK, relay=True)
        self.master.run()
        places = places_of(cell)
        for index, place in enumerate(places):
            self._put(index, place, places.index(place))
            self.comms.append(self._peer(index, place))

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        self.master.interrupt()
        self._threads.shutdown()
        IOThread.give_up(self._user)

    def _peer(self, index: int, place: Place) -> pccl.Communicator:
        self._use(f"{NET}.{2 + index}", place.version)
        master = f"[{V6_HOST}]:{self.port}" if place.version == 6 else f"{MASTER}:{self.port}"
        return pccl.Communicator(master, timing=QUICK, listen="[::]")

    def join(self) -> None:
        """All join; their ids are in the order of their places."""
        calls: list[Future[None]] = []
        for comm in self.comms:
            calls.append(self._threads.submit(comm.connect, min_peers=4))
            until(lambda: len(machine_of(self.master).membership.peers) == len(calls))
        for call in calls:
            call.result(LIMIT_S)

    def paths(self) -> str:
        """How they reach each other now."""
        return paths_of([engine_of(comm) for comm in self.comms])

    def widths(self) -> set[int]:
        """How many lanes the links have that both ends have dialled."""
        return widths_of([engine_of(comm) for comm in self.comms], "p")

    def each(self, work: Callable[[pccl.Communicator], T]) -> list[T]:
        """All do the same at the same time."""
        return [one.result(LIMIT_S) for one in [self._threads.submit(work, c) for c in self.comms]]

    def _use(self, host: str, version: int = 0) -> None:
        """What is made next is on this host."""
        transport = NatTransport(self._inner, self._network, host, version)
        self._monkeypatch.setattr(self._io, "transport", transport)

    def _put(self, index: int, place: Place, first: int) -> None:
        """Put a peer behind its NAT, which is that of the first in this place if they share it."""
        if place.nat is None:
            return
        host, network = f"{NET}.{2 + index}", self._network
        outside = f"{NET}.{12 + (first if place.is_shared else index)}"
        if place.is_home:
            network.homes[host] = outside
        if outside in network.nats:
            network.nats[host] = network.nats[outside]
        else:
            ports = (self.port,) if place.is_barred else ()
            network.translate(replace(place.nat, ports=ports), outside, host)


@pytest.mark.parametrize(("cell", "paths"), TABLE)
def test_four_peers_reduce_synchronize_and_train(
    cell: str, paths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "v6" in cell and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    peers = Peers(cell, monkeypatch)
    try:
        peers.join()
        until(lambda: peers.paths() == paths, LIMIT_S, 0.01)
        assert peers.each(reduce) == [8.0] * 4
        assert peers.paths() == paths
        if "p" in paths and "r" not in paths:  # a reduce uses a link that both have dialled
            until(lambda: LANES_BETWEEN_MACHINES in peers.widths(), LIMIT_S, 0.01)
        assert len(set(peers.each(share))) == 1
        assert len(set(peers.each(train))) == 1
    finally:
        peers.close()


def has_ipv6() -> bool:
    try:
        with socket.create_server((V6_HOST, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
