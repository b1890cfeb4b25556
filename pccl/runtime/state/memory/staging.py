"""``Staging``: memory or a file that holds fetched pieces until all have arrived.

Above a size limit it is a file without a name, which disappears with the process. Only
:meth:`Staging.apply` changes the caller's tensors.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.layout import StateLayout


class Staging:
    """A buffer for some pieces of a state, one after the other.

    Args:
        layout: layout of the state.
        numbers: numbers of the pieces, each once.
        memory_max_bytes: if the pieces have more bytes than this, they go to a file.
        directory: directory of the file; None: the system's for temporary files.

    Attributes:
        nbytes: bytes of all pieces.
        spooled: whether the pieces are in a file.

    Raises:
        OSError: the disk has no room, or the file cannot be made.
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        layout: StateLayout,
        numbers: Sequence[int],
        memory_max_bytes: int,
        directory: str | None = None,
    ) -> None:
        self._layout = layout
        self._starts: dict[int, int] = {}
        self.nbytes = 0
        for number in numbers:
            assert number not in self._starts
            self._starts[number] = self.nbytes
            self.nbytes += layout.piece(number).length
        self.spooled = self.nbytes > memory_max_bytes
        self._map: mmap.mmap | None = None
        if self.spooled:
            self._map = _map_of_file(self.nbytes, directory or tempfile.gettempdir())
        elif self.nbytes:
            self._map = _map_of_memory(self.nbytes)
        self._view = memoryview(b"" if self._map is None else self._map)

    def __contains__(self, number: object) -> bool:
        return number in self._starts

    def slot(self, number: int) -> memoryview:
        """Return the writable memory of one piece. Its first contents are undefined.

        Raises:
            KeyError: the piece is not one of ``numbers``.
            ValueError: the buffer is closed.
        """
        start = self._starts[number]
        return self._view[start : start + self._layout.piece(number).length]

    def apply(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Copy pieces into the tensors, with the interpreter lock released."""
        for number in numbers:
            target = memory.view(self._layout.piece(number))
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.slot(number), np.uint8))

    def close(self) -> None:
        """Free the buffer. Later calls do nothing.

        A slot that is still referenced stays valid; the buffer is freed with the last such slot.
        """
        self._view.release()
        held, self._map = self._map, None
        if held is not None:
            with suppress(BufferError):
                held.close()


def _map_of_memory(nbytes: int) -> mmap.mmap:
    """Return anonymous memory of this process. Untouched pages take no room."""
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            held = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(
            f"no memory for {nbytes} bytes of fetched shared state; lower staging_bytes_max, so "
            "that they go to a file"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may not support them
            held.madvise(mmap.MADV_HUGEPAGE)  # a fault for every 4 KiB costs more than the copying
    return held


def _map_of_file(nbytes: int, directory: str) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(prefix="pccl-", dir=directory) as file:
            _reserve(file.fileno(), nbytes)
            return mmap.mmap(file.fileno(), nbytes)  # keeps the file open
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = (
            "free space there, or set staging_directory to another directory"
            if error.errno in _NO_ROOM
            else "set staging_directory to a writable directory"
        )
        raise OSError(
            error.errno or errno.EIO,
            f"cannot reserve {nbytes} bytes in {directory} for fetched shared state: {reason}; "
            f"{hint}, or raise staging_bytes_max to keep them in memory",
        ) from error


def _reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk blocks for the whole file: on a full disk, writing to a hole raises SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        else:
            return
    zeros = memoryview(bytes(_ZEROS_BYTES))
    written = 0
    while written < nbytes:
        written += os.pwrite(descriptor, zeros[: nbytes - written], written)


_ZEROS_BYTES = 1 << 20
_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
