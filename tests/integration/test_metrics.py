"""Metrics as Prometheus reads them: two peers and a master in this process, scraped over HTTP."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pccl
from pccl.observe import metrics_server
from pccl.observe.metrics import METRICS
from tests.integration.conftest import Run
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S
from tests.support.ports import free_port, free_ports
from tests.support.waiting import until

prometheus_parser = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus_client is not installed"
)

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""Each value of a scrape by its name and labels."""
NAMES = ("alice", "bob")


def scrape(url: str) -> Values:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    found: Values = {}
    for family in prometheus_parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, "two values of one series"
            found[key] = sample.value
    return found


def value(values: Values, name: str, /, **labels: str) -> float:
    """The one value that has these labels, and maybe more."""
    (found,) = all_of(values, name, **labels)
    return found


def all_of(values: Values, name: str, /, **labels: str) -> list[float]:
    wanted = labels.items()
    return [found for (one, has), found in values.items() if one == name and wanted <= set(has)]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where all peers and masters of this process serve; none is left at the end."""
    port = free_port()
    monkeypatch.setenv("PCCL_METRICS", str(port))
    yield f"http://127.0.0.1:{port}/metrics"
    servers = metrics_server._servers  # pyright: ignore[reportPrivateUsage]
    until(lambda: not servers)


@pytest.fixture
def run(url: str, over_tcp: None) -> Iterator[Run]:
    made = Run()
    for name, limit in zip(NAMES, (10**9, None), strict=True):
        made.join(name=name, upload_bytes_per_s_max=limit)
    yield made
    made.close()


def test_a_scrape_shows_both_peers_and_the_master(run: Run, url: str) -> None:
    before = scrape(url)
    run.reduce([np.ones(1 << 16, np.float32) for _ in NAMES])
    states = [
        pccl.SharedState([pccl.TensorInfo.from_numpy(np.full(1000, float(rank)), "w")])
        for rank in range(2)
    ]
    for state in states:
        state.revision = 5
    tuple(
        one.result(LIMIT_S)
        for one in [
            run.start(member.sync_shared_state, state)
            for member, state in zip(run.members, states, strict=True)
        ]
    )
    run.members[0].report_step(17, loss=-0.5)
    values = scrape(url)
    for rank, name in enumerate(NAMES):
        assert value(values, "pccl_peers", name=name, state="member") == 2
        assert value(values, "pccl_master_connected", name=name) == 1
        assert value(values, "pccl_state_revision", name=name) == 5
        peer_id = str(run.members[rank].peer_id)
        assert value(values, "pccl_info", name=name, peer_id=peer_id, rank=str(rank)) == 1
        assert value(values, "pccl_rounds_total", name=name, call="all_reduce", outcome="ok") == 1
        assert value(values, "pccl_round_seconds_count", name=name, call="all_reduce") == 1
        assert value(values, "pccl_round_seconds_sum", name=name, call="all_reduce") > 0
        for direction in ("sent", "received"):
            labels = {"name": name, "direction": direction, "plane": "data"}
            moved = value(values, "pccl_wire_bytes_total", **labels)
            assert moved - value(before, "pccl_wire_bytes_total", **labels) > 4 << 15
            assert value(values, "pccl_wire_bytes_total", **{**labels, "plane": "control"}) > 0
        (other,) = set(NAMES) - {name}
        assert len(all_of(values, "pccl_link_bytes_per_second", name=name)) == 2
        assert len(all_of(values, "pccl_link_bytes_per_second", name=name, peer=other)) == 2
        for on in ("peers", "transfer"):
            assert 0 < value(values, "pccl_blocked_seconds_total", name=name, on=on) < LIMIT_S
        assert value(values, "pccl_blocked_seconds_total", name=name, on="master") == 0
    assert value(values, "pccl_loss", name=NAMES[0]) == -0.5
    assert [value(values, "pccl_step", name=name) for name in NAMES] == [17, 0]
    assert value(values, "pccl_upload_limit_bytes_per_second", name=NAMES[0]) == 10**9
    assert not all_of(values, "pccl_upload_limit_bytes_per_second", name=NAMES[1])
    assert value(values, "pccl_peers", name="master", state="member") == 2
    assert value(values, "pccl_operations_open", name="master") == 0
    assert value(values, "pccl_term", name="master") == 1
    assert value(values, "pccl_uptime_seconds", name="master") > 0
    assert not all_of(values, "pccl_removals_total")
    seen = {re.sub("_(bucket|sum|count)$", "", name) for name, _ in values}
    assert seen == METRICS.keys() - {"pccl_removals_total"}


def test_losses_and_failures_are_counted(run: Run, url: str) -> None:
    first, second = run.members
    with pytest.raises(TimeoutError):
        run.start(first.all_reduce, np.ones(10), timeout_s=0.2).result(LIMIT_S)
    second.close()
    until(lambda: all_of(scrape(url), "pccl_removals_total", cause="GOODBYE") == [1])
    until(lambda: value(scrape(url), "pccl_peers", name="alice") == 1)
    values = scrape(url)
    errors = {"name": "alice", "call": "all_reduce", "outcome": "DeadlineExceeded"}
    assert value(values, "pccl_rounds_total", **errors) == 1
    assert not all_of(values, "pccl_round_seconds_count", call="all_reduce")
    assert value(values, "pccl_blocked_seconds_total", name="alice", on="peers") > 0.2
    assert not all_of(values, "pccl_info", name="bob")
    assert not all_of(values, "pccl_link_bytes_per_second", peer="bob")  # bounded by the group


def test_an_open_call_counts_while_it_waits(run: Run, url: str) -> None:
    first, second = run.members
    waiting = run.start(first.all_reduce, np.ones(10))
    run.until(lambda: run.requests == 1)
    labels = {"name": "alice", "on": "peers"}
    begun = value(scrape(url), "pccl_blocked_seconds_total", **labels)
    until(lambda: value(scrape(url), "pccl_blocked_seconds_total", **labels) > begun + 0.1)
    assert value(scrape(url), "pccl_operations_open") == 1
    second.all_reduce(np.ones(10))
    waiting.result(LIMIT_S)
    assert value(scrape(url), "pccl_blocked_seconds_total", **labels) > begun + 0.1


def test_bytes_of_ended_connections_stay_in_the_totals(run: Run, url: str) -> None:
    first, second = run.members
    run.reduce([np.ones(1 << 16, np.float32) for _ in NAMES])
    labels = {"name": "alice", "direction": "sent", "plane": "data"}
    before = value(scrape(url), "pccl_wire_bytes_total", **labels)
    second.close()
    first.update_topology()
    until(lambda: value(scrape(url), "pccl_peers", name="alice") == 1)
    assert value(scrape(url), "pccl_wire_bytes_total", **labels) >= before


def test_peers_of_one_name_get_numbers_and_their_links_ids(url: str) -> None:
    run = Run()
    try:
        for _ in range(2):
            run.join(name="same")
        values = scrape(url)
        assert value(values, "pccl_peers", name="same") == 2
        assert value(values, "pccl_peers", name="same#2") == 2
        ids = [member.peer_id for member in run.members]
        for name, peer in (("same", ids[1]), ("same#2", ids[0])):
            rates = all_of(values, "pccl_link_bytes_per_second", name=name, peer=f"same ({peer})")
            assert len(rates) == 2
    finally:
        run.close()


# -- the server ------------------------------------------------------------------------------------


def test_the_server_ends_with_its_last_user_and_frees_the_port(url: str) -> None:
    threads = set(threading.enumerate())
    first, second = pccl.Communicator("127.0.0.1:9"), pccl.Communicator("127.0.0.1:9")
    first.close()
    assert scrape(url)
    second.close()
    port = int(url.split(":")[2].partition("/")[0])
    socket.create_server(("127.0.0.1", port)).close()
    until(lambda: set(threading.enumerate()) <= threads)
    pccl.Communicator("127.0.0.1:9").close()  # and it can be served again


def test_a_dropped_communicator_ends_its_metrics(url: str) -> None:
    comm = pccl.Communicator("127.0.0.1:9")
    assert scrape(url)
    del comm
    with pytest.raises(OSError, match="refused"):
        scrape(url)


def test_a_taken_port_is_an_error_at_construction(url: str) -> None:
    port = int(url.split(":")[2].partition("/")[0])
    words = rf"cannot serve metrics at 127.0.0.1:{port}: .*auto"
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(OSError, match=words):
            pccl.Communicator("127.0.0.1:9")
        with pytest.raises(OSError, match=words):
            pccl.MasterNode("127.0.0.1:0").run()
    pccl.Communicator("127.0.0.1:9").close()


@pytest.mark.parametrize("text", ["x", "70000", "1:2:3", "0.0.0.0"])
def test_a_wrong_value_is_an_error_at_construction(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="metrics must be PORT, HOST:PORT or auto"):
        pccl.MasterNode("127.0.0.1:0", metrics=text)
    monkeypatch.setenv("PCCL_METRICS", text)
    with pytest.raises(ValueError, match="PCCL_METRICS must be PORT, HOST:PORT or auto"):
        pccl.Communicator("127.0.0.1:9")


def test_without_the_package_the_error_names_the_extra(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'pccl[metrics]'")):
        pccl.Communicator("127.0.0.1:9")


def test_the_package_is_imported_only_by_who_serves() -> None:
    program = "import sys, pccl; pccl.Communicator('127.0.0.1:9').close(); print(*sys.modules)"
    done = run_to_end(sys.executable, "-c", program, env=environment_with())
    assert "pccl.observe.metrics_server" in done.stdout.split()
    assert "prometheus_client" not in done.stdout.split()


def test_a_forked_child_serves_nothing(url: str) -> None:
    with pccl.Communicator("127.0.0.1:9"):
        child = os.fork()
        if child == 0:
            os._exit(len(metrics_server._servers))  # pyright: ignore[reportPrivateUsage]
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert scrape(url)


def test_a_scrape_does_without_a_peer_whose_thread_is_busy(
    run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "SCRAPE_S_MAX", 0.05)
    freed, blocked = threading.Event(), threading.Event()
    io: Any = run.members[0]._session._io  # pyright: ignore[reportPrivateUsage]

    def block() -> None:
        blocked.set()
        freed.wait(LIMIT_S)

    io.loop.call_soon_threadsafe(block)
    assert blocked.wait(LIMIT_S)
    try:
        assert scrape(url) == {}
    finally:
        freed.set()
    until(lambda: value(scrape(url), "pccl_master_connected", name="alice") == 1)


# -- commands --------------------------------------------------------------------------------------


def test_launch_serves_the_master_and_each_peer_at_the_next_ports() -> None:
    program = (
        "import pccl, urllib.request, os\n"
        "with pccl.Communicator() as comm:\n"
        "    comm.connect(min_peers=2)\n"
        "    comm.barrier()\n"
        "    port = int(os.environ['PCCL_METRICS'].split(':')[1])\n"
        "    for one in (port - 1 - int(os.environ['PCCL_PEER_INDEX']), port):\n"
        "        text = urllib.request.urlopen(f'http://127.0.0.1:{one}/metrics').read().decode()\n"
        "        print('name=' + text.partition('name=\"')[2].partition('\"')[0])\n"
        "    comm.barrier()\n"
    )
    port = str(free_ports(3)[0])
    command = [*PCCL, "launch", "--metrics", port, "--", sys.executable, "-c", program]
    done = run_to_end(*command, env=environment_with())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[p0] name=master",
        "[p0] name=p0",
        "[p1] name=master",
        "[p1] name=p1",
    ]
    assert "metrics of the master: http://127.0.0.1:" in done.stderr


@pytest.mark.parametrize("command", ["master", "launch", "join"])
def test_commands_refuse_wrong_addresses(command: str, ready_pccl: tuple[str, ...]) -> None:
    rest = {"launch": ["--", "true"], "join": ["127.0.0.1:9", "--", "true"]}.get(command, [])
    done = run_to_end(*ready_pccl, command, "--metrics", "x", *rest, env=environment_with())
    assert done.returncode == 2
    assert "metrics must be PORT, HOST:PORT or auto, not 'x'" in done.stderr


def test_a_master_whose_metrics_have_no_port_ends_with_the_reason(
    ready_pccl: tuple[str, ...],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*ready_pccl, "master", "--listen", "127.0.0.1:0", "--metrics", port]
        done = run_to_end(*command, env=environment_with())
    assert done.returncode == 1
    assert f"Error: cannot serve metrics at 127.0.0.1:{port}: " in done.stderr


def test_launch_needs_as_many_ports_as_peers(ready_pccl: tuple[str, ...]) -> None:
    command = [*ready_pccl, "launch", "-n", "3", "--metrics", "65533", "--", "true"]
    done = run_to_end(*command, env=environment_with())
    assert done.returncode == 2
    assert "3 peers need the ports after it" in done.stderr
