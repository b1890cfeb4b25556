"""``PublishWork``: the versions that a process publishes beside its joint calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from random import Random
from typing import Any

import numpy as np

from pccl._api.arguments import publish_request
from pccl.machines.peer.machine import Standing
from pccl.protocol.errors import NotConnected
from pccl.shared_state import SharedState, TensorInfo
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.publication.checker import LAST, PublicationChecker
from pccl.stress.sim.workloads.calls import SimCalls

_PERIOD_NS = 400 * MS
"""Members publish the version of the present period, so most of them publish the same."""
_LOOK_NS = 250 * MS


class PublishWork:
    """What one process publishes.

    Args:
        parts: shared objects of the run.
        checker: knows the contents.
        process: the process.
        calls: sleeps for it.
    """

    def __init__(
        self, parts: RunParts, checker: PublicationChecker, process: PeerProcess, calls: SimCalls
    ) -> None:
        self._loop, self._checker, self._calls = parts.loop, checker, calls
        self._process = process
        self._rng = Random(f"{parts.scenario.seed}/{process.name}/publishes")
        self._arrays = checker.arrays()
        infos = [TensorInfo.from_numpy(array, f"t{n}") for n, array in enumerate(self._arrays)]
        self._state = SharedState(infos)

    async def during(self, work: Coroutine[Any, Any, None]) -> None:
        """Do other work, and publish meanwhile; then publish the last version, and wait."""
        publishing = self._loop.create_task(self._go_on())
        try:
            await work
        finally:
            publishing.cancel()
            with suppress(asyncio.CancelledError, NotConnected):
                await publishing
        try:
            with suppress(NotConnected):
                await self._publish(LAST)
                while self._is_member and not self._checker.may_go(self._process.name):
                    await self._calls.sleep(_LOOK_NS)
        finally:
            self._checker.goes(self._process.name)

    @property
    def _is_member(self) -> bool:
        return self._process.engine.machine.standing is Standing.MEMBER

    async def _go_on(self) -> None:
        while True:
            if self._is_member:
                await self._publish(self._loop.now_ns() // _PERIOD_NS)
            await self._calls.sleep(self._rng.randrange(2 * _PERIOD_NS))

    async def _publish(self, number: int) -> None:
        for array, content in zip(self._arrays, self._checker.contents(number), strict=True):
            array[:] = np.frombuffer(content, array.dtype)
        self._state.revision = number
        began_ns = self._checker.publishes(number)
        await self._process.engine.publish(publish_request(self._state))
        self._checker.has_published(self._process.name, began_ns)
