"""Run several reduces at once, and do other work meanwhile, on one asyncio loop.

    pccl launch -n 3 -- python examples/with_asyncio.py

Tags distinguish reduces in flight. A handle leaves the loop free: each process counts how often it
did other work before the big sum was complete.
"""

import asyncio
import os

import numpy as np

import pccl.aio


async def main() -> None:
    """Join the run, reduce four arrays together, then one in the background."""
    index, peers = int(os.environ["PCCL_PEER_INDEX"]), int(os.environ["PCCL_PEERS"])
    async with pccl.aio.Communicator() as comm:
        await comm.connect(min_peers=peers)

        arrays = [np.full(1000, 10.0 * index + tag) for tag in range(4)]
        await asyncio.gather(*(comm.all_reduce(x, tag=tag) for tag, x in enumerate(arrays)))
        print("sums by tag:", [float(x[0]) for x in arrays])

        big = np.ones(4_000_000, np.float32)
        handle = await comm.all_reduce_async(big)  # the array is in use until it is done
        turns = 0
        while not handle.done:
            turns += 1  # stands for useful work
            await asyncio.sleep(0.001)
        info = await handle  # raises if it failed
        print(f"each of {big.size} elements is {big[0]:g}, from peers {info.contributors}")
        print(f"the loop had {turns} turns meanwhile")


if __name__ == "__main__":
    asyncio.run(main())
