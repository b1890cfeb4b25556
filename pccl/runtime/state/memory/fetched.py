"""``FetchedPieces``: pieces that were fetched and verified, but are not in the tensors yet.

It outlives the attempts of a call, so a new attempt keeps the pieces of earlier attempts. If the
caller has set ``in_place``, the slots are the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.runtime.state.memory.staging import Staging
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.digests import PieceMap


class FetchedPieces:
    """The fetched pieces of one state.

    Args:
        memory: memory of the state.
        memory_max_bytes: bytes to keep in memory; larger downloads go to a temporary file.
        directory: directory of that file; None: the system's for temporary files.
        in_place: whether the slots are the tensors themselves.
    """

    def __init__(
        self,
        memory: StateMemory,
        memory_max_bytes: int,
        directory: str | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        self.verified: dict[int, bytes] = {}
        """Number of each verified piece -> its digest."""
        self.verified_bytes = 0
        """Bytes of the verified pieces."""
        self.in_place = in_place
        self._memory_max_bytes = memory_max_bytes
        self._directory = directory
        self.memory = memory
        self._staging: Staging | None = None
        self._numbers: frozenset[int] = frozenset()

    def prepare(self, wanted: Sequence[int], wanted_map: PieceMap) -> None:
        """Reserve slots for these pieces. Keep verified pieces that have the wanted digests.

        Raises:
            OSError, MemoryError: there is no room for the pieces, or no file can be made.
        """
        self.verified = {
            number: self.verified[number]
            for number in wanted
            if self.verified.get(number) == wanted_map[number]
        }
        self.verified_bytes = self.memory.layout.bytes_of(self.verified)
        if self.in_place:
            for entry in self._entries(wanted):
                self.memory.touch(entry)  # the call may fail after it has written a piece
            return
        if self._numbers.issuperset(wanted):
            return
        before, layout = self._staging, self.memory.layout
        staging = Staging(layout, wanted, self._memory_max_bytes, self._directory)
        for number in self.verified:
            assert before is not None
            staging.slot(number)[:] = before.slot(number)
        self._staging, self._numbers = staging, frozenset(wanted)
        if before is not None:
            before.close()

    def put(self, number: int, digest: bytes) -> None:
        """Record that a verified piece is in its slot."""
        if number not in self.verified:
            self.verified_bytes += self.memory.layout.piece(number).length
        self.verified[number] = digest

    def slot(self, number: int) -> memoryview:
        """Return the writable memory of a piece; ``prepare`` has reserved it."""
        if self.in_place:
            return self.memory.view(self.memory.layout.piece(number))
        assert self._staging is not None
        return self._staging.slot(number)

    def apply(self, numbers: Sequence[int]) -> None:
        """Write verified pieces into the tensors, and their digests into the map; any thread."""
        assert self.verified.keys() >= set(numbers)
        memory, entries = self.memory, self._entries(numbers)
        known = entries if self.in_place else [e for e in entries if e not in memory.stale]
        for entry in entries:
            memory.touch(entry)  # if this raises, the tensors may be half-written
        if not self.in_place and self._staging is not None:
            self._staging.apply(memory, numbers)
        for number in numbers:
            memory.piece_map[number] = self.verified[number]
        memory.store(entries)
        memory.hashed(known)

    def _entries(self, numbers: Sequence[int]) -> list[int]:
        return sorted({self.memory.layout.piece(number).entry for number in numbers})

    def close(self) -> None:
        """Forget all pieces, and free their slots."""
        self.verified.clear()
        self.verified_bytes = 0
        self._numbers = frozenset()
        if self._staging is not None:
            self._staging.close()
            self._staging = None
