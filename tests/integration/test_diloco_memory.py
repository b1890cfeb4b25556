"""How much memory ``DiLoCo`` takes on the host: what the kernel says of a process that trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import pccl
from tests.support.diloco_memory import COUNT, MODES, WIDTH, train
from tests.support.patience import LIMIT_S

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux says the peak of a process"
)

BOUNDS = {"sync": 20, "int8": 24, "delay": 24, "streaming": 24, "eager": 24}
"""By mode: bytes per parameter beyond parameters, gradients and inner optimizer."""

ROOM_BYTES = 12e6
"""For one of eight tensors in the outer step, segments and buffers of links: no copy of all."""

EVERY_BLOCK_MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Has glibc give memory back to the kernel when it is freed."""


@pytest.fixture(scope="module")
def peaks() -> Iterator[dict[str, float]]:
    """The peaks of one of two peers, by mode."""
    masters = [pccl.MasterNode("127.0.0.1:0") for _ in range(1 + len(MODES))]
    for master in masters:
        master.run()
    addresses = [master.address for master in masters]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.diloco_memory", *addresses],
        env={**os.environ, **EVERY_BLOCK_MAPPED}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(1) as other:
            other.submit(train, addresses[0], 8, "eager").result(LIMIT_S)
            for mode, address in zip(MODES, addresses[1:], strict=True):
                other.submit(train, address, WIDTH, mode).result(LIMIT_S)
        written, _ = process.communicate(timeout=LIMIT_S)
        yield {mode: peak for mode, (peak, _) in json.loads(written).items()}
    finally:
        process.kill()
        process.wait()
        for master in masters:
            master.interrupt()


@pytest.mark.parametrize("mode", MODES)
def test_peak(peaks: dict[str, float], mode: str) -> None:
    assert peaks[mode] < BOUNDS[mode] + ROOM_BYTES / COUNT
