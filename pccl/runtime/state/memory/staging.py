"""``Staging``: where pieces are that were fetched, until all of them are there.

Memory, or above a limit a file without a name, which is gone with the process. Nothing of the
caller's is touched before :meth:`Staging.apply`.
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
    """Room for some pieces of a state, one behind the other.

    Args:
        layout: of the state.
        numbers: of the pieces, each once.
        memory_max_bytes: more than this goes to disk.
        directory: for the file; None: the system's own for temporary files.

    Attributes:
        nbytes: of all the pieces.
        spooled: whether they are in a file.

    Raises:
        OSError: there is no room on the disk, or no file can be made there.
        MemoryError: there is no room in memory.
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
        """The place of one piece, writable; nothing in particular is in it at first.

        Raises:
            KeyError: there is no room for this one.
            ValueError: it was closed.
        """
        start = self._starts[number]
        return self._view[start : start + self._layout.piece(number).length]

    def apply(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        """Copy pieces to where they belong, with the interpreter lock released."""
        for number in numbers:
            target = memory.view(self._layout.piece(number))
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.slot(number), np.uint8))

    def close(self) -> None:
        """Give the room back; once or more often.

        If somebody still holds a slot, it stays valid, and the room goes when he lets go.
        """
        self._view.release()
        held, self._map = self._map, None
        if held is not None:
            with suppress(BufferError):
                held.close()


def _map_of_memory(nbytes: int) -> mmap.mmap:
    """Private to this process; pages that nobody touches cost nothing."""
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            held = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            held = mmap.mmap(-1, nbytes)
    except OSError as error:
        raise MemoryError(
            f"no room in memory for {nbytes} bytes of shared state that are to be fetched; lower "
            "the limit above which they go to disk"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without
            held.madvise(mmap.MADV_HUGEPAGE)  # a fault for every 4 KiB costs more than the copying
    return held


def _map_of_file(nbytes: int, directory: str) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(prefix="pccl-", dir=directory) as file:
            _reserve(file.fileno(), nbytes)
            return mmap.mmap(file.fileno(), nbytes)  # keeps the file
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = (
            "make room there, or name another directory"
            if error.errno in _NO_ROOM
            else "name a directory that can be written to"
        )
        raise OSError(
            error.errno or errno.EIO,
            f"cannot set aside {nbytes} bytes in {directory} for shared state that is to be "
            f"fetched: {reason}; {hint}, or raise the limit below which they stay in memory",
        ) from error


def _reserve(descriptor: int, nbytes: int) -> None:
    """Give every page of a file its blocks: one without would be a SIGBUS on a full disk."""
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
