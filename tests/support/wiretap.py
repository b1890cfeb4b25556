"""``Wiretap``: a TCP port in front of another one. It keeps all bytes, and may change them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

Meddle = Callable[[int, bool, bytes], bytes]
"""(number of the connection, whether the dialler sent it, bytes) -> bytes to pass on."""


class Wiretap:
    """Passes bytes on between those who dial its port and ``target``.

    Args:
        target: ``HOST:PORT`` of the other port.
        meddle: changes what is passed on; None: nothing.
    """

    def __init__(self, target: str, meddle: Meddle | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.meddle = meddle
        self.sent: list[bytearray] = []
        """By connection: what its dialler has sent."""
        self.answered: list[bytearray] = []
        """By connection: what came back."""
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Wiretap:
        self._start(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    @property
    def heard(self) -> bytes:
        """All bytes in both directions."""
        return b"".join((*self.sent, *self.answered))

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                dialler, _ = self._listener.accept()
                try:
                    target = socket.create_connection(self._target)
                except OSError:
                    dialler.close()
                    continue
                self._ends += (dialler, target)
                number = len(self.sent)
                self.sent.append(bytearray())
                self.answered.append(bytearray())
                self._start(self._pass_on, number, dialler, target, True)
                self._start(self._pass_on, number, target, dialler, False)

    def _pass_on(self, number: int, source: socket.socket, to: socket.socket, sent: bool) -> None:
        kept = (self.sent if sent else self.answered)[number]
        with suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                to.sendall(data if self.meddle is None else self.meddle(number, sent, data))
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)
