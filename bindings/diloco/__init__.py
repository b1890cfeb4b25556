"""DiLoCo for PyTorch: wrap the inner optimizer, and train with peers that may come and go.

* ``optimizer``: an inner optimizer that averages with other peers now and then.
* ``schedule``: which fragment is reduced in which round, and how many inner steps lie between.
* ``ledger``: where the run is, and whose work is in its last rounds; part of the shared state.
* ``rounds``: the joint calls of one replica, in the order in which all members make them. Pure.
* ``pipeline``: what one replica has to do after each of its inner steps. Pure.
* ``local_trainer``: what its training loop does between the joint calls. Pure.
* ``outer``: the float32 copy that the members hold bit for bit alike, on the host.
* ``local_model``: the local model, and how far it has moved away from what the members hold.
* ``joint_caller``: a thread that makes all joint calls of one replica, in order.
* ``training_driver``: the training thread of one replica: trains, and waits where it has to.
* ``interrupts``: Ctrl-C must not leave a model half updated.

    from pccl.bindings.diloco import DiLoCo

Sources: DiLoCo (arXiv:2311.08105), OpenDiLoCo (2407.07852), Streaming DiLoCo (2501.18512), eager
and delayed updates (2502.12996).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl.bindings.diloco.optimizer import DiLoCo

__all__ = ["DiLoCo"]


def __getattr__(name: str) -> Any:
    # Rounds and schedules need no torch: the simulator uses them without.
    if name != "DiLoCo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pccl.bindings.diloco.optimizer import DiLoCo

    return DiLoCo
