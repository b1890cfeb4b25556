"""Processes of one machine copy segments from each other's memory: process_vm_readv(2) of Linux.

Over TCP the kernel copies every byte twice, and both processes wait for it. Here the reader copies
each byte once. The owner of the memory does nothing, so it must not reuse memory too early:

* Each lease has a word with its generation. Announcements contain the generation. To revoke a lease
  is to change the word. One call of the reader copies the word, the segment, and the word again, in
  this order; the segment counts if both copies have the announced generation.
* Generations begin with a random number, so a process that got the id of a dead one does not have
  the right word.
* The kernel takes references to the pages of each range with atomic operations that are full memory
  barriers, on every processor. So the reader's three copies stay in order. The owner reads its word
  through the kernel after changing it, so its later writes stay behind the change.

The kernel refuses the call for processes of other users, and where a sandbox or Yama forbids it.
Then the connection carries the segments.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from ctypes import addressof, c_char, c_uint64
from functools import lru_cache
from pathlib import Path
from typing import Any

from pccl.protocol.checksum import bytes_hash
from pccl.transports.announcement import (
    ANCESTRY_MAX,
    PROOF_BYTES,
    Announcement,
    encode_announcement,
    encode_one_part,
)
from pccl.transports.base import MACHINES, Connection
from pccl.transports.local.socket_owner import holds_other_end

_PAGE_WORDS = 512
_PR_SET_PTRACER = 0x59616D61
_RANGES = 3
"""Ranges of most pulls: the word, the segment, and the word again."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

_writable = c_char.from_buffer


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of ``view``, which is not empty."""
    if view.readonly:
        import numpy as np  # a master, which shares no arrays, starts without it

        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return addressof(_writable(view))


class _Words:
    """Generations of the leases of this process; a word that was given back is used again."""

    def __init__(self) -> None:
        self._free: list[_Word] = []

    def take(self) -> _Word:
        if not self._free:
            page = (c_uint64 * _PAGE_WORDS).from_buffer_copy(os.urandom(8 * _PAGE_WORDS))
            self._free = [_Word(page, number) for number in range(_PAGE_WORDS)]
        return self._free.pop()

    def give(self, word: _Word) -> None:
        self._free.append(word)


class _Word:
    """One generation: a number in memory that other processes can read."""

    __slots__ = ("_number", "_page", "address", "value")

    def __init__(self, page: ctypes.Array[c_uint64], number: int) -> None:
        self._page = page
        self._number = number
        self.address = addressof(page) + 8 * number
        self.value: int = page[number]

    def change(self) -> None:
        self._page[self._number] += 1  # modulo 2**64
        self.value = self._page[self._number]


class _Lease:
    """See :class:`pccl.transports.base.Lease`."""

    __slots__ = ("_memory", "_used", "_word")

    def __init__(self, memory: ProcessMemory, word: _Word) -> None:
        self._memory = memory
        self._word = word
        self._used = False

    def announce(self, views: Sequence[memoryview]) -> bytes:
        self._used = True
        word, first = self._word, views[0]
        if len(views) == 1 and not first.readonly:
            return encode_one_part(
                word.address, word.value, addressof(_writable(first)), len(first)
            )
        parts = list(zip(map(address_of, views), map(len, views), strict=True))
        return encode_announcement(word.address, word.value, parts)

    def revoke(self) -> None:
        if self._used:
            self._used = False
            self._word.change()
            self._memory.fence(self._word.address)

    def release(self) -> None:
        self.revoke()
        self._memory.words.give(self._word)


class _Shown:
    """See :class:`pccl.transports.base.Shown`."""

    def __init__(self, proof: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(proof, len(proof))
        self.place = (os.getpid(), addressof(self._bytes))


@lru_cache(maxsize=1)
def _ancestry(pid: int) -> tuple[int, ...]:
    pids = [pid]
    while pids[-1] > 1 and len(pids) < ANCESTRY_MAX:
        try:
            status = Path(f"/proc/{pids[-1]}/stat").read_text()
        except OSError:
            break
        pids.append(int(status.rpartition(")")[2].split()[1]))
    return tuple(pid for pid in pids if pid)


@lru_cache(maxsize=1)
def _machine(pid: int) -> int:
    try:
        spaces = [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("pid", "user", "net")]
        known = [_BOOT.read_text(), str(os.getuid()), *spaces]
    except OSError:
        return 0
    return bytes_hash(" ".join(known).encode()) % MACHINES + 1


class ProcessMemory:
    """The memory of this process and of others. See :class:`pccl.transports.base.LocalMemory`.

    Attributes:
        words: the words of all leases.
        named: the process that this one has named for Yama.
    """

    pull_bytes_min = 192 << 10

    def __init__(self) -> None:
        self.words = _Words()
        self.named: int | None = None
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._readv: Any = self._libc.process_vm_readv
        size, pointer = ctypes.c_ulong, ctypes.c_void_p
        self._readv.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
        self._readv.restype = ctypes.c_ssize_t
        self._found = (c_uint64 * 2)()
        """Copies of a word, before and after a pull."""
        self._ours, self._theirs = (c_uint64 * (2 * _RANGES))(), (c_uint64 * (2 * _RANGES))()
        first = addressof(self._found)
        self._ours[:] = [first, 8, 0, 0, first + 8, 8]
        self._theirs[:] = [0, 8, 0, 0, 0, 8]

    @property
    def machine(self) -> int:
        """Hash of the system's boot, the user, and the namespaces; 0: unknown, or forbidden."""
        return _machine(os.getpid()) if self.scope in (None, 0, 1) else 0

    @property
    def ancestry(self) -> Sequence[int]:
        """Id of this process, of its parent, and so on, at most ``ANCESTRY_MAX``."""
        return _ancestry(os.getpid())

    def reaches(self, connection: Connection) -> bool:
        """Whether both ends of ``connection`` have the same address."""
        return connection.local.host == connection.remote.host

    def holds(self, pid: int, connection: Connection) -> bool:
        """Whether process ``pid`` has the other end of ``connection`` open."""
        return holds_other_end(pid, connection.local, connection.remote)

    def lease(self) -> _Lease:
        """Return a lease with a word of its own."""
        return _Lease(self, self.words.take())

    def show(self, proof: bytes) -> _Shown:
        """Copy ``proof`` to memory that the result owns."""
        return _Shown(proof)

    @property
    def scope(self) -> int | None:
        """The ptrace scope of Yama; None: the system has no Yama."""
        try:
            return int(_YAMA.read_text())
        except (OSError, ValueError):
            return None

    def name(self, pid: int) -> None:
        """Call prctl(2) with PR_SET_PTRACER; -1 stands for every process, there as here."""
        if self._libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), *[ctypes.c_ulong()] * 3) == 0:
            self.named = pid

    def prove(self, pid: int, address: int, proof: bytes) -> bool:
        """Whether ``proof`` is at ``address`` in process ``pid``, whose memory can be read."""
        copy = ctypes.create_string_buffer(PROOF_BYTES)
        ours = (c_uint64 * 2)(addressof(copy), PROOF_BYTES)
        theirs = (c_uint64 * 2)(address, PROOF_BYTES)
        return self._readv(pid, ours, 1, theirs, 1, 0) == PROOF_BYTES and copy.raw == proof

    def pull(self, pid: int, announcement: Announcement, into: Sequence[memoryview]) -> bool:
        """Copy a segment and, before and after it, the word of its lease.

        Raises:
            OSError: the process has ended, its memory is gone, or the system forbids the call.
        """
        word, parts = announcement.word, announcement.parts
        if len(into) == len(parts) == 1:
            ours, theirs = self._ours, self._theirs
            ours[2], ours[3] = addressof(_writable(into[0])), len(into[0])
            theirs[0] = theirs[4] = word
            theirs[2], theirs[3] = parts[0]
        else:
            first = addressof(self._found)
            places = [(address_of(view), view.nbytes) for view in into]
            ours = _ranges((first, 8), places, (first + 8, 8))
            theirs = _ranges((word, 8), parts, (word, 8))
        wanted = announcement.length + 16
        got = self._readv(pid, ours, len(ours) // 2, theirs, len(theirs) // 2, 0)
        if got == wanted:
            before, after = self._found
            return before == after == announcement.generation
        if got < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        if self._read_word(pid, word) == announcement.generation:
            raise OSError(f"only {got} of {wanted} bytes can be read")
        return False

    def fence(self, word: int) -> None:
        """Keep later writes of this process behind earlier ones; see the top of this module."""
        self._read_word(os.getpid(), word)

    def _read_word(self, pid: int, word: int) -> int:
        found = c_uint64()
        ours, theirs = (c_uint64 * 2)(addressof(found), 8), (c_uint64 * 2)(word, 8)
        return found.value if self._readv(pid, ours, 1, theirs, 1, 0) == 8 else 0


def _ranges(
    before: tuple[int, int], parts: Sequence[tuple[int, int]], after: tuple[int, int]
) -> ctypes.Array[c_uint64]:
    """Return the array of ``struct iovec`` for these addresses and lengths."""
    numbers = [number for part in (before, *parts, after) for number in part]
    return (c_uint64 * len(numbers))(*numbers)


def process_memory() -> ProcessMemory | None:
    """Return the memory of this process; None: this system lacks process_vm_readv."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    return ProcessMemory() if hasattr(ctypes.CDLL(None), "process_vm_readv") else None
