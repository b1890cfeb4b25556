"""Calls in threads of their own, and members of a run in one process: for tests and programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import pccl
from tests.support.patience import LIMIT_S

T = TypeVar("T")

PAUSE_S = 0.002
"""Between two rounds that admitted nobody."""


class Call(Generic[T]):
    """A call in a thread that ends with it, as a thread of a program does."""

    def __init__(self, call: Callable[..., T], *arguments: Any, **options: Any) -> None:
        self._outcome: Future[T] = Future()
        told = (call, arguments, options)
        self._thread = threading.Thread(target=self._run, args=told, daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., T], arguments: Any, options: Any) -> None:
        try:
            self._outcome.set_result(call(*arguments, **options))
        except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
            self._outcome.set_exception(error)

    def exception(self, limit_s: float = LIMIT_S) -> BaseException | None:
        """What it has raised, when it has ended."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive()
        return self._outcome.exception(0)

    def result(self, limit_s: float = LIMIT_S) -> T:
        """What it has returned."""
        self.exception(limit_s)
        return self._outcome.result(0)


def all_at_once(*calls: Callable[[], T]) -> list[T]:
    """What calls return that are made at the same time."""
    return [made.result() for made in [Call(call) for call in calls]]


def grow(member: pccl.Communicator, size: int) -> None:
    """Update until the run is so large, with pauses: the newcomer may need the processor."""
    while member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
        member.update_topology()
        if member.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < size:
            time.sleep(PAUSE_S)


def admit(member: pccl.Communicator, newcomer: pccl.Communicator) -> None:
    """Let a second one in."""
    joining = Call(newcomer.connect)
    grow(member, 2)
    joining.result()


def pair_at(address: str, **options: Any) -> tuple[pccl.Communicator, pccl.Communicator]:
    """Two members of the run of a master."""
    first, second = (pccl.Communicator(address, **options) for _ in range(2))
    first.connect()
    admit(first, second)
    return first, second
