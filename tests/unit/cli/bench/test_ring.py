"""The bare ring among threads of this process: sums by hand, lengths that do not divide, an end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from pccl.cli.bench import ring as module
from pccl.cli.bench.ring import Ring, RingReduce

Array = npt.NDArray[Any]


def with_ring(peers: int, play: Callable[[int, Ring], Array]) -> list[Array]:
    """What the peers of a ring return, by rank."""
    with ExitStack() as stack, ThreadPoolExecutor(peers) as threads:
        rings = [stack.enter_context(Ring()) for _ in range(peers)]
        ports = [ring.port for ring in rings]

        def run(rank: int) -> Array:
            rings[rank].connect(rank, ports)
            return play(rank, rings[rank])

        return list(threads.map(run, range(peers)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 1000, 100_003])
@pytest.mark.parametrize("peers", [2, 3, 5])
def test_sums(peers: int, count: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 4096)

    def values(rank: int, number: int) -> Array:
        return (np.arange(count) % 251 + rank + 1000 * number).astype(np.float32)

    def play(rank: int, ring: Ring) -> Array:
        found: list[Array] = []
        for number in range(3):
            send = values(rank, number)
            recv = send if in_place else np.full(count, np.nan, np.float32)
            ring.barrier()
            reduce = RingReduce(ring, send, recv)
            assert reduce.result is recv
            assert reduce.reduce() == "ring"
            found.append(recv.copy())
            assert in_place or np.array_equal(send, values(rank, number))
        return np.stack(found)

    total = np.stack([sum(values(rank, at) for rank in range(peers)) for at in range(3)])
    for found in with_ring(peers, play):
        np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize("peers", [2, 3])
def test_more_than_all_buffers_hold(peers: int) -> None:
    def play(rank: int, ring: Ring) -> Array:
        send, recv = np.arange(8 << 20, dtype=np.int64) + rank, np.empty(8 << 20, np.int64)
        for _ in range(3):
            ring.reduce(send, recv)
        return recv

    total = peers * np.arange(8 << 20) + peers * (peers - 1) // 2
    for found in with_ring(peers, play):
        np.testing.assert_array_equal(found, total)


@pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.bfloat16])
def test_types(dtype: Any) -> None:
    def play(rank: int, ring: Ring) -> Array:
        send, recv = np.full(9, rank + 1, dtype), np.zeros(9, dtype)
        ring.reduce(send, recv)
        return recv

    for found in with_ring(3, play):
        assert found.dtype == dtype
        assert found.tolist() == [6] * 9


def test_sockets_have_the_congestion_control_that_was_asked_for() -> None:
    with Ring() as ring:
        default = ring.congestion
    with Ring(default) as ring:
        assert ring.congestion == default
        assert RingReduce(ring, np.zeros(1), np.zeros(1)).figures() == {
            "algorithm": "ring",
            "congestion": default,
        }


def test_a_lost_neighbour_ends_the_reduce() -> None:
    with Ring() as stays, Ring() as goes, ThreadPoolExecutor(1) as threads:
        ports = [stays.port, goes.port]
        other = threads.submit(goes.connect, 1, ports)
        stays.connect(0, ports)
        other.result()
        goes.__exit__()
        with pytest.raises(ConnectionError):
            stays.reduce(np.zeros(4 << 20), np.zeros(4 << 20))
