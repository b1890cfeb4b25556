"""The holders of shared state: what they take, what they refuse, and that memory stays alive."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pccl
from pccl import DataType, DeviceType, SharedState, SharedStateSyncInfo, TensorInfo


def entry(name: str = "weights", **changes: Any) -> TensorInfo:
    said: dict[str, Any] = {
        "data_ptr": 4096,
        "numel": 3,
        "dtype": DataType.FLOAT,
        "device_type": DeviceType.CPU,
        "allow_content_inequality": False,
    }
    return TensorInfo(name, **{**said, **changes})


def held(info: TensorInfo) -> tuple[Any, ...]:
    return (info.name, info.data_ptr, info.numel, info.dtype, info.device_type,
            info.allow_content_inequality)  # fmt: skip


def test_raw_pointers() -> None:
    info = entry(allow_content_inequality=True)
    assert held(info) == ("weights", 4096, 3, DataType.FLOAT, DeviceType.CPU, True)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", DataType.FLOAT16),
        ("int16", DataType.INT16),
        ("uint64", DataType.UINT64),
        ("float64", DataType.DOUBLE),
        (ml_dtypes.bfloat16, DataType.BFLOAT16),
    ],
)
def test_from_numpy(dtype: Any, expected: DataType) -> None:
    array = np.zeros((2, 3), dtype)
    info = TensorInfo.from_numpy(array, "momentum")
    address = array.ctypes.data
    assert held(info) == ("momentum", address, 6, expected, DeviceType.CPU, False)
    assert TensorInfo.from_numpy(array, "b", allow_content_inequality=True).allow_content_inequality
    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is not None
    del info
    gc.collect()
    assert alive() is None


def test_from_torch() -> None:
    torch = pytest.importorskip("torch")
    for tensor, dtype in (
        (torch.zeros(2, 3), DataType.FLOAT),
        (torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16)), DataType.BFLOAT16),
        (torch.zeros(6, dtype=torch.int16), DataType.INT16),
    ):
        info = TensorInfo.from_torch(tensor, "layer.0")
        assert held(info) == ("layer.0", tensor.data_ptr(), 6, dtype, DeviceType.CPU, False)
        assert info.tensor is tensor


def test_scalars_empties_and_unaligned_memory() -> None:
    torch = pytest.importorskip("torch")
    for scalar in (np.array(2.5), torch.tensor(2.5, dtype=torch.float64)):
        made = TensorInfo.from_numpy if isinstance(scalar, np.ndarray) else TensorInfo.from_torch
        info = made(scalar, "step")
        assert (info.numel, info.shape, info.dtype) == (1, (), DataType.DOUBLE)
        assert bytes(SharedState([info]).memory.views[0]) == np.float64(2.5).tobytes()
    for empty in (TensorInfo.from_numpy(np.ones((0, 4)), "e"), entry("e", data_ptr=0, numel=0)):
        assert (empty.numel, SharedState([empty]).nbytes) == (0, 0)
    assert TensorInfo.from_torch(torch.ones(2, 0), "e").shape == (2, 0)
    unaligned = np.zeros(17, np.uint8)[1:].view(np.float64)
    assert unaligned.ctypes.data % 8
    info = TensorInfo.from_numpy(unaligned, "u")
    assert (info.data_ptr, info.shape) == (unaligned.ctypes.data, (2,))
    assert entry("p").shape == (3,)


def test_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    assert pccl.cuda.is_available() is torch.cuda.is_available()

    with monkeypatch.context() as without_torch:
        without_torch.setitem(sys.modules, "torch", None)
        assert pccl.cuda.is_available() is False

    class OnDevice(torch.Tensor):  # type: ignore[misc, name-defined]
        device = torch.device("cuda:1")

    tensor = torch.ones(2, 3).as_subclass(OnDevice)
    monkeypatch.setattr(pccl.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'w' is on cuda:1, but torch finds no CUDA device"):
        TensorInfo.from_torch(tensor, "w")
    monkeypatch.setattr(pccl.cuda, "is_available", lambda: True)
    info = TensorInfo.from_torch(tensor, "w")
    assert held(info) == ("w", tensor.data_ptr(), 6, DataType.FLOAT, DeviceType.CUDA, False)
    assert (info.is_cuda, info.tensor is tensor, info.shape) == (True, True, (2, 3))
    with pytest.raises(ValueError, match=r"address on a CUDA device.*from_torch\("):
        entry(device_type=DeviceType.CUDA)


def read_only() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


def test_wrong_entries() -> None:
    torch = pytest.importorskip("torch")
    of_numpy, of_torch = TensorInfo.from_numpy, TensorInfo.from_torch

    class DTensor(torch.Tensor):  # type: ignore[misc, name-defined]
        __module__ = "torch.distributed.tensor"

    sharded = torch.ones(3).as_subclass(DTensor)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: entry(""), ValueError, "name must not be empty"),
        (lambda: entry(5), TypeError, "name must be a string"),  # type: ignore[arg-type]
        (lambda: entry(data_ptr=0), ValueError, "data_ptr of 'weights' must be from 1"),
        (lambda: entry("a\ud800"), ValueError, "lone surrogate"),
        (lambda: entry(numel=-1), ValueError, "numel of 'weights' must be from 0"),
        (
            lambda: entry(dtype="float8"),
            ValueError,
            "dtype must be one of 'uint8', .*'double', not",
        ),
        (lambda: entry(device_type="mps"), ValueError, "device_type must be one of 'cpu', 'cuda'"),
        (lambda: entry(allow_content_inequality=1), TypeError, "must be True or False, not 1"),
        (lambda: entry(device_type=DeviceType.CUDA), ValueError, r"CUDA device.*from_torch\("),
        (
            lambda: of_numpy("a", np.ones(3)),  # type: ignore[arg-type]
            TypeError,
            r"name must be a string, not ndarray; .* first: from_numpy\(array, name\)",
        ),
        (lambda: of_torch("a", torch.ones(3)), TypeError, r"not Tensor; .*from_torch\(tensor, n"),
        (lambda: of_numpy(np.ones(3, bool), "a"), TypeError, r"'a': no D.*\.view\(np\.uint8\)$"),
        (lambda: of_numpy(np.array([None]), "a"), TypeError, "no DataType for .*DOUBLE$"),
        (lambda: of_numpy([1.0], "a"), TypeError, "'a' must be a NumPy array, not list"),
        (lambda: of_numpy(torch.ones(3), "a"), TypeError, "must be a NumPy array, not Tensor"),
        (lambda: of_numpy(np.ma.masked_array(np.ones(3)), "a"), TypeError, "not MaskedArray"),
        (lambda: of_numpy(np.ones(6)[::2], "a"), ValueError, "ascontiguousarray"),
        (lambda: of_numpy(read_only(), "a"), ValueError, r"read-only.*copy\(\)"),
        (lambda: of_numpy(np.ones(3, complex), "a"), TypeError, "'a': no DataType for .*complex"),
        (lambda: of_torch(np.ones(3), "a"), TypeError, "'a' must be a torch tensor, not ndarray"),
        (lambda: of_torch(torch.ones(4, 4).t()[:2], "a"), ValueError, r"\.contiguous\(\)"),
        (lambda: of_torch(torch.ones(3, device="meta"), "a"), ValueError, r"on meta.*\.cpu\(\)"),
        (lambda: of_torch(torch.ones(3).to_sparse(), "a"), TypeError, r"\.to_dense\(\)"),
        (
            lambda: of_torch(torch.ones(3, dtype=torch.cfloat), "a"),
            TypeError,
            r"no DataType for torch\.complex64.*\.view\(torch\.uint8\)$",
        ),
        (lambda: of_torch(torch._neg_view(torch.ones(3)), "a"), ValueError, r"resolve_neg\(\)"),
        (lambda: of_torch(sharded, "a"), TypeError, r"DTensor; .*\.to_local\(\)"),
    ]
    for make, kind, words in wrong:
        with pytest.raises(kind, match=words) as caught:
            make()
        assert not isinstance(caught.value, pccl.PCCLError)


def test_shared_state() -> None:
    infos = [entry("a"), entry("b")]
    state = SharedState(infos)
    infos.clear()
    assert [info.name for info in state.tensor_infos] == ["a", "b"]
    assert state.revision == 0
    state.push_revision()
    state.push_revision()
    assert state.revision == 2
    state.revision = 2**64 - 1
    with pytest.raises(ValueError, match="revision must be from 0 to 18446744073709551615"):
        state.push_revision()
    assert state.revision == 2**64 - 1
    with pytest.raises(ValueError, match="revision"):
        state.revision = -1
    with pytest.raises(TypeError, match="revision must be an integer"):
        state.revision = 1.0  # type: ignore[assignment]


def test_memory_is_made_once_and_knows_what_was_touched() -> None:
    arrays = [np.zeros(3), np.zeros(5, np.int8)]
    infos = [TensorInfo.from_numpy(array, f"layer.{n}") for n, array in enumerate(arrays)]
    state = SharedState(infos, track_touched=True)
    assert (state.nbytes, state.lineage) == (29, None)
    state.touch("layer.1")  # nobody has looked yet: everything is new anyway
    memory = state.memory
    assert memory.stale == {0, 1}
    memory.hashed([0, 1])
    state.touch("layer.1")
    assert (state.memory is memory, memory.stale) == (True, {1})
    state.touch()
    assert memory.stale == {0, 1}
    memory.hashed([0, 1])
    with pytest.raises(ValueError, match=r"no tensor is called 'layer\.3'; did you mean 'layer\."):
        state.touch("layer.0", "layer.3")
    assert memory.stale == set()
    with pytest.raises(ValueError, match=r"no tensor is called 'zzz'$"):
        state.touch("zzz")
    always = SharedState(infos)
    always.memory.hashed([0, 1])
    assert always.memory.stale == {0, 1}
    with pytest.raises(TypeError, match="track_touched must be True or False"):
        SharedState(infos, track_touched=1)  # type: ignore[arg-type]


def test_a_tensor_that_moved_is_named() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.ones(3))
    state = SharedState([TensorInfo.from_torch(weights, "w")])
    weights.data.mul_(2.0)
    assert bytes(state.memory.views[0]) == np.full(3, 2.0, np.float32).tobytes()
    weights.data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'w' has other memory.*new SharedState"):
        _ = state.memory


def test_wrong_shared_states() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        SharedState([])
    with pytest.raises(ValueError, match="two tensors are called 'a'"):
        SharedState([entry("a"), entry("b"), entry("a")])
    with pytest.raises(
        TypeError, match=r"each entry .* pccl\.TensorInfo, not ndarray; make each with TensorInfo\."
    ):
        SharedState([np.ones(3)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"must be a list, even of one: SharedState\(\[info\]\)"):
        SharedState(entry("a"))  # type: ignore[arg-type]
    for wrong in ({"a": entry("a")}, np.float64(1), None, "a"):
        with pytest.raises(TypeError, match=r"must be a list of TensorInfos, not .*; make each"):
            SharedState(wrong)  # type: ignore[arg-type]


def test_repr() -> None:
    infos = [entry("a"), entry("b", allow_content_inequality=True)]
    assert repr(infos[0]) == "<TensorInfo 'a': 3 x float32 on CPU>"
    assert repr(infos[1]) == "<TensorInfo 'b': 3 x float32 on CPU, allow_content_inequality>"
    state = SharedState(infos)
    state.push_revision()
    assert repr(state) == "<SharedState: revision 1, 2 tensors, 24 bytes>"
    assert repr(SharedState(infos[:1])) == "<SharedState: revision 0, 1 tensor, 12 bytes>"


def test_sync_info() -> None:
    info = SharedStateSyncInfo(tx_bytes=3, rx_bytes=4)
    assert (info.tx_bytes, info.rx_bytes) == (3, 4)
