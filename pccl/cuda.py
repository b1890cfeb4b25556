"""What the library can do with tensors in the memory of CUDA devices."""

from __future__ import annotations


def is_available() -> bool:
    """Whether shared state may lie on CUDA devices: torch is installed and finds one.

    Collectives take CPU tensors. This imports torch.
    """
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
