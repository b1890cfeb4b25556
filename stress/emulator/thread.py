"""A relay on a thread of its own, for tests and benchmarks: its faults may come from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, TypeVar

from pccl.stress.emulator.connection import Side
from pccl.stress.emulator.relay import FlowStatus, Relay
from pccl.stress.emulator.shaper import Direction
from pccl.stress.emulator.sorting import LinkOf
from pccl.stress.emulator.spec import LinkSpec
from pccl.transports.base import Address

_T = TypeVar("_T")

ANSWER_S = 30.0
"""A relay that does not answer for so long never will: an error in it, not a slow machine."""


def run_in_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in a new loop of this thread: uvloop's where there is one."""
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        factory = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


class RelayThread:
    """A context in which a relay runs; see :class:`pccl.stress.emulator.relay.Relay`.

        with RelayThread("127.0.0.1:4711", LinkSpec.parse("rate=200mbit,rtt=80ms")) as relay:
            socket.create_connection(relay.address)
            relay.stall()

    The thread shares the interpreter with whoever made it: to measure, run the relay as a process
    (``python -m pccl.stress relay``).

    Args: those of ``Relay``.

    Raises:
        OSError: on entering: ``listen`` cannot be had, or ``to`` names no host.
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
        self._relay = Relay(to, spec, listen=listen, link_of=link_of, seed=seed)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> RelayThread:
        self._thread.start()
        self._started.result(ANSWER_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the relay and its thread; all its connections are reset. Again: no effect."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(ANSWER_S)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._relay.address

    def flows(self) -> tuple[FlowStatus, ...]:
        """See ``Relay.flows``."""
        return self._call(self._relay.flows)

    def change(self, spec: LinkSpec, *, link: Hashable = None) -> None:
        """See ``Relay.change``."""
        self._call(lambda: self._relay.change(spec, link=link))

    def stall(
        self,
        *,
        link: Hashable = None,
        flow: int | None = None,
        direction: Direction | None = None,
    ) -> None:
        """See ``Relay.stall``."""
        self._call(lambda: self._relay.stall(link=link, flow=flow, direction=direction))

    def cut(
        self,
        *,
        link: Hashable = None,
        flow: int | None = None,
        direction: Direction | None = None,
    ) -> None:
        """See ``Relay.cut``."""
        self._call(lambda: self._relay.cut(link=link, flow=flow, direction=direction))

    def resume(
        self,
        *,
        link: Hashable = None,
        flow: int | None = None,
        direction: Direction | None = None,
    ) -> None:
        """See ``Relay.resume``."""
        self._call(lambda: self._relay.resume(link=link, flow=flow, direction=direction))

    def reset(self, *, link: Hashable = None, flow: int | None = None) -> None:
        """See ``Relay.reset``."""
        self._call(lambda: self._relay.reset(link=link, flow=flow))

    def half_open(self, gone: Side, *, link: Hashable = None, flow: int | None = None) -> None:
        """See ``Relay.half_open``."""
        self._call(lambda: self._relay.half_open(gone, link=link, flow=flow))

    def refuse_new(self) -> None:
        """See ``Relay.refuse_new``."""
        self._call(self._relay.refuse_new)

    def blackhole_new(self) -> None:
        """See ``Relay.blackhole_new``."""
        self._call(self._relay.blackhole_new)

    def accept_new(self) -> None:
        """See ``Relay.accept_new``."""
        self._call(self._relay.accept_new)

    def _call(self, work: Callable[[], _T]) -> _T:
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def answered() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is the caller's
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(answered)
        return answer.result(ANSWER_S)

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
        self._relay.start()
        try:
            self._started.set_result(None)
            await self._stop.wait()
        finally:
            self._relay.close()


__all__ = ["RelayThread", "run_in_loop"]
