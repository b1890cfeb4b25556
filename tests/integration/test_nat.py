"""Peers behind real address translators: how they reach each other, and that they work together.

The second peer joins after the first, which is the elder.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.nat_networks import NatNetworks
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

PEER = ROOT / "tests/integration/nat_peer.py"
PYTHON: tuple[str, ...] = ()
PCCL: tuple[str, ...] = ()
"""The interpreter and the command; each process is a fork."""
TOKEN = {"PCCL_TOKEN": "a secret that all members know"}


@pytest.fixture(autouse=True)
def run_files_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands of tests that run at the same time do not find these masters."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(autouse=True)
def forks(
    monkeypatch: pytest.MonkeyPatch, ready_python: tuple[str, ...], ready_pccl: tuple[str, ...]
) -> None:
    monkeypatch.setattr(f"{__name__}.PYTHON", ready_python)
    monkeypatch.setattr(f"{__name__}.PCCL", ready_pccl)


def one_home(nets: NatNetworks) -> Sequence[str]:
    home = nets.home()
    return nets.inside(home), nets.inside(home)


def two_homes(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home()), nets.inside(nets.home())


def one_symmetric(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home()), nets.inside(nets.home(is_symmetric=True))


def two_symmetric(nets: NatNetworks) -> Sequence[str]:
    return tuple(nets.inside(nets.home(is_symmetric=True)) for _ in range(2))


def elder_public(nets: NatNetworks) -> Sequence[str]:
    return nets.public()[0], nets.inside(nets.home(is_symmetric=True))


def younger_public(nets: NatNetworks) -> Sequence[str]:
    return nets.inside(nets.home(is_symmetric=True)), nets.public()[0]


NAMES = ("alice", "bob", "carol", "dave")
OPEN_A_PORT = "open a port of one of them, or switch on port mapping: docs/two-machines.md"
DIALLED_BACK = (
    "dialled back: peer 1 (alice) cannot be dialled, so it has dialled peer 2 (bob); "
    "open a port of peer 1 (alice): then peers that cannot be dialled reach it, too"
)


def neither(one: int, other: int) -> str:
    first, second = (f"peer {peer} ({NAMES[peer - 1]})" for peer in (one, other))
    return f"neither {first} nor {second} can be dialled"


def relayed(one: int, other: int) -> str:
    why = f"{neither(one, other)}, and simultaneous open has not succeeded"
    return f"relayed by the master: {why}; {OPEN_A_PORT}"


PUNCHED = f"punched: {neither(1, 2)}"


@pytest.mark.parametrize(
    ("where", "path"),
    [
        (elder_public, "direct"),
        (younger_public, DIALLED_BACK),
        (one_home, "direct"),
        (two_homes, PUNCHED),
        (one_symmetric, relayed(1, 2)),
        (two_symmetric, relayed(1, 2)),
    ],
)
def test_two_peers_work_together(where: Callable[[NatNetworks], Sequence[str]], path: str) -> None:
    for text in outputs_of(where, [path] * 2):
        assert text.splitlines()[-1:] == ["the state is that of rank 0"], text


def two_homes_and_two_symmetric(nets: NatNetworks) -> Sequence[str]:
    return *two_homes(nets), *two_symmetric(nets)


def test_four_peers_train() -> None:
    """The hardest mix: one pair meets, and the master forwards for the other five."""
    pairs = [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
    paths = [PUNCHED, *(relayed(*pair) for pair in pairs[1:])]
    outputs = outputs_of(two_homes_and_two_symmetric, paths * 2, "train")
    ends = [text.splitlines()[-2:] for text in outputs]
    assert {end[-1] for end in ends} == {"the state is that of rank 0"}, outputs
    assert ends[0][0].startswith("trained "), outputs
    assert {end[0] for end in ends} == {ends[0][0]}, outputs


def outputs_of(
    where: Callable[[NatNetworks], Sequence[str]], paths: Sequence[str], *more: str
) -> list[str]:
    """Run a master and peers until the links have these paths; return what the peers print."""
    with NatNetworks() as nets:
        host, address = nets.public()
        master, peers = f"{address}:48148", where(nets)
        started = [spawn(host, [*PCCL, "master", "--listen", master, "--relay"])]
        try:
            for place, peer in enumerate(peers):
                wanted = [str(len(peers)), str(place), "|".join(sorted(paths)), *more]
                command = [*PYTHON, str(PEER), master, *wanted]
                started.append(spawn(peer, command, PCCL_NAME=NAMES[place]))
            return [one.communicate(timeout=LIMIT_S)[0] for one in started[1:]]
        finally:
            for one in started:
                one.kill()
                one.communicate()


@pytest.mark.parametrize(
    ("chosen", "interface", "hosts"),
    [([], "up0", "203.0.113"), (["--interface", "vpn0"], "vpn0", "10.9.0")],
)
def test_two_peers_use_the_interface_that_is_named(
    chosen: list[str], interface: str, hosts: str
) -> None:
    """Both interfaces lead to the master. The system prefers ``up0``."""
    with NatNetworks() as nets:
        server, address = nets.two_ways()
        master, peers = f"{address}:48148", (nets.public()[0], nets.public()[0])
        started = [spawn(server, [*PCCL, "master", "--listen", master])]
        try:
            command = [*PCCL, "join", master, *chosen, "--"]
            command += [*PYTHON, str(PEER), master, "2", "0", "direct|direct"]
            started += [spawn(peer, command) for peer in peers]
            outputs = [one.communicate(timeout=LIMIT_S)[0] for one in started[1:]]
        finally:
            for one in started:
                one.kill()
                one.communicate()
    for own, output in enumerate(outputs, 1):
        said = f"reaches the master {master} from {hosts}.{own} (interface {interface})"
        assert said in output, output
        assert f"links lead from {hosts}.{own} to {hosts}.{3 - own}\n" in output, output
        assert "the state is that of rank 0" in output.splitlines(), output


LISTENS = """
import asyncio
from pccl.transports.base import Address, Connection
from pccl.transports.tcp import TcpTransport

async def main() -> None:
    def accept(connection: Connection) -> None:
        print("accepted", flush=True)
        connection.close()

    transport = TcpTransport(asyncio.get_running_loop()).through("vpn0")
    listener = await transport.listen(Address("0.0.0.0", 0), accept)
    print(listener.address.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
DIALS = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close()"


def test_a_port_of_an_interface_that_is_made_anew() -> None:
    """As when a VPN restarts. The port is the same, and stays shut at another interface."""
    with NatNetworks() as nets:
        server, _ = nets.two_ways()
        peer, by_up0 = nets.public()
        by_vpn0 = nets.address_of(peer, "vpn0")
        listener = spawn(peer, [*PYTHON, "-c", LISTENS])
        assert listener.stdout is not None
        try:
            port = listener.stdout.readline().strip()

            def reaches(host: str) -> bool:
                dial = spawn(server, [*PYTHON, "-c", DIALS, host, port])
                dial.communicate(timeout=LIMIT_S)
                return dial.returncode == 0

            assert (reaches(by_vpn0), reaches(by_up0)) == (True, False)
            nets.make_anew(peer)
            until(lambda: reaches(by_vpn0))
            assert not reaches(by_up0)
            assert [listener.stdout.readline() for _ in range(2)] == ["accepted\n"] * 2
        finally:
            listener.kill()
            listener.communicate()


def test_an_interface_that_does_not_exist() -> None:
    command = [*PCCL, "join", "127.0.0.1:1", "--interface", "eth99", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 2
    assert "'--interface': interface: this machine has no network interface 'eth99'" in done.stderr
    assert "lo" in done.stderr.rpartition("; it has ")[2]


def spawn(namespace: str, command: Sequence[str], **settings: str) -> subprocess.Popen[str]:
    set_up = [f"{name}={value}" for name, value in {**TOKEN, **settings}.items()]
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, "env", f"PYTHONPATH={ROOT}", *set_up, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
