"""Home networks behind translators of the kernel, in network namespaces: Linux, root and nft.

Each has a router with one address on a network that stands for the internet. The router translates
what its hosts send, and drops what comes from outside and answers nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

_SEARCHED = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


class NatNetworks:
    """The internet and the home networks of one test; leaving the block removes them.

    Skips the test if the system does not allow them.

    Args:
        internet: the first three numbers of all public addresses.
    """

    def __init__(self, internet: str = "203.0.113") -> None:
        self._public = internet
        self._internet = f"pi{os.getpid()}"
        self._made: list[str] = []
        self._links = self._homes = self._hosts = self._rules = 0
        self._has_two_ways = False

    def __enter__(self) -> Self:
        if not sys.platform.startswith("linux") or os.geteuid():
            pytest.skip("network namespaces need Linux and root")
        for program in ("ip", "nft", "sysctl"):
            if shutil.which(program, path=_SEARCHED) is None:
                pytest.skip(f"there is no program {program}")
        try:
            self._namespace(self._internet)
            self._run("ip", "-n", self._internet, "link", "add", "br0", "type", "bridge")
            self._run("ip", "-n", self._internet, "link", "set", "br0", "up")
        except RuntimeError as error:
            self.__exit__()
            pytest.skip(f"network namespaces are not possible here: {error}")
        return self

    def __exit__(self, *exc: object) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @staticmethod
    def public_v6(address: str) -> str:
        """Return the IPv6 address of the host on the internet with this IPv4 address."""
        return f"2001:db8::{address.rpartition('.')[2]}"

    @staticmethod
    def named(hosts: Path, host: str, *command: str) -> tuple[str, ...]:
        """Return the command line that runs a command on a host with this file as /etc/hosts."""
        mount = f'mount --bind {hosts} /etc/hosts && exec "$@"'
        return NatNetworks.inside_of(host, "sh", "-c", mount, "sh", *command)

    @staticmethod
    def inside_of(host: str, *command: str) -> tuple[str, ...]:
        """Return the command line that runs a command on a host."""
        return "ip", "netns", "exec", host, *command

    def public(self) -> tuple[str, str]:
        """Add a host on the internet; return its namespace and its address."""
        name, address = self._on_the_internet()
        return name, address

    def two_ways(self) -> tuple[str, str]:
        """Let each later host on the internet reach it through ``vpn0``, too, but prefer ``up0``.

        Returns the namespace of a host that both ways lead to, and its address.
        """
        router, inside = self._internet, "198.51.100.1"
        self._run("ip", "-n", router, "link", "add", "br1", "type", "bridge")
        for bridge, address in ("br0", "203.0.113.254/24"), ("br1", "10.9.0.254/24"):
            self._run("ip", "-n", router, "addr", "add", address, "dev", bridge)
            self._run("ip", "-n", router, "link", "set", bridge, "up")
        self._run("ip", "-n", router, "addr", "add", f"{inside}/32", "dev", "lo")
        self._has_two_ways = True
        return router, inside

    def make_anew(self, name: str) -> None:
        """Remove the interface ``vpn0`` of a host, and make it again, with the same address."""
        address = self.address_of(name, "vpn0")
        self._run("ip", "-n", name, "link", "delete", "vpn0")
        self._plug("vpn0", name, self._internet, "br1", address)

    def swallow(self, name: str, longer_than: int) -> None:
        """Drop long packets on their way to a host, and tell nobody (a path MTU black hole).

        The namespace of the internet, which the packets pass, sends each one alone, as a network
        card does. Otherwise the kernel joins them, and all are too long.
        """
        self._run("ip", "-n", name, "link", "set", "up0", "gso_max_segs", "1")
        rules = f"""
        table ip hole {{
            chain in {{
                type filter hook prerouting priority filter;
                meta length > {longer_than} drop
            }}
        }}
        """
        self._run("ip", "netns", "exec", name, "nft", "-f", "-", given=rules)

    def home(self, *, is_symmetric: bool = False, behind: str = "") -> str:
        """Add a home network; return the namespace of its router.

        Args:
            behind: the router of the network that this one is in; empty: the internet.
            is_symmetric: whether the router chooses another port for each destination; otherwise it
                keeps the port of its host. In both cases, only who was dialled may answer.
        """
        router = self.inside(behind) if behind else self._on_the_internet()[0]
        self._homes += 1
        self._run("ip", "-n", router, "link", "add", "br0", "type", "bridge")
        self._run("ip", "-n", router, "addr", "add", f"192.168.{self._homes}.1/24", "dev", "br0")
        self._run("ip", "-n", router, "link", "set", "br0", "up")
        self._run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        how = "masquerade fully-random" if is_symmetric else "masquerade"
        rules = f"""
        table ip nat {{
            chain post {{
                type nat hook postrouting priority srcnat;
                oifname "up0" {how}
            }}
        }}
        table ip filter {{
            chain in {{
                type filter hook input priority filter;
                iifname "up0" ct state new drop
            }}
            chain through {{
                type filter hook forward priority filter;
                iifname "up0" ct state new drop
            }}
        }}
        """
        self._run("ip", "netns", "exec", router, "nft", "-f", "-", given=rules)
        return router

    def inside(self, router: str) -> str:
        """Add a host to a home network; return its namespace."""
        home = self._run("ip", "-n", router, "-4", "-o", "addr", "show", "br0").split()[3]
        gateway = home.partition("/")[0]
        self._hosts += 1
        name = f"ph{self._hosts}-{os.getpid()}"
        self._join(name, router, f"{gateway.rpartition('.')[0]}.{1 + self._hosts}")
        self._run("ip", "-n", name, "route", "add", "default", "via", gateway)
        return name

    def address_of(self, host: str, interface: str = "up0") -> str:
        """Return the IPv4 address of a host, or of a router on its outer side."""
        shown = self._run("ip", "-n", host, "-4", "-o", "addr", "show", interface)
        return shown.split()[3].partition("/")[0]

    def rule(self, host: str, hook: str, rule: str) -> None:
        """Let a host or a router drop, refuse or count what passes a hook; a rule of nftables."""
        self._rules += 1
        chain = f"type filter hook {hook} priority filter; policy accept; {rule};"
        table = f"table inet more{self._rules} {{ chain one {{ {chain} }}; }}"
        self._run("ip", "netns", "exec", host, "nft", "-f", "-", given=table)

    def _on_the_internet(self) -> tuple[str, str]:
        self._hosts += 1
        name, address = f"pp{self._hosts}-{os.getpid()}", f"{self._public}.{self._hosts}"
        self._join(name, self._internet, address)
        if self._has_two_ways:
            self._plug("vpn0", name, self._internet, "br1", f"10.9.0.{self._hosts}")
            for metric, router, way in (1, "203.0.113.254", "up0"), (2, "10.9.0.254", "vpn0"):
                route = ("default", "via", router, "dev", way, "metric", str(metric))
                self._run("ip", "-n", name, "route", "add", *route)
        six = f"{self.public_v6(address)}/64"
        self._run("ip", "-n", name, "addr", "add", six, "dev", "up0", "nodad")
        return name, address

    def _join(self, name: str, bridged: str, address: str) -> None:
        """Make a namespace whose interface ``up0`` is at the bridge of another one."""
        self._namespace(name)
        self._plug("up0", name, bridged, "br0", address)

    def _plug(self, interface: str, name: str, bridged: str, bridge: str, address: str) -> None:
        """Connect an interface of a namespace to the bridge of another one."""
        self._links += 1
        there = f"v{self._links}"
        peer = ("peer", "name", there, "netns", bridged)
        self._run("ip", "-n", name, "link", "add", interface, "type", "veth", *peer)
        self._run("ip", "-n", bridged, "link", "set", there, "master", bridge, "up")
        self._run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
        self._run("ip", "-n", name, "link", "set", interface, "up")

    def _namespace(self, name: str) -> None:
        self._run("ip", "netns", "add", name)
        self._made.append(name)
        self._run("ip", "-n", name, "link", "set", "lo", "up")

    def _run(self, *command: str, given: str = "") -> str:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": _SEARCHED},
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout
