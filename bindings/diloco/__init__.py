"""DiLoCo for PyTorch: wrap the inner optimizer, and train with peers that may come and go.

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
