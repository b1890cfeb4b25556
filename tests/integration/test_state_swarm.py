"""A newcomer fetches a large state from three processes; one dies, stalls or lies half-way.

The master lives in the test's process; the peers are processes of their own, and this file is their
program too. What they hold is computed, also by the test, from nothing but the size.

``SWARM_MIB`` sets the size (64 by default; 1024 takes a minute), and ``-s`` prints the figures.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

import pccl
from pccl import Timing
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.protocol.types import PeerId
from pccl.runtime.state.upload import StateUpload
from tests.support import members
from tests.support.patience import LONG_LIMIT_S
from tests.support.peers import PeerProcess, obey, report

SIZE = int(os.environ.get("SWARM_MIB", "64")) << 20
PIECES = SIZE // PIECE_BYTES
TIMING = Timing(heartbeat_s=0.2, tick_s=0.05, connect_retry_s=0.01, deadline_s=4.0)

Array = npt.NDArray[np.uint64]


def contents() -> Array:
    """No two pieces are alike."""
    return np.arange(SIZE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def digest_of(array: Array) -> str:
    return hashlib.sha1(array.data).hexdigest()


# -- the peers' program --------------------------------------------------------------------------


class Peer:
    """A member that does what it is told on stdin and reports on stdout."""

    def __init__(self, address: str, full: str) -> None:
        self.comm = pccl.Communicator(address, timing=TIMING)
        self.array = contents() if full == "full" else np.zeros(SIZE // 8, np.uint64)
        self.array[:1] += 0  # its own pages
        self.state = pccl.SharedState([pccl.TensorInfo.from_numpy(self.array, "w")])
        self.given = 0

    def connect(self) -> dict[str, Any]:
        self.comm.connect()
        return {"peer": self.comm.peer_id}

    def grow(self, size: int) -> dict[str, Any]:
        members.grow(self.comm, size)
        return {"world": size}

    def sync(self) -> dict[str, Any]:
        began = time.perf_counter()
        info = self.comm.sync_shared_state(self.state)
        took_s = time.perf_counter() - began
        self.state.push_revision()
        return {
            "took_s": took_s,
            "tx": info.tx_bytes,
            "rx": info.rx_bytes,
            "attempts": info.attempts,
            "wrong": info.wrong_pieces,
            "revision": info.revision,
            "digest": digest_of(self.array),
            "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }

    def wipe(self) -> dict[str, Any]:
        self.array[:] = 0
        self.state.revision = 0
        return {}

    def send_plain(self) -> dict[str, Any]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            report({"port": server.getsockname()[1]})
            connection, _ = server.accept()
            with connection:
                connection.sendall(self.array.data)
        return {}

    def receive_plain(self, port: int) -> dict[str, Any]:
        fresh: memoryview = np.zeros(SIZE, np.uint8).data
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            received = 0
            while received < SIZE:
                received += connection.recv_into(fresh[received:])
        return {"took_s": time.perf_counter() - began}

    def stop_after(self, share: float, what: str) -> dict[str, Any]:
        """Get this signal when about to give so much of the state."""

        def make(peer: PeerId, number: int, payload: memoryview) -> memoryview:
            self.given += len(payload)
            if self.given >= share * SIZE and what:
                signal.pthread_kill(threading.get_ident(), getattr(signal, what))
                self.given = -(1 << 60)  # once
            return payload

        self._patch(make)
        return {}

    def lie_once(self) -> dict[str, Any]:
        """Flip a bit in the second piece that is given."""
        made = 0

        def make(peer: PeerId, number: int, payload: memoryview) -> memoryview:
            nonlocal made
            made += 1
            if made != 2:
                return payload
            wrong = bytearray(payload)
            wrong[len(wrong) // 3] ^= 4
            return memoryview(wrong)

        self._patch(make)
        return {}

    def _patch(self, make: Callable[[PeerId, int, memoryview], memoryview]) -> None:
        payload = StateUpload._payload  # pyright: ignore[reportPrivateUsage]

        def patched(upload: StateUpload, peer: PeerId, number: int) -> Callable[[], memoryview]:
            real = payload(upload, peer, number)
            return lambda: make(peer, number, real())

        mock.patch.object(StateUpload, "_payload", patched).start()


def serve(address: str, full: str) -> None:
    peer = Peer(address, full)
    obey(peer)
    peer.comm.close()


# -- the test's side -----------------------------------------------------------------------------


class Swarm:
    """Three members with a state, and one that has just joined without."""

    def __init__(self, sources: int = 3) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0", timing=TIMING)
        self.master.run()
        self.processes: list[PeerProcess] = []
        self.digest = digest_of(contents())
        for _ in range(sources):
            self._join("full")
        for source in self.processes:
            source.tell("sync")
        assert [source.answer()["rx"] for source in self.processes] == [0] * sources
        self._join("empty")
        *self.sources, self.joiner = self.processes

    def _join(self, full: str) -> None:
        size = len(self.processes) + 1
        newcomer = PeerProcess(__name__, self.master.address, full, limit_s=LONG_LIMIT_S)
        newcomer.tell("connect")
        for process in self.processes:
            process.tell("grow", size)
        for process in (*self.processes, newcomer):
            process.answer()
        self.processes.append(newcomer)

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.master.interrupt()


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    made = Swarm()
    yield made
    made.close()


def plain_copy_s(source: PeerProcess, joiner: PeerProcess) -> float:
    port = source.ask("send_plain")["port"]
    took_s: float = joiner.ask("receive_plain", port)["took_s"]
    source.answer()
    return took_s


def print_figures(what: str, answers: dict[str, dict[str, Any]], plain_s: float) -> None:
    took_s = answers["joiner"]["took_s"]
    peak = {name: answer["rss_mib"] for name, answer in answers.items()}
    print(  # noqa: T201
        f"\n{what}: {SIZE >> 20} MiB in {took_s:.2f} s, plain copy {plain_s:.2f} s; "
        f"peak MiB: {peak}; tx MiB: {[answer['tx'] >> 20 for answer in answers.values()]}"
    )


@pytest.mark.parametrize("sources", [1, 3])
def test_from_some_at_once(sources: int) -> None:
    swarm = Swarm(sources)
    try:
        for process in swarm.processes:
            process.tell("sync")
        answers = [process.answer() for process in swarm.processes]
        named = dict(
            zip([f"source {n}" for n in range(sources)] + ["joiner"], answers, strict=True)
        )
        print_figures(f"from {sources}", named, plain_copy_s(swarm.sources[0], swarm.joiner))
        assert {answer["digest"] for answer in answers} == {swarm.digest}
        assert answers[-1]["rx"] == SIZE
        assert all(answer["tx"] > 0 for answer in answers[:-1])
        # The end game asks a second source for outstanding pieces: at most a window of each slow
        # source, and a window is what a source sends in a second.
        assert sum(answer["tx"] for answer in answers) <= SIZE + SIZE // 2
    finally:
        swarm.close()


def test_one_is_killed_and_one_lies(swarm: Swarm) -> None:
    victim, liar, honest = swarm.sources
    victim.ask("stop_after", 1 / 8, "SIGKILL")
    liar.ask("lie_once")
    for process in swarm.processes:
        process.tell("sync")
    left = [liar, honest, swarm.joiner]
    answers = [process.answer() for process in left]
    named = {"liar": answers[0], "honest": answers[1], "joiner": answers[2]}
    print_figures("one killed, one lies", named, plain_copy_s(honest, swarm.joiner))
    assert victim.process.wait(LONG_LIMIT_S) == -signal.SIGKILL
    assert {answer["digest"] for answer in answers} == {swarm.digest}
    assert {answer["attempts"] for answer in answers} == {1}
    assert {answer["revision"] for answer in answers} == {1}
    got = named["joiner"]
    assert (got["rx"], got["wrong"], got["tx"]) == (SIZE, 1, 0)
    sent = sum(answer["tx"] for answer in answers)
    # What the dead one had sent is not fetched again, but for what was on its way.
    assert SIZE - SIZE // 8 <= sent <= SIZE - SIZE // 8 + 24 * PIECE_BYTES
    for process in left:  # they go on
        process.tell("sync")
    assert [process.answer()["rx"] for process in left] == [0, 0, 0]


def test_one_is_stopped(swarm: Swarm) -> None:
    """It has what is elected, so nobody waits for it; when it goes on, it is a member as before."""
    victim, *others = swarm.sources
    victim.ask("stop_after", 1 / 8, "SIGSTOP")
    for process in swarm.processes:
        process.tell("sync")
    left = [*others, swarm.joiner]
    try:
        answers = [process.answer() for process in left]
    finally:
        victim.process.send_signal(signal.SIGCONT)
    assert {answer["digest"] for answer in answers} == {swarm.digest}
    assert answers[-1]["rx"] == SIZE
    assert {answer["attempts"] for answer in answers} == {1}
    late = victim.answer()
    assert late["digest"] == swarm.digest
    assert sum(answer["tx"] for answer in answers) <= SIZE + SIZE // 8
    for process in swarm.processes:
        process.tell("sync")
    assert [process.answer()["rx"] for process in swarm.processes] == [0, 0, 0, 0]


if __name__ == "__main__":
    serve(*sys.argv[1:])
