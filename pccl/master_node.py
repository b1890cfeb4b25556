"""The master as an object, for programs that run it themselves."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from pccl.addresses import is_loopback, parse_address, parse_masters, parse_proxies
from pccl.checks import check_flag, check_listener, check_timing
from pccl.config import resolve_encrypt, resolve_metrics, resolve_token, resolve_upload_max
from pccl.errors import PCCLError, named
from pccl.machines.master.tokens import Tokens
from pccl.observe.listeners import Consumers
from pccl.observe.logs import log_events, show_log
from pccl.observe.master_metrics import MasterMetrics
from pccl.observe.metrics_server import Served
from pccl.protocol.handshake.keys import SECRET_BYTES
from pccl.protocol.handshake.proxy_header import is_named
from pccl.protocol.limits import Timing
from pccl.protocol.messages import MasterAddress
from pccl.protocol.status_report import StatusReport as MasterStatus
from pccl.runtime.clock import LoopClock
from pccl.runtime.control.greeting import encryption
from pccl.runtime.io_thread import INTERRUPT_POLL_S, IOThread
from pccl.runtime.keys_file import KEYS_FILE, KeysFile, RunKeys
from pccl.runtime.master_server import MasterServer
from pccl.runtime.master_store import DirectoryStore
from pccl.runtime.run_tokens import ensure_token, expel_key, make_token, revoke_token
from pccl.telemetry.events import PeerReport
from pccl.transports.base import Connection
from pccl.transports.pacing.transport import is_upload, limited

__all__ = [
    "KEYS_FILE",
    "KeysFile",
    "MasterNode",
    "RunKeys",
    "Tokens",
    "ensure_token",
    "expel_key",
    "make_token",
    "revoke_token",
]

_log = logging.getLogger("pccl.master")

_serving: set[MasterNode] = set()
"""Running masters. They keep serving when the program drops them or reaches its end."""
_some_ended = threading.Condition()

_OF_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address that stands for all -> the one from which processes of this machine connect to it."""


class MasterNode:
    """Coordinates one run. It never sees tensor data.

    After :meth:`run` it serves until :meth:`interrupt`, the end of its ``with`` block, or Ctrl-C.
    It keeps serving without a reference to the object: the interpreter waits for it before exiting.
    If the program ends with an exception, the master ends, too.

    Args:
        listen_address: ``"host:port"``; port 0 takes any free one (see ``address``).
        timing: deadlines; None: the defaults.
        token: a secret of the run, at least 16 characters; every process must prove that it
            knows it. None: PCCL_TOKEN or PCCL_TOKEN_FILE. Without a token, every process that
            reaches the address may join, unless the file of ``keys`` has tokens.
        state: a directory in which it stores the identity of its run. A master that restarts with
            this directory knows the run at once. None: it learns the run from the members.
        keys: a file with the run's key and tokens (:class:`KeysFile`), made if it
            does not exist. None: ``run.keys`` in ``state``, otherwise no file.
        standby: ``"host:port"`` of a second master, which it announces to the peers; several
            separated by commas. With a standby, a master continues only with a majority of the
            members.
        standby_of: ``"host:port"`` of the master that this one is a standby of; several separated
            by commas. It begins no run. It asks that master for its run, so it must reach that
            master and have the same token. When that master is lost, it takes over that run only.
        metrics: where it serves metrics for Prometheus: ``PORT`` (for this machine only),
            ``HOST:PORT``, or ``auto`` for a free port, which the log tells. None: PCCL_METRICS,
            otherwise nowhere.
        relay: whether it forwards between peers that cannot dial each other, if no member can. It
            sees encrypted bytes only.
        proxy_from: the IP addresses or networks, separated by commas, from which TCP proxies
            connect to this master. Their connections must begin with a header of the PROXY
            protocol, version 2, and count as connections from the source that it names. None:
            there is no such proxy.
        upload_bytes_per_s_max: as for :class:`pccl.Communicator`: what it forwards, and all else.
        inspect_process: for a program that has started the peers: returns what the system knows of
            the process of a peer, by the peer's name, as values for JSON; None: nothing. It is
            called in a thread of the library, when a person asks (``pccl why``).

    Attributes:
        metrics_url: URL of its metrics, once it runs; empty: it serves none.

    Raises:
        TypeError, ValueError: an address is malformed, or the token is not good.
    """

    def __init__(
        self,
        listen_address: str,
        *,
        timing: Timing | None = None,
        token: str | bytes | None = None,
        state: str | os.PathLike[str] | None = None,
        keys: str | os.PathLike[str] | None = None,
        standby: str | None = None,
        standby_of: str | None = None,
        metrics: str | None = None,
        relay: bool = False,
        proxy_from: str | None = None,
        upload_bytes_per_s_max: int | None = None,
        inspect_process: Callable[[str], object] | None = None,
    ) -> None:
        self._relays = check_flag("relay", relay)
        self._proxies = () if proxy_from is None else parse_proxies(proxy_from)
        self._upload = resolve_upload_max(upload_bytes_per_s_max)
        self._inspect_process = inspect_process
        self._listen = parse_address(listen_address)
        self._store = None if state is None else DirectoryStore(state)
        if keys is None and state is not None:
            keys = os.path.join(state, KEYS_FILE)
        self._keys = None if keys is None else KeysFile(keys)
        self._standbys = () if standby is None else parse_masters(standby)
        self._standby_of = () if standby_of is None else parse_masters(standby_of)
        if self._standby_of:
            others = (*self._standby_of, *self._standbys)
            self._standbys = tuple(dict.fromkeys(others))
        if self._listen in self._standbys:
            raise ValueError(f"{listen_address} is this master itself; name another master")
        self._timing = check_timing(timing)
        self._metrics = resolve_metrics(metrics)
        self.metrics_url = ""
        show_log("master")
        self._token = resolve_token(token)
        self._encrypts_all = resolve_encrypt()
        self._server: MasterServer | None = None
        self._io: IOThread | None = None
        self._consumers: Consumers
        self._leave: Callable[[], None]

    def __repr__(self) -> str:
        runs = "running" if self in _serving else "not running"
        return f"<pccl.master_node.MasterNode: {self.address}, {runs}>"

    @property
    def address(self) -> str:
        """The address at which peers reach the master, with the actual port once it runs."""
        return str(self._server.address if self._server is not None else self._listen)

    def _is_upload(self, connection: Connection) -> bool:
        """Whether what a connection sends leaves this machine, perhaps through a proxy on it."""
        return is_upload(connection) or is_named(connection.remote.host, self._proxies)

    def run(self) -> None:
        """Start serving, and return at once. The process does not end before the master does.

        Raises:
            LinkError: the address cannot be used (is another master running there?).
            OSError: the address of the metrics cannot be used.
            LocalProtocolError: the state directory or the file of keys cannot be read or written,
                or the token is of another run.
            PCCLError: this master is already running.
        """
        if self in _serving:
            raise PCCLError(4, "MasterNode.run", "this master is already running")
        user = object()
        leave: Callable[[], None] | None = None
        try:
            io = IOThread.acquire(user)
            clock = LoopClock(io.loop)
            if self._keys is not None:
                self._keys.make(os.urandom(SECRET_BYTES))
            standbys = tuple(MasterAddress(known.host, known.port) for known in self._standbys)
            server = MasterServer(
                clock,
                limited(io.transport, clock, self._upload, self._is_upload),
                self._timing,
                os.urandom,
                token=self._token,
                store=self._store,
                standbys=standbys,
                standby_of=self._standby_of,
                encrypts=encryption(always=self._encrypts_all),
                keys=self._keys,
                relays=self._relays,
                proxies=self._proxies,
            )
            log_events(server.events, lambda: "master")
            if (inspect := self._inspect_process) is not None:
                server.inspect_process = lambda name: asyncio.to_thread(inspect, name)
            leave = self._leave = partial(io.leave, user, partial(_stop, server))
            io.submit(lambda: server.start(self._listen)).wait()
            if self._metrics is not None:
                values = io.call(lambda: MasterMetrics(server))
                served = Served(self._metrics, "master", io, values.read)
                leave = self._leave = partial(served.end_before, leave)
                self.metrics_url = served.url
            self._consumers = Consumers(server.events)
            self._leave = partial(self._consumers.end_after, leave)
            self._server, self._io = server, io
            _serving.add(self)
        except BaseException as error:
            _serving.discard(self)
            if leave is not None:
                leave()
            IOThread.give_up(user)
            if isinstance(error, PCCLError):
                raise named(error, "MasterNode.run") from None
            raise
        if server.keys.is_open and (self._proxies or not is_loopback(server.address.host)):
            _log.warning(
                "no token: any process that reaches %s can join the run, and read and change its "
                "tensors; to prevent this, set token=, or PCCL_TOKEN here and at the peers",
                "its proxy" if self._proxies else self.address,
            )
        host = _OF_THIS_MACHINE.get(server.address.host, server.address.host)
        if is_named(host, self._proxies):
            _log.warning(
                "the master refuses processes of this machine that connect from %s, such as pccl "
                "status, because they send no PROXY header; let the proxy connect from another "
                "address, such as 127.0.0.2, and name that one",
                host,
            )

    def status(self) -> MasterStatus:
        """Return the status of the run, as :func:`pccl.master_status` does for other processes.

        Raises:
            PCCLError: this master is not running.
        """
        io, server = self._running("status")

        async def ask() -> MasterStatus:
            return server.machine.status()

        return io.submit(ask).wait()

    def on_event(self, consumer: Callable[[PeerReport], object]) -> Callable[[], None]:
        """Call ``consumer`` with each later ``RunChanged`` of this master.

        It is called as by :meth:`pccl.Communicator.on_event`.

        Returns:
            A function that ends this.

        Raises:
            TypeError: ``consumer`` is not callable.
            PCCLError: this master is not running.
        """
        check_listener("consumer", consumer)
        self._running("on_event")
        return self._consumers.add(consumer)

    def _running(self, call: str) -> tuple[IOThread, MasterServer]:
        if self not in _serving or self._io is None or self._server is None:
            raise PCCLError(4, f"MasterNode.{call}", "this master is not running")
        return self._io, self._server

    def interrupt(self) -> None:
        """Stop serving; peers that are still in the run lose their master. Idempotent."""
        if self not in _serving:
            return
        try:
            self._leave()
        except BaseException:  # Ctrl-C
            self._leave()
            raise
        finally:
            with _some_ended:
                _serving.discard(self)
                _some_ended.notify_all()

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
    for _ in range(2):  # let the transport report the ends of the closed connections
        await asyncio.sleep(0)


def _serve_on() -> None:
    """At the end of the program, wait until all masters have ended."""
    if hasattr(sys, "last_type"):  # an exception or Ctrl-C has ended the program
        _end_all()
    for node in list(_serving):  # a copy, because another thread may end a master
        _log.warning("the master at %s keeps serving until Ctrl-C", node.address)
    try:
        with _some_ended:
            while _serving:
                _some_ended.wait(INTERRUPT_POLL_S)
    except KeyboardInterrupt:
        _end_all()


def _end_all() -> None:
    for node in list(_serving):
        node.interrupt()


# Not ``atexit``, whose functions run when no thread can be started any more: a master that looks up
# a name needs a thread. The standard library ends its thread pools in the same way.
threading._register_atexit(_serve_on)  # type: ignore[attr-defined]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_serving.clear)  # a child has no threads, so no masters
