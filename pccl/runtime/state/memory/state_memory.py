"""``StateMemory``: the bytes of a shared state, tensor by tensor, in memory of this host.

What lies on the CPU is used where it lies. What lies on a CUDA device has a page-locked buffer
here, allocated once: :meth:`StateMemory.load` fills it, :meth:`StateMemory.store` writes it back.
Torch is never imported: whoever has such a tensor has done so.
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
    """What is known of one tensor; ``pccl.TensorInfo`` is one."""

    @property
    def name(self) -> str:
        """The same on all members."""
        ...

    @property
    def data_ptr(self) -> int:
        """Address of the first byte; anything if there are no elements."""
        ...

    @property
    def numel(self) -> int:
        """Elements."""
        ...

    @property
    def dtype(self) -> DataType:
        """Of the elements."""
        ...

    @property
    def allow_content_inequality(self) -> bool:
        """Members may hold different values."""
        ...

    @property
    def is_cuda(self) -> bool:
        """Whether it is a torch tensor on a CUDA device."""
        ...

    @property
    def tensor(self) -> Any:
        """The tensor or array; None: the caller keeps the memory alive."""
        ...


def layout_of(tensors: Iterable[Tensor], piece_bytes: int = PIECE_BYTES) -> StateLayout:
    """The layout of a state made of these."""
    entries = (
        Entry(one.name, one.dtype, one.numel, one.allow_content_inequality) for one in tensors
    )
    return StateLayout(entries, piece_bytes)


class StateMemory:
    """The memory of one state, the digests of its pieces, and which of them may be outdated.

    Args:
        tensors: in order; they stay referenced, and so does the memory of the views.
        track_touched: a tensor that was hashed counts as unchanged until it is touched. Otherwise
            it may have changed at any time.
        piece_bytes: fixed size of pieces (tests); all members must agree.

    Attributes:
        layout: of the tensors.
        views: the writable bytes of each, shape (nbytes,), format ``"B"``.
        piece_map: the digests of what was hashed last.
        stale: indices of the tensors whose digests may not be those of their contents.

    Raises:
        RuntimeError: torch has no room for page-locked buffers.
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
        """Use it alone: only one call at a time reads or writes a whole state.

        Raises:
            ValueError: another call uses it, of whichever communicator.
        """
        if not self._claim.acquire(blocking=False):
            raise ValueError("another call still uses this shared state; wait for it")
        try:
            yield
        finally:
            self._claim.release()

    def view(self, piece: Piece) -> memoryview:
        """The bytes of one piece."""
        return self.views[piece.entry][piece.offset : piece.offset + piece.length]

    def check_in_place(self) -> None:
        """Make sure that the tensors are still where they were.

        Raises:
            ValueError: one has got other memory, by ``tensor.data = ...`` or a resize, say.
        """
        for one in self._tensors:
            if one.tensor is not None and one.numel and _address_of(one.tensor) != one.data_ptr:
                raise ValueError(
                    f"{one.name!r} lies in other memory than when the shared state was made; "
                    "update it in place (copy_(), array[...] = ...), or make a new SharedState"
                )

    @property
    def holds_tensors(self) -> bool:
        """Whether the memory lives as long as this does; not if it is known by addresses only."""
        return all(one.tensor is not None or not one.numel for one in self._tensors)

    @property
    def has_devices(self) -> bool:
        """Whether any tensor is on a device."""
        return bool(self._devices)

    # -- devices: any thread --------------------------------------------------------------------

    def load(self, entries: Iterable[int] | None = None) -> None:
        """Copy tensors on devices to this host, and return when they are here.

        Args:
            entries: their indices; others are passed over. None: those that are stale.
        """
        found = self._on_devices(self.stale if entries is None else entries)
        for entry in found:
            entry.load()
        for entry in found:
            entry.wait()

    def store(self, entries: Iterable[int]) -> None:
        """Copy tensors back to their devices, and return when they are there.

        Args:
            entries: their indices; those that are on the CPU need nothing.
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
        """This tensor may have changed."""
        self.stale.add(index)

    def touch_all(self) -> None:
        """Any tensor may have changed."""
        self.stale.update(range(len(self.layout.entries)))

    def stale_pieces(self) -> list[int]:
        """The numbers of all pieces of stale tensors, in order."""
        return [number for index in sorted(self.stale) for number in self.layout.pieces(index)]

    def hashed(self, entries: Iterable[int]) -> None:
        """All digests of these tensors are up to date; without ``track_touched`` only for now."""
        if self._tracks:
            self.stale.difference_update(entries)


class _DeviceEntry:
    """A tensor on a device and its buffer on this host.

    The caller's kernels may run on any stream, so all of the device's work is waited for before a
    copy begins; copies run side by side and are waited for at the end.

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
        """Wait until nothing that was begun on the device is under way."""
        self._cuda.synchronize(self._device)

    def load(self) -> None:
        """Begin to copy to this host."""
        self._here.copy_(self._there, non_blocking=True)

    def store(self) -> None:
        """Begin to copy to the device."""
        self._there.copy_(self._here, non_blocking=True)

    def wait(self) -> None:
        """Wait for what was begun in this thread."""
        self._cuda.current_stream(self._device).synchronize()


def _host_view(one: Tensor, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(bytearray())
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(one.data_ptr)
    memory.owner = _owner_of(one.tensor)  # lives as long as any view
    return np.frombuffer(memory, np.uint8).data


def _owner_of(tensor: Any) -> object:
    """What keeps the memory alive, even if the tensor gets other memory (``tensor.data = ...``)."""
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def _address_of(tensor: Any) -> int:
    held = tensor.ctypes.data if hasattr(tensor, "ctypes") else tensor.data_ptr()
    return int(held)
