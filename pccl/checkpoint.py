"""Checkpoints of shared state: safetensors files with digests of their contents.

Any reader of safetensors can load the tensors. A changed byte anywhere in the file is detected.

This module does not use the safetensors library, whose writer needs all tensors and their digests
at once. It writes piece by piece, hashes exactly the bytes that it writes, and then adds the header
with the digests (:mod:`pccl.state.checkpoint_header`) in front.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.shared_state import DIGEST_BYTES, PIECE_BYTES, Lineage
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.checkpoint_header import (
    HEADER_BYTES_MAX,
    LENGTH,
    Checkpoint,
    CheckpointTensor,
    checkpoint_of,
    header_of,
)
from pccl.state.digests import piece_digest, tensor_digest

__all__ = ["Checkpoint", "CheckpointTensor", "Path", "load", "restore", "verify", "write"]

Array = npt.NDArray[Any]
Path = str | os.PathLike[str]


# -- writing ---------------------------------------------------------------------------------------


def write(
    path: Path,
    memory: StateMemory,
    shapes: Sequence[tuple[int, ...]],
    revision: int,
    lineage: Lineage | None,
) -> Checkpoint:
    """Write a state to ``path``. If this fails, an earlier file there stays unchanged.

    A replaced file keeps its mode. Needs memory for one piece. A process that is killed meanwhile
    leaves a file whose name starts with a dot and ends with ``.tmp``.

    Args:
        path: path of the file.
        memory: memory of the state.
        shapes: shapes of the tensors.
        revision: revision of the state.
        lineage: lineage of the contents.

    Raises:
        OSError: the file cannot be written.
        ValueError: safetensors files do not allow a name, or the number of tensors.
    """
    entries = memory.layout.entries
    tensors = [
        CheckpointTensor(entry.name, entry.dtype, shape, entry.may_differ)
        for entry, shape in zip(entries, shapes, strict=True)
    ]
    # Longest items first, so that each tensor is aligned for readers that map the file.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].dtype.itemsize)
    start = 0
    for index in order:
        tensors[index] = replace(tensors[index], start=start)
        start += tensors[index].nbytes
    memory.load(order)
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        with FileIO(temporary, "x") as file:
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
            _write_all(file, header_of(Checkpoint(revision, lineage, tuple(tensors))))
            for index in order:
                digest = _write_tensor(file, memory.views[index])
                tensors[index] = replace(tensors[index], digest=digest)
            written = Checkpoint(revision, lineage, tuple(tensors))
            file.seek(0)
            _write_all(file, header_of(written))
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(folder)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise _with_path(error, path) from error
        raise
    return written


def _write_tensor(file: FileIO, view: memoryview) -> bytes:
    """Write one tensor; return the digest of the written bytes, even if the tensor changes."""
    room = memoryview(bytearray(min(PIECE_BYTES, len(view))))
    digests = bytearray()
    for start in range(0, len(view), PIECE_BYTES):
        piece = room[: len(view) - start]
        piece[:] = view[start : start + PIECE_BYTES]
        digests += piece_digest(piece)
        _write_all(file, piece)
    return tensor_digest(bytes(digests))


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _sync_folder(folder: str) -> None:
    """Make the new file name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_path(error: OSError, path: Path) -> OSError:
    return OSError(error.errno, error.strerror or str(error), os.fspath(path))


# -- reading ---------------------------------------------------------------------------------------


class Reader:
    """An open checkpoint with a verified header; a context manager.

    Args:
        path: path of the file.

    Attributes:
        checkpoint: contents of the header. ``read`` verifies the tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no checkpoint, truncated, or altered.
    """

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._file = FileIO(path)
        try:
            self.checkpoint, self._data_start = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, tensor: CheckpointTensor, target: memoryview | None = None) -> bytes:
        """Read and verify a tensor; return the concatenated digests of its pieces.

        Args:
            tensor: a tensor of the checkpoint.
            target: destination, shape (tensor.nbytes,), with undefined contents if this fails;
                None: only verify the tensor.

        Raises:
            OSError: the file cannot be read.
            ValueError: the tensor was altered.
        """
        room = memoryview(bytearray(min(PIECE_BYTES, tensor.nbytes) if target is None else 0))
        digests = bytearray()
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            if target is None:
                piece = room[: tensor.nbytes - start]
            else:
                piece = target[start : start + PIECE_BYTES]
            self._fill(piece, tensor, start)
            digests += piece_digest(piece)
        if tensor_digest(bytes(digests)) != tensor.digest:
            raise self._refusal(f"tensor {tensor.name!r} was altered since it was written")
        return bytes(digests)

    def copy(self, tensor: CheckpointTensor, digests: bytes, target: memoryview) -> None:
        """Read a verified tensor again, and copy each piece that is unchanged into ``target``.

        Args:
            tensor: a tensor of the checkpoint.
            digests: the result of :meth:`read`.
            target: destination, shape (tensor.nbytes,).

        Raises:
            OSError: the file can no longer be read.
            ValueError: the file was changed meanwhile.
        """
        room = memoryview(bytearray(min(PIECE_BYTES, tensor.nbytes)))
        for number, start in enumerate(range(0, tensor.nbytes, PIECE_BYTES)):
            piece = room[: tensor.nbytes - start]
            self._fill(piece, tensor, start)
            if piece_digest(piece) != digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
                raise self._refusal(
                    f"tensor {tensor.name!r} was altered while it was read, and the shared state "
                    "holds parts of it; restore another checkpoint"
                )
            target[start : start + PIECE_BYTES] = piece

    def _fill(self, piece: memoryview, tensor: CheckpointTensor, start: int) -> None:
        self._file.seek(self._data_start + tensor.start + start)
        if self._read(piece) < len(piece):
            raise self._refusal(f"the file ends inside tensor {tensor.name!r}")

    def _read(self, target: memoryview) -> int:
        """Read until ``target`` is full or the file ends; return the number of bytes read."""
        count = 0
        while count < len(target):
            try:
                got = self._file.readinto(target[count:])
            except OSError as error:
                raise _with_path(error, self._path) from error
            if not got:
                break
            count += got
        return count

    def _read_header(self) -> tuple[Checkpoint, int]:
        size = os.fstat(self._file.fileno()).st_size
        length = bytearray(LENGTH.size)
        self._read(memoryview(length))
        (count,) = LENGTH.unpack(length)
        if count > min(HEADER_BYTES_MAX, size - LENGTH.size):
            raise self._refusal("it is not a safetensors file, or it is cut off inside its header")
        header = length + bytearray(count)
        if self._read(memoryview(header)[LENGTH.size :]) < count:
            raise self._refusal("it is cut off inside its header")
        try:
            checkpoint = checkpoint_of(bytes(header))
        except ValueError as error:
            raise self._refusal(str(error)) from error.__cause__
        missing = len(header) + checkpoint.nbytes - size
        if missing < 0:
            raise self._refusal(f"it has {-missing} bytes too many at its end")
        for tensor in sorted(checkpoint.tensors, key=lambda one: one.start):
            if len(header) + tensor.start + tensor.nbytes > size:
                raise self._refusal(f"the file ends inside tensor {tensor.name!r}")
        return checkpoint, len(header)

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{self._path} is not a valid checkpoint: {reason}")


def verify(path: Path) -> Checkpoint:
    """Read and verify a whole checkpoint; return the contents of its header.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no checkpoint, truncated, or altered.
    """
    with Reader(path) as reader:
        for tensor in reader.checkpoint.tensors:
            reader.read(tensor)
        return reader.checkpoint


def load(path: Path) -> tuple[Checkpoint, list[Array]]:
    """Read and verify a whole checkpoint into new arrays with the saved shapes and dtypes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no checkpoint, truncated, or altered.
    """
    with Reader(path) as reader:
        arrays: list[Array] = []
        for tensor in reader.checkpoint.tensors:
            array = np.empty(tensor.shape, tensor.dtype.to_numpy_dtype())
            reader.read(tensor, array.reshape(-1).view(np.uint8).data)
            arrays.append(array)
        return reader.checkpoint, arrays


def restore(path: Path, memory: StateMemory) -> Checkpoint:
    """Verify a whole checkpoint, and then copy it into the tensors of a state.

    It reads the file twice, verifies each piece both times, and needs memory for one piece.

    Args:
        path: path of the file.
        memory: memory of a state with the same names, dtypes, lengths and flags, in this order.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no checkpoint, truncated, altered, or of another state.
    """
    with Reader(path) as reader:
        checkpoint = reader.checkpoint
        _check_layout(os.fspath(path), checkpoint, memory)
        digests = [reader.read(tensor) for tensor in checkpoint.tensors]
        memory.touch_all()
        for index, tensor in enumerate(checkpoint.tensors):
            reader.copy(tensor, digests[index], memory.views[index])
            memory.store([index])
        return checkpoint


def _check_layout(path: str, checkpoint: Checkpoint, memory: StateMemory) -> None:
    there = [str(tensor) for tensor in checkpoint.tensors]
    here = [str(entry) for entry in memory.layout.entries]
    if there == here:
        return
    what_to_do = "make a state with the file's tensors, or use SharedState.load"
    if sorted(there) == sorted(here):
        what_to_do = (
            "they are the same tensors in another order; list them in the file's order, or use "
            "SharedState.load"
        )
    if len(there) != len(here):
        differs = f"{len(there)} tensors, but the shared state has {len(here)}"
    else:
        number = next(
            at for at, pair in enumerate(zip(there, here, strict=True)) if len({*pair}) > 1
        )
        differs = f"{there[number]} at position {number}, but the shared state has {here[number]}"
    raise ValueError(f"{path} has {differs}; {what_to_do}")
