"""Threads with an event loop, and a proxy on such a thread, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pccl.stress.emulator.proxy import Proxy
from pccl.stress.emulator.sorting import LinkOf
from pccl.stress.emulator.spec import LinkSpec
from pccl.transports.base import Address

_T = TypeVar("_T")
_P = ParamSpec("_P")

ANSWER_S = 60.0
"""Longest wait for a loop, in seconds. A longer silence is an error, not a slow machine."""


def run_in_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in a new loop of this thread; uvloop's, if installed."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        factory = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class LoopThread:
    """A thread with an event loop, as a context manager. Any other thread may call it.

    Args:
        name: name of the thread.
        begin: called in the loop first; ``__enter__`` raises its error.
        end: called in the loop last.
    """

    def __init__(self, name: str, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._begin = begin
        self._end = end
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result(ANSWER_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loop and its thread; idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(ANSWER_S)

    def call(self, work: Callable[[], _T]) -> _T:
        """Call ``work`` in the loop, and return its result or raise its error."""

        async def answered() -> _T:
            return work()

        return self.wait(answered())

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop, and return its result or raise its error."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)

    def _run(self) -> None:
        try:
            run_in_loop(self._main())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._begin()
        try:
            self._started.set_result(None)
            await self._stop.wait()
        finally:
            self._end()


def _in_loop(
    method: Callable[Concatenate[Proxy, _P], _T],
) -> Callable[Concatenate[ProxyThread, _P], _T]:
    """Make a method for any thread from a method of a proxy."""

    @wraps(method)
    def call(self: ProxyThread, /, *args: _P.args, **options: _P.kwargs) -> _T:
        return self.thread.call(lambda: method(self.proxy, *args, **options))

    return call


class ProxyThread:
    """A proxy on a thread, as a context manager; see :class:`pccl.stress.emulator.proxy.Proxy`.

        with ProxyThread("127.0.0.1:4711", LinkSpec.parse("rate=200mbit,rtt=80ms")) as proxy:
            socket.create_connection(proxy.address)
            proxy.stall()

    The thread shares the interpreter with the program. For measurements, run the proxy as a process
    (``python -m pccl.stress proxy``). Arguments are those of ``Proxy`` except ``first_byte_count``.

    Raises:
        OSError: from ``__enter__``: ``listen`` cannot be bound, or the host of ``to`` is unknown.
    """

    def __init__(
        self,
        to: str,
        spec: LinkSpec,
        *,
        listen: str = "127.0.0.1:0",
        link_of: LinkOf | None = None,
        seed: int = 0,
    ) -> None:
        self.proxy = Proxy(to, spec, listen=listen, link_of=link_of, seed=seed)
        self.thread = LoopThread("proxy", self.proxy.start, self.proxy.close)

    def __enter__(self) -> Self:
        self.thread.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset all connections, and end the proxy and its thread; idempotent."""
        self.thread.close()

    @property
    def address(self) -> Address:
        """The address at which the proxy listens."""
        return self.proxy.address

    flows = _in_loop(Proxy.flows)
    change = _in_loop(Proxy.change)
    stall = _in_loop(Proxy.stall)
    cut = _in_loop(Proxy.cut)
    resume = _in_loop(Proxy.resume)
    reset = _in_loop(Proxy.reset)
    half_open = _in_loop(Proxy.half_open)
    refuse_new = _in_loop(Proxy.refuse_new)
    blackhole_new = _in_loop(Proxy.blackhole_new)
    accept_new = _in_loop(Proxy.accept_new)
