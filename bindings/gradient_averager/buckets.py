"""Buckets of gradients that are contiguous in host memory.

The gradient of a CPU parameter *becomes* a part of the bucket (``parameter.grad`` is a view), so
the optimizer reads the average without a copy. The gradient of a CUDA parameter is copied to
page-locked memory and back, on the stream of the backward pass, without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Bucket:
    """Gradients that are reduced together.

    Args:
        named: names and parameters, in the order of the values; on one device.

    Attributes:
        values: all gradients, shape (n,), on the host.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        first = self._parameters[0]
        self._is_cuda = first.is_cuda
        self._is_host = first.device.type == "cpu"
        sizes = [parameter.numel() for parameter in self._parameters]
        self.values = torch.zeros(sum(sizes), dtype=first.dtype, pin_memory=self._is_cuda)
        self._views = [
            view.view(parameter.shape)
            for view, parameter in zip(
                torch.split(self.values, sizes), self._parameters, strict=True
            )
        ]
        self._here = [False] * len(self._views)
        self._missing = len(self._views)
        self._copied: Any = None  # a CUDA event; torch types them only in part
        self._returned: Any = None  # another one

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters of the gradients, in the order of the values."""
        return tuple(self._parameters)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients were taken; copies from a device may still be running."""
        return not self._missing

    @property
    def is_on_host(self) -> bool:
        """Whether all gradients were taken, and have arrived in ``values``."""
        return self.is_complete and (self._copied is None or bool(self._copied.query()))

    def wait_on_host(self) -> None:
        """Wait until the copies from the device are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def begin(self) -> None:
        """Begin a new step: no gradient has been taken yet."""
        self._here = [False] * len(self._views)
        self._missing = len(self._views)
        self._copied = None

    def take(self, place: int) -> None:
        """Copy the gradient of the parameter at this place into the bucket.

        Raises:
            RuntimeError: the gradient was taken already in this step.
            TypeError: the gradient is sparse.
        """
        if self._here[place]:
            raise RuntimeError(
                f"a second backward() has made a gradient of {self._names[place]!r} while the "
                "first one is being averaged; to accumulate gradients, run all but the last "
                "backward() in `with averager.no_sync():`, else call averager.step() in between"
            )
        gradient, view = self._parameters[place].grad, self._views[place]
        if gradient is None:
            if self._returned is not None:  # the device may still be reading the last average
                self._returned.synchronize()
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self._names[place]!r} is sparse, but buckets hold only dense "
                "ones; create the embedding with sparse=False"
            )
        elif gradient is not view:
            view.copy_(gradient.detach(), non_blocking=self._is_cuda)
        if self._is_host:
            self._parameters[place].grad = view
        self._here[place] = True
        self._missing -= 1
        if self._is_cuda and not self._missing:
            self._copied = _recorded(self._parameters[place].device)

    def take_rest(self) -> None:
        """Take the remaining gradients; a missing gradient counts as zero."""
        for place, here in enumerate(self._here):
            if not here:
                self.take(place)

    def give_back(self) -> None:
        """Copy ``values`` into the gradients of the parameters."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(view, non_blocking=True)
        if self._is_cuda:
            self._returned = _recorded(self._parameters[0].device)


def _recorded(device: torch.device) -> Any:
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event
