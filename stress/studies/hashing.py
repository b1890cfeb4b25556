"""How fast shared state is hashed, beside the hash itself with all processors.

A program::

    python -m pccl.stress.studies.hashing --bytes 268435456 --rounds 5

In turn: the pieces as a synchronization hashes them (:class:`pccl.runtime.hashing.PooledHasher`);
one call of BLAKE3 over everything with all processors; and with one. It ends with a JSON object:
seconds and CPU seconds of every round, by name. Digests are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np
from blake3 import blake3

import pccl
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.runtime.hashing import PooledHasher
from pccl.runtime.state.memory.state_memory import StateMemory


async def measure(nbytes: int, round_count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and CPU seconds of each way.

    Args:
        nbytes: of the state, one tensor.
        round_count: how many rounds are measured, after one that is not.

    Raises:
        RuntimeError: the digests are wrong.
    """
    content = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
    state = StateMemory([pccl.TensorInfo.from_numpy(content, "content")])
    view = content.data
    hasher = PooledHasher(asyncio.get_running_loop())

    async def pieces() -> None:
        await hasher.hash_pieces(state, range(state.layout.piece_count))

    async def all_processors() -> None:
        blake3(view, max_threads=blake3.AUTO).digest()

    async def one_processor() -> None:
        blake3(view).digest()

    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "pieces": pieces,
        "all_processors": all_processors,
        "one_processor": one_processor,
    }
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "cpu_s": []} for name in ways}
    for number in range(round_count + 1):
        order = list(ways.items())
        for name, way in order if number % 2 == 0 else reversed(order):
            cpu_s, started_s = time.process_time(), time.perf_counter()
            await way()
            seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
            if number:
                found[name]["seconds"].append(seconds)
                found[name]["cpu_s"].append(cpu_s)
    hasher.close()
    for number, piece in enumerate(map(state.layout.piece, range(state.layout.piece_count))):
        digest = blake3(view[piece.offset : piece.offset + piece.length]).digest()
        if state.piece_map[number] != digest:
            raise RuntimeError(f"piece {number} of {PIECE_BYTES} bytes has a wrong digest")
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.studies.hashing")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = asyncio.run(measure(given.bytes, given.rounds))
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
