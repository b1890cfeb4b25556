"""Checks whether shared state may use tensors on CUDA devices on this machine."""

from __future__ import annotations


def is_available() -> bool:
    """Whether shared state may use CUDA tensors: torch is installed and finds a device.

    Collectives need CPU tensors. This function imports torch.
    """
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
