"""Tells whether the library supports tensors on CUDA devices here."""

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
