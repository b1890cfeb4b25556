"""``FetchedPieces``: verified pieces of a shared state that are not in place yet.

It outlives the attempts of a call, so that none of them begins anew. Where the caller wants pieces
to be written straight into his tensors, their places are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.runtime.state.memory.staging import Staging
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.digests import PieceMap


class FetchedPieces:
    """Fetched pieces of one state.

    Args:
        memory: the state.
        memory_max_bytes: more than that is kept in a temporary file.
        directory: of that file; None: the usual one.
        in_place: pieces go straight into the tensors.
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
        """Number of a piece that is here -> its digest."""
        self.verified_bytes = 0
        """Of the pieces that are here."""
        self.in_place = in_place
        self._memory_max_bytes = memory_max_bytes
        self._directory = directory
        self.memory = memory
        self._staging: Staging | None = None
        self._numbers: frozenset[int] = frozenset()

    def prepare(self, wanted: Sequence[int], wanted_map: PieceMap) -> None:
        """Make room for these pieces; what is here of them and has these digests stays.

        Raises:
            OSError: there is no room on the disk.
        """
        self.verified = {
            number: self.verified[number]
            for number in wanted
            if self.verified.get(number) == wanted_map[number]
        }
        self.verified_bytes = self.memory.layout.bytes_of(self.verified)
        if self.in_place:
            for entry in self._entries(wanted):
                self.memory.touch(entry)  # whatever becomes of the call
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
        """A piece is in its slot."""
        if number not in self.verified:
            self.verified_bytes += self.memory.layout.piece(number).length
        self.verified[number] = digest

    def slot(self, number: int) -> memoryview:
        """Where a piece belongs that there is room for."""
        if self.in_place:
            return self.memory.view(self.memory.layout.piece(number))
        assert self._staging is not None
        return self._staging.slot(number)

    def apply(self, numbers: Sequence[int]) -> None:
        """Put pieces that are here into the tensors; any thread."""
        memory, entries = self.memory, self._entries(numbers)
        known = entries if self.in_place else [e for e in entries if e not in memory.stale]
        for entry in entries:
            memory.touch(entry)  # should this end half-way, they are neither the one nor the other
        if not self.in_place and self._staging is not None:
            self._staging.apply(memory, numbers)
        for number in numbers:
            memory.piece_map[number] = self.verified[number]
        memory.store(entries)
        memory.hashed(known)

    def _entries(self, numbers: Sequence[int]) -> list[int]:
        return sorted({self.memory.layout.piece(number).entry for number in numbers})

    def close(self) -> None:
        """Let go of everything."""
        self.verified.clear()
        self.verified_bytes = 0
        self._numbers = frozenset()
        if self._staging is not None:
            self._staging.close()
            self._staging = None
