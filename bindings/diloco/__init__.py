"""DiLoCo for PyTorch: wrap the inner optimizer, and train with peers that may join and leave.

* ``optimizer``: wraps an inner optimizer, and periodically averages with other peers.
* ``schedule``: the fragment of each round, and the inner steps between rounds.
* ``ledger``: the position of the run, and the contributors of its last rounds.
* ``rounds``: the joint calls of one replica, in the order in which all members make them. Pure.
* ``round_effects``: the calls that ``rounds`` asks for, their results, and its notices.
* ``pipeline``: decides what a replica has to do after each inner step. Pure.
* ``local_trainer``: the actions of a replica's training loop between the joint calls. Pure.
* ``model``: the parameters and buffers of a replica, and those that all members share.
* ``replica_calls``: makes calls of a communicator from what ``rounds`` asks for. Pure.
* ``joint_caller``: a thread that makes all joint calls of one replica, in order.
* ``training_driver``: the part of a replica that runs on the training thread.
* ``checkpoints``: saves and loads the state of a replica.

    from pccl.bindings.diloco import DiLoCo

Sources: DiLoCo (arXiv:2311.08105), OpenDiLoCo (2407.07852), Streaming DiLoCo (2501.18512), eager
and delayed updates (2502.12996).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl.bindings.diloco.model.outer_optimizers import clipped
    from pccl.bindings.diloco.optimizer import DiLoCo

__all__ = ["DiLoCo", "clipped"]


def __getattr__(name: str) -> Any:
    # The simulator uses rounds and schedules without torch, so torch is imported only here.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pccl.bindings.diloco import optimizer
    from pccl.bindings.diloco.model import outer_optimizers

    return getattr(optimizer if name == "DiLoCo" else outer_optimizers, name)
