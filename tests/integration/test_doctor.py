"""``pccl doctor`` against real masters and members of this machine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pccl
from pccl.inquiry import examine_master, master_status
from tests.integration.conftest import Run
from tests.support.commands import PCCL, environment_with, run_to_end, running
from tests.support.patience import LIMIT_S
from tests.support.ports import free_port

TOKEN = "b7Qz-Tr4k_Wm9x-Jp2v"


@pytest.fixture
def doctor(
    ready_pccl: tuple[str, ...], tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command, which sees no run file of other tests."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        settings = environment_with(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path), **more)
        return run_to_end(*ready_pccl, "doctor", *arguments, env=settings, limit_s=LIMIT_S)

    return run


Doctor = Callable[..., subprocess.CompletedProcess[str]]


def findings(ended: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert ended.stderr == ""
    told = json.loads(ended.stdout)["findings"]
    assert ended.returncode == any(one["level"] == "fail" for one in told)
    return {one["name"]: one for one in told}


def test_a_machine_alone(doctor: Doctor) -> None:
    found = findings(doctor("--json"))
    assert found["packages"]["level"] == "ok"
    assert "with the address of a master" in found["run"]["found"]
    assert "handshake" not in found
    lines = doctor().stdout.splitlines()
    assert [line.split(":")[0][6:] for line in lines] == list(found)


def test_a_run_is_examined_and_not_changed(new_run: Callable[..., Run], doctor: Doctor) -> None:
    run = new_run(2)
    version = master_status(run.master.address).roster_version
    found = findings(doctor("--json", run.master.address))
    bad = {name: one for name, one in found.items() if one["level"] != "ok"}
    assert set(bad) <= {"loopback", "descriptors"}  # of a busy machine
    assert found["handshake"]["found"].endswith("the run has 2 members")
    assert found["reach in"]["found"].startswith("the master has reached 127.0.0.1:")
    assert found["members"]["found"] == "dialled 2 of 2; all answer"
    assert found["NAT"]["found"].startswith("none")
    assert "not measured" in found["throughput"]["found"]
    after = master_status(run.master.address)
    assert (after.roster_version, after.removal_count, run.registered) == (version, 0, 2)
    run.check()


def test_the_clock_of_this_machine_is_that_of_the_master(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    made = examine_master(run.master.address)
    assert abs(made.clock_offset_s) <= made.clock_error_s + 1e-3
    assert made.clock_error_s < LIMIT_S


def test_a_port_that_nobody_can_dial(new_run: Callable[..., Run], doctor: Doctor) -> None:
    run = new_run(1)
    told, opened = (f"127.0.0.1:{free_port()}" for _ in range(2))
    shut = {"PCCL_ADVERTISE": told, "PCCL_LISTEN": opened}
    ended = doctor("--json", run.master.address, **shut)
    found = findings(ended)["reach in"]
    assert (found["level"], ended.returncode) == ("warn", 0)
    assert found["found"] == f"the master cannot reach {told}: connection refused"


def test_a_member_that_nobody_can_dial(new_run: Callable[..., Run], doctor: Doctor) -> None:
    run = new_run(1)
    run.join(advertise=f"127.0.0.1:{free_port()}", listen=f"127.0.0.1:{free_port()}")
    name = master_status(run.master.address).members[1].name
    found = findings(doctor("--json", run.master.address))["members"]
    assert found["level"] == "warn"
    assert found["found"].startswith(f"dialled 2 of 2; no answer from {name} at 127.0.0.1:")


def test_tokens(doctor: Doctor) -> None:
    with pccl.MasterNode("127.0.0.1:0", token=TOKEN) as master:
        good = findings(doctor("--json", master.address, PCCL_TOKEN=TOKEN))
        assert (good["handshake"]["level"], good["reach in"]["level"]) == ("ok", "ok")
        wrong = findings(doctor("--json", master.address, PCCL_TOKEN=TOKEN[::-1]))
        assert wrong["handshake"]["level"] == "fail"
        assert wrong["handshake"]["found"] == "the other side does not accept this token"
        assert "set PCCL_TOKEN" in wrong["handshake"]["remedy"]
        weak = findings(doctor("--json", master.address, PCCL_TOKEN="short"))
        assert (weak["token"]["level"], weak["reach out"]["level"]) == ("fail", "ok")
        assert "handshake" not in weak


def test_ipv6_and_a_standby_that_is_down(doctor: Doctor) -> None:
    with pccl.MasterNode("[::1]:0", token=TOKEN) as master:
        down = f"127.0.0.1:{free_port()}"
        told = doctor("--json", f"{down},{master.address}", PCCL_TOKEN=TOKEN)
    found = json.loads(told.stdout)["findings"]
    out = [one for one in found if one["name"] == "reach out"]
    assert [one["level"] for one in out] == ["fail", "ok"]
    assert told.returncode == 1
    assert "the master has reached [::1]:" in told.stdout


def test_no_master_and_no_name(doctor: Doctor) -> None:
    refused = doctor(f"127.0.0.1:{free_port()}")
    assert refused.returncode == 1
    assert "connection refused; remedy: start the master here" in refused.stdout
    nowhere = findings(doctor("--json", "no.such.host.invalid:1", "--timeout", str(LIMIT_S)))
    assert "has no address" in nowhere["reach out"]["found"]


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["nowhere"], {}, "is not an address"),
        ([], {"PCCL_MASTER": "nowhere"}, "PCCL_MASTER: 'nowhere' is not an address"),
        (["--timeout", "0"], {}, "not in the range"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], environment: dict[str, str], says: str, doctor: Doctor
) -> None:
    ended = doctor(*arguments, **environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert says in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PCCL_LISTEN", "a:b:c", "PCCL_LISTEN: 'a:b:c' is not an address"),
        ("PCCL_ADVERTISE", ":0", "PCCL_ADVERTISE: ':0' is not an address"),
        ("PCCL_LISTEN", "no.such.host.invalid:7", "'no.such.host.invalid:7': "),
        ("PCCL_ADVERTISE", "no.such.host.invalid", "'no.such.host.invalid': "),
        ("PCCL_LISTEN", "192.0.2.77", "'192.0.2.77': cannot assign requested address"),
    ],
)
def test_an_address_of_this_machine_that_is_none(
    variable: str, text: str, says: str, doctor: Doctor
) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        for arguments in ([], [master.address]):
            found = findings(doctor("--json", *arguments, **{variable: text}))
            assert found[variable]["level"] == "fail"
            assert found[variable]["found"].startswith(says)
            assert found[variable]["remedy"].startswith(f"correct {variable}")
            assert "handshake" not in found


def test_addresses_of_this_machine(doctor: Doctor) -> None:
    given = {"PCCL_LISTEN": "localhost:7", "PCCL_ADVERTISE": ":48200-48299"}
    found = findings(doctor("--json", **given))
    assert {name: (found[name]["level"], found[name]["found"]) for name in given} == {
        name: ("ok", text) for name, text in given.items()
    }


def test_a_launched_run_needs_no_address(doctor: Doctor, tmp_path: Path) -> None:
    peer = "import pccl, signal; c = pccl.Communicator(); c.connect(); print('x'); signal.pause()"
    own = environment_with(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path))
    command = (*PCCL, "launch", "-n", "1", "--", sys.executable, "-c", peer)
    with running(*command, env=own) as launch:
        assert launch.stdout is not None
        assert launch.stdout.readline().endswith("] x\n")
        found = findings(doctor("--json"))
    assert found["handshake"]["found"].endswith("the run has 1 member")
    assert found["token"]["found"].startswith("84 bytes")


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """It waits for a handshake that never comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        own = environment_with(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path))
        command = (*PCCL, "doctor", address, "--timeout", str(10 * LIMIT_S))
        with running(*command, env=own) as process:
            assert process.stdout is not None
            while "token: " not in process.stdout.readline():
                pass
            process.send_signal(signal.SIGINT)
            assert process.wait(LIMIT_S) == 130
