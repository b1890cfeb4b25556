"""Checkpoints: readable by anybody, whole or refused, and never half written."""

from __future__ import annotations

import errno
import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from importlib import import_module
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from pccl import DataType, DeviceType, SharedState, TensorInfo, checkpoint
from pccl.protocol.shared_state import PIECE_BYTES, Lineage
from pccl.protocol.types import OperationId

LIBRARY: Any = import_module("safetensors")
OF_NUMPY: Any = import_module("safetensors.numpy")
LINEAGE = Lineage(bytes(range(16)), OperationId(2, 7, 5, 2**64 - 1, 9))


def values_of(dtype: DataType, count: int) -> Any:
    return (np.arange(count) % 100).astype(dtype.to_numpy_dtype())


def state_of(arrays: dict[str, Any], *flagged: str, revision: int = 0) -> SharedState:
    state = SharedState(
        TensorInfo.from_numpy(array, name, allow_content_inequality=name in flagged)
        for name, array in arrays.items()
    )
    state.revision = revision
    return state


def arrays_in(state: SharedState) -> dict[str, Any]:
    return {info.name: info.tensor for info in state.tensor_infos}


def small(offset: int = 0) -> dict[str, Any]:
    return {
        "bytes": np.arange(3, dtype=np.uint8) + np.uint8(offset),
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3) + np.float32(offset),
        "step": np.array(41 + offset, np.int64),
        "empty": np.zeros((0, 4), np.int16),
        "halves": (np.arange(5) + offset).astype(ml_dtypes.bfloat16),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    state = state_of(small(), "halves")
    state.synchronized(12, LINEAGE)
    state.save(path)
    return path


def test_a_state_comes_back_as_it_was(saved: Path) -> None:
    state = SharedState.load(saved)
    assert (state.revision, state.lineage) == (12, LINEAGE)
    assert [(i.name, i.allow_content_inequality) for i in state.tensor_infos] == [
        ("bytes", False), ("weights", False), ("step", False), ("empty", False), ("halves", True),
    ]  # fmt: skip
    for name, expected in small().items():
        found = arrays_in(state)[name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes()
        found[...] = 0  # it is an array like any other
    assert state.memory.stale == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o664])
def test_a_file_that_is_replaced_keeps_its_mode(saved: Path, mode: int) -> None:
    saved.chmod(mode)
    SharedState.load(saved).save(saved)
    assert saved.stat().st_mode & 0o777 == mode
    link = saved.with_name("link")
    link.symlink_to(saved)
    SharedState.load(saved).save(link)
    assert saved.stat().st_mode & 0o777 == mode


def test_a_state_that_was_never_synchronized_has_no_lineage(tmp_path: Path) -> None:
    path = tmp_path / "new"
    state_of({"a": np.ones(1)}, revision=2**64 - 1).save(str(path))
    assert SharedState.load(str(path)).lineage is None
    state = SharedState.load(path, track_touched=True)
    assert state.revision == 2**64 - 1
    state.memory.hashed([0])
    assert state.memory.stale == set()


def test_every_dtype_is_readable_by_the_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    of_torch: Any = import_module("safetensors.torch")
    path = tmp_path / "all"
    arrays = {dtype.label: values_of(dtype, 2 * n + 1) for n, dtype in enumerate(DataType)}
    arrays["scalar"] = np.array(7, np.uint16)
    arrays["empty"] = np.zeros((3, 0), np.float64)
    state_of(arrays).save(path)
    there = of_torch.load_file(path)
    assert there.keys() == arrays.keys()
    for name, expected in arrays.items():
        dtype = DataType.from_numpy_dtype(expected.dtype)
        assert there[name].dtype is dtype.to_torch_dtype()
        assert tuple(there[name].shape) == expected.shape
        assert there[name].flatten().view(torch.uint8).numpy().tobytes() == expected.tobytes()
    for name, found in OF_NUMPY.load_file(path).items():
        assert found.shape == arrays[name].shape
        assert found.tobytes() == arrays[name].tobytes()


def test_metadata_tell_the_rest(saved: Path) -> None:
    with LIBRARY.safe_open(saved, "np") as file:
        metadata: dict[str, str] = file.metadata()
    assert metadata["pccl.format"] == "1"
    assert metadata["pccl.revision"] == "12"
    assert metadata["pccl.run"] == LINEAGE.run.hex()
    assert json.loads(metadata["pccl.operation"]) == [2, 7, 5, 2**64 - 1, 9]
    assert json.loads(metadata["pccl.names"]) == list(small())
    assert json.loads(metadata["pccl.allow_content_inequality"]) == ["halves"]
    context = "pccl 2026-11 shared state: {}"  # docs of pccl.state.digests, written out

    def tensor(array: Any) -> bytes:
        content = array.tobytes()
        pieces = blake3(content).digest() if content else b""
        return blake3(pieces, derive_key_context=context.format("tensor")).digest()

    digests = [tensor(array) for array in small().values()]
    assert json.loads(metadata["pccl.digests"]) == [digest.hex() for digest in digests]
    content = blake3(b"".join(digests[:4]), derive_key_context=context.format("content"))
    assert metadata["pccl.content"] == content.hexdigest()
    found = checkpoint.verify(saved)
    assert (found.revision, found.lineage, found.nbytes) == (12, LINEAGE, 3 + 24 + 8 + 0 + 10)
    assert found.digest == content.digest()
    assert [one.digest for one in found.tensors] == digests


def test_tensors_are_aligned_in_the_file(saved: Path) -> None:
    (length,) = struct.unpack("<Q", saved.read_bytes()[:8])
    assert length % 8 == 0
    for one in checkpoint.verify(saved).tensors:
        assert one.start % one.dtype.itemsize == 0


def test_torch_tensors_and_addresses(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weights, plain = torch.arange(4.0).reshape(2, 2).to(torch.bfloat16), np.arange(3, dtype=np.int8)
    infos = [
        TensorInfo.from_torch(weights, "w"),
        TensorInfo(
            "p", plain.ctypes.data, numel=3, dtype=DataType.INT8, device_type=DeviceType.CPU,
            allow_content_inequality=False,
        ),
    ]  # fmt: skip
    state = SharedState(infos)
    state.save(tmp_path / "c")
    shapes = [one.shape for one in checkpoint.verify(tmp_path / "c").tensors]
    assert shapes == [(2, 2), (3,)]
    weights.zero_()
    plain[:] = 0
    state.revision = 5
    state.restore(tmp_path / "c")
    assert weights.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert plain.tolist() == [0, 1, 2]
    assert state.revision == 0


def test_restore_fills_the_tensors_in_place(saved: Path) -> None:
    arrays = small(offset=9)
    state = state_of(arrays, "halves", revision=3)
    state.memory.hashed(range(5))
    state.restore(saved)
    assert (state.revision, state.lineage) == (12, LINEAGE)
    for name, expected in small().items():
        assert arrays[name].tobytes() == expected.tobytes()
    assert state.memory.stale == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": None}, "has 5 tensors, but the shared state has 4; make .* or use Shared"),
        ({"weights": np.zeros(7, np.float32)}, r"'weights' \(6 x float32\) at position 1.*\(7 x"),
        ({"weights": np.zeros(6, np.int32)}, r"\(6 x float32\) at position 1.*\(6 x int32\)"),
        ({"flags": ()}, r"'halves' \(5 x bfloat16, allow_content_inequality\) at position 4"),
        (
            {"order": True},
            r"has 'bytes' \(3 x uint8\) at position 0, .* 'halves' .*; they are "
            "the same tensors in another order; list them in the file's order, or use SharedState",
        ),
    ],
)
def test_the_checkpoint_of_another_state_is_refused(
    saved: Path, change: dict[str, Any], words: str
) -> None:
    arrays = small(offset=9)
    flags: tuple[str, ...] = change.pop("flags", ("halves",))
    if change.pop("order", False):
        arrays = dict(reversed(arrays.items()))
    arrays |= change
    arrays = {name: array for name, array in arrays.items() if array is not None}
    before = {name: array.tobytes() for name, array in arrays.items()}
    state = state_of(arrays, *flags, revision=3)
    with pytest.raises(ValueError, match=words) as caught:
        state.restore(saved)
    assert str(saved) in str(caught.value)
    assert (state.revision, state.lineage) == (3, None)
    assert {name: array.tobytes() for name, array in arrays.items()} == before


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        st.tuples(
            st.sampled_from(DataType), st.lists(st.integers(0, 4), max_size=3), st.booleans()
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**64 - 1),
)
def test_any_names_and_shapes(
    tmp_path_factory: pytest.TempPathFactory, said: dict[str, Any], revision: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    arrays = {
        name: values_of(dtype, prod(shape)).reshape(shape)
        for name, (dtype, shape, _) in said.items()
    }
    flagged = [name for name, (_, _, flag) in said.items() if flag]
    state_of(arrays, *flagged, revision=revision).save(path)
    state = SharedState.load(path)
    assert state.revision == revision
    assert [info.name for info in state.tensor_infos] == list(said)
    assert [i.name for i in state.tensor_infos if i.allow_content_inequality] == flagged
    there = OF_NUMPY.load_file(path)
    for name, expected in arrays.items():
        assert arrays_in(state)[name].dtype == expected.dtype
        assert arrays_in(state)[name].shape == there[name].shape == expected.shape
        assert arrays_in(state)[name].tobytes() == there[name].tobytes() == expected.tobytes()


def test_names_that_look_like_the_header(tmp_path: Path) -> None:
    names = ['"pccl.header":"' + "0" * 64, "pccl.header", 'pccl.header":"', "\\", "\n", "日"]
    arrays = {name: np.full(n + 1, n) for n, name in enumerate(names)}
    state_of(arrays).save(tmp_path / "c")
    assert list(arrays_in(SharedState.load(tmp_path / "c"))) == names
    assert OF_NUMPY.load_file(tmp_path / "c").keys() == set(names)
    with pytest.raises(ValueError, match="is called '__metadata__'"):
        state_of({"__metadata__": np.ones(1)}).save(tmp_path / "d")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# -- what is not whole is refused ------------------------------------------------------------------


def refusal_of(path: Path) -> str:
    """Of both ways to read; nothing may have been written."""
    with pytest.raises(ValueError, match="is not a valid checkpoint") as caught:
        SharedState.load(path)
    said = str(caught.value)
    assert said.startswith(f"{path} is not a valid checkpoint: ")
    arrays = small(offset=9)
    state = state_of(arrays, "halves", revision=3)
    with pytest.raises(ValueError, match="is not a valid checkpoint") as caught:
        state.restore(path)
    assert str(caught.value) == said
    assert (state.revision, state.lineage) == (3, None)
    for name, expected in small(offset=9).items():
        assert arrays[name].tobytes() == expected.tobytes()
    return said


def places(path: Path) -> Iterator[tuple[int, str]]:
    """Every byte of the file, and the tensor that it belongs to."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    said = json.loads(content[8:start])
    for at in range(len(content)):
        found = [
            name
            for name, one in said.items()
            if name != "__metadata__"
            and one["data_offsets"][0] <= at - start < one["data_offsets"][1]
        ]
        yield at, found[0] if found else ""


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80])
def test_any_byte_that_differs_is_noticed(saved: Path, mask: int) -> None:
    content = saved.read_bytes()
    owners = dict(places(saved))
    assert {*owners.values()} == {"", "bytes", "weights", "step", "halves"}
    for at, name in owners.items():
        altered = bytearray(content)
        altered[at] ^= mask
        saved.write_bytes(altered)
        said = refusal_of(saved)
        if name:
            assert f"tensor {name!r} was altered" in said


def test_a_file_that_ends_anywhere_too_early_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    for length, name in places(saved):
        saved.write_bytes(content[:length])
        said = refusal_of(saved)
        if name:
            assert f"the file ends inside tensor {name!r}" in said
    saved.write_bytes(content + b"\0")
    assert "1 bytes too many" in refusal_of(saved)


@given(st.data())
def test_anything_else_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "altered"
    state_of(small(), "halves", revision=1).save(path)
    content = path.read_bytes()
    first = data.draw(st.integers(0, len(content)))
    last = data.draw(st.integers(first, min(len(content), first + 40)))
    altered = content[:first] + data.draw(st.binary(max_size=40)) + content[last:]
    if altered != content:
        path.write_bytes(altered)
        refusal_of(path)


def test_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    OF_NUMPY.save_file({"a": np.ones(3)}, path)
    said = refusal_of(path)
    assert "SharedState.save did not write it" in said
    assert said.endswith("load its tensors with safetensors and make a SharedState from them")
    path.write_bytes(b"")
    assert "not a safetensors file, or it is cut off" in refusal_of(path)
    path.write_bytes(b"PK\3\4" + bytes(100))
    assert "not a valid checkpoint" in refusal_of(path)
    path.write_bytes(b"\xff" * 64)
    assert "not a safetensors file" in refusal_of(path)


def forged(path: Path, **changes: Any) -> None:
    """A file whose header is changed on purpose, with its digest made right again."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    said = json.loads(content[8:start])
    for name, value in changes.items():
        owner, _, key = name.rpartition("/")
        said[owner or "__metadata__"][key] = value
    said["__metadata__"]["pccl.header"] = "0" * 64
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    header = struct.pack("<Q", len(text)) + text
    digest = blake3(header, derive_key_context="pccl 2026-11 checkpoint: header").hexdigest()
    path.write_bytes(header.replace(b"0" * 64, digest.encode(), 1) + content[start:])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pccl.format": "2"}, "format 2; use a newer pccl"),
        ({"pccl.revision": "-1"}, "the revision is -1"),
        ({"pccl.revision": None}, "is malformed"),
        ({"pccl.names": "[]"}, "is malformed"),
        ({"pccl.names": '["a", "b", "c", "d", "e"]'}, "is malformed"),
        ({"pccl.digests": '["00", "00", "00", "00", "00"]'}, "contradicts the digests of the"),
        ({"weights/shape": [-2, -3]}, "'weights' has a negative dimension"),
        ({"weights/shape": [2, 4]}, "begins at byte"),
        ({"weights/dtype": "C64"}, "is malformed"),
        ({"weights/data_offsets": [0, 24]}, "begins at byte"),
        ({"pccl.operation": "[1]"}, "is malformed"),
        ({"pccl.operation": "[" * 9000}, "is malformed"),
    ],
)
def test_headers_that_make_no_sense(saved: Path, changes: dict[str, Any], words: str) -> None:
    forged(saved)
    assert SharedState.load(saved).revision == 12  # to forge is possible: it proves no author
    forged(saved, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        SharedState.load(saved)
    assert str(caught.value).startswith(f"{saved} is not a valid checkpoint: its header is")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, kind in ((tmp_path / "none", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            SharedState.load(path)
        assert caught.value.filename == path
        with pytest.raises(kind):
            state_of(small()).restore(path)


def test_a_disk_that_fails_while_it_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FileIO):
        def readinto(self, buffer: Any, /) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "FileIO", Failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        SharedState.load(saved)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(saved))


def test_a_file_that_changes_while_it_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint.Reader.read

    def read_and_alter(self: Any, tensor: Any, target: Any = None) -> bytes:
        digests = read(self, tensor, target)
        if tensor.name == "halves":  # the last one: all are verified
            content = bytearray(saved.read_bytes())
            content[next(at for at, name in places(saved) if name == "step")] ^= 1
            saved.write_bytes(content)
        return digests

    monkeypatch.setattr(checkpoint.Reader, "read", read_and_alter)
    arrays = small(offset=9)
    state = state_of(arrays, "halves", revision=3)
    with pytest.raises(ValueError, match=r"'step' was altered while it was read.* holds parts"):
        state.restore(saved)
    assert arrays["weights"].tobytes() == small()["weights"].tobytes()
    assert arrays["step"] == 50
    assert state.revision == 3


# -- what is not finished leaves what was there ----------------------------------------------------


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "interrupt"])
def test_a_save_that_fails_leaves_the_old_file(
    saved: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    error: BaseException = OSError(errno.ENOSPC, "No space left on device")
    if step == "interrupt":
        error = KeyboardInterrupt()

    def fail(*_: Any) -> Any:
        raise error

    if step == "write":
        monkeypatch.setattr(checkpoint, "FileIO", type("F", (FileIO,), {"write": fail}))
    else:
        monkeypatch.setattr(os, "replace" if step == "replace" else "fsync", fail)
    with pytest.raises(type(error)) as caught:
        state_of(small(offset=1), revision=99).save(saved)
    if isinstance(caught.value, OSError):
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(saved))
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_file_and_folder_are_on_the_disk_before_save_returns(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor: int) -> None:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append(f"fsync {os.path.relpath(target, saved.parent).rpartition('.')[2] or '.'}")
        if target.endswith(".tmp"):
            assert checkpoint.verify(target).revision == 99  # all of it, header and contents
        fsync(descriptor)

    def logged_replace(source: str, target: str) -> None:
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    state_of(small(offset=1), revision=99).save(saved)
    assert done == ["fsync tmp", "replace", "fsync ."]
    assert SharedState.load(saved).revision == 99


def test_a_link_is_followed_and_a_missing_folder_named(saved: Path) -> None:
    link = saved.parent / "latest"
    link.symlink_to(saved.name)
    state_of(small(offset=1), revision=5).save(link)
    assert link.is_symlink()
    assert SharedState.load(saved).revision == 5
    missing = saved.parent / "none" / "c"
    with pytest.raises(FileNotFoundError) as caught:
        state_of(small()).save(missing)
    assert caught.value.filename == str(missing)


def test_tensors_that_change_meanwhile_make_no_bad_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.zeros(2 * PIECE_BYTES, np.uint8)

    class Changing(FileIO):
        def write(self, data: Any, /) -> int:
            array[:] += 1
            return super().write(data)

    monkeypatch.setattr(checkpoint, "FileIO", Changing)
    state_of({"a": array}).save(tmp_path / "c")
    monkeypatch.undo()
    found = arrays_in(SharedState.load(tmp_path / "c"))["a"]
    assert (found[0], found[-1]) == (1, 2)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(FileIO):
        def write(self, data: Any, /) -> int:
            return super().write(memoryview(data)[:100])

    monkeypatch.setattr(checkpoint, "FileIO", Short)
    state_of(small(), revision=4).save(tmp_path / "c")
    monkeypatch.undo()
    assert SharedState.load(tmp_path / "c").revision == 4


def test_neither_save_nor_restore_holds_the_state_twice(tmp_path: Path) -> None:
    array = np.zeros(64 * PIECE_BYTES, np.uint8)
    array[:: PIECE_BYTES // 2] = 3
    state = state_of({"a": array})
    tracemalloc.start()
    try:
        state.save(tmp_path / "c")
        array[:] = 1
        state.restore(tmp_path / "c")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * PIECE_BYTES
    assert int(array.sum(dtype=np.int64)) == 3 * 128
