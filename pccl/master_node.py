"""The master as an object, for programs that bring their own."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType

from pccl.addresses import is_loopback, parse_address, parse_masters
from pccl.checks import check_timing
from pccl.config import resolve_token
from pccl.errors import PCCLError, named
from pccl.protocol.limits import Timing
from pccl.protocol.messages import MasterAddress
from pccl.runtime.clock import LoopClock
from pccl.runtime.io_thread import IOThread
from pccl.runtime.master_server import MasterServer
from pccl.runtime.master_store import DirectoryStore

_log = logging.getLogger("pccl.master")


class MasterNode:
    """Coordinates one run. It never sees tensor data.

    Args:
        listen_address: ``"host:port"``; port 0 takes any free one (see ``address``).
        timing: deadlines; None: the defaults.
        token: the secret that every process of the run has to prove it knows, at least 16
            characters; None: what PCCL_TOKEN or PCCL_TOKEN_FILE says, and if both are silent,
            anybody who reaches the address may join.
        state: a directory in which it keeps which run it has; a master that is started there again
            knows from the start that there is one. None: it learns that from the members.
        standby: ``"host:port"`` of a second master, which the peers are told; several separated by
            commas. With one, no master goes on without a majority of the members.
        standby_of: ``"host:port"`` of the master that this one is a standby of; several separated
            by commas. It begins no run. It asks that master for its run, so it must be able to
            reach it and have the same token, and takes over that run, and no other, when its
            master is gone.

    Raises:
        TypeError, ValueError: not an address, or no good token.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        timing: Timing | None = None,
        token: str | bytes | None = None,
        state: str | os.PathLike[str] | None = None,
        standby: str | None = None,
        standby_of: str | None = None,
    ) -> None:
        self._listen = parse_address(listen_address)
        self._store = None if state is None else DirectoryStore(state)
        self._standbys = () if standby is None else parse_masters(standby)
        self._standby_of = () if standby_of is None else parse_masters(standby_of)
        if self._standby_of:
            others = (*self._standby_of, *self._standbys)
            self._standbys = tuple(dict.fromkeys(others))
        if self._listen in self._standbys:
            raise ValueError(f"{listen_address} is this master itself; a standby is another one")
        self._timing = check_timing(timing)
        self._token = resolve_token(token)
        self._server: MasterServer | None = None
        self._finalizer: weakref.finalize[..., MasterNode] | None = None
        self._leave: Callable[[], None]

    @property
    def address(self) -> str:
        """Where it listens, as peers should write it; the real port once it runs."""
        return str(self._server.address if self._server is not None else self._listen)

    def run(self) -> None:
        """Start to serve; returns at once.

        Raises:
            LinkError: the address cannot be used (is another master running there?).
            LocalProtocolError: the state cannot be read or kept.
            PCCLError: it runs already.
        """
        if self._finalizer is not None and self._finalizer.alive:
            raise PCCLError(4, "MasterNode.run", "this master runs already")
        user = object()
        leave: Callable[[], None] | None = None
        try:
            io = IOThread.acquire(user)
            clock = LoopClock(io.loop)
            standbys = tuple(MasterAddress(known.host, known.port) for known in self._standbys)
            server = MasterServer(
                clock,
                io.transport,
                self._timing,
                os.urandom,
                token=self._token,
                store=self._store,
                standbys=standbys,
                standby_of=self._standby_of,
            )
            leave = self._leave = partial(io.leave, user, partial(_stop, server))
            io.submit(lambda: server.start(self._listen)).wait()
            self._finalizer = weakref.finalize(self, leave)
            self._server = server
        except BaseException as error:
            if leave is not None:
                leave()
            IOThread.give_up(user)
            if isinstance(error, PCCLError):
                raise named(error, "MasterNode.run") from None
            raise
        if self._token is None and not is_loopback(server.address.host):
            _log.warning(
                "no token: whoever reaches %s can join the run, read its tensors and spoil them; "
                "set token=, or PCCL_TOKEN here and at the peers, to keep others out",
                self.address,
            )

    def interrupt(self) -> None:
        """Stop to serve; idempotent. Peers that are still in the run lose their master."""
        if self._finalizer is None:
            return
        try:
            self._finalizer()
        except BaseException:  # Ctrl-C, and the finalizer does nothing if it is called again
            self._leave()
            raise

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


async def _stop(server: MasterServer) -> None:
    server.close()
    for _ in range(2):  # let the transport report the ends of what was closed
        await asyncio.sleep(0)
