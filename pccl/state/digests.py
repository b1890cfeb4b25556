"""The digests of pieces, of tensors and of the whole state.

    piece    BLAKE3 of its bytes
    tensor   BLAKE3 of the digests of its pieces
    content  BLAKE3 of the digests of all tensors that must not differ, in order
    extra    the same for all tensors that may differ
    layout   BLAKE3 of the names, dtypes, lengths and flags

(BLAKE3: O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020; section 2.1 for the derived contexts.) The
digests form a tree. A peer that knows the content's digest can check a list of piece digests before
it trusts the list, and then each piece on arrival. Each level has its own context, so a list
of digests is never valid as a piece.
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
    """Return the digest of a piece. blake3 releases the interpreter lock for a long piece."""
    return blake3(content).digest()


def tensor_digest(pieces: bytes) -> bytes:
    """Return the digest of a tensor from the concatenated digests of its pieces."""
    return blake3(pieces, derive_key_context=_TENSOR).digest()


def content_digest(tensors: Sequence[bytes]) -> bytes:
    """Return the digest of a state's contents from the digests of its tensors."""
    return blake3(b"".join(tensors), derive_key_context=_CONTENT).digest()


def layout_digest(layout: StateLayout) -> bytes:
    """Return the digest of a layout."""
    return blake3(layout.pack(), derive_key_context=_LAYOUT).digest()


class PieceMap:
    """The digests of all pieces of one state.

    Args:
        layout: layout of the state.
        digests: digests of its pieces in order, ``DIGEST_BYTES`` each; None: zeros.
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
        """Return the digests of consecutive pieces, concatenated."""
        return bytes(self._digests[numbers.start * DIGEST_BYTES : numbers.stop * DIGEST_BYTES])

    def tensor(self, entry: int) -> bytes:
        """Return the digest of one tensor."""
        return tensor_digest(self.part(self.layout.pieces(entry)))

    def digest(self, *, may_differ: bool) -> bytes:
        """Return the digest of all tensors that may differ, or of all that must not."""
        return content_digest(
            [
                self.tensor(index)
                for index, entry in enumerate(self.layout.entries)
                if entry.may_differ is may_differ
            ]
        )

    def copy(self) -> PieceMap:
        """Return an independent copy."""
        return PieceMap(self.layout, self._digests.copy())
