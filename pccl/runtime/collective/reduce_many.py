"""Many reduces as one call: each is tried again until it succeeds, some at a time.

Members that pass the same list in the same order keep the same operations in flight. Each operation
has its own outcome, so a failure costs the others nothing. If one can't succeed, those that have
started are waited for, those that have not are withdrawn, and the error names the tags whose
tensors are reduced. Of several errors the one that the caller must act on first is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from pccl.protocol import errors
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.collective.memory import Range, clash
from pccl.runtime.collective.operand import Operand
from pccl.runtime.requests import Deadline, ReduceInfo, ReduceManyRequest, ReduceRequest
from pccl.runtime.waiting import cancelled_and_settled


class Reducer(Protocol):
    """What reduces one tensor: the engine."""

    async def reduce_while(
        self, request: ReduceRequest, deadline: Deadline | None, may_retry: Callable[[], bool]
    ) -> ReduceInfo:
        """Reduce, after losses again and again for as long as ``may_retry``."""
        ...

    def withdraw_unless_started(self, operand: Operand, reason: str) -> None:
        """Leave the call that this memory is lent to, if it may wait for others for ever."""
        ...

    def left_committed(self, info: ReduceInfo, operand: Operand) -> None:
        """The caller left and can't know that this was committed: make the input what it was."""
        ...

    def left_failed(self, error: BaseException) -> None:
        """The caller left and can't know that this was raised."""
        ...


class ReduceMany:
    """One call that reduces several tensors.

    Args:
        loop: where it runs.
        reducer: reduces one.
        peer: the incarnation of this peer that begins the call.
        request: all-reduces with different tags, on memory that doesn't overlap; at least one.
        deadline: of all together.

    Raises:
        ValueError: a tag occurs twice, or tensors overlap.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reducer: Reducer,
        peer: PeerId,
        request: ReduceManyRequest,
        deadline: Deadline | None,
    ) -> None:
        _check_tags(request.requests)
        _check_memory(request.requests)
        self._loop = loop
        self._reducer = reducer
        self._peer = peer
        self._requests = request.requests
        self._max_in_flight = request.max_in_flight
        self._deadline = deadline
        self._waiting: Iterator[ReduceRequest] = iter(request.requests)
        self._infos: dict[int, ReduceInfo] = {}
        """By tag."""
        self._failure: Exception | None = None
        self._running: dict[int, ReduceRequest] = {}
        """By tag."""

    async def run(self) -> ReduceInfo:
        """Reduce them all.

        Returns:
            The last operation, with the bytes of all and the most attempts that one took.

        Raises:
            PCCLError: one can't succeed; ``completed_tags`` names those that did.
            ValueError: the memory of one is in use elsewhere.
        """
        lanes = min(self._max_in_flight, len(self._requests))
        workers = [self._loop.create_task(self._work()) for _ in range(lanes)]
        try:
            for worker in workers:
                await worker
        except BaseException:
            for worker in workers:
                await cancelled_and_settled(worker)
            for request in self._requests:
                info = self._infos.get(request.tag)
                if info is not None and request.operand is not None:
                    self._reducer.left_committed(info, request.operand)
            if self._failure is not None:
                self._reducer.left_failed(self._failure)
            raise
        if isinstance(self._failure, errors.PCCLError):
            raise self._named(self._failure)
        if self._failure is not None:
            raise self._failure
        infos = [self._infos[request.tag] for request in self._requests]
        tx_bytes = sum(info.tx_bytes for info in infos)
        raw_tx_bytes = sum(info.compression * info.tx_bytes for info in infos)
        return replace(
            infos[-1],
            tx_bytes=tx_bytes,
            rx_bytes=sum(info.rx_bytes for info in infos),
            attempts=max(info.attempts for info in infos),
            compression=raw_tx_bytes / tx_bytes if tx_bytes else 1.0,
            quantization_error=max(info.quantization_error for info in infos),
        )

    async def _work(self) -> None:
        begun_by = NOBODY
        for waiting in self._waiting:
            request = replace(waiting, asks=replace(waiting.asks, begun_by=begun_by))
            self._running[request.tag] = request
            try:
                info = await self._reducer.reduce_while(request, self._deadline, self._goes_on)
            except Exception as error:  # noqa: BLE001 - raised once those that have started are over
                self._fail(error)
            else:
                self._infos[request.tag] = info
                begun_by = self._peer
            finally:
                del self._running[request.tag]
            if not self._goes_on():
                return

    def _goes_on(self) -> bool:
        return self._failure is None

    def _fail(self, error: Exception) -> None:
        """What has started comes to its end; what waits for others might wait for ever."""
        if self._failure is not None:
            if _weight(error) > _weight(self._failure):
                self._failure = error
            return
        self._failure = error
        for request in self._running.values():
            assert request.operand is not None
            reason = "another tensor of the same call could not be reduced"
            self._reducer.withdraw_unless_started(request.operand, reason)

    def _named(self, error: errors.PCCLError) -> errors.PCCLError:
        completed = tuple(r.tag for r in self._requests if r.tag in self._infos)
        tags = ", ".join(str(tag) for tag in completed) or "none"
        reason = f"{error.reason}; tags that completed: {tags}; the other inputs are what they were"
        named = type(error)(error.result, error.func, reason)
        if isinstance(error, errors.Evicted) and isinstance(named, errors.Evicted):
            named.cause, named.ago_s = error.cause, error.ago_s
        named.completed_tags = completed
        named.__cause__ = error.with_traceback(None)  # its frames hold the tensors
        return named


def _weight(error: Exception) -> int:
    """Of several errors a caller hears one: what he must act on first, otherwise the first."""
    if isinstance(error, errors.Evicted | errors.MasterLost):
        return 2  # until the caller joins again there is nothing else to do
    return 1 if isinstance(error, errors.OutcomeUnknown) else 0


def _check_tags(requests: Sequence[ReduceRequest]) -> None:
    seen: set[int] = set()
    for request in requests:
        if request.tag in seen:
            raise ValueError(f"tag {request.tag} occurs twice; give each tensor a tag of its own")
        seen.add(request.tag)


def _check_memory(requests: Sequence[ReduceRequest]) -> None:
    """Results must not overlap anything else; inputs may overlap each other."""
    ranges: list[Range] = []
    for request in requests:
        operand = request.operand
        assert operand is not None
        name = str(request.tag)
        ranges += [(start, stop, written, name) for start, stop, written, _ in operand.ranges]
    found = clash(ranges)
    if found is not None:
        raise ValueError(
            f"the tensors of tags {found[0]} and {found[1]} overlap; pass copies, or one tensor"
        )


__all__ = ["ReduceMany", "Reducer"]
