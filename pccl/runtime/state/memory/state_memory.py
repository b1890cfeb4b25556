"""``StateMemory``: the bytes of each tensor of a shared state, in memory of this host.

It uses CPU tensors without a copy. A CUDA tensor has a page-locked buffer on this host, allocated
once: :meth:`StateMemory.load` fills it, :meth:`StateMemory.store` writes it back. This module never
imports torch, because a program with a CUDA tensor has imported it already.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.state.digests import PieceMap
from pccl.state.layout import Entry, Piece, StateLayout


class Tensor(Protocol):
    """One tensor of a shared state. ``pccl.TensorInfo`` implements it."""

    @property
    def name(self) -> str:
        """Name of the tensor, the same on all members."""
        ...

    @property
    def data_ptr(self) -> int:
        """Address of the first byte; undefined for a tensor without elements."""
        ...

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    @property
    def dtype(self) -> DataType:
        """Type of the elements."""
        ...

    @property
    def allow_content_inequality(self) -> bool:
        """Whether members may hold different values."""
        ...

    @property
    def is_cuda(self) -> bool:
        """Whether this is a torch tensor on a CUDA device."""
        ...

    @property
    def tensor(self) -> Any:
        """The tensor or array; None: the caller keeps the memory alive."""
        ...


def layout_of(tensors: Iterable[Tensor], piece_bytes: int = PIECE_BYTES) -> StateLayout:
    """Return the layout of a state made of these tensors."""
    entries = (
        Entry(one.name, one.dtype, one.numel, one.allow_content_inequality) for one in tensors
    )
    return StateLayout(entries, piece_bytes)


class StateMemory:
    """The memory of one state, the digests of its pieces, and the list of stale tensors.

    Args:
        tensors: the tensors in order; the object keeps arrays and torch tensors alive.
        track_touched: a hashed tensor counts as unchanged until it is touched. Otherwise every
            tensor always counts as stale.
        piece_bytes: size of pieces (other values only in tests); all members must agree.

    Attributes:
        layout: layout of the tensors.
        views: the writable bytes of each tensor, shape (nbytes,), format ``"B"``.
        piece_map: the digests as of the last hashing.
        stale: indices of the tensors whose digests may be outdated.

    Raises:
        RuntimeError: torch cannot allocate page-locked memory.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        track_touched: bool = False,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.layout = layout_of(tensors, piece_bytes)
        self._tensors = tuple(tensors)
        self._tracks = track_touched
        self._devices = {
            index: _DeviceEntry(one.tensor, sys.modules["torch"])
            for index, one in enumerate(tensors)
            if one.is_cuda and one.numel
        }
        self.views = tuple(
            self._devices[index].view if index in self._devices else _host_view(one, entry.nbytes)
            for index, (one, entry) in enumerate(zip(tensors, self.layout.entries, strict=True))
        )
        self.piece_map = PieceMap(self.layout)
        self.stale: set[int] = set()
        self._claim = threading.Lock()
        self.touch_all()

    @contextmanager
    def claimed(self) -> Generator[None, None, None]:
        """Claim the state for one call, because two calls must not use it at once.

        Raises:
            ValueError: another call uses the state, perhaps of another communicator.
        """
        if not self._claim.acquire(blocking=False):
            raise ValueError("another call still uses this shared state; wait until it returns")
        try:
            yield
        finally:
            self._claim.release()

    def view(self, piece: Piece) -> memoryview:
        """Return the writable bytes of one piece."""
        return self.views[piece.entry][piece.offset : piece.offset + piece.length]

    def check_in_place(self) -> None:
        """Check that each tensor still has the memory that it had when this object was made.

        Raises:
            ValueError: a tensor has other memory now, after ``tensor.data = ...`` or a resize.
        """
        for one in self._tensors:
            if one.tensor is not None and one.numel and _address_of(one.tensor) != one.data_ptr:
                raise ValueError(
                    f"tensor {one.name!r} has other memory than when the shared state was made; "
                    "update it in place (copy_(), array[...] = ...), or make a new SharedState"
                )

    @property
    def holds_tensors(self) -> bool:
        """Whether this object keeps the memory alive; False if a tensor is only an address."""
        return all(one.tensor is not None or not one.numel for one in self._tensors)

    @property
    def has_devices(self) -> bool:
        """Whether any tensor is on a CUDA device."""
        return bool(self._devices)

    # -- devices: any thread --------------------------------------------------------------------

    def load(self, entries: Iterable[int] | None = None) -> None:
        """Copy CUDA tensors to this host, and return when the copies are complete.

        Args:
            entries: indices of tensors; CPU tensors need no copy. None: all stale tensors.
        """
        found = self._on_devices(self.stale if entries is None else entries)
        for entry in found:
            entry.load()
        for entry in found:
            entry.wait()

    def store(self, entries: Iterable[int]) -> None:
        """Copy CUDA tensors back to their devices, and return when the copies are complete.

        Args:
            entries: indices of tensors; CPU tensors need no copy.
        """
        found = self._on_devices(entries)
        for entry in found:
            entry.store()
        for entry in found:
            entry.wait()

    def _on_devices(self, entries: Iterable[int]) -> list[_DeviceEntry]:
        found = [self._devices[index] for index in sorted(entries) if index in self._devices]
        for entry in found:
            entry.settle()
        return found

    # -- what is known of the contents ----------------------------------------------------------

    def touch(self, index: int) -> None:
        """Record that this tensor may have changed."""
        self.stale.add(index)

    def touch_all(self) -> None:
        """Record that every tensor may have changed."""
        self.stale.update(range(len(self.layout.entries)))

    def stale_pieces(self) -> list[int]:
        """Return the numbers of all pieces of stale tensors, in order."""
        return [number for index in sorted(self.stale) for number in self.layout.pieces(index)]

    def hashed(self, entries: Iterable[int]) -> None:
        """Record that these tensors are hashed. Without ``track_touched`` they stay stale."""
        if self._tracks:
            self.stale.difference_update(entries)


class _DeviceEntry:
    """A tensor on a CUDA device, and its buffer on this host.

    The caller's kernels may run on any stream, so ``settle`` waits for all work of the device
    before a copy. Several copies may run at once; ``wait`` waits for them.

    Args:
        tensor: contiguous, on a CUDA device, not empty.
        torch: the module.
    """

    def __init__(self, tensor: Any, torch: Any) -> None:
        self._cuda = torch.cuda
        self._device = tensor.device
        self._there = tensor.detach().reshape(-1).view(torch.uint8)  # the same memory, kept alive
        self._here = torch.empty(self._there.numel(), dtype=torch.uint8, pin_memory=True)
        self.view = self._here.numpy().data

    def settle(self) -> None:
        """Wait until the device has finished all work."""
        self._cuda.synchronize(self._device)

    def load(self) -> None:
        """Start the copy to this host."""
        self._here.copy_(self._there, non_blocking=True)

    def store(self) -> None:
        """Start the copy to the device."""
        self._there.copy_(self._here, non_blocking=True)

    def wait(self) -> None:
        """Wait for the copies that this thread has started on the device."""
        self._cuda.current_stream(self._device).synchronize()


def _host_view(one: Tensor, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(one.data_ptr)
    memory.owner = _owner_of(one.tensor)  # lives as long as any view
    return np.frombuffer(memory, np.uint8).data


def _owner_of(tensor: Any) -> object:
    """Return an object that keeps the present memory alive, even after ``tensor.data = ...``."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _address_of(tensor: Any) -> int:
    held = tensor.ctypes.data if hasattr(tensor, "ctypes") else tensor.data_ptr()
    return int(held)
