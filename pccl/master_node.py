"""The master as an object, for programs that bring their own."""

from __future__ import annotations

import asyncio
import os
import weakref
from types import TracebackType

from pccl.addresses import parse_address
from pccl.errors import PCCLError
from pccl.protocol.limits import Timing
from pccl.runtime.clock import LoopClock
from pccl.runtime.io_thread import IOThread
from pccl.runtime.master_server import MasterServer
from pccl.session import named


class MasterNode:
    """Coordinates one run. It never sees tensor data.

    Args:
        listen_address: ``"host:port"``; port 0 takes any free one (see ``address``).
        timing: deadlines; None: the defaults.

    Raises:
        ValueError: not an address.
    """

    def __init__(self, listen_address: str, *, timing: Timing | None = None) -> None:
        self._listen = parse_address(listen_address)
        self._timing = timing or Timing()
        self._server: MasterServer | None = None
        self._finalizer: weakref.finalize[..., MasterNode] | None = None

    @property
    def address(self) -> str:
        """Where it listens, as peers should write it; the real port once it runs."""
        return str(self._server.address if self._server is not None else self._listen)

    def run(self) -> None:
        """Start to serve; returns at once.

        Raises:
            LinkError: the address cannot be used (is another master running there?).
            PCCLError: it runs already.
        """
        if self._finalizer is not None and self._finalizer.alive:
            raise PCCLError(4, "MasterNode.run", "this master runs already")
        io = IOThread.acquire()
        loop = io.loop

        async def start() -> MasterServer:
            server = MasterServer(LoopClock(loop), io.transport, self._timing, os.urandom)
            await server.start(self._listen)
            return server

        try:
            self._server = io.submit(start()).wait()
        except BaseException as error:
            io.release()
            if isinstance(error, PCCLError):
                raise named(error, "MasterNode.run") from None
            raise
        self._finalizer = weakref.finalize(self, _stop, io, self._server)

    def interrupt(self) -> None:
        """Stop to serve; idempotent. Peers that are still in the run lose their master."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.interrupt()


def _stop(io: IOThread, server: MasterServer) -> None:
    if io.abandoned:  # a copy that fork made
        return

    async def stop() -> None:
        server.close()
        for _ in range(2):  # let the transport report the ends of what was closed
            await asyncio.sleep(0)

    submission = io.submit(stop()).start()
    if io.owns_current_thread():
        submission.finished.add_done_callback(lambda _: io.release())
        return
    try:
        submission.finished.result(5.0)
    finally:
        io.release()
