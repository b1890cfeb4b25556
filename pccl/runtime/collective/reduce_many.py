"""Many reduces as one call, some at a time; ``machines.batch`` makes the decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from pccl.machines.batch import WITHDRAWN, ReduceBatch
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.calls import Calls
from pccl.runtime.collective.memory import Range, clash
from pccl.runtime.collective.operand import Operand
from pccl.runtime.requests import ReduceInfo, ReduceManyRequest, ReduceRequest
from pccl.runtime.waiting import cancelled_and_settled

MayRetry = Callable[[], bool]


class ReduceMany:
    """One call that reduces several tensors.

    Args:
        loop: event loop that the call runs on.
        calls: calls of this peer, to undo reduces whose results the caller has not seen.
        reduce: makes one reduce, and retries it after losses while its second argument allows it.
        withdraw: leaves the call that borrows an operand, unless its operation has started.
        peer: id of this peer when the call begins.
        request: all-reduces with different tags, on memory that does not overlap; at least one.

    Raises:
        ValueError: a tag occurs twice, or tensors overlap.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: Calls,
        reduce: Callable[[ReduceRequest, MayRetry], Coroutine[Any, Any, ReduceInfo]],
        withdraw: Callable[[Operand, str], None],
        peer: PeerId,
        request: ReduceManyRequest,
    ) -> None:
        self._batch = ReduceBatch([one.tag for one in request.requests], request.max_in_flight)
        _check_memory(request.requests)
        self._loop = loop
        self._calls = calls
        self._reduce = reduce
        self._withdraw = withdraw
        self._peer = peer
        self._requests = {one.tag: one for one in request.requests}
        self._infos: dict[int, ReduceInfo] = {}
        """Reports of the completed reduces, by tag."""

    async def run(self) -> ReduceInfo:
        """Make all reduces.

        Returns:
            The report of the last request, but with all bytes, the most attempts and largest error.

        Raises:
            PCCLError: a reduce failed; ``completed_tags`` names the reduces that succeeded.
            ValueError: another call uses the memory of a reduce.
        """
        workers = [self._loop.create_task(self._work()) for _ in range(self._batch.width)]
        try:
            for worker in workers:
                await worker
        except BaseException:
            for worker in workers:
                await cancelled_and_settled(worker)
            for tag, request in self._requests.items():
                if tag in self._infos:
                    self._calls.left_committed(self._infos[tag], [request.operand])
            if self._batch.failure is not None:
                self._calls.left_failed(self._batch.failure)
            raise
        failure = self._batch.named_failure()
        if failure is not None:
            raise failure
        infos = [self._infos[tag] for tag in self._requests]
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
        while (tag := self._batch.begin_next()) is not None:
            begun_by = self._peer if self._infos else NOBODY
            waiting = self._requests[tag]
            request = replace(waiting, asks=replace(waiting.asks, begun_by=begun_by))
            try:
                info = await self._reduce(request, lambda: self._batch.goes_on)
            except Exception as error:  # noqa: BLE001 - raised when all started reduces have ended
                for other in self._batch.failed(tag, error):
                    operand = self._requests[other].operand
                    assert operand is not None
                    self._withdraw(operand, WITHDRAWN)
            else:
                self._infos[tag] = info
                self._batch.completed(tag)


def _check_memory(requests: Sequence[ReduceRequest]) -> None:
    """Check that results overlap no other memory. Inputs may overlap each other."""
    ranges: list[Range] = []
    for request in requests:
        operand = request.operand
        assert operand is not None
        name = str(request.tag)
        ranges += [(start, stop, written, name) for start, stop, written, _ in operand.ranges]
    found = clash(ranges)
    if found is not None:
        raise ValueError(
            f"the tensors of tags {found[0]} and {found[1]} overlap; pass copies, or only one"
        )
