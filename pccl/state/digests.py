"""Digests of shared state: of pieces, of tensors, of everything.

    piece    BLAKE3 of its bytes
    tensor   BLAKE3 of the digests of its pieces
    content  BLAKE3 of the tensors' digests, in order, of those that must not differ
    extra    likewise of those that may
    layout   BLAKE3 of the names, dtypes, lengths and flags

(BLAKE3: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020; section 2.1 for the derived contexts.) A
tree, so that whoever knows the content's digest can check a list of piece digests before he trusts
any of them, and each piece as it comes. Each level has a context of its own: a list of digests can
never be passed off as a piece.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.state.layout import StateLayout

_CONTEXT = "pccl 2026-11 shared state: {}"
_TENSOR, _CONTENT, _LAYOUT = (_CONTEXT.format(name) for name in ("tensor", "content", "layout"))

Buffer = bytes | bytearray | memoryview


def piece_digest(content: Buffer) -> bytes:
    """Of a piece; of many bytes with the interpreter lock released."""
    return blake3(content).digest()


def tensor_digest(pieces: bytes) -> bytes:
    """Of a tensor, from the digests of its pieces, one behind the other."""
    return blake3(pieces, derive_key_context=_TENSOR).digest()


def content_digest(tensors: Sequence[bytes]) -> bytes:
    """Of a state's contents, from the digests of its tensors."""
    return blake3(b"".join(tensors), derive_key_context=_CONTENT).digest()


def layout_digest(layout: StateLayout) -> bytes:
    """Of a layout."""
    return blake3(layout.pack(), derive_key_context=_LAYOUT).digest()


class PieceMap:
    """The digests of all pieces of one state.

    Args:
        layout: of the state.
        digests: of its pieces in order, ``DIGEST_BYTES`` each; of other pieces anything.
    """

    def __init__(self, layout: StateLayout, digests: bytearray | None = None) -> None:
        self.layout = layout
        self._digests = digests or bytearray(layout.piece_count * DIGEST_BYTES)
        assert len(self._digests) == layout.piece_count * DIGEST_BYTES

    def __len__(self) -> int:
        return self.layout.piece_count

    def __getitem__(self, number: int) -> bytes:
        return bytes(self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])

    def __setitem__(self, number: int, digest: bytes) -> None:
        assert len(digest) == DIGEST_BYTES
        self._digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = digest

    def part(self, numbers: range) -> bytes:
        """The digests of consecutive pieces."""
        return bytes(self._digests[numbers.start * DIGEST_BYTES : numbers.stop * DIGEST_BYTES])

    def tensor(self, entry: int) -> bytes:
        """The digest of one tensor."""
        return tensor_digest(self.part(self.layout.pieces(entry)))

    def digest(self, *, may_differ: bool) -> bytes:
        """Of all tensors that may differ, or of all others."""
        return content_digest(
            [
                self.tensor(index)
                for index, entry in enumerate(self.layout.entries)
                if entry.may_differ is may_differ
            ]
        )

    def copy(self) -> PieceMap:
        """The same, apart from this one."""
        return PieceMap(self.layout, self._digests.copy())
