"""A TCP port that accepts connections, also after its network interface was made anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, MutableSet

from pccl.protocol.guards.log_quota import LogQuota
from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address, Connection
from pccl.transports.tcp_socket import (
    ACCEPTED_INHERIT,
    Resolved,
    SocketAddress,
    listening_socket,
    reason_of,
    set_options,
    to_address,
)

ACCEPTS_PER_TURN = 64
"""Connections that a listener accepts per turn of the loop, so that many dials cannot block it."""

ACCEPT_BACKOFF_S = 0.5
"""Pause before a port accepts again after an error, such as a lack of descriptors or memory."""

INTERFACE_LOOK_S = 2.0
"""How often a port that is limited to an interface checks that this is still the same one."""

_log = logging.getLogger("pccl.link")


class TcpListener:
    """A listening socket. It accepts a bounded number of connections per turn of the loop.

    Args:
        loop: the loop that accepts.
        to: the address to listen on.
        interface: accept what arrives through this network interface only; empty: through any.
        sockets: every socket that this listener opens is added here.
        adopt: makes a connection of an accepted socket, its own and the other side's address.
        on_connection: called with each connection.

    Raises:
        OSError: the address or the interface cannot be used.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        to: Resolved,
        interface: str,
        sockets: MutableSet[socket.socket],
        adopt: Callable[[socket.socket, Address, Address], Connection],
        on_connection: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._interface = interface
        self._index = _index_of(interface)
        self._sockets = sockets
        self._adopt = adopt
        self._on_connection = on_connection
        self._open = True
        self._pause: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        self._complaints = LogQuota(lines_max=1)
        self._to = to
        self._sock = self._listen()
        self._to = (*to[:4], self._sock.getsockname())  # with the port that the kernel chose
        self._address = to_address(self._sock.getsockname())
        if interface:
            self._look()

    def __repr__(self) -> str:
        return f"<TCP listener on {self._address}{'' if self._open else ' closed'}>"

    @property
    def address(self) -> Address:
        """Where this port is."""
        return self._address

    def close(self) -> None:
        """Accept no more; what was accepted stays."""
        if not self._open:
            return
        self._open = False
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
        for timer in (self._pause, self._next_look):
            if timer is not None:
                timer.cancel()
        self._sock.close()

    def _listen(self) -> socket.socket:
        sock = listening_socket(self._to, self._interface)
        self._sockets.add(sock)
        self._loop.add_reader(sock, self._on_readable)
        return sock

    def _look(self) -> None:
        """Listen anew if the interface was removed and made again, as a VPN does that restarts.

        The kernel binds a socket to the interface's index, and a new interface has another one.
        """
        self._next_look = self._loop.call_later(INTERFACE_LOOK_S, self._look)
        index = _index_of(self._interface)
        if index in (0, self._index):
            return
        with contextlib.suppress(OSError):  # a new interface may have no address yet
            former, self._sock = self._sock, self._listen()  # of two interfaces, each has the port
            self._index = index
            self._loop.remove_reader(former)
            former.close()
            _log.info("%s listens anew: %s was made anew", self._address, self._interface)

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if not self._open:
                return
            try:
                sock, socket_address = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the dialling side has closed it already
            except OSError as error:  # no descriptors or memory left, or the network is down
                self._back_off(error)
                return
            self._hand_over(sock, socket_address)

    def _hand_over(self, sock: socket.socket, socket_address: SocketAddress) -> None:
        sock.setblocking(False)
        if not ACCEPTED_INHERIT:
            set_options(sock)
        remote = to_address(socket_address)
        try:
            local = to_address(sock.getsockname())
        except OSError:  # some systems report no address for a connection that has ended already
            sock.close()
            return
        connection = self._adopt(sock, local, remote)
        try:
            self._on_connection(connection)
        except Exception as error:  # noqa: BLE001 - a bug above must not stop the listener
            connection.abort()
            message = f"closed a new connection from {remote}: pccl failed: {error!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _back_off(self, error: OSError) -> None:
        now_ns = round(self._loop.time() * NS_PER_S)
        due_ns = self._complaints.due_ns
        if due_ns is not None and now_ns >= due_ns:
            self._complaints.take_count()  # reset: the line below reports the problem again
        if self._complaints.admit(now_ns):
            text = "%s cannot accept connections: %s; retrying every %g s"
            _log.warning(text, self._address, reason_of(error), ACCEPT_BACKOFF_S)
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(ACCEPT_BACKOFF_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if self._open:
            self._loop.add_reader(self._sock, self._on_readable)


def _index_of(interface: str) -> int:
    """Return the kernel's number of an interface; 0: there is none of this name."""
    with contextlib.suppress(OSError):
        return socket.if_nametoindex(interface)
    return 0
