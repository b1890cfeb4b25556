"""The public names, with the positions, defaults and values that users of PCCL know.

The tables are written by hand from the description of PCCL 1.0.0. Ours may add keyword-only
parameters, methods and enum members; nothing else.
"""

from __future__ import annotations

import enum
import inspect
import traceback
from typing import Any

import pytest

import pccl
import pccl.aio

NONE: Any = object()
"""No default."""

P, K = "positional", "keyword"

NAMES = {
    "AsyncReduceHandle", "Attribute", "Communicator", "DataType", "DistributionHint", "MasterNode",
    "PCCLError", "QuantizationAlgorithm", "QuantizationOptions", "ReduceDescriptor", "ReduceInfo",
    "ReduceOp", "ReduceOpDescriptor", "ReduceOperandDescriptor", "SharedState",
    "SharedStateSyncInfo", "SharedStateSyncStrategy", "TensorInfo", "cuda",
}  # fmt: skip

ENUMS: dict[str, dict[str, int]] = {
    "Result": {
        "SUCCESS": 0, "NOT_INITIALIZED": 1, "INTERNAL_ERROR": 2, "INVALID_ARGUMENT": 3,
        "INVALID_USAGE": 4, "TOO_FEW_PEERS": 5, "MASTER_CONNECTION_FAILED": 6,
        "RANK_CONNECTION_FAILED": 7, "RANK_CONNECTION_LOST": 8, "NO_SHARED_STATE_AVAILABLE": 9,
        "PENDING_ASYNC_OPS": 10, "UPDATE_TOPOLOGY_FAILED": 11, "TOPOLOGY_OPTIMIZATION_FAILED": 12,
    },
    "ReduceOp": {"SUM": 0, "AVG": 1, "PROD": 2, "MAX": 3, "MIN": 4},
    "Attribute": {
        "GLOBAL_WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 2, "NUM_DISTINCT_PEER_GROUPS": 3,
        "LARGEST_PEER_GROUP_WORLD_SIZE": 4,
    },
    "SharedStateSyncStrategy": {"ENFORCE_POPULAR": 0, "RECEIVE_ONLY": 1, "SEND_ONLY": 2},
    "DataType": {
        "UINT8": 0, "INT8": 1, "INT16": 2, "UINT16": 3, "UINT32": 4, "INT32": 5, "UINT64": 6,
        "INT64": 7, "FLOAT16": 8, "BFLOAT16": 9, "FLOAT": 10, "DOUBLE": 11,
    },
    "DeviceType": {"CPU": 0, "CUDA": 1},
    "DistributionHint": {"NONE": 0, "NORMAL": 1, "UNIFORM": 2},
    "QuantizationAlgorithm": {"NONE": 0, "MIN_MAX": 1, "ZERO_POINT_SCALE": 2},
}  # fmt: skip

Row = list[tuple[str, str, Any]]
"""(name, kind, default) of each parameter."""

REDUCE: Row = [
    ("send", P, NONE),
    ("recv", P, None),  # there without a default
    ("op", K, pccl.ReduceOp.SUM),  # there without a default
    ("tag", K, 0),
    ("operand_descriptor", K, None),
    ("quantization_options", K, None),
]
BUFFERS: Row = [("send", P, NONE), ("recv", P, NONE), ("reduce_descriptor", P, NONE)]
ENTRY: Row = [("tensor", P, NONE), ("name", P, NONE), ("allow_content_inequality", K, False)]

# ``Communicator.sync_shared_state`` comes with the synchronization of shared state.
CALLS: dict[str, Row] = {
    "PCCLError": [("result", P, None), ("func", P, "")],  # there without defaults; "func_name"
    "PCCLError.check": [("result", P, NONE), ("func_name", P, NONE)],
    "Communicator": [
        ("address", P, None),  # None: from the environment; there without a default
        ("peer_group", P, None),  # None: from the environment, otherwise 0
        ("p2p_connection_pool_size", P, None),  # likewise
    ],
    "Communicator.connect": [("n_attempts", P, 5)],
    "Communicator.get_attribute": [("attribute", P, NONE)],
    "Communicator.update_topology": [],
    "Communicator.optimize_topology": [],
    "Communicator.are_peers_pending": [],
    "Communicator.all_reduce": REDUCE,
    "Communicator.all_reduce_async": REDUCE,
    "Communicator.all_reduce_multiple_with_retry": [
        ("descriptors", P, NONE),
        ("max_in_flight", K, 4),
    ],
    "AsyncReduceHandle.wait": [],
    "ReduceInfo": [("local_world_size", P, NONE), ("tx_bytes", P, NONE), ("rx_bytes", P, NONE)],
    "SharedStateSyncInfo": [("tx_bytes", P, NONE), ("rx_bytes", P, NONE)],
    "ReduceOperandDescriptor": [
        ("datatype", P, NONE),
        ("distribution_hint", P, pccl.DistributionHint.NONE),
    ],
    "QuantizationOptions": [
        ("quantized_datatype", P, pccl.DataType.UINT8),
        ("algorithm", P, pccl.QuantizationAlgorithm.MIN_MAX),
    ],
    "ReduceDescriptor": [
        ("count", P, NONE),
        ("op", P, NONE),
        ("tag", P, NONE),
        ("operand_descriptor", P, NONE),
        ("quantization_options", P, NONE),
    ],
    "ReduceOpDescriptor": [
        ("sendbuf_ptr", P, NONE),
        ("recvbuf_ptr", P, NONE),
        ("reduce_descriptor", P, NONE),
    ],
    "ReduceOpDescriptor.from_torch": BUFFERS,
    "ReduceOpDescriptor.from_numpy": BUFFERS,
    "TensorInfo": [
        ("name", P, NONE),
        ("data_ptr", P, NONE),
        ("numel", K, NONE),
        ("dtype", K, NONE),
        ("device_type", K, NONE),
        ("allow_content_inequality", K, NONE),
    ],
    "TensorInfo.from_torch": ENTRY,
    "TensorInfo.from_numpy": ENTRY,
    "SharedState": [("tensor_infos", P, NONE)],
    "SharedState.push_revision": [],
    "MasterNode": [("listen_address", P, NONE)],
    "MasterNode.run": [],
    "MasterNode.interrupt": [],
    "DataType.to_torch_dtype": [],
    "DataType.to_numpy_dtype": [],
    "DataType.from_torch_dtype": [("dtype", P, NONE)],
    "DataType.from_numpy_dtype": [("dtype", P, NONE)],
    "DeviceType.from_torch_device_type": [("device_type", P, NONE)],
    "cuda.is_available": [],
}

MORE_POSITIONS = {
    "PCCLError": ["reason"],
    "ReduceInfo": [
        *("contributors", "view", "attempts", "algorithm"),
        *("compression", "quantization_error", "weights"),
    ],
    "SharedStateSyncInfo": ["revision", "members", "attempts", "wrong_pieces"],
}
"""Positions that ours adds behind the others, each with a default."""


def find(path: str) -> Any:
    found: Any = pccl
    for name in path.split("."):
        found = getattr(found, name)
    return found


def parameters_of(path: str) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(find(path)).parameters.values())
    owner, _, name = path.rpartition(".")
    is_bound = not owner or owner == "cuda"
    if not is_bound:
        member = inspect.getattr_static(find(owner), name)
        is_bound = isinstance(member, staticmethod | classmethod)
    return parameters if is_bound else parameters[1:]


@pytest.mark.parametrize("path", CALLS)
def test_signatures(path: str) -> None:
    expected = CALLS[path]
    positions = [row for row in expected if row[1] == P]
    parameters = parameters_of(path)
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    more = MORE_POSITIONS.get(path, [])
    assert [p.name for p in by_position] == [name for name, _, _ in positions] + more
    assert all(p.default is not p.empty for p in by_position[len(positions) :])
    by_name = {p.name: p for p in parameters}
    assert {p.kind for p in parameters} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    for name, kind, default in expected:
        parameter = by_name[name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == (kind == K), name
        assert parameter.default == (parameter.empty if default is NONE else default), name
    for parameter in parameters:
        if parameter.name not in {name for name, _, _ in expected}:
            assert parameter.default is not parameter.empty, f"{parameter.name} is required"


@pytest.mark.parametrize(
    "path",
    [*(path for path in CALLS if path.startswith("Communicator.")), "Communicator.all_reduce_many"],
)
def test_the_asyncio_calls_take_the_same(path: str) -> None:
    name = path.partition(".")[2]
    blocking = inspect.signature(getattr(pccl.Communicator, name)).parameters
    awaitable = getattr(pccl.aio.Communicator, name)
    assert inspect.signature(awaitable).parameters == blocking
    assert inspect.iscoroutinefunction(awaitable) == (name != "get_attribute")


def test_ours_are_the_same_in_both() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(pccl.Communicator) == public(pccl.aio.Communicator)
    assert public(pccl.Communicator) >= {
        "all_reduce_many",
        "barrier", "broadcast", "close", "members", "peer_id", "rank", "world_size",
    }  # fmt: skip


@pytest.mark.parametrize("name", ENUMS)
def test_enums(name: str) -> None:
    kind: type[enum.IntEnum] = getattr(pccl, name)
    assert issubclass(kind, enum.IntEnum)
    assert {member.name: int(member) for member in kind} == ENUMS[name]


def test_exported_names() -> None:
    assert set(pccl.__all__) == NAMES
    assert len(pccl.__all__) == len(NAMES)
    scope: dict[str, Any] = {}
    exec("from pccl import *", scope)
    assert scope.keys() - {"__builtins__"} == NAMES
    for name in (*NAMES, "Result", "DeviceType", "Timing", "aio", "cuda", "errors"):
        assert name in dir(pccl)
        assert getattr(pccl, name) is not None
    assert pccl.__version__
    private = [name for name in dir(pccl) if name.startswith("_")]
    assert private == ["__version__"]
    assert not {"Any", "TYPE_CHECKING", "annotations", "import_module"} & {*dir(pccl)}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Comunicator", "; did you mean Communicator?"),
        ("communicater", "; did you mean Communicator?"),
        ("AIO", "; did you mean aio?"),
        ("Nonsense", ""),
    ],
)
def test_a_misspelt_name(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(pccl, name)
    assert str(caught.value) == f"module 'pccl' has no attribute {name!r}{hint}"
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.lower().count("did you mean") == bool(hint)  # the interpreter adds no second one


def test_where_the_attributes_are() -> None:
    assert isinstance(pccl.SharedState.revision, property)
    assert isinstance(pccl.cuda.is_available(), bool)


def test_error_check() -> None:
    pccl.PCCLError.check(0, "all_reduce")
    pccl.PCCLError.check(pccl.Result.SUCCESS, "all_reduce")
    with pytest.raises(pccl.PCCLError) as caught:
        pccl.PCCLError.check(11, "update_topology")
    assert caught.value.result is pccl.Result.UPDATE_TOPOLOGY_FAILED
    assert caught.value.func == "update_topology"
