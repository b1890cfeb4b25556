"""The network namespace of ``pccl bench``: its sockets, its rights, and systems that forbid it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from pccl.cli.bench.machine import congestion_default
from pccl.cli.bench.namespace import held
from pccl.cli.processes.crew import Crew
from tests.support.commands import FROM_ANYWHERE, PCCL, run_to_end
from tests.support.processes import is_there

VISITOR = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pccl.cli.bench.namespace import enter, enter_network

def control(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\\0")[0].decode()

def visit():
    name = enter_network(network, "reno")
    listener, dialer = socket.create_server(("127.0.0.1", 0)), socket.socket()
    dialer.connect(listener.getsockname())
    accepted, _ = listener.accept()
    return name, dialer, accepted

network = enter(int(sys.argv[1]))
outside = socket.create_server(("127.0.0.1", 0))
with ThreadPoolExecutor(1) as thread:
    name, dialer, accepted = thread.submit(visit).result()
dialer.sendall(b"across threads")
text = accepted.recv(64).decode()
reached = socket.socket().connect_ex(outside.getsockname())
rights = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
controls = [control(sock) for sock in (dialer, accepted, outside)]
print(json.dumps([name, *controls, text, reached, rights]))
"""


def test_only_the_sockets_of_a_thread_inside_have_another_congestion_control() -> None:
    before = congestion_default()
    with Crew() as crew, held(crew) as (holder, fault):
        if fault:
            pytest.skip(f"this system forbids network namespaces: {fault}")
        env = {**FROM_ANYWHERE, "OMP_NUM_THREADS": "1"}
        run = run_to_end(sys.executable, "-c", VISITOR, str(holder), env=env)
        assert run.stderr == ""
        kept = f"{1 << 12 | 1 << 21:016x}"  # CAP_NET_ADMIN and CAP_SYS_ADMIN, in the namespace only
        expected = ["reno", "reno", "reno", before, "across threads", 0, kept]
        assert json.loads(run.stdout) == expected
    assert congestion_default() == before
    assert not is_there(holder)


def test_a_system_that_forbids_namespaces() -> None:
    """Inside a namespace that may hold no others, as some systems and containers set it up."""
    pytest.importorskip("torch")
    unshare = [str(shutil.which("unshare")), "--user", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], check=False).returncode:
        pytest.skip("this system forbids namespaces to `unshare` too, or lacks it")
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    options = ("bench", "--size", "4KiB", "--against", "gloo", "--rounds", "1", "--json")
    run = run_to_end(*unshare, "/bin/sh", "-c", script, "sh", *PCCL, *options)
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [each["side"] for each in results] == ["pccl", "gloo"]
    for each in results:
        assert each["values_ok"] is True
        assert "unshare: No space left on device" in each["conditions"]["no_namespace"]
