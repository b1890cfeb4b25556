"""``pccl doctor`` in broken set-ups: what it finds, and the remedy that it names.

Each set-up is real: processes, and where it needs networks, namespaces with rules of nftables.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import pytest

import pccl
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import PROTOCOL_VERSION
from tests.support.commands import environment_with, run_to_end, running
from tests.support.nat_networks import NatNetworks
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S, patient
from tests.support.ports import free_port

TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"
MASTER_PORT = 48148
SHORT_S = patient(0.5)
"""How long the doctor waits for what is not answered."""
PYTHON: tuple[str, ...] = ()
PCCL: tuple[str, ...] = ()
"""The interpreter and the command; each process is a fork."""


class Said(NamedTuple):
    """One line of the doctor."""

    level: str
    found: str
    remedy: str


@pytest.fixture
def nets() -> Generator[NatNetworks]:
    with NatNetworks() as made:
        yield made


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the run files of these masters from other commands on this machine, and theirs away."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(autouse=True)
def forks(
    monkeypatch: pytest.MonkeyPatch, forked_python: tuple[str, ...], ready_pccl: tuple[str, ...]
) -> None:
    monkeypatch.setattr(f"{__name__}.PYTHON", forked_python)
    monkeypatch.setattr(f"{__name__}.PCCL", ready_pccl)


@pytest.fixture
def doctor() -> Callable[..., dict[str, Said]]:
    """The command on this machine, or on a host of ``nets``."""

    def run(
        master: str,
        host: str = "",
        timeout_s: float = SHORT_S,
        hosts: Path | None = None,
        **more: str,
    ) -> dict[str, Said]:
        command: tuple[str, ...] = (*PCCL, "doctor", "--json", master, "--timeout", str(timeout_s))
        if hosts is not None:
            command = NatNetworks.named(hosts, host, *command)
        elif host:
            command = NatNetworks.inside_of(host, *command)
        given = environment_with(**{"PYTHONPATH": str(ROOT), "PCCL_TOKEN": TOKEN, **more})
        if not given["PCCL_TOKEN"]:
            del given["PCCL_TOKEN"]
        ended = run_to_end(*command, env=given, limit_s=LIMIT_S)
        assert ended.stderr == ""
        lines = json.loads(ended.stdout)["findings"]
        return {one["name"]: Said(one["level"], one["found"], one["remedy"]) for one in lines}

    return run


Doctor = Callable[..., dict[str, Said]]


@contextlib.contextmanager
def running_on(host: str, *command: str, **more: str) -> Generator[None]:
    """Run a command on a host of ``nets``; it has printed its first line."""
    own = environment_with(PYTHONPATH=str(ROOT), PCCL_TOKEN=TOKEN, **more)
    with running(*NatNetworks.inside_of(host, *command), env=own) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield


def master_on(
    host: str, *more: str, listen: str = f"0.0.0.0:{MASTER_PORT}"
) -> contextlib.AbstractContextManager[None]:
    """Run a master on a host of ``nets``."""
    return running_on(host, *PCCL, "master", "--listen", listen, *more)


JOIN = """
import signal, sys, pccl
with pccl.Communicator(sys.argv[1], name=sys.argv[2], map_port=False) as comm:
    comm.connect()
    print("joined", flush=True)
    signal.pause()
"""


def member_on(
    host: str, master: str, name: str, **more: str
) -> contextlib.AbstractContextManager[None]:
    """Run a member on a host of ``nets``."""
    return running_on(host, *PYTHON, "-c", JOIN, f"{master}:{MASTER_PORT}", name, **more)


# -- 1: the master does not answer -----------------------------------------------------------------


def test_nothing_listens_on_this_machine(doctor: Doctor) -> None:
    port = free_port()
    assert doctor(f"127.0.0.1:{port}")["reach out"] == (
        "fail",
        f"no connection to 127.0.0.1:{port}: connection refused",
        f"start the master here: pccl master --listen 127.0.0.1:{port}; if it runs, correct the "
        "port",
    )


def test_nothing_listens_on_the_masters_machine(nets: NatNetworks, doctor: Doctor) -> None:
    (_, address), here = nets.public(), nets.inside(nets.home())
    assert doctor(f"{address}:48148", here)["reach out"] == (
        "fail",
        f"no connection to {address}:48148: connection refused",
        "start the master there: pccl master --listen 0.0.0.0:48148; if it runs, correct the port, "
        "or let TCP port 48148 through the firewall that refuses",
    )


def test_a_firewall_drops_what_the_master_shall_get(nets: NatNetworks, doctor: Doctor) -> None:
    (there, address), here = nets.public(), nets.inside(nets.home())
    nets.rule(there, "input", "tcp dport 48148 drop")
    assert doctor(f"{address}:48148", here)["reach out"] == (
        "fail",
        f"no connection to {address}:48148: no answer in time",
        "open TCP port 48148 in the firewall of the master's machine and of its network (in a "
        "cloud, the security group; at home, forward it on the router), or correct the address",
    )


def test_a_master_at_a_private_address(nets: NatNetworks, doctor: Doctor) -> None:
    """Its home is another one, and the address of that router is not given."""
    assert doctor("192.168.2.9:48148", nets.inside(nets.home()))["reach out"] == (
        "fail",
        "no connection to 192.168.2.9:48148: network is unreachable",
        "192.168.2.9 is a private address, which answers only inside its own network: if the "
        "master is elsewhere, write its public address, and forward the port on its router",
    )


# -- 2: nobody can dial this machine ---------------------------------------------------------------

OPEN = (
    "open a TCP port, such as 48200, in the firewall of this machine and of its network (in a "
    "cloud, the security group), and announce it: pccl join --advertise :48200 (or "
    "PCCL_ADVERTISE=:48200)"
)
FORWARD = (
    "forward a TCP port of the router, such as 48200, to this machine, and announce it: pccl join "
    "--advertise :48200 (or PCCL_ADVERTISE=:48200)"
)
DIRECT = "direct to members that this machine can dial, because others cannot dial it"


def test_the_firewall_of_this_machine_is_closed(nets: NatNetworks, doctor: Doctor) -> None:
    (there, master), (here, own) = nets.public(), nets.public()
    nets.rule(here, "input", "ct state established accept; tcp dport != 48200 drop")
    with master_on(there, "--relay"):
        said = doctor(f"{master}:48148", here, PCCL_LISTEN=":48123")
        opened = doctor(f"{master}:48148", here, PCCL_ADVERTISE=":48200")
    assert said["reach in"] == (
        "warn", f"the master cannot reach {own}:48123: no answer in time", OPEN,
    )  # fmt: skip
    assert said["NAT"].level == "ok"
    assert said["links"] == (
        "warn",
        f"{DIRECT}; to the others, both dial at the same time, and the master forwards until then, "
        "or if that fails",
        f"for direct links: {OPEN}",
    )
    assert opened["links"] == ("ok", f"direct: others dial {own}:48200", "")


SAYS_HELLO = """
import socket
with socket.create_server(("", 48200)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.9\\r\\n" + bytes(300))
            connection.recv(1 << 16)
"""


@pytest.mark.parametrize(
    ("is_member", "why"), [(True, ""), (False, ": the process does not speak this protocol")]
)
def test_another_machine_has_the_address_that_this_one_announces(
    is_member: bool, why: str, nets: NatNetworks, doctor: Doctor
) -> None:
    (there, master), (here, _), (other, typo) = nets.public(), nets.public(), nets.public()
    with master_on(there), contextlib.ExitStack() as stack:
        if is_member:
            taken = member_on(other, master, "carol", PCCL_ADVERTISE=":48200")
        else:
            taken = running_on(other, *PYTHON, "-c", SAYS_HELLO)
        stack.enter_context(taken)
        said = doctor(f"{master}:48148", here, PCCL_ADVERTISE=f"{typo}:48200")
    assert said["reach in"] == (
        "warn",
        f"another process than this one has answered the master at {typo}:48200{why}",
        "correct the address that this machine announces (PCCL_ADVERTISE, --advertise)",
    )


# -- 3: a symmetric NAT ----------------------------------------------------------------------------


def test_a_symmetric_nat(nets: NatNetworks, doctor: Doctor) -> None:
    """Two can tell: the master, and a member outside."""
    (there, master), (carols, _) = nets.public(), nets.public()
    here = nets.inside(nets.home(is_symmetric=True))
    with master_on(there, "--relay"), member_on(carols, master, "carol"):
        said = doctor(f"{master}:48148", here, PCCL_MAP_PORT="0")
    assert said["NAT"].level == "warn"
    assert re.search(
        r"the NAT is symmetric: another port for each destination \(\d+ toward the master, \d+ "
        r"toward carol\)$",
        said["NAT"].found,
    ), said["NAT"]
    assert said["NAT"].remedy == FORWARD
    assert said["links"] == (
        "warn",
        f"{DIRECT}; the master forwards to the others, because the NAT is symmetric",
        f"for direct links: {FORWARD}",
    )


def test_nobody_can_tell_whether_a_nat_is_symmetric(nets: NatNetworks, doctor: Doctor) -> None:
    """The master alone sees one port."""
    (there, master), here = nets.public(), nets.inside(nets.home(is_symmetric=True))
    with master_on(there, "--relay"):
        said = doctor(f"{master}:48148", here, PCCL_MAP_PORT="0")
    assert said["NAT"].found.endswith(
        "; whether it is symmetric could not be told, because no member outside has seen the port, "
        "too"
    )
    assert said["links"].found == (
        f"{DIRECT}; the master forwards to the others, unless the NAT is not symmetric"
    )


def test_a_nat_that_keeps_ports(nets: NatNetworks, doctor: Doctor) -> None:
    (there, master), (carols, _) = nets.public(), nets.public()
    here = nets.inside(nets.home())
    with master_on(there), member_on(carols, master, "carol"):
        said = doctor(f"{master}:48148", here, PCCL_MAP_PORT="0")
    assert re.search(
        r"; the NAT keeps the port \((\d+) toward the master, \1 toward carol\)$",
        said["NAT"].found,
    ), said["NAT"]
    assert said["links"].found == (
        f"{DIRECT}; to the others, both dial at the same time, and a member forwards until then, "
        "or if that fails"
    )


# -- 4: two routers in a row -----------------------------------------------------------------------

ROUTER = """
import socket, sys
from tests.support.home_router import HomeRouter
router = HomeRouter(host=sys.argv[1])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("", 5351))
    print("answering", flush=True)
    while True:
        data, source = sock.recvfrom(2048)
        for answer in router.answers(data):
            sock.sendto(answer, source)
"""
OUTER = (
    "if the outer router is yours, make one of the two a bridge, or forward the port on both; if "
    "it is the provider's, ask for a public address (or IPv6), or run `pccl master --relay`"
)


@pytest.mark.parametrize(
    ("is_double", "tells", "found", "remedy"),
    [
        (
            True,
            "",
            "it forwards port N of 192.168.1.4 to this machine (PCP), but this address is not "
            "public: another router lies before it",
            OUTER,
        ),
        (
            True,
            "9.9.9.9",
            "it forwards port N of 9.9.9.9 to this machine (PCP), but the master sees this machine "
            "as 8.8.4.2: another router lies before it",
            OUTER,
        ),
        (
            False,
            "8.8.4.2",
            "it forwards port N of 8.8.4.2 to this machine (PCP), but the master does not reach it",
            "let this machine's firewall accept dials, or restart the router",
        ),
    ],
)
def test_a_router_whose_forwarded_port_nobody_reaches(
    is_double: bool, tells: str, found: str, remedy: str, doctor: Doctor
) -> None:
    """The peer's own router believes what it tells; that of the provider forwards nothing."""
    with NatNetworks("8.8.4") as nets:  # a router is not asked if the master's address is private
        there, master = nets.public()
        router = nets.home()
        if is_double:
            router = nets.home(behind=router)
        here, outer = nets.inside(router), tells or nets.address_of(router)
        with (
            master_on(there, "--relay"),
            running_on(router, *PYTHON, "-c", ROUTER, outer),
        ):
            said = doctor(f"{master}:48148", here)
    assert re.sub(r"port \d+ of", "port N of", said["router"].found) == found
    assert said["router"][::2] == ("warn", remedy)
    assert said["links"].level == "warn"


# -- 5: token, version, and no relay ---------------------------------------------------------------

SET_TOKEN = "set PCCL_TOKEN, or token=, to the run's token; commands of pccl take --token FILE"


@pytest.mark.parametrize(
    ("of_master", "here", "found", "remedy"),
    [
        (TOKEN, TOKEN[::-1], "the other side does not accept this token", SET_TOKEN),
        (TOKEN, "", "the other side requires a token", SET_TOKEN),
        (
            None,
            TOKEN,
            "this process has a token, but the other side has none",
            "start the master with the same token, or unset PCCL_TOKEN here",
        ),
    ],
)
def test_tokens_that_differ(
    of_master: str | None, here: str, found: str, remedy: str, doctor: Doctor
) -> None:
    with pccl.MasterNode("127.0.0.1:0", token=of_master) as master:
        assert doctor(master.address, PCCL_TOKEN=here)["handshake"] == ("fail", found, remedy)


ADDRESS = "correct the address, or the port: `pccl master` prints it when it starts"


@pytest.mark.parametrize(
    ("answer", "found", "remedy"),
    [
        (
            Opening(Channel.CONTROL, version=PROTOCOL_VERSION - 1).encode(),
            f"the other side has protocol version {PROTOCOL_VERSION - 1}, this one "
            f"{PROTOCOL_VERSION}",
            "install the same version of pccl",
        ),
        (b"SSH-2.0-OpenSSH_9.9", "the process does not speak this protocol", ADDRESS),
        (
            b"",
            "the other side did not complete the pccl handshake in time",
            "restart the process that listens there, or correct the port",
        ),
        (
            Opening(Channel.LANE).encode(),
            "a peer, not the master, listens at this address",
            ADDRESS,
        ),
    ],
)
def test_something_else_than_a_master_of_this_version(
    answer: bytes, found: str, remedy: str, doctor: Doctor
) -> None:
    with answering(answer) as address:
        assert doctor(address)["handshake"] == ("fail", found, remedy)


@contextlib.contextmanager
def answering(answer: bytes) -> Generator[str]:
    """Answer each connection with these bytes, and keep it open."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as open_ones:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connection = open_ones.enter_context(server.accept()[0])
                    with contextlib.suppress(OSError):  # it has left
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_two_that_nobody_can_dial_and_no_relay(nets: NatNetworks, doctor: Doctor) -> None:
    (there, master), carols = nets.public(), nets.inside(nets.home())
    here = nets.inside(nets.home())
    with master_on(there), member_on(carols, master, "carol"):
        said = doctor(f"{master}:48148", here, PCCL_MAP_PORT="0")
    assert said["links"] == (
        "fail",
        f"{DIRECT}; no link to the others, because nobody forwards",
        f"start the master with `pccl master --relay`; or {FORWARD}",
    )


# -- 6: IPv6 and long packets ----------------------------------------------------------------------


def test_ipv6_leads_nowhere(nets: NatNetworks, doctor: Doctor, tmp_path: Path) -> None:
    """A race of both versions of IP hides it."""
    (there, master), (here, _) = nets.public(), nets.public()
    six, hosts = nets.public_v6(master), tmp_path / "hosts"
    hosts.write_text(f"{six} master.test\n{master} master.test\n", encoding="ascii")
    nets.rule(here, "output", f"ip6 daddr {six} drop")
    with master_on(there, listen="[::]:48148"):
        said = doctor("master.test:48148", here, hosts=hosts)
    assert said["reach out"] == (
        "warn",
        f"connected to master.test:48148, which is {master}:48148; no answer at {six}: no answer "
        "in time",
        f"let TCP port 48148 through in IPv6, too, or repair IPv6 on the way, or remove {six} from "
        "the name; until then each dial may take longer, and peers work",
    )
    assert said["links"].level == "ok"


LONG = (
    "make packets shorter: ip link set dev up0 mtu 1280, or sysctl net.ipv4.tcp_mtu_probing=1 here "
    "and on the master's machine; a tunnel or a VPN on the way drops long packets and does not say "
    "so"
)


@pytest.mark.parametrize("hook", ["input", "output"])
def test_long_packets_get_lost(hook: str, nets: NatNetworks, doctor: Doctor) -> None:
    """In one direction: short ones pass in both."""
    (there, master), (here, _) = nets.public(), nets.public()
    nets.rule(here, hook, "meta length > 1400 drop")
    with master_on(there):
        said = doctor(f"{master}:48148", here)
    assert said["long packets"] == (
        "fail",
        "short packets arrive, and long ones do not: the master is connected, but sent no answer "
        "in time",
        LONG,
    )
