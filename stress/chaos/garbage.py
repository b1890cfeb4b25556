"""Sends hostile bytes to a port, as scanners, broken programs and attackers do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

from pccl.addresses import parse_address
from pccl.protocol.handshake.opening import OPENING_BYTES

HOLD_S_MAX = 3.0
BYTES_MAX = 64 << 10


async def pour(door: str, connections: int, seed: int, at_s: float) -> None:
    """Open several connections, and send garbage of a random kind over each of them.

    Args:
        door: address ``HOST:PORT``.
        connections: number of connections at the same time.
        seed: seed of the run.
        at_s: time of the fault; each fault has its own garbage.
    """
    random = Random(f"garbage {seed} {at_s}")
    await asyncio.gather(*(_pour_one(door, random.getrandbits(64)) for _ in range(connections)))


async def _pour_one(door: str, seed: int) -> None:
    random = Random(seed)
    address = parse_address(door)
    with suppress(OSError):  # the process closes it, as it should
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            writer.write(_bytes(random))
            await writer.drain()
            if random.random() < 0.5:  # send nothing more, and stay connected
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
        return b""  # only connect
    if kind == 2:
        return random.randbytes(random.randrange(1, OPENING_BYTES))
    return random.randbytes(random.randrange(OPENING_BYTES, BYTES_MAX))
