"""``JointTask``: makes the joint calls of a simulated process, while another task trains.

The two tasks take the place of the two threads of the optimizer wrapper, and pass each other the
same objects as these do in ``JointCaller``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from pccl.bindings.diloco.rounds import NEWCOMERS_POLL_S, Contribution, NewcomersWait, Take
from pccl.protocol.errors import PCCLError
from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.process import ProcessClock
from pccl.stress.sim.workloads.application import wake

NEWCOMERS_POLL_NS = round(NEWCOMERS_POLL_S * NS_PER_S)

Effect = TypeVar("Effect")
News = TypeVar("News")


class WaitInterrupted(Exception):
    """Ctrl-C has ended a wait."""


class CallsEnded(Exception):
    """The process makes no more joint calls."""


class JointTask(Generic[News]):
    """A task that makes joint calls, and what it shares with the task that trains.

    Args:
        loop: the loop of the run.
        clock: the clock of the process.
        newcomers_wait: returns whether newcomers are ready for admission.

    Attributes:
        news: events for the task that trains, in order.
        is_idle: whether the task waits for a contribution, and none is queued.
        is_closing: whether it takes no more contributions.
    """

    def __init__(
        self, loop: VirtualLoop, clock: ProcessClock, newcomers_wait: Callable[[], bool]
    ) -> None:
        self.news: deque[News] = deque()
        self.is_idle = self.is_closing = False
        self._loop, self._clock = loop, clock
        self._newcomers_wait = newcomers_wait
        self._contributions: deque[Contribution] = deque()
        self._failure: BaseException | None = None
        self._has_ended = False
        self._waiting: list[asyncio.Future[None]] = []

    def start(
        self,
        steps: Generator[Effect, Any, Any],
        carry_out: Callable[[Effect], Awaitable[object]],
    ) -> asyncio.Task[None]:
        """Start the task.

        Args:
            steps: yields the effects to carry out, in order.
            carry_out: returns the result of an effect for ``steps``, or raises a PCCLError for it.
        """
        return self._loop.create_task(self._run(steps, carry_out))

    # -- the task that trains ----------------------------------------------------------------------

    def put(self, contribution: Contribution) -> None:
        """Queue a contribution for its round."""
        self._contributions.append(contribution)
        self.is_idle = False
        self._changed()

    def check(self) -> None:
        """Raise an error if the task makes no more calls.

        Raises:
            CallsEnded: the task has ended.
        """
        if self._failure is not None:
            raise self._failure
        if self._has_ended:
            raise CallsEnded

    async def until(self, condition: Callable[[], bool], interrupt_ns: int | None = None) -> None:
        """Wait until a condition holds.

        Args:
            condition: the condition.
            interrupt_ns: duration after which Ctrl-C ends the wait; None: never.

        Raises:
            CallsEnded: the task has ended.
            WaitInterrupted: Ctrl-C has ended the wait.
        """
        end_ns: int | None = None
        if interrupt_ns is not None:
            end_ns = self._clock.now_ns() + interrupt_ns
            self._clock.call_at_ns(end_ns, self._changed)
        while not condition():
            self.check()
            if end_ns is not None and self._clock.now_ns() >= end_ns:
                raise WaitInterrupted
            await self._wait(None)

    # -- the task that makes joint calls -----------------------------------------------------------

    def tell(self, news: News) -> None:
        """Append an event for the task that trains."""
        self.news.append(news)
        self._changed()

    async def take(self, take: Take) -> Contribution | NewcomersWait | None:
        """Carry out a ``Take``."""
        self.is_idle = not self._contributions
        self._changed()
        if self.is_closing:
            return None
        while not self._contributions:
            if take.or_newcomers and self._newcomers_wait():
                self.is_idle = False
                return NewcomersWait()
            await self._wait(NEWCOMERS_POLL_NS if take.or_newcomers else None)
        return self._contributions.popleft()

    async def _run(
        self,
        steps: Generator[Effect, Any, Any],
        carry_out: Callable[[Effect], Awaitable[object]],
    ) -> None:
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = await carry_out(effect)
                except PCCLError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(outcome)
        except StopIteration:
            pass
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the task that trains raises it
            self._failure = error
        self._has_ended = True
        self._changed()

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            wake(future)

    async def _wait(self, longest_ns: int | None) -> None:
        """Wait until something has changed, at most for ``longest_ns``; None: without limit."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiting)
        if longest_ns is not None:
            self._clock.call_at_ns(self._clock.now_ns() + longest_ns, wake, waiting)
        await waiting
