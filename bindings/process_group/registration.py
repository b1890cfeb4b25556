"""Tells torch about the backend.

torch 2.14 and later finds it by the entry point ``torch.distributed.backends``, when a program asks
for it. Earlier versions call all entry points ``torch.backends`` when torch is imported, so this
module imports nothing else of ours before the backend is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any


def register() -> None:
    """Register the backend ``pccl``, and let ``env://`` join the run of a launch. Idempotent."""
    from pccl.bindings.process_group.untyped import dist

    if not dist.is_available() or "PCCL" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("pccl", _create, extended_api=True, devices=["cpu", "cuda"])
    _replace_handler()


def _create(asked: Any, options: Any) -> Any:
    from pccl.bindings.process_group.creation import create

    return create(asked, options)


def _replace_handler() -> None:
    """Replace the handler of ``env://``. torch's public function takes new schemes only."""
    from importlib import import_module

    theirs = import_module("torch.distributed.rendezvous")
    handlers: dict[str, Any] = getattr(theirs, "_rendezvous_handlers", {})
    usual: Callable[..., Iterator[Any]] | None = handlers.get("env")
    if usual is None:
        return  # another torch: init_method="env://" takes RANK and MASTER_ADDR only

    def handler(url: str, **options: Any) -> Iterator[Any]:
        if not is_launched():
            return usual(url, **options)
        from pccl.bindings.process_group.rendezvous import rendezvous

        return rendezvous(**options)

    handlers["env"] = handler


def is_launched() -> bool:
    """Whether this process was started for a run, and has no rank from elsewhere."""
    environ = os.environ
    return bool(environ.get("PCCL_MASTER")) and not ("RANK" in environ or "MASTER_ADDR" in environ)
