"""What a checkpoint says of itself, and how that is written in front of a safetensors file.

    8 bytes   length of what follows, little-endian
    JSON      for each tensor dtype, shape and place; ``__metadata__``; spaces to a multiple of 8
    contents  of the tensors

The metadata say what safetensors have no place for: revision and lineage, the order of the tensors,
which of them members may hold differently, the digests of :mod:`pccl.state.digests`, and a digest
of the header itself. (https://github.com/huggingface/safetensors#format)
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from blake3 import blake3

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import BYTE_STRING_MAX
from pccl.protocol.shared_state import DIGEST_BYTES, REVISION_MAX, Lineage
from pccl.protocol.types import OperationId
from pccl.state.digests import content_digest

FORMAT = 1
HEADER_BYTES_MAX = 100_000_000
"""Readers of safetensors take no longer ones."""

METADATA = "__metadata__"
LENGTH = struct.Struct("<Q")
_HEADER_CONTEXT = "pccl 2026-11 checkpoint: header"
_HEADER_KEY = b'"pccl.header":"'
_NO_DIGEST = b"0" * (2 * DIGEST_BYTES)

_LABELS = {
    DataType.UINT8: "U8",
    DataType.INT8: "I8",
    DataType.INT16: "I16",
    DataType.UINT16: "U16",
    DataType.UINT32: "U32",
    DataType.INT32: "I32",
    DataType.UINT64: "U64",
    DataType.INT64: "I64",
    DataType.FLOAT16: "F16",
    DataType.BFLOAT16: "BF16",
    DataType.FLOAT: "F32",
    DataType.DOUBLE: "F64",
}
_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What comes of reading JSON that is anything else than what is written."""

_DTYPES = {label: dtype for dtype, label in _LABELS.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: as in the shared state.
        dtype: of its elements.
        shape: ``()`` for a scalar.
        allow_content_inequality: members may hold different values.
        start: of its bytes, in the data part of the file.
        digest: of its contents.
    """

    name: str
    dtype: DataType
    shape: tuple[int, ...]
    allow_content_inequality: bool
    start: int = 0
    digest: bytes = bytes(DIGEST_BYTES)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        differs = ", allow_content_inequality" if self.allow_content_inequality else ""
        return f"{self.name!r} ({self.numel} x {self.dtype.label}{differs})"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself.

    Attributes:
        revision: of the shared state.
        lineage: of its contents; None: they had never been synchronized.
        tensors: in the shared state's order.
    """

    revision: int
    lineage: Lineage | None
    tensors: tuple[CheckpointTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors)

    @property
    def digest(self) -> bytes:
        """Of the contents that all members share; equal on all of them."""
        return self.digest_of(allow_content_inequality=False)

    def digest_of(self, *, allow_content_inequality: bool) -> bytes:
        """Of all tensors with this flag."""
        return content_digest(
            [
                one.digest
                for one in self.tensors
                if one.allow_content_inequality is allow_content_inequality
            ]
        )


def header_of(checkpoint: Checkpoint) -> bytes:
    """Length and JSON of a checkpoint; as long for any digests.

    Raises:
        ValueError: a name that safetensors files cannot have, or too many tensors for one.
    """
    tensors = checkpoint.tensors
    metadata = {
        "pccl.format": str(FORMAT),
        "pccl.revision": str(checkpoint.revision),
        "pccl.names": json.dumps([one.name for one in tensors]),
        "pccl.allow_content_inequality": json.dumps(
            [one.name for one in tensors if one.allow_content_inequality]
        ),
        "pccl.digests": json.dumps([one.digest.hex() for one in tensors]),
        "pccl.content": checkpoint.digest.hex(),
        "pccl.header": _NO_DIGEST.decode(),
    }
    if checkpoint.lineage is not None:
        operation = checkpoint.lineage.operation
        metadata["pccl.run"] = checkpoint.lineage.run.hex()
        metadata["pccl.operation"] = json.dumps(
            [operation.term, operation.group, operation.view, operation.tag, operation.n]
        )
    said: dict[str, Any] = {METADATA: metadata}
    for one in sorted(tensors, key=lambda one: (one.start, one.nbytes)):
        if one.name == METADATA:
            raise ValueError(f"no tensor in a safetensors file may be called {METADATA!r}")
        said[one.name] = {
            "dtype": _LABELS[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [one.start, one.start + one.nbytes],
        }
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH.size)
    if len(text) > HEADER_BYTES_MAX:
        raise ValueError(
            f"{len(tensors)} tensors with these names take a header of {len(text)} bytes, and "
            f"safetensors files have at most {HEADER_BYTES_MAX}; take fewer tensors"
        )
    header = LENGTH.pack(len(text)) + text
    return header.replace(_HEADER_KEY + _NO_DIGEST, _HEADER_KEY + _header_digest(header), 1)


def _header_digest(header: bytes) -> bytes:
    """In hexadecimal; of a header that has zeros in its place."""
    return blake3(header, derive_key_context=_HEADER_CONTEXT).hexdigest().encode()


def checkpoint_of(header: bytes) -> Checkpoint:
    """The checkpoint of a header; the message of an error is for behind the file's name.

    Args:
        header: length and JSON.

    Raises:
        ValueError: ``save`` has not written it so.
    """
    at = header.find(_HEADER_KEY) + len(_HEADER_KEY)
    digest = header[at : at + len(_NO_DIGEST)]
    if _HEADER_KEY not in header or len(digest) < len(_NO_DIGEST):
        raise ValueError(
            "SharedState.save did not write it, or its header was altered; to begin with another "
            "safetensors file, load its tensors with safetensors and make a SharedState of them"
        )
    if digest != _header_digest(header[:at] + _NO_DIGEST + header[at + len(digest) :]):
        raise ValueError("its header was altered since it was written")
    try:
        return _parse(json.loads(header[LENGTH.size :]))
    except _NONSENSE as error:
        raise ValueError(f"its header makes no sense ({error})") from error


def _parse(said: Any) -> Checkpoint:
    """What a header says, which its digest has shown to be what was written.

    Raises:
        ValueError: something that is never written; or any other error, for the same reason.
    """
    metadata = said.pop(METADATA)
    if int(metadata["pccl.format"]) != FORMAT:
        raise ValueError(f"it has format {metadata['pccl.format']}; take a newer pccl")
    lineage = None
    if "pccl.run" in metadata:
        term, group, view, tag, n = map(int, json.loads(metadata["pccl.operation"]))
        run = bytes.fromhex(metadata["pccl.run"])
        if not all(0 <= one < 1 << 32 for one in (term, group, view, n)) or not 0 <= tag < 1 << 64:
            raise ValueError("there is no such operation")
        if len(run) > BYTE_STRING_MAX:
            raise ValueError(f"the id of a run has {len(run)} bytes")
        lineage = Lineage(run, OperationId(term, group, view, tag, n))
    may_differ = set(json.loads(metadata["pccl.allow_content_inequality"]))
    tensors: list[CheckpointTensor] = []
    names, digests = json.loads(metadata["pccl.names"]), json.loads(metadata["pccl.digests"])
    for name, digest in zip(names, digests, strict=True):
        entry = said.pop(name)
        shape = tuple(map(int, entry["shape"]))
        dtype, start = _DTYPES[entry["dtype"]], int(entry["data_offsets"][0])
        if min(shape, default=0) < 0:
            raise ValueError(f"{name!r} has a negative length")
        digest = bytes.fromhex(digest)
        tensors.append(CheckpointTensor(name, dtype, shape, name in may_differ, start, digest))
    if said or not tensors:
        raise ValueError("the names do not agree")
    end = 0
    for tensor in sorted(tensors, key=lambda one: (one.start, one.nbytes)):
        if tensor.start != end:
            raise ValueError(f"there is a gap before {tensor.name!r}, or it overlaps another")
        end += tensor.nbytes
    revision = int(metadata["pccl.revision"])
    if not 0 <= revision <= REVISION_MAX:
        raise ValueError(f"the revision is {revision}")
    checkpoint = Checkpoint(revision, lineage, tuple(tensors))
    if checkpoint.digest.hex() != metadata["pccl.content"]:
        raise ValueError("the digest of the contents is not that of the tensors")
    return checkpoint
