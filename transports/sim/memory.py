"""Simulated processes of one machine that pull segments from each other's memory.

In this model a pull takes no time, so memory never changes during a pull. If an announcement was
withdrawn, the memory has another use by now: the reader gets other bytes, and has to notice. A dead
process has no memory; a stopped one has.

Invariant: addresses are numbers that count up, so they do not depend on the interpreter.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from zlib import crc32

from pccl.transports.announcement import Announcement, encode_announcement
from pccl.transports.base import MACHINES, Connection

_GARBAGE = 0xA5
"""Value of each byte that a withdrawn pull leaves."""


class SimLease:
    """See :class:`pccl.transports.base.Lease`."""

    def __init__(self, memory: SimMemory, word: int) -> None:
        self.generation = 1
        self.views: dict[int, memoryview] = {}
        """Announced memory, by address."""
        self._memory = memory
        self._word = word

    def announce(self, views: Sequence[memoryview]) -> bytes:
        """Announce a segment in ``views``."""
        parts = [(self._memory.place(view.nbytes), view.nbytes) for view in views]
        for (address, _), view in zip(parts, views, strict=True):
            self.views[address] = view
        return encode_announcement(self._word, self.generation, parts)

    def revoke(self) -> None:
        """Withdraw all announcements."""
        self.generation += 1
        self.views.clear()

    def release(self) -> None:
        """Withdraw all announcements. The word stays, as in a process that uses it again."""
        self.revoke()


class _SimShown:
    """See :class:`pccl.transports.base.Shown`."""

    def __init__(self, pid: int, address: int) -> None:
        self.place = (pid, address)


class SimMemory:
    """The memory of one simulated process. See :class:`pccl.transports.base.LocalMemory`.

    Attributes:
        host: name of its host.
        alive: whether the process lives.
        forbidden: whether the system refuses to read other processes' memory (for fault plans).
        leases: all leases, by the address of the word.
        proofs: bytes that this process shows, by address.
    """

    pull_bytes_min = 1
    scope: int | None = None
    named: int | None = None

    def __init__(
        self, memories: SimMemories, host: str, pid: int, alive: Callable[[], bool]
    ) -> None:
        self.host = host
        self.ancestry = (pid,)
        self.alive = alive
        self.forbidden = False
        self.leases: dict[int, SimLease] = {}
        self.proofs: dict[int, bytes] = {}
        self._memories = memories
        self._next_address = 1

    def reaches(self, connection: Connection) -> bool:
        """Whether both hosts are on one machine."""
        machines = self._memories.machines
        machine = machines.get(connection.local.host)
        return machine is not None and machine == machines.get(connection.remote.host)

    @property
    def machine(self) -> int:
        """Hash of the name of the machine; without a machine, of the host."""
        return crc32(self._memories.machines.get(self.host, self.host).encode()) % MACHINES + 1

    def holds(self, pid: int, connection: Connection) -> bool:
        """Whether process ``pid`` is on the host at the other end."""
        memory = self._memories.of.get(pid)
        return memory is not None and memory.host == connection.remote.host

    def place(self, nbytes: int) -> int:
        """Return an address at which ``nbytes`` bytes are free."""
        self._next_address += nbytes
        return self._next_address - nbytes

    def lease(self) -> SimLease:
        """Return a lease with a word of its own."""
        word = self.place(8)
        lease = self.leases[word] = SimLease(self, word)
        return lease

    def show(self, proof: bytes) -> _SimShown:
        """Keep ``proof`` at a new address."""
        address = self.place(len(proof))
        self.proofs[address] = proof
        return _SimShown(self.ancestry[0], address)

    def name(self, pid: int) -> None:
        """Do nothing: simulated systems let all processes of a machine read."""

    def prove(self, pid: int, address: int, proof: bytes) -> bool:
        """Whether ``proof`` is at ``address`` in process ``pid``, whose memory can be read."""
        memory = self._memories.of.get(pid)
        if memory is None or not memory.alive() or self.forbidden:
            return False
        return memory.proofs.get(address) == proof

    def pull(self, pid: int, announcement: Announcement, into: Sequence[memoryview]) -> bool:
        """Copy a segment from process ``pid``.

        Raises:
            OSError: the process has ended, it has no such memory, or the system forbids the call.
        """
        memory = self._memories.of[pid]
        if not memory.alive():
            raise ProcessLookupError(errno.ESRCH, "no such process")
        if self.forbidden:
            raise PermissionError(errno.EPERM, "operation not permitted")
        lease = memory.leases.get(announcement.word)
        views = [lease.views.get(address) for address, _ in announcement.parts] if lease else []
        found = [view for view in views if view is not None]
        if lease is None or lease.generation != announcement.generation:
            data = bytes([_GARBAGE]) * announcement.length
        elif len(found) < len(views):
            raise OSError(errno.EFAULT, "bad address")
        else:
            data = b"".join(found)
        for view in into:
            view[:] = data[: len(view)]
            data = data[len(view) :]
        arrived = lease is not None and lease.generation == announcement.generation
        self._memories.done["pulled" if arrived else "withdrawn before the pull"] += 1
        return arrived


class SimMemories:
    """The memory of all processes of a network.

    Attributes:
        machines: name of the machine of each host that shares one with others.
        done: numbers of pulls by what came of them.
        of: the memory of each process, by process id.
    """

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.of: dict[int, SimMemory] = {}

    def boot(self, host: str, alive: Callable[[], bool]) -> SimMemory | None:
        """Return the memory of a new process on ``host``; None: no other host is on its machine."""
        if host not in self.machines:
            return None
        pid = 1000 + len(self.of)
        memory = self.of[pid] = SimMemory(self, host, pid, alive)
        return memory
