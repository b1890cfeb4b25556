"""A network namespace in which peers open sockets under another congestion control.

A socket keeps the namespace and the congestion control of its creation. So a thread can enter the
namespace and create Gloo's sockets there, and the rest of the process stays where users run it.

Program: the holder, a process that creates a user and a network namespace, which exist until it
ends. Peers enter the user namespace for the right to enter the network namespace. This needs no
privilege, but some systems and containers forbid it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Generator
from pathlib import Path

from pccl.cli.processes.crew import Crew, ProcessDied
from pccl.cli.processes.reports import Doing, Failed, decode, say

CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""The default of new sockets in the network namespace of the calling thread."""

HOLDER = "namespace"

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
"""Linux's flags of the two kinds of namespaces; see namespaces(7)."""

KEPT = 1 << 12 | 1 << 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN, to enter the namespace and to change its settings."""

CAPABILITY_VERSION = 0x20080522

SET_FLAGS, FLAGS_OF_LO = 0x8914, struct.pack("16sH22x", b"lo", 1)
"""The call of netdevice(7) that brings the loopback interface up."""


@contextlib.contextmanager
def held(crew: Crew) -> Generator[tuple[int, str]]:
    """Start the holder. Yield its process id and "", or 0 and why the system forbids namespaces.

    Raises:
        click.ClickException: the holder died.
    """
    pid = crew.start(HOLDER, __name__, [])
    try:
        said = crew.first_lines([HOLDER])[HOLDER]
    except ProcessDied as death:
        raise death.to_error() from death
    failed = decode(said, (Failed,))
    yield (pid, "") if failed is None else (0, failed.reason)
    crew.dismiss([HOLDER])


def enter(holder: int) -> int:
    """Enter the user namespace of ``holder``; return a descriptor of its network namespace.

    The process must have one thread. It keeps no further capability in the user namespace, because
    links between the peers could do more with it than those of users.

    Raises:
        OSError: the system forbids it.
    """
    network, user = (os.open(f"/proc/{holder}/ns/{kind}", os.O_RDONLY) for kind in ("net", "user"))
    _call("setns", user, NEW_USER)
    os.close(user)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(KEPT, KEPT)  # effective and permitted
    _call("capset", header, sets)
    return network


def enter_network(network: int, congestion: str) -> str:
    """Move this thread into a network namespace, and set the default congestion control there.

    Returns:
        The congestion control that new sockets of this thread get.

    Raises:
        OSError: the system forbids it.
    """
    _call("setns", network, NEW_NETWORK)
    _write(CONGESTION, congestion)
    return CONGESTION.read_text().strip()


def hold() -> None:
    """Create the namespaces, say so, and wait for a signal. Say why, if the system forbids them."""
    try:
        _create()
    except (OSError, AttributeError) as error:  # a system without namespaces has no such function
        say(Failed(str(error)))
        return
    say(Doing(HOLDER))
    signal.pause()


def _create() -> None:
    user, group = os.getuid(), os.getgid()
    _call("unshare", NEW_USER | NEW_NETWORK)
    # The user stays the same; without "deny", an unprivileged process may not map its group.
    for name, text in (
        ("uid_map", f"{user} {user} 1"),
        ("setgroups", "deny"),
        ("gid_map", f"{group} {group} 1"),
    ):
        _write(Path("/proc/self", name), text)
    with socket.socket() as sock:
        fcntl.ioctl(sock, SET_FLAGS, FLAGS_OF_LO)
    _write(CONGESTION, CONGESTION.read_text())  # containers may mount it read-only


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:  # it may lack the name of the file
        raise OSError(error.errno, f"{path}: {error.strerror}") from error


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    hold()
