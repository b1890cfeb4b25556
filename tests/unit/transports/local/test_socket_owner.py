"""Which process holds the other end of a connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from pccl.transports.base import Address
from pccl.transports.local.socket_owner import holds_other_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has netlink")

HOLDER = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).recv(1)"


@pytest.fixture(params=["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip("this system has no IPv6")
        listener.listen()
        ours = socket.create_connection(listener.getsockname()[:2])
        theirs, _ = listener.accept()
        with ours, theirs:
            yield ours, theirs


def addresses(ours: socket.socket) -> tuple[Address, Address]:
    return Address(*ours.getsockname()[:2]), Address(*ours.getpeername()[:2])


def test_both_ends_in_this_process(ends: tuple[socket.socket, socket.socket]) -> None:
    for end in ends:
        assert holds_other_end(os.getpid(), *addresses(end))
        assert not holds_other_end(os.getppid(), *addresses(end))
        assert not holds_other_end((1 << 31) - 1, *addresses(end))


def test_a_descriptor_that_is_closed_meanwhile(ends: tuple[socket.socket, socket.socket]) -> None:
    read, closed = os.readlink, list[str]()

    def readlink(entry: os.DirEntry[str]) -> str:
        if not closed:
            closed.append(entry.name)
            raise FileNotFoundError
        return read(entry)

    with mock.patch("os.readlink", readlink):
        assert holds_other_end(os.getpid(), *addresses(ends[0]))
    assert closed


def test_the_other_end_in_another_process(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    number = theirs.fileno()
    command = [sys.executable, "-c", HOLDER, str(number)]
    with subprocess.Popen(command, pass_fds=[number]) as holder:
        theirs.close()
        assert holds_other_end(holder.pid, *addresses(ours))
        assert not holds_other_end(os.getpid(), *addresses(ours))
        ours.sendall(b"x")


def test_a_connection_of_no_machine_here(ends: tuple[socket.socket, socket.socket]) -> None:
    local, remote = addresses(ends[0])
    for wrong in (Address(remote.host, 1), Address("name", remote.port), Address("fe80::1%x", 1)):
        assert not holds_other_end(os.getpid(), local, wrong)


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, BlockingIOError])
def test_a_system_that_does_not_say(
    ends: tuple[socket.socket, socket.socket], error: type[OSError]
) -> None:
    with mock.patch("socket.socket", side_effect=error):
        assert not holds_other_end(os.getpid(), *addresses(ends[0]))
    with mock.patch("os.scandir", side_effect=error):
        assert not holds_other_end(os.getpid(), *addresses(ends[0]))
