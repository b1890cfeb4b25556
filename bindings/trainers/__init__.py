"""Callbacks with which the trainers of other libraries follow a run of ``DiLoCo``.

* ``following``: what the callbacks share: finds the wrapper, and brings its scheduler along.
* ``hugging_face``: the callback for ``transformers.Trainer``.
* ``lightning_callback``: the callback for ``lightning.Trainer``.

    from pccl.bindings.trainers import HuggingFaceCallback

``DiLoCo`` is the optimizer of the trainer, so checkpoints, clipping and mixed precision need no
callback. A loop with ``accelerate`` needs none at all: see docs/trainers.md. This file imports
neither library; naming a callback imports its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pccl.bindings.trainers.hugging_face import HuggingFaceCallback
    from pccl.bindings.trainers.lightning_callback import LightningCallback

__all__ = ["HuggingFaceCallback", "LightningCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "HuggingFaceCallback":
        from pccl.bindings.trainers import hugging_face

        return hugging_face.HuggingFaceCallback
    from pccl.bindings.trainers import lightning_callback

    return lightning_callback.LightningCallback
