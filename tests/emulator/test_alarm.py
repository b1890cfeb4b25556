"""The alarm rings once for each time, never before it, with either of its timers."""

from __future__ import annotations

import asyncio
import sys
import time

import pytest

from pccl.stress.emulator.alarm import Alarm
from tests.support.patience import LIMIT_S

MS = 1_000_000


class Bell:
    """An alarm that remembers when it rang."""

    def __init__(self, fine: bool) -> None:
        self.rings: list[int] = []
        self._rang = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), self._ring, fine)
        assert self.alarm.is_fine == (fine and sys.platform == "linux")

    def _ring(self) -> None:
        self.rings.append(time.monotonic_ns())
        self._rang.set()

    async def wait(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._rang.wait()
        self._rang.clear()


@pytest.mark.parametrize("fine", [True, False])
async def test_it_rings_at_its_time_and_not_before(fine: bool) -> None:
    bell = Bell(fine)
    # asyncio's own loop rings up to its clock's resolution early.
    early_ns = 0 if fine else 1 * MS
    for number in range(5):
        due_ns = time.monotonic_ns() + number * MS
        bell.alarm.set(due_ns)
        bell.alarm.set(due_ns)  # changes nothing
        await bell.wait()
        assert bell.rings[-1] >= due_ns - early_ns
        assert len(bell.rings) == number + 1
    bell.alarm.close()


@pytest.mark.parametrize("fine", [True, False])
async def test_what_is_past_rings_at_once_and_what_is_replaced_never(fine: bool) -> None:
    bell = Bell(fine)
    bell.alarm.set(time.monotonic_ns() + 20 * MS)
    bell.alarm.set(0)
    await bell.wait()
    bell.alarm.set(time.monotonic_ns() + 5 * MS)
    bell.alarm.set(None)
    await asyncio.sleep(0.03)
    bell.alarm.set(time.monotonic_ns() + 5 * MS)
    bell.alarm.close()
    await asyncio.sleep(0.01)
    assert len(bell.rings) == 1
