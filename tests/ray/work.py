"""What the peers of these tests do, and the board on which they write it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

import pccl
from pccl.bindings.ray import register_backend
from pccl.bindings.ray.library import ray
from pccl.errors import CollectiveAborted, TooFewPeers

STEP_S = 0.1
SYNC_EVERY = 20

BOARD = "board"

GROUP = "group"


class Board:
    """An actor to which peers report their steps, and that tells them when to end."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, Any]] = {}
        self._left: dict[int, dict[str, Any]] = {}
        self._ends = False

    def report(self, slot: int, facts: dict[str, Any]) -> bool:
        """Note what the peer of a slot says; return whether the run shall end."""
        self._reports[slot] = facts
        return self._ends

    def leave(self, slot: int, facts: dict[str, Any]) -> None:
        self._left[slot] = facts

    def left(self) -> dict[int, dict[str, Any]]:
        return self._left

    def reports(self) -> dict[int, dict[str, Any]]:
        return self._reports

    def end(self) -> None:
        self._ends = True


def board() -> Any:
    return ray.get_actor(BOARD, namespace=BOARD)


def reduce() -> tuple[str, int]:
    """Add up what all peers send, until the board ends that; return a digest, and the steps."""
    slot = int(os.environ["PCCL_PEER_INDEX"])
    asked = board()
    state = np.zeros(1001)  # steps made, sums: the same on all members
    drawn = np.random.default_rng(slot)
    with pccl.Communicator() as comm:
        comm.connect(min_peers=2)
        ends = False
        while not ends:
            try:
                comm.update_topology()
                comm.broadcast(state, root=0)
                facts = {"step": int(state[0]), "members": comm.world_size, "pid": os.getpid()}
                sent = drawn.normal(size=1001)
                sent[0] = ray.get(asked.report.remote(slot, facts))
                comm.all_reduce(sent, retry=True)
            except (CollectiveAborted, TooFewPeers):
                continue
            finally:
                time.sleep(STEP_S)  # it computes
            ends = sent[0] > 0
            sent[0] = 1
            state += sent
    return hashlib.sha256(state.tobytes()).hexdigest(), int(state[0])


def wait() -> None:
    """Never return."""
    ray.get(board().report.remote(0, {"pid": os.getpid()}))
    threading.Event().wait()


def fail() -> None:
    """End the process, as a crash in C code does; the next time raise, as a mistake does."""
    try:
        os.mkdir(os.environ["MARK"])
    except FileExistsError:
        raise ValueError("a mistake in the program") from None
    os._exit(7)


def train() -> None:
    """Train one number with DiLoCo until this peer must leave: each inner step subtracts 1.

    It reports how many steps it has made, and when it leaves, how many of them are in the model.
    """
    torch = import_module("torch")
    diloco = import_module("pccl.bindings.diloco")
    slot, asked = int(os.environ["PCCL_PEER_INDEX"]), board()
    facts = {"pid": os.getpid(), "made": 0, "averaged": 0}
    weight = torch.nn.Parameter(torch.zeros(4))

    def hear(event: Any) -> None:
        facts["averaged"] += int(getattr(event, "own_weight", 0))

    with (
        pccl.Communicator() as comm,
        diloco.DiLoCo(
            [("weight", weight)],
            inner=torch.optim.SGD([weight], lr=1.0),
            outer=partial(torch.optim.SGD, lr=1.0),
            comm=comm,
            sync_every=SYNC_EVERY,
            min_peers=2,
            on_event=hear,
        ) as optimizer,
    ):
        optimizer.join()
        try:
            while True:
                ray.get(asked.report.remote(slot, dict(facts)))
                time.sleep(STEP_S)  # it computes
                weight.grad = torch.ones(4)
                facts["made"] += 1
                optimizer.step()
        finally:
            ray.get(asked.leave.remote(slot, {**facts, "model": weight.tolist()}))


class GroupMember:
    """An actor of a group of ``ray.util.collective``."""

    def __init__(self) -> None:
        register_backend()
        self._calls: Any = import_module("ray.util.collective")

    def join(self, size: int, rank: int, group: str = GROUP) -> None:
        if self._calls.is_group_initialized(group):
            self._calls.destroy_collective_group(group)
        self._calls.init_collective_group(size, rank, "pccl", group)

    def barrier(self) -> None:
        self._calls.barrier(GROUP)

    def refused(self) -> None:
        self._calls.get_group_handle(GROUP).allreduce([np.zeros(1), np.zeros(1)], None)

    def call(
        self,
        name: str,
        rank: int,
        values: Any,
        kind: str = "numpy",
        op: str = "SUM",
        root: int = 0,
        group: str = GROUP,
    ) -> Any:
        """Make a call with the values of the own rank; return what is in the own tensor then."""
        calls, size = self._calls, len(values)
        made = np.array if kind == "numpy" else import_module("torch").tensor
        tensor, chosen = made(values[rank]), getattr(calls.types.ReduceOp, op)
        match name:
            case "allreduce":
                calls.allreduce(tensor, group, chosen)
            case "reduce":
                calls.reduce(tensor, root, group, chosen)
            case "broadcast":
                calls.broadcast(tensor, root, group)
            case "allgather":
                everything = [made(np.zeros_like(values[0])) for _ in range(size)]
                calls.allgather(everything, tensor, group)
                return np.stack([np.asarray(one) for one in everything])
            case "reducescatter":
                calls.reducescatter(tensor, [made(one * (rank + 1)) for one in values], group)
            case "pass_on":  # in two ways, because calls block
                received, after = made(values[rank]), (rank + 1) % size
                if rank:
                    calls.recv(received, rank - 1, group)
                calls.send(tensor, after, group)
                if not rank:
                    calls.recv(received, size - 1, group)
                tensor = received
            case _:
                calls.barrier(group)
        return np.asarray(tensor)
