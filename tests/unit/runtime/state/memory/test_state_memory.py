"""The bytes of a shared state: where they are, piece by piece, and what comes from devices."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.runtime.state.memory.state_memory import StateMemory, layout_of
from pccl.state.digests import piece_digest
from pccl.state.layout import Entry, StateLayout


@dataclass
class Given:
    """One tensor, as ``pccl.TensorInfo`` says it."""

    name: str
    data_ptr: int
    numel: int
    dtype: DataType
    tensor: Any = None
    allow_content_inequality: bool = False
    is_cuda: bool = False


def given_array(array: Any, name: str = "x") -> Given:
    dtype = DataType.from_numpy_dtype(array.dtype)
    return Given(name, array.ctypes.data, array.size, dtype, array)


def unaligned(dtype: Any, count: int, shift: int) -> Any:
    """An array whose address is no multiple of its item size."""
    room = np.zeros(count * np.dtype(dtype).itemsize + 16, np.uint8)
    start = -room.ctypes.data % 8 + shift
    return room[start : start + count * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize("dtype", DataType)
def test_views_are_the_memory_of_every_dtype(dtype: DataType) -> None:
    array = unaligned(dtype.to_numpy_dtype(), 5, 1)
    assert dtype.itemsize == 1 or not array.flags.aligned
    (view,) = StateMemory([given_array(array)]).views
    assert (view.format, view.ndim, view.readonly) == ("B", 1, False)
    view[:] = bytes(range(dtype.itemsize * 5))
    assert array.tobytes() == bytes(range(dtype.itemsize * 5))
    array[:] = np.zeros(5, array.dtype)
    assert bytes(view) == bytes(dtype.itemsize * 5)


def test_scalars_empties_and_addresses() -> None:
    scalar, empty, plain = np.array(7, np.int32), np.zeros((0, 3), np.int16), np.arange(3.0)
    memory = StateMemory(
        [
            given_array(scalar, "scalar"),
            given_array(empty, "empty"),
            Given("null", 0, 0, DataType.FLOAT),
            Given("address", plain.ctypes.data, 3, DataType.DOUBLE),
        ]
    )
    assert [len(view) for view in memory.views] == [4, 0, 0, 24]
    assert memory.layout.piece_count == 2
    memory.view(memory.layout.piece(0))[:] = (258).to_bytes(4, sys.byteorder)
    assert scalar == 258
    assert bytes(memory.view(memory.layout.piece(1))) == plain.tobytes()


def test_more_than_four_gib_is_arithmetic_in_python() -> None:
    count = (5 << 30) // 4 + 1
    layout = layout_of(
        [Given("small", 64, 3, DataType.UINT8), Given("big", 8, count, DataType.FLOAT)]
    )
    assert layout.nbytes == 3 + (5 << 30) + 4
    last = layout.piece(layout.piece_count - 1)
    assert (last.number, last.entry, last.offset, last.length) == (5121, 1, 5 << 30, 4)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 40),
            st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 5]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_pieces_cover_everything_once(lengths: list[int]) -> None:
    source = np.random.default_rng(len(lengths))
    arrays = [source.integers(0, 256, length, np.uint8) for length in lengths]
    wanted = b"".join(array.tobytes() for array in arrays)
    targets = [np.zeros(length, np.uint8) for length in lengths]
    here = StateMemory([given_array(one, f"t{n}") for n, one in enumerate(arrays)])
    there = StateMemory([given_array(one, f"t{n}") for n, one in enumerate(targets)])
    joined = b""
    for number in range(here.layout.piece_count):
        piece = here.layout.piece(number)
        joined += bytes(here.view(piece))
        there.view(piece)[:] = here.view(piece)
    assert joined == wanted
    assert b"".join(array.tobytes() for array in targets) == wanted


def test_memory_lives_as_long_as_any_view() -> None:
    array = np.zeros(8)
    alive = weakref.ref(array)
    view = StateMemory([given_array(array)]).views[0][8:16]
    del array
    gc.collect()
    assert alive() is not None
    view.release()
    gc.collect()
    assert alive() is None


def test_a_tensor_that_got_other_memory_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    first = torch.nn.Parameter(torch.ones(4))
    info = Given("w", first.data_ptr(), 4, DataType.FLOAT, first)
    memory = StateMemory([info, given_array(np.zeros(3), "n"), Given("p", 0, 0, DataType.INT8)])
    memory.check_in_place()
    first.data = torch.zeros(4)
    with pytest.raises(ValueError, match=r"'w' has other memory.*copy_\(\)"):
        memory.check_in_place()
    assert np.frombuffer(memory.views[0], np.float32).tolist() == [1.0] * 4  # not freed


def test_what_has_to_be_hashed() -> None:
    sizes = (2 * PIECE_BYTES, 0, 1)
    infos = [given_array(np.zeros(size, np.uint8), f"t{n}") for n, size in enumerate(sizes)]
    memory = StateMemory(infos, track_touched=True)
    assert (memory.stale, memory.stale_pieces()) == ({0, 1, 2}, [0, 1, 2])
    memory.hashed([0, 1])
    assert memory.stale_pieces() == [2]
    memory.hashed([2])
    memory.touch(0)
    assert memory.stale_pieces() == [0, 1]
    memory.touch_all()
    assert memory.stale_pieces() == [0, 1, 2]
    always = StateMemory(infos)
    always.hashed([0, 1, 2])
    assert always.stale_pieces() == [0, 1, 2]


# -- devices: what the real ones do when they are waited for --------------------------------------


class Device:
    """Has its own memory; copies happen when its stream is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun: list[Callable[[], object]] = []
        self.uint8 = np.uint8
        self.cuda = SimpleNamespace(synchronize=self.settle, current_stream=self.stream)

    def settle(self, device: str) -> None:
        self.log.append(f"settle {device}")

    def stream(self, device: str) -> SimpleNamespace:
        return SimpleNamespace(synchronize=partial(self.wait, device))

    def wait(self, device: str) -> None:
        self.log.append(f"wait {device}")
        for copy in self.begun:
            copy()
        self.begun.clear()

    def empty(self, count: int, *, dtype: Any, pin_memory: bool) -> DeviceTensor:
        assert pin_memory
        self.log.append(f"allocate {count}")
        return DeviceTensor(self, "host", np.full(count, 255, dtype))


class DeviceTensor:
    """As much of torch.Tensor as is used."""

    def __init__(self, owner: Device, device: str, values: Any) -> None:
        self.owner, self.device, self.values = owner, device, values

    def detach(self) -> DeviceTensor:
        return self

    def reshape(self, shape: int) -> DeviceTensor:
        return DeviceTensor(self.owner, self.device, self.values.reshape(shape))

    def view(self, dtype: Any) -> DeviceTensor:
        return DeviceTensor(self.owner, self.device, self.values.view(dtype))

    def numel(self) -> int:
        return int(self.values.size)

    def data_ptr(self) -> int:
        return int(self.values.ctypes.data)

    def numpy(self) -> Any:
        assert self.device == "host"
        return self.values

    def copy_(self, source: DeviceTensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.owner.log.append(f"copy {source.device}->{self.device}")
        self.owner.begun.append(lambda: np.copyto(self.values, source.values))


def on_device(device: Device, where: str, values: Any, name: str) -> Given:
    tensor = DeviceTensor(device, where, values)
    dtype = DataType.from_numpy_dtype(values.dtype)
    return Given(name, tensor.data_ptr(), values.size, dtype, tensor, is_cuda=True)


def test_devices_are_copied_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setitem(sys.modules, "torch", device)
    first, second = np.arange(6, dtype=np.int16).reshape(2, 3), np.ones(2, np.float64)
    host = np.zeros(3, np.uint8)
    memory = StateMemory(
        [
            on_device(device, "cuda:0", first, "a"),
            given_array(host, "b"),
            on_device(device, "cuda:1", second, "c"),
            on_device(device, "cuda:1", np.zeros(0, np.int8), "d"),
        ],
        track_touched=True,
    )
    memory.check_in_place()
    assert [len(view) for view in memory.views] == [12, 3, 16, 0]
    assert device.log == ["allocate 12", "allocate 16"]
    device.log.clear()
    memory.load()
    copies = ["copy cuda:0->host", "copy cuda:1->host"]
    assert device.log == [
        *("settle cuda:0", "settle cuda:1"), *copies, *("wait cuda:0", "wait cuda:1"),
    ]  # fmt: skip
    assert bytes(memory.views[0]) == first.tobytes()
    assert bytes(memory.views[2]) == second.tobytes()
    assert piece_digest(memory.views[0]) == piece_digest(first.tobytes())  # as on a CPU

    memory.views[2][:] = np.array([4.0, 5.0]).tobytes()
    memory.views[0][:] = bytes(12)
    device.log.clear()
    memory.store([1, 2, 3])
    assert device.log == ["settle cuda:1", "copy host->cuda:1", "wait cuda:1"]
    assert second.tolist() == [4.0, 5.0]
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]

    memory.hashed([0, 1, 2, 3])  # what did not change is not copied again, unless asked for
    device.log.clear()
    memory.load()
    assert device.log == []
    memory.touch(0)
    memory.load()
    assert device.log == ["settle cuda:0", "copy cuda:0->host", "wait cuda:0"]
    assert bytes(memory.views[0]) == first.tobytes()
    memory.load([2])
    assert device.log[3:] == ["settle cuda:1", "copy cuda:1->host", "wait cuda:1"]


def test_layouts_say_what_the_tensors_are() -> None:
    one = Given("x", 8, 3, DataType.INT16, allow_content_inequality=True)
    assert layout_of([one]).entries == (Entry("x", DataType.INT16, 3, may_differ=True),)
    assert StateLayout([]).piece_count == 0
