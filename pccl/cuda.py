"""What the library can do with tensors in the memory of CUDA devices."""

from __future__ import annotations


def is_available() -> bool:
    """Whether shared state may lie on CUDA devices: not yet. Collectives take CPU tensors."""
    return False
