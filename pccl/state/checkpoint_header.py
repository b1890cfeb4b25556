"""The header of a checkpoint: a safetensors file with revision, lineage and digests.

    8 bytes   length of the JSON, little-endian
    JSON      dtype, shape and offsets of each tensor; ``__metadata__``; spaces to a multiple of 8
    contents  bytes of the tensors

``__metadata__`` holds what the format lacks: revision, lineage, tensor order, and tensors that may
differ between members. It also holds the digests of :mod:`pccl.state.digests`, and a digest of the
header itself. (https://github.com/huggingface/safetensors#format)
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
"""Limit of the safetensors library, which refuses to read longer headers."""

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
"""Errors that ``_parse`` may raise on JSON that ``header_of`` did not write."""

_DTYPES = {label: dtype for dtype, label in _LABELS.items()}


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor of a checkpoint.

    Attributes:
        name: name of the tensor in the shared state.
        dtype: type of its elements.
        shape: shape of the tensor; ``()`` for a scalar.
        allow_content_inequality: whether members may hold different values.
        start: offset of its first byte in the data part of the file.
        digest: digest of its contents.
    """

    name: str
    dtype: DataType
    shape: tuple[int, ...]
    allow_content_inequality: bool
    start: int = 0
    digest: bytes = bytes(DIGEST_BYTES)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        differs = ", allow_content_inequality" if self.allow_content_inequality else ""
        return f"{self.name!r} ({self.numel} x {self.dtype.label}{differs})"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The metadata of a checkpoint.

    Attributes:
        revision: revision of the shared state.
        lineage: synchronization that elected the contents; None: there was none.
        tensors: the tensors, in the shared state's order.
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
        """Digest of the contents that must be equal on all members."""
        return self.digest_of(allow_content_inequality=False)

    def digest_of(self, *, allow_content_inequality: bool) -> bytes:
        """Return the digest of all tensors with this flag."""
        return content_digest(
            [
                one.digest
                for one in self.tensors
                if one.allow_content_inequality is allow_content_inequality
            ]
        )


def header_of(checkpoint: Checkpoint) -> bytes:
    """Return length and JSON of a checkpoint. The size does not depend on the digests.

    Raises:
        ValueError: a tensor has the name ``__metadata__``, or the tensors need too long a header.
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
            raise ValueError(f"a tensor is called {METADATA!r}, which safetensors files reserve")
        said[one.name] = {
            "dtype": _LABELS[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [one.start, one.start + one.nbytes],
        }
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH.size)
    if len(text) > HEADER_BYTES_MAX:
        raise ValueError(
            f"{len(tensors)} tensors with these names need a header of {len(text)} bytes, but "
            f"safetensors files allow {HEADER_BYTES_MAX}; use fewer tensors, or shorter names"
        )
    header = LENGTH.pack(len(text)) + text
    return header.replace(_HEADER_KEY + _NO_DIGEST, _HEADER_KEY + _header_digest(header), 1)


def _header_digest(header: bytes) -> bytes:
    """Return the digest in hexadecimal of a header that has zeros in place of its digest."""
    return blake3(header, derive_key_context=_HEADER_CONTEXT).hexdigest().encode()


def checkpoint_of(header: bytes) -> Checkpoint:
    """Decode a header. Callers put the file's name in front of the message of an error.

    Args:
        header: length and JSON.

    Raises:
        ValueError: the header is altered, malformed, not from ``SharedState.save``, or too new.
    """
    at = header.find(_HEADER_KEY) + len(_HEADER_KEY)
    digest = header[at : at + len(_NO_DIGEST)]
    if _HEADER_KEY not in header or len(digest) < len(_NO_DIGEST):
        raise ValueError(
            "SharedState.save did not write it, or its header was altered; to use another "
            "safetensors file, load its tensors with safetensors and make a SharedState from them"
        )
    if digest != _header_digest(header[:at] + _NO_DIGEST + header[at + len(digest) :]):
        raise ValueError("its header was altered since it was written")
    try:
        return _parse(json.loads(header[LENGTH.size :]))
    except _NONSENSE as error:
        raise ValueError(f"its header is malformed: {error}") from error


def _parse(said: Any) -> Checkpoint:
    """Decode the JSON of a header that has the right digest.

    Raises:
        ValueError: ``header_of`` did not write this; other errors of ``_NONSENSE`` mean the same.
    """
    metadata = said.pop(METADATA)
    if int(metadata["pccl.format"]) != FORMAT:
        raise ValueError(f"it has format {metadata['pccl.format']}; use a newer pccl")
    lineage = None
    if "pccl.run" in metadata:
        term, group, view, tag, n = map(int, json.loads(metadata["pccl.operation"]))
        run = bytes.fromhex(metadata["pccl.run"])
        if not all(0 <= one < 1 << 32 for one in (term, group, view, n)) or not 0 <= tag < 1 << 64:
            raise ValueError("the operation id of its lineage is out of range")
        if len(run) > BYTE_STRING_MAX:
            raise ValueError(f"the run id has {len(run)} bytes, over {BYTE_STRING_MAX}")
        lineage = Lineage(run, OperationId(term, group, view, tag, n))
    may_differ = set(json.loads(metadata["pccl.allow_content_inequality"]))
    tensors: list[CheckpointTensor] = []
    names, digests = json.loads(metadata["pccl.names"]), json.loads(metadata["pccl.digests"])
    for name, digest in zip(names, digests, strict=True):
        entry = said.pop(name)
        shape = tuple(map(int, entry["shape"]))
        dtype, start = _DTYPES[entry["dtype"]], int(entry["data_offsets"][0])
        if min(shape, default=0) < 0:
            raise ValueError(f"tensor {name!r} has a negative dimension")
        digest = bytes.fromhex(digest)
        tensors.append(CheckpointTensor(name, dtype, shape, name in may_differ, start, digest))
    if said or not tensors:
        raise ValueError("the list of names is empty, or lacks a tensor")
    end = 0
    for tensor in sorted(tensors, key=lambda one: (one.start, one.nbytes)):
        if tensor.start != end:
            raise ValueError(f"tensor {tensor.name!r} begins at byte {tensor.start}, not {end}")
        end += tensor.nbytes
    revision = int(metadata["pccl.revision"])
    if not 0 <= revision <= REVISION_MAX:
        raise ValueError(f"the revision is {revision}, not between 0 and {REVISION_MAX}")
    checkpoint = Checkpoint(revision, lineage, tuple(tensors))
    if checkpoint.digest.hex() != metadata["pccl.content"]:
        raise ValueError("the digest of the contents contradicts the digests of the tensors")
    return checkpoint
