"""New ranks after losses, newcomers, and their state."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pccl.bindings.gradient_averager.replica import AveragedReplica
from pccl.bindings.process_group.group import RunGroup, run_group
from pccl.bindings.process_group.rendezvous import ProcessMembership, joined
from pccl.bindings.process_group.untyped import dist
from pccl.errors import Evicted, MasterLost, ResyncRequired

_M = TypeVar("_M", bound=nn.Module)

_DDP_PARAMETERS = inspect.signature(DistributedDataParallel).parameters

_DDP_OPTIONS = (
    *("device_ids", "output_device", "dim", "find_unused_parameters", "gradient_as_bucket_view"),
    *("static_graph", "mixed_precision", "skip_all_reduce_unused_params", "batched_grad_copy"),
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers",
)
"""Arguments of DDP which it keeps under the same name; earlier versions of torch have fewer."""


def reconfigure(
    model: _M, optimizer: torch.optim.Optimizer, step: int = 0, *, resume: str = "never"
) -> tuple[_M, int]:
    """Give new ranks to the live members, admit newcomers, and give them the state.

    All ranks call it between two steps, for example before each one. The first call of a process
    makes its model, its optimizer and its step equal to those of the run. In later calls the
    members agree on who is there. If somebody left or came, they make the default process group
    anew, and DDP around the same module with the same arguments and communication hook. Other
    groups, and what uses them, have to be made anew.

    A newcomer waits in ``init_process_group`` for this call of the others. Before its own first
    call, it can make no collective. ``DistributedDataParallel(model)`` makes none there.

    Args:
        model: DDP, or a plain module.
        optimizer: the optimizer of its parameters; its state must be tensors and numbers.
        step: number of steps that this process has taken. The most steps win in a new run.
        resume: as for ``Communicator.sync_shared_state``.

    Returns:
        The model, which is another DDP object if members left or came; and the run's step.

    Raises:
        TypeError: the default group has another backend.
        MasterLost, NotAdmitted: the run is out of reach.
        StateUnavailable: no live member has the state of the run; as for ``sync_shared_state``.
    """
    one, group = joined(), run_group(None)
    assert one is not None
    wrapped: Any = model
    module: nn.Module = wrapped.module if isinstance(model, DistributedDataParallel) else model
    if one.replica is None or one.replica.model is not module:
        one.replica = AveragedReplica(module, optimizer, {}, {})
    else:
        _meet(one)
        changed = one.look()
        if changed:
            group = _found_anew(one, group)
        if module is not wrapped and getattr(wrapped.process_group, "has_ended", changed):
            wrapped = _wrapped_anew(wrapped)
    replica = one.replica
    assert replica is not None
    is_new = replica.state.lineage is None
    if is_new or group.is_apart:
        replica.steps = step
        if is_new:
            replica.begin_anew()
        replica.publish()
        one.comm.sync_shared_state(replica.state, resume=resume)
        replica.state.push_revision()
        replica.adopt()
        step = replica.steps
        if is_new:
            one.has_state()
        one.is_apart = group.is_apart = False
    one.comm.report_step(step)
    return wrapped, step


def _meet(one: ProcessMembership) -> None:
    """Agree with the others on who is there; a peer that was cut off joins again."""
    try:
        try:
            one.comm.update_topology()
        except ResyncRequired:
            one.comm.connect()
            raise
    except (Evicted, MasterLost, ResyncRequired):
        assert one.replica is not None
        one.replica.begin_anew()
        if not one.is_member:
            one.comm.update_topology()


def _found_anew(one: ProcessMembership, group: RunGroup) -> RunGroup:
    """Make the default process group anew. It is apart until the newcomers have the state."""
    one.is_reconfigured = True
    dist.destroy_process_group()
    one.is_reconfigured, one.is_apart = False, True
    dist.init_process_group(
        "pccl",
        store=one.store,
        rank=one.rank,
        world_size=len(one.peers),
        timeout=group.timeout,
        pg_options=group.options,
    )
    return run_group(None)


def _wrapped_anew(model: Any) -> Any:
    """Return another DDP around the module of a DDP."""
    options: dict[str, Any] = {
        name: getattr(model, name) for name in _DDP_OPTIONS if name in _DDP_PARAMETERS
    }
    anew = type(model)(model.module, bucket_cap_mb=model.bucket_bytes_cap / (1 << 20), **options)
    for hook, state in model._comm_hooks:
        anew.register_comm_hook(state, hook)
    return anew
