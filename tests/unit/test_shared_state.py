"""The holders of shared state: what they take, what they refuse, and that memory stays alive."""

from __future__ import annotations

import gc
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
        (lambda: entry("a\ud800"), ValueError, "half a character"),
        (lambda: entry(numel=-1), ValueError, "numel of 'weights' must be from 0"),
        (lambda: entry(dtype="float32"), ValueError, "dtype must be one of DataType.UINT8"),
        (lambda: entry(device_type="cpu"), ValueError, "device_type must be one of"),
        (lambda: entry(allow_content_inequality=1), TypeError, "must be True or False, not 1"),
        (lambda: entry(device_type=DeviceType.CUDA), ValueError, r"CUDA device.*from_torch\("),
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
        (lambda: of_torch(torch.ones(3, dtype=torch.cfloat), "a"), TypeError, "no DataType"),
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


def test_wrong_shared_states() -> None:
    with pytest.raises(ValueError, match="at least one tensor"):
        SharedState([])
    with pytest.raises(ValueError, match="two tensors are called 'a'"):
        SharedState([entry("a"), entry("b"), entry("a")])
    with pytest.raises(TypeError, match=r"pccl\.TensorInfo"):
        SharedState([np.ones(3)])  # type: ignore[list-item]


def test_sync_info() -> None:
    info = SharedStateSyncInfo(tx_bytes=3, rx_bytes=4)
    assert (info.tx_bytes, info.rx_bytes) == (3, 4)
