"""A backend of ``ray.util.collective``: its groups of actors call ``pccl``.

Each group is a run of its own. Its master is in an actor that rank 0 starts, and ends with rank 0.

| call | is |
| --- | --- |
| ``allreduce``, ``broadcast``, ``barrier``, ``allgather``, ``send``, ``recv`` | that of ``pccl`` |
| ``reduce`` | ``reduce``: only the root's tensor changes |
| ``reducescatter`` | ``reduce_scatter`` of the concatenated tensors |

The tensors are NumPy arrays, or torch tensors of the CPU. If a member is lost, calls raise
``CollectiveAborted``, and keep their inputs unchanged. If rank 0 is lost, with the master, they
raise ``MasterLost`` after 10 s. Then destroy the group in all members, and create it again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import pccl
from pccl.bindings.ray.actors import GroupMasters
from pccl.bindings.ray.library import on_node, ray

if TYPE_CHECKING:

    class _BaseGroup:
        _group_name: str

        def __init__(self, world_size: int, rank: int, group_name: str) -> None: ...

else:
    from ray.util.collective.collective_group.base_collective_group import BaseGroup as _BaseGroup

BACKEND = "PCCL"

GROUP_S = 60.0
"""How long a member waits for all others of its group, in seconds."""

PAUSE_S = 0.1

TIMING = pccl.Timing(master_lost_s=10.0)

_kept: dict[str, Any] = {}
"""By the name of a destroyed group: its masters, which end with this handle if it is of rank 0."""


def register_backend() -> None:
    """Make ``backend="pccl"`` known to ``ray.util.collective``, in this process. Idempotent.

    The driver and each actor must call it before they create a group.
    """
    registry = import_module("ray.util.collective.backend_registry")
    if not registry._global_registry.is_registered(BACKEND):
        registry.register_collective_backend(BACKEND, RayGroup)


def _only(tensors: Sequence[Any], call: str) -> Any:
    """Return the tensor of a call; Ray wraps it in a list, for several GPUs of a process."""
    if len(tensors) != 1:
        raise NotImplementedError(
            f"{call}_multigpu: the pccl backend takes one tensor from each process; "
            "start a process for each GPU"
        )
    return tensors[0]


def _concatenated(tensors: Sequence[Any]) -> Any:
    if isinstance(tensors[0], np.ndarray):
        return np.concatenate([one.ravel() for one in tensors])
    return import_module("torch").cat([one.reshape(-1) for one in tensors])


def _op(options: Any) -> str:
    name = str(options.reduceOp.name).lower()
    return "prod" if name == "product" else name


def _budget_s(options: Any) -> float | None:
    """Return the time limit of a call; Ray marks a missing one by a negative time."""
    limit: timedelta = options.timeout_ms
    return None if limit < timedelta(0) else limit.total_seconds()


class RayGroup(_BaseGroup):
    """One member's side of a group of actors. Ray makes it, for ``backend="pccl"``.

    Args:
        world_size: number of members of the group.
        rank: number of this member.
        group_name: name of the group, which no other group of this Ray namespace has.

    Raises:
        DeadlineExceeded: the other members did not come within a minute.
        ValueError: the members do not give the ranks of one group.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._size = world_size
        ends_s = time.monotonic() + GROUP_S
        address, token = self._find_master(rank, group_name, ends_s)
        self._comm = pccl.Communicator(
            address, peer_group=0, token=token, name=f"rank-{rank}", timing=TIMING
        )
        try:
            self._comm.connect(min_peers=world_size, timeout_s=ends_s - time.monotonic())
            ranks = self._comm.all_gather_object(rank, timeout_s=GROUP_S)
            if sorted(ranks) != list(range(world_size)):
                raise ValueError(
                    f"group {group_name!r}: its members have the ranks {ranks}; "
                    f"give each of 0 to {world_size - 1} to one member"
                )
            self._members = self._comm.subgroup([ranks.index(one) for one in range(world_size)])
        except BaseException:
            self._comm.close()
            raise

    def _find_master(self, rank: int, group_name: str, ends_s: float) -> tuple[str, str]:
        """Return address and token of the master, in an actor that rank 0 starts."""
        name = f"pccl_collective_{group_name}"
        while True:
            try:
                if rank == 0:
                    here = on_node(ray.get_runtime_context().get_node_id())
                    actor = ray.remote(GroupMasters).options(
                        name=name, get_if_exists=True, num_cpus=0, scheduling_strategy=here
                    )
                    self._masters = actor.remote()
                else:
                    self._masters = ray.get_actor(name)
                found: tuple[str, str] = ray.get(self._masters.join.remote(rank))
                return found
            except (ValueError, ray.exceptions.RayActorError):  # not yet, or no longer there
                if time.monotonic() >= ends_s:
                    raise
            time.sleep(PAUSE_S)

    def destroy_group(self) -> None:
        """Leave the group."""
        self._comm.close()
        _kept[self._group_name] = self._masters

    @classmethod
    def backend(cls) -> str:
        """Return the name of this backend."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Whether this backend can be used."""
        return True

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        """Reduce the tensor over all members, in place."""
        values = _only(tensor, "allreduce")
        if self._size > 1:
            budget_s = _budget_s(allreduce_options)
            self._members.all_reduce(values, op=_op(allreduce_options), timeout_s=budget_s)

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait until all members have called this."""
        self._members.barrier(timeout_s=barrier_options and _budget_s(barrier_options))

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Reduce the tensor over all members, in place at the root."""
        values, root = _only(tensor, "reduce"), reduce_options.root_rank
        if self._size > 1:
            budget_s = _budget_s(reduce_options)
            self._members.reduce(values, op=_op(reduce_options), root=root, timeout_s=budget_s)

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Copy the root's tensor to all members."""
        self._members.broadcast(
            _only(tensor, "broadcast"),
            root=broadcast_options.root_rank,
            timeout_s=_budget_s(broadcast_options),
        )

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any
    ) -> None:
        """Give each member's tensor to all members."""
        sent, received = _only(tensor, "allgather"), _only(tensor_list, "allgather")
        if self._size == 1:
            received[0][...] = sent
        else:
            self._members.all_gather(sent, received, timeout_s=_budget_s(allgather_options))

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any
    ) -> None:
        """Reduce the tensors of a list over all members, and give each member the one of its rank.

        Raises:
            NotImplementedError: the tensors have different sizes.
        """
        sent, received = _only(tensor_list, "reducescatter"), _only(tensor, "reducescatter")
        if len({tuple(one.shape) for one in sent}) > 1:
            raise NotImplementedError("reducescatter: the tensors must have equal shapes")
        if self._size == 1:
            received[...] = sent[0]
            return
        self._members.reduce_scatter(
            _concatenated(sent),
            received,
            op=_op(reducescatter_options),
            timeout_s=_budget_s(reducescatter_options),
        )

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send a tensor to one member, which calls ``recv``."""
        if send_options.n_elements:
            raise NotImplementedError("send_multigpu: send the part itself, as tensor[:n]")
        self._members.send(
            _only(tensor, "send"), to=send_options.dst_rank, timeout_s=_budget_s(send_options)
        )

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive a tensor from one member, which calls ``send``."""
        if recv_options.n_elements:
            raise NotImplementedError("recv_multigpu: receive into the part itself, as tensor[:n]")
        self._members.recv(_only(tensor, "recv"), source=recv_options.src_rank)
