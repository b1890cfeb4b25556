"""Hostile bytes on a port: what scanners, broken programs and bad people send."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from pccl.addresses import parse_address
from pccl.protocol.handshake import OPENING_BYTES

HOLD_S_MAX = 3.0
BYTES_MAX = 64 << 10


async def pour(door: str, connections: int, seed: int, at_s: float) -> None:
    """Open so many connections and send garbage, each of a kind that the seed draws.

    Args:
        door: ``HOST:PORT``.
        connections: how many, at the same time.
        seed: of the run.
        at_s: of the fault; each has garbage of its own.
    """
    random = Random(f"garbage {seed} {at_s}")
    await asyncio.gather(*(_pour_one(door, random.getrandbits(64)) for _ in range(connections)))


async def _pour_one(door: str, seed: int) -> None:
    random = Random(seed)
    address = parse_address(door)
    with suppress(OSError):  # they close it: as they should
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(_bytes(random))
            await writer.drain()
            if random.random() < 0.5:  # says nothing more, and holds the line
                await asyncio.wait_for(reader.read(BYTES_MAX), random.random() * HOLD_S_MAX)
        except TimeoutError:
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def _bytes(random: Random) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 1:
        return b""  # connects, and that is all
    if kind == 2:
        return random.randbytes(random.randrange(1, OPENING_BYTES))
    return random.randbytes(random.randrange(OPENING_BYTES, BYTES_MAX))
