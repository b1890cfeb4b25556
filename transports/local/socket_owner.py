"""Finds out whether a process of this machine holds the other end of a connection, on Linux.

The kernel says which inode the other end is (sock_diag(7)), and which inodes a process has open.
So a process that only passes bytes on cannot stand for another one: a relay, or a member that gives
away what a third process has answered.
"""

from __future__ import annotations

import os
import socket
import struct

from pccl.transports.base import Address

_SOCK_DIAG = 4
"""Netlink protocol that describes sockets."""

_BY_FAMILY = 20
"""Type of request and answer."""

_REQUEST = struct.Struct("=IHHII BBBBI")
_SOCKET_ID = struct.Struct(">HH16s16s12s")
_ANY = b"\0\0\0\0" + b"\xff" * 8
"""Any interface, and no cookie."""

_INODE_AT = 16 + 4 + _SOCKET_ID.size + 4 * 4
"""Offset of the inode, u32, in an answer."""


def holds_other_end(pid: int, local: Address, remote: Address) -> bool:
    """Whether process ``pid`` has the socket at ``remote`` open that is connected to ``local``.

    False if the system does not say.
    """
    try:
        found = f"socket:[{_inode(remote, local)}]"
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return any(_target(entry) == found for entry in entries)
    except (OSError, struct.error):
        return False


def _target(entry: os.DirEntry[str]) -> str:
    try:
        return os.readlink(entry)
    except FileNotFoundError:  # the process has just closed this descriptor
        return ""


def _inode(here: Address, there: Address) -> int:
    """Return the inode of the TCP socket at ``here`` that is connected to ``there``."""
    family = socket.AF_INET6 if ":" in here.host else socket.AF_INET
    ends = [socket.inet_pton(family, end.host) for end in (here, there)]
    asked = _SOCKET_ID.pack(here.port, there.port, *ends, _ANY)
    size = _REQUEST.size + len(asked)
    header = (size, _BY_FAMILY, 1, 1, 0)
    states = (1 << 32) - 1
    request = _REQUEST.pack(*header, family, socket.IPPROTO_TCP, 0, 0, states) + asked
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as netlink:
        netlink.send(request)
        answer = netlink.recv(4096, socket.MSG_DONTWAIT)
    if struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
        raise ProcessLookupError("there is no such socket on this machine")
    (inode,) = struct.unpack_from("=I", answer, _INODE_AT)
    return int(inode)
