"""Where the processes run: all on loopback, or each in a network namespace with a real rate.

With ``--netns`` each process has a namespace, and a virtual Ethernet pair joins it to a bridge.
Both ends of a peer's pair have a token bucket (``tc ... tbf``), so the kernel limits the rates
instead of the proxies. The proxies still add the delay, because not every kernel has netem.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

from pccl.stress.timeline import MASTER

LOOPBACK = "127.0.0.1"

PROCESSES_MAX = 250
"""Largest number of processes with a namespace: each has an address of one /24 network."""


class NamespacesRefused(Exception):
    """The system does not allow namespaces; the message says why and what to do."""


class Loopback:
    """All processes run on one address."""

    proxy_host = LOOPBACK

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def host(self, index: int) -> str:
        """Return the loopback address."""
        return LOOPBACK

    def test_host(self, host: str) -> str:
        """Return ``host``."""
        return host

    def prefix(self, index: int) -> Sequence[str]:
        """Return an empty prefix of the command."""
        return ()


class Namespaces:
    """Namespaces and a bridge, named after this process; leaving the block removes them all.

    Args:
        rate_bps: rate of each peer in each direction; None: no limit.

    Raises:
        NamespacesRefused: on entering, if the system does not allow namespaces.
    """

    def __init__(self, rate_bps: int | None) -> None:
        self._rate_bps = rate_bps
        self._name = f"pccl{os.getpid()}"
        self._network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self._made: dict[int, str] = {}
        self._ip = ""
        self._tc = ""

    def __enter__(self) -> Self:
        if not sys.platform.startswith("linux"):
            raise NamespacesRefused("--netns needs Linux; all other options work without it")
        if os.geteuid() != 0:
            raise NamespacesRefused(
                "--netns needs root, to make network namespaces; leave it out, or use sudo"
            )
        self._ip, self._tc = _find("ip"), _find("tc")
        self._remove_old()
        try:
            self._run_ip("link", "add", self._name, "type", "bridge")
            self._run_ip("addr", "add", f"{self.proxy_host}/24", "dev", self._name)
            self._run_ip("link", "set", self._name, "up")
            self.host(MASTER)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    @property
    def proxy_host(self) -> str:
        """Address of the bridge."""
        return f"{self._network}.1"

    def host(self, index: int) -> str:
        """Return the address of a process in its namespace; create the namespace if necessary."""
        if index not in self._made:
            if len(self._made) == PROCESSES_MAX:
                raise NamespacesRefused(
                    f"--netns has room for {PROCESSES_MAX} processes; plan fewer joiners"
                )
            self._made[index] = f"{self._network}.{2 + len(self._made)}"
            self._make(index, self._made[index])
        return self._made[index]

    def test_host(self, host: str) -> str:
        """Return the loopback address, because all ports of a new namespace are free."""
        return LOOPBACK

    def prefix(self, index: int) -> Sequence[str]:
        """Return the command prefix that runs a program inside the namespace of a process."""
        self.host(index)
        return (self._ip, "netns", "exec", self._namespace(index))

    def _namespace(self, index: int) -> str:
        return f"{self._name}-{index + 1}"

    def _make(self, index: int, host: str) -> None:
        inside, outside = f"i{index + 1}-{os.getpid()}", f"o{index + 1}-{os.getpid()}"
        namespace = self._namespace(index)
        self._run_ip("netns", "add", namespace)
        self._run_ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        self._run_ip("link", "set", outside, "master", self._name, "up")
        self._run_ip("link", "set", inside, "netns", namespace)
        self._run_ip("-n", namespace, "addr", "add", f"{host}/24", "dev", inside)
        self._run_ip("-n", namespace, "link", "set", inside, "up")
        self._run_ip("-n", namespace, "link", "set", "lo", "up")
        if self._rate_bps is not None and index != MASTER:
            # A burst of 2 ms of the rate, and never less than a few full packets.
            burst = max(64 << 10, self._rate_bps // 8 // 500)
            shape = ("root", "tbf", "rate", f"{self._rate_bps}bit")
            limit = ("burst", f"{burst}b", "latency", "50ms")
            _run([self._tc, "qdisc", "add", "dev", outside, *shape, *limit])
            _run([self._tc, "-n", namespace, "qdisc", "add", "dev", inside, *shape, *limit])

    def _remove(self) -> None:
        for index in self._made:
            self._run_ip("netns", "del", self._namespace(index), check=False)
            self._run_ip("link", "del", f"o{index + 1}-{os.getpid()}", check=False)
        self._run_ip("link", "del", self._name, check=False)

    def _remove_old(self) -> None:
        """Remove the namespaces of a harness that was killed."""
        listed = subprocess.run([self._ip, "netns", "list"], capture_output=True, check=False)
        for line in listed.stdout.decode().splitlines():
            name = (line.split() or [""])[0]
            pid = name.removeprefix("pccl").partition("-")[0]
            if name.startswith("pccl") and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                self._run_ip("netns", "del", name, check=False)
                self._run_ip("link", "del", f"pccl{pid}", check=False)

    def _run_ip(self, *arguments: str, check: bool = True) -> None:
        _run([self._ip, *arguments], check=check)


Hosts = Loopback | Namespaces
"""Where processes run, and how the harness starts them there."""


def _find(program: str) -> str:
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        raise NamespacesRefused(f"--netns needs the program {program} (package iproute2)")
    return found


def _run(command: Sequence[str], *, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    if check and done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip() or f"status {done.returncode}"
        raise NamespacesRefused(
            f"--netns is not possible here: {' '.join(command)}: {words}; all other "
            "options work without it"
        )
