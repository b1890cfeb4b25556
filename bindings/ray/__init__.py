"""Ray starts, places and replaces the peers of a run; and ``ray.util.collective`` over ``pccl``.

* ``policy``: decides, without Ray, what follows the end of a peer, and what a peer is started with.
* ``library``: Ray itself, or an error that says what to install; which nodes will be removed.
* ``actors``: the actors that run the master and the peers.
* ``supervisor``: the actor that starts, watches and replaces the peers of a run.
* ``run``: ``RayRun``, which starts a run in a cluster and returns its results.
* ``collective``: a backend of ``ray.util.collective``.

    from pccl.bindings.ray import RayRun

See docs/ray.md. This file does not import Ray; naming one of its classes does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl.bindings.ray.collective import register_backend
    from pccl.bindings.ray.run import RayRun

__all__ = ["RayRun", "register_backend"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "RayRun":
        from pccl.bindings.ray.run import RayRun

        return RayRun
    from pccl.bindings.ray.collective import register_backend

    return register_backend
