"""Strangers who dial faster than anybody can greet: peers join all the same, and the run goes on.

The strangers dial from a process of their own. This process has the master and the members, so its
descriptors and its log are theirs.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Channel, Opening, Security
from pccl.protocol.limits import LOG_INTERVAL_NS, LOG_LINES_MAX
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.transports.tcp import TcpTransport
from tests.integration.conftest import QUICK, Run
from tests.support.claimant import greet
from tests.support.insides import lanes_of, master_port, port_of, server_of
from tests.support.patience import LIMIT_S, patient
from tests.support.secrets import secrets_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs /proc, and all of 127.0.0.0/8"
)

TOKEN = secrets.token_urlsafe(24)
FLOODER = Path(__file__).with_name("flooder.py")
LANES = 4
MASTER, PEER = 0, 1
IDLE, BEGUN = b"", Opening(Channel.CONTROL).encode()
"""What the strangers say. An opening without a token is answered, and refused."""
RATES = {IDLE: 1250, BEGUN: 300}
"""Dials a second. To refuse one costs more than to let it be idle: not so many, so
that a slow machine is not saturated."""


def reduce(run: Run) -> None:
    size = len(run.members)
    arrays = [np.full(300_000, rank + 1.0, np.float32) for rank in range(size)]
    run.reduce(arrays)
    assert all((array == size * (size + 1) / 2).all() for array in arrays)


@pytest.fixture
def run(new_run: Callable[..., Run]) -> Run:
    return new_run(1, QUICK, token=TOKEN, p2p_connection_pool_size=LANES)


def ports_of(run: Run) -> tuple[tuple[str, int], tuple[str, int]]:
    """Of the master, and of the first member."""
    return master_port(run.master), port_of(run.members[0])


@contextmanager
def flood(port: tuple[str, int], says: bytes, addresses: int) -> Generator[Callable[[], int]]:
    """Dial a port from elsewhere; gives what ends it and tells how often it was dialled."""
    numbers = [str(RATES[says]), str(LIMIT_S), str(addresses), says.hex()]
    command = [sys.executable, str(FLOODER), port[0], str(port[1]), *numbers]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as flooder:
        try:
            assert flooder.stdout is not None
            assert flooder.stdout.readline() == "dials\n"
            yield lambda: int(flooder.communicate("", LIMIT_S)[0])
        finally:
            flooder.kill()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def most_descriptors() -> Generator[Callable[[], int]]:
    """Count them all the time; gives the most that there were."""
    most, ended = [descriptors()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            most[0] = max(most[0], descriptors())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: most[0]
    finally:
        ended.set()
        watching.join()


@pytest.mark.parametrize(
    ("port", "says", "addresses"),
    [(MASTER, IDLE, 1), (MASTER, BEGUN, 40), (PEER, IDLE, 40), (PEER, IDLE, 1), (PEER, BEGUN, 1)],
    ids=["master, idle", "master, refused", "peer, idle", "peer, idle, one address", "refused"],
)
def test_peers_join_and_reduce_while_strangers_dial(
    run: Run, port: int, says: bytes, addresses: int, caplog: pytest.LogCaptureFixture
) -> None:
    """1,250 idle dials a second, for a second and a half and as long as it takes."""
    caplog.set_level(logging.INFO, logger="pccl")
    limits = _transport(run).port_limits
    before = descriptors()
    began_s = time.monotonic()
    with most_descriptors() as most, flood(ports_of(run)[port], says, addresses) as end:
        run.join()
        run.join()
        reduce(run)
        run.until(lambda: lanes_of(run.members[0]) == lanes_of(run.members[2]) == 2 * LANES)
        while time.monotonic() < began_s + 1.5:
            reduce(run)
        dials = end()
        reduce(run)
    assert dials > RATES[says] / patient(1.0)
    own = 3 * 2 * 2 * LANES + 50  # both ends of every lane and connection are in this process
    assert most() - before <= limits.unproven + limits.lingering + own
    intervals = 1 + (time.monotonic() - began_s) * NS_PER_S // LOG_INTERVAL_NS
    lines = [text for text in caplog.messages if "closed a connection from" in text]
    assert 0 < len(lines) <= 2 * (LOG_LINES_MAX + 1) * intervals  # of two levels


@pytest.mark.parametrize("port", [MASTER, PEER], ids=["master", "peer"])
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["own", "the strangers'"])
def test_a_slow_peer_proves_itself_while_strangers_dial(run: Run, port: int, source: str) -> None:
    """Its proof needs more than a second, as if a packet were lost on the way.

    Before, 1,250 strangers a second pushed everybody out of a peer's port after 0.2 s, and out of a
    master's after 0.8 s.
    """
    address = ports_of(run)[port]
    if port == MASTER:
        handshake = Handshake.dial(Opening(Channel.CONTROL), secrets_of(TOKEN.encode()))
    else:
        opening = Opening(Channel.LANE, run.machine.run, 1, PeerId(99), PeerId(1), lanes=LANES)
        handshake = run.greeting(opening)
    with flood(address, IDLE, 1):
        time.sleep(0.5)
        with socket.create_connection(address, LIMIT_S, (source, 0)) as sock:
            remote = greet(sock, handshake, pause_s=0.6)
    assert remote.security == (Security.TOKEN if port == MASTER else Security.NONE)


def _transport(run: Run) -> TcpTransport:
    transport = server_of(run.master)._transport  # pyright: ignore[reportPrivateUsage]
    assert isinstance(transport, TcpTransport)
    return transport


FEW_DESCRIPTORS = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
import numpy as np, pccl
with pccl.MasterNode("127.0.0.1:0") as master:
    print(master.address, flush=True)
    input()
    members = []
    for size in range(1, 4):
        newcomer = pccl.Communicator(master.address)
        joining = threading.Thread(target=newcomer.connect)
        joining.start()
        def grow(member):
            while member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
                member.update_topology()
        growing = [threading.Thread(target=grow, args=(member,)) for member in members]
        for thread in growing: thread.start()
        for thread in (joining, *growing): thread.join()
        members.append(newcomer)
    arrays = [np.ones(1000) for _ in members]
    calls = [threading.Thread(target=m.all_reduce, args=(a,)) for m, a in zip(members, arrays)]
    for call in calls: call.start()
    for call in calls: call.join()
    open("/dev/null").close()
    print([float(array[0]) for array in arrays], flush=True)
    input()
    for member in members: member.close()
"""


def test_with_few_descriptors_strangers_do_not_use_them_up() -> None:
    """Before, as many strangers as there are descriptors kept everybody else out."""
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process,
        ExitStack() as closes,
    ):
        closes.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().rpartition(":")
        for _ in range(400):
            closes.enter_context(socket.create_connection((host, int(port)), LIMIT_S))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "[3.0, 3.0, 3.0]\n"
        _, errors = process.communicate("\n", LIMIT_S)
    assert process.returncode == 0
    assert "too many open files" not in errors
