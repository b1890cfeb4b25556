"""What a caller says about a reduce, and what becomes of it before anything is sent."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import (
    DataType,
    DeviceType,
    DistributionHint,
    ErrorFeedback,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    WireFormat,
)
from pccl._api.arguments import broadcast_request, list_request, many_request, reduce_request
from pccl.protocol.types import Algorithm, AlgorithmTable, Collective, Quantization


def about(count: int = 4, tag: int = 0, **changes: Any) -> ReduceDescriptor:
    said: dict[str, Any] = {
        "count": count,
        "op": ReduceOp.AVG,
        "tag": tag,
        "operand_descriptor": None,
        "quantization_options": None,
    }
    return ReduceDescriptor(**{**said, **changes})


FLOATS = ReduceOperandDescriptor(DataType.FLOAT)


def test_holders_hold() -> None:
    operand = ReduceOperandDescriptor(datatype=DataType.FLOAT)
    assert (operand.datatype, operand.distribution_hint) == (DataType.FLOAT, DistributionHint.NONE)
    options = QuantizationOptions()
    assert options.quantized_datatype is DataType.UINT8
    assert options.algorithm is QuantizationAlgorithm.MIN_MAX
    assert (options.format, options.block, options.stochastic) == (None, None, False)
    assert (options.error_feedback, options.name) == (None, None)
    descriptor = ReduceDescriptor(10, ReduceOp.SUM, 3, operand, options)
    assert (descriptor.count, descriptor.op, descriptor.tag) == (10, ReduceOp.SUM, 3)
    descriptor.tag = 4
    assert descriptor == ReduceDescriptor(10, ReduceOp.SUM, 4, operand, options)


def test_device_types() -> None:
    assert DeviceType.from_torch_device_type("cpu") is DeviceType.CPU
    assert DeviceType.from_torch_device_type("cuda") is DeviceType.CUDA
    assert DeviceType.from_torch_device_type("mps") is None


# -- one reduce ----------------------------------------------------------------------------------


def test_request_of_a_reduce() -> None:
    array = np.ones(5, np.float32)
    hint = ReduceOperandDescriptor(DataType.FLOAT, DistributionHint.NORMAL)
    request = reduce_request(array, op=ReduceOp.MAX, tag=7, operand_descriptor=hint)
    assert request.tag == 7
    assert request.operand is not None
    assert request.operand.in_place
    assert np.shares_memory(request.operand.result, array)
    descriptor = request.asks.descriptor
    assert (descriptor.dtype, descriptor.op, descriptor.count) == (DataType.FLOAT, 3, 5)
    assert descriptor.collective is Collective.ALL_REDUCE
    assert descriptor.quantization == Quantization(WireFormat.NONE, 0, False)


def test_plain_numbers_do_for_enums() -> None:
    loose: Any = ReduceOperandDescriptor(10)  # type: ignore[arg-type]
    request = reduce_request(np.ones(2, np.float32), op=2, operand_descriptor=loose)  # type: ignore[arg-type]
    assert request.asks.descriptor.op is ReduceOp.PROD


@pytest.mark.parametrize("op", ["avg", "AVG", "Avg", 1, ReduceOp.AVG])
def test_names_do_for_enums(op: Any) -> None:
    operand = ReduceOperandDescriptor("float32")
    quantized = QuantizationOptions("float16", "zero_point_scale")
    tensor = np.ones(2, np.float32)
    request = reduce_request(
        tensor, op=op, operand_descriptor=operand, quantization_options=quantized
    )
    descriptor = request.asks.descriptor
    assert descriptor.op is ReduceOp.AVG
    assert descriptor.quantization.format is WireFormat.FLOAT16
    listed = ReduceDescriptor(2, op, 0, operand, None)
    described = ReduceOpDescriptor.from_numpy(tensor, tensor, listed)
    asked = many_request([described]).requests[0].asks.descriptor
    assert (asked.op, asked.dtype) == (ReduceOp.AVG, DataType.FLOAT)


ONES = np.ones(4, np.float32)

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"op": 5}, ValueError, "op must be one of 'sum', 'avg', .*'min', not 5"),
    ({"op": "mean"}, ValueError, "op must be one of 'sum', 'avg', .*, not 'mean'"),
    ({"op": True}, TypeError, "op must be one of"),
    ({"tag": -1}, ValueError, "tag must be from 0 to 9223372036854775807, not -1"),
    ({"tag": 2**64 - 1}, ValueError, "tag"),
    ({"tag": 1.0}, TypeError, "tag must be an integer"),
    ({"operand_descriptor": DataType.FLOAT}, TypeError, "pccl.ReduceOperandDescriptor"),
    (
        {"operand_descriptor": ReduceOperandDescriptor(DataType.DOUBLE)},
        ValueError,
        "the tensor holds .*FLOAT.*; pass DataType.FLOAT",
    ),
    ({"quantization_options": DataType.UINT8}, TypeError, "pccl.QuantizationOptions"),
    (
        {"quantization_options": QuantizationOptions(algorithm=9)},  # type: ignore[arg-type]
        ValueError,
        "algorithm must be one of",
    ),
    (
        {"quantization_options": QuantizationOptions("u8")},
        ValueError,
        "quantized_datatype must be one of",
    ),
    ({"quantization_options": QuantizationOptions(format="int3")}, ValueError,
     "format must be one of 'none', 'uint8', .*'sparse', not 'int3'"),
    ({"quantization_options": QuantizationOptions(format=99)},  # type: ignore[arg-type]
     ValueError, "format must be one of 'none'"),
    ({"quantization_options": QuantizationOptions(block=7)}, ValueError,
     "block must be from 8 to 65536, not 7"),
    ({"quantization_options": QuantizationOptions(block=65537)}, ValueError, "block"),
    ({"quantization_options": QuantizationOptions(block=8.0)},  # type: ignore[arg-type]
     TypeError, "block must be an integer"),
    ({"quantization_options": QuantizationOptions(stochastic=1)},  # type: ignore[arg-type]
     TypeError, "stochastic must be True or False"),
    ({"quantization_options": QuantizationOptions(name="w")}, ValueError, "error_feedback too"),
    ({"quantization_options": QuantizationOptions(error_feedback=ErrorFeedback())},
     ValueError, "error_feedback needs the tensor's name"),
    ({"quantization_options": QuantizationOptions(error_feedback={}, name="w")},  # type: ignore[arg-type]
     TypeError, "error_feedback must be a pccl.ErrorFeedback"),
    ({"quantization_options": QuantizationOptions(error_feedback=ErrorFeedback(), name="")},
     ValueError, "name must not be empty"),
    ({"quantization_options": QuantizationOptions(error_feedback=ErrorFeedback(), name="w"),
      "op": ReduceOp.MAX}, ValueError, "with SUM and AVG only, because MAX"),
    ({"weight": 1.0}, ValueError, "weight and guard are for op=ReduceOp.AVG, not for SUM"),
    ({"weight": -1, "op": ReduceOp.AVG}, ValueError, r"weight must be from 0 to 1e\+300, not -1"),
    ({"weight": 2e300, "op": ReduceOp.AVG}, ValueError, "weight must be from 0"),
    ({"weight": 10**400, "op": ReduceOp.AVG}, ValueError, "weight must be from 0"),
    ({"weight": np.float32("nan"), "op": ReduceOp.AVG}, ValueError, "weight must be .* not nan"),
    ({"weight": np.inf, "op": ReduceOp.AVG}, ValueError, "weight must be .* not inf"),
    ({"weight": "1", "op": ReduceOp.AVG}, TypeError, "weight must be a number or None, not '1'"),
    ({"weight": True, "op": ReduceOp.AVG}, TypeError, "weight must be a number or None, not True"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "words"), WRONG)
def test_wrong_arguments_of_a_reduce(
    changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    right: dict[str, Any] = {
        "op": ReduceOp.SUM, "tag": 0, "operand_descriptor": None, "quantization_options": None,
    }  # fmt: skip
    with pytest.raises(kind, match=words) as caught:
        reduce_request(ONES, None, **{**right, **changes})
    assert not isinstance(caught.value, pccl.PCCLError)


def test_a_weight_makes_another_request_and_its_value_does_not() -> None:
    plain, *weighted = (
        reduce_request(ONES, op=ReduceOp.AVG, weight=weight).asks  # type: ignore[arg-type]
        for weight in (None, 0, 2.5, np.float32(0.5), np.int64(3))
    )
    assert not plain.descriptor.weighted
    assert {one.descriptor for one in weighted} == {replace(plain.descriptor, weighted=True)}
    assert [one.weight for one in weighted] == [0.0, 2.5, 0.5, 3.0]
    assert {type(one.weight) for one in weighted} == {float}
    assert str(weighted[0].descriptor) == "weighted AVG of 4 x float32"
    many = list_request([ONES, ONES.copy()], op=ReduceOp.AVG, weight=7).asks
    assert (many.descriptor.weighted, many.weight) == (True, 7.0)
    what = ReduceDescriptor(4, ReduceOp.AVG, 3, None, None, weight=1.5)
    (described,) = many_request([ReduceOpDescriptor.from_numpy(ONES, ONES, what)]).requests
    assert (described.asks.descriptor.weighted, described.asks.weight) == (True, 1.5)


def test_only_floats_are_averaged_by_weight() -> None:
    with pytest.raises(ValueError, match="int32 can't be averaged by weight"):
        reduce_request(np.ones(4, np.int32), op=ReduceOp.AVG, weight=1.0)


# -- quantization --------------------------------------------------------------------------------


def asked(options: QuantizationOptions | None, kind: DataType = DataType.FLOAT) -> Quantization:
    array = np.ones(4, kind.to_numpy_dtype())
    return reduce_request(array, quantization_options=options).asks.descriptor.quantization


MIN_MAX, ZERO_POINT = QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE


@pytest.mark.parametrize(
    ("wire", "algorithm", "expected", "block"),
    [
        (DataType.UINT8, MIN_MAX, WireFormat.UINT8, 96),
        (DataType.INT8, MIN_MAX, WireFormat.UINT8, 96),
        (DataType.UINT8, ZERO_POINT, WireFormat.INT8, 32),
        (DataType.INT8, ZERO_POINT, WireFormat.INT8, 32),
        (DataType.UINT16, MIN_MAX, WireFormat.UINT16, 96),
        (DataType.INT16, ZERO_POINT, WireFormat.UINT16, 96),
        (DataType.FLOAT16, MIN_MAX, WireFormat.FLOAT16, 256),
        (DataType.BFLOAT16, ZERO_POINT, WireFormat.BFLOAT16, 256),
    ],
)
def test_what_users_of_pccl_ask_for(
    wire: DataType, algorithm: QuantizationAlgorithm, expected: WireFormat, block: int
) -> None:
    assert asked(QuantizationOptions(wire, algorithm)) == Quantization(expected, block, False)


@pytest.mark.parametrize("name", ["int8", "uint8", "companded8", "int4", "float16", "bfloat16",
                                  "uint16", "e3m0", "int2"])  # fmt: skip
def test_our_names_of_formats(name: str) -> None:
    wire = WireFormat[name.upper()]
    options = QuantizationOptions(format=name, block=64, stochastic=True)
    assert asked(options) == Quantization(wire, 64, True)
    assert asked(QuantizationOptions(format=wire)) == Quantization(wire, wire.default_block)
    assert str(asked(options)) == f"{name} in blocks of 64, stochastic"


def test_sparse_has_a_block_of_2_percent_and_one_way_to_travel() -> None:
    options = QuantizationOptions(format="sparse")
    assert asked(options) == Quantization(WireFormat.SPARSE, 3200)
    with pytest.raises(ValueError, match="'sparse' cannot round at random"):
        asked(QuantizationOptions(format="sparse", stochastic=True))
    values = np.zeros(8, np.float32)
    for op, algorithm, words in [
        ("avg", "ring", "'sparse' travels from each peer to all others, not by 'ring'"),
        ("sum", "star", "'sparse' travels"),
        ("max", "auto", "'sparse' is for SUM and AVG, because MAX"),
    ]:
        with pytest.raises(ValueError, match=words):
            reduce_request(values, op=op, algorithm=algorithm, quantization_options=options)
    table = AlgorithmTable()  # a ring for all sizes
    asks = reduce_request(values, op="avg", quantization_options=options).asks
    assert asks.descriptor.settled(table).algorithm is Algorithm.MESH


def test_a_format_wins_over_dtype_and_algorithm() -> None:
    options = QuantizationOptions(DataType.DOUBLE, QuantizationAlgorithm.NONE, format="int4")
    assert asked(options) == Quantization(WireFormat.INT4, 32)
    assert asked(QuantizationOptions(format="none")) == Quantization()


def test_members_that_ask_for_different_things_are_told_so() -> None:
    options = QuantizationOptions(format="int8", block=40)
    descriptor = reduce_request(ONES, quantization_options=options).asks.descriptor
    assert str(descriptor) == "SUM of 4 x float32, quantized as int8 in blocks of 40"
    plain = reduce_request(ONES, op=ReduceOp.SUM).asks.descriptor
    assert str(plain) == "SUM of 4 x float32"


def test_what_is_no_quantization() -> None:
    plain = reduce_request(ONES, op=ReduceOp.SUM).asks.descriptor
    for options in (
        QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.NONE),
        QuantizationOptions(DataType.FLOAT, QuantizationAlgorithm.MIN_MAX),
        QuantizationOptions(DataType.UINT64),
    ):
        assert reduce_request(ONES, quantization_options=options).asks.descriptor == plain
    unquantized = Quantization()
    assert asked(QuantizationOptions(DataType.UINT16), DataType.FLOAT16) == unquantized
    assert asked(QuantizationOptions(format="float16"), DataType.BFLOAT16) == unquantized
    assert asked(QuantizationOptions(), DataType.INT8) == unquantized
    assert asked(QuantizationOptions(format="none"), DataType.INT32) == unquantized


@pytest.mark.parametrize("kind", [DataType.INT32, DataType.UINT64])
@pytest.mark.parametrize("options", [QuantizationOptions(), QuantizationOptions(format="int4")])
def test_integers_cannot_be_quantized(kind: DataType, options: QuantizationOptions) -> None:
    with pytest.raises(ValueError, match=f"{kind.label} cannot be quantized .* reduce a float"):
        asked(options, kind)
    with pytest.raises(ValueError, match="int8 cannot be quantized to int8"):
        asked(QuantizationOptions(format="int8"), DataType.INT8)


def test_error_feedback_for_sums_and_averages() -> None:
    options = QuantizationOptions(error_feedback=ErrorFeedback(), name="w")
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        descriptor = reduce_request(ONES, op=op, quantization_options=options).asks.descriptor
        assert descriptor.quantization == Quantization(WireFormat.UINT8, 96)


# -- several reduces -----------------------------------------------------------------------------


def test_from_numpy_keeps_the_memory_alive() -> None:
    send, recv = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    addresses = send.ctypes.data, recv.ctypes.data
    made = ReduceOpDescriptor.from_numpy(send, recv, about(operand_descriptor=FLOATS))
    assert (made.sendbuf_ptr, made.recvbuf_ptr) == addresses
    alive = weakref.ref(send)
    del send
    gc.collect()
    assert alive() is not None
    (request,) = many_request([made]).requests
    assert request.operand is not None
    assert request.operand.send.ctypes.data == addresses[0]
    assert request.operand.send.tolist() == [0, 1, 2, 3]
    assert not request.operand.in_place


def test_from_torch_takes_bfloat16_and_parameters() -> None:
    torch = pytest.importorskip("torch")
    halves = torch.ones(2, 3, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.ones(5))
    requests = many_request(
        [
            ReduceOpDescriptor.from_torch(halves, halves, about(6, 1)),
            ReduceOpDescriptor.from_torch(parameter, parameter, about(5, 2)),
        ]
    ).requests
    assert [request.asks.descriptor.dtype for request in requests] == [
        DataType.BFLOAT16,
        DataType.FLOAT,
    ]
    assert [request.tag for request in requests] == [1, 2]
    assert all(request.operand and request.operand.in_place for request in requests)


def test_raw_pointers() -> None:
    send, recv = np.arange(4, dtype=np.int16), np.zeros(4, np.int16)
    what = about(operand_descriptor=ReduceOperandDescriptor(DataType.INT16))
    made = ReduceOpDescriptor(send.ctypes.data, recv.ctypes.data, what)
    assert made.buffers is None
    (request,) = many_request([made]).requests
    assert request.operand is not None
    assert request.operand.send.tolist() == [0, 1, 2, 3]
    request.operand.result[:] = 5
    assert recv.tolist() == [5, 5, 5, 5]


def test_wrong_descriptors() -> None:
    torch = pytest.importorskip("torch")
    array, tensor = np.ones(4, np.float32), torch.ones(4)
    nothing: Any = None
    of_numpy, of_torch = ReduceOpDescriptor.from_numpy, ReduceOpDescriptor.from_torch
    says_double = about(operand_descriptor=ReduceOperandDescriptor(DataType.DOUBLE))
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: of_numpy(tensor, tensor, about()), TypeError, "send must be a NumPy array"),
        (lambda: of_numpy(array, None, about()), TypeError, "recv must be a NumPy array"),
        (lambda: of_torch(array, array, about()), TypeError, "send must be a torch tensor"),
        (lambda: of_torch(tensor, [1.0], about()), TypeError, "recv must be a torch .* not list"),
        (lambda: of_numpy(array, array, about(5)), ValueError, "5 elements, but the tensor has 4"),
        (lambda: of_numpy(array, array, says_double), ValueError, "pass DataType.FLOAT"),
        (lambda: of_numpy(array, array, nothing), TypeError, "pccl.ReduceDescriptor"),
        (lambda: of_numpy(array[::2], array[::2], about(2)), ValueError, "contiguous"),
        (lambda: ReduceOpDescriptor(0, 8, about()), ValueError, "sendbuf_ptr must be from 1"),
        (lambda: ReduceOpDescriptor(8, 0, about()), ValueError, "recvbuf_ptr must be from 1"),
        (lambda: ReduceOpDescriptor("8", 8, about()), TypeError, "sendbuf_ptr"),  # type: ignore[arg-type]
    ]
    for make, kind, words in wrong:
        with pytest.raises(kind, match=words):
            make()


def from_array(array: Any, **changes: Any) -> ReduceOpDescriptor:
    return ReduceOpDescriptor.from_numpy(array, array, about(array.size, **changes))


def test_wrong_lists() -> None:
    array = np.ones(8, np.float32)
    address = array.ctypes.data
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "nothing to reduce"),
        ([array], TypeError, "a descriptor must be a pccl.ReduceOpDescriptor"),
        ([from_array(array, tag=-1)], ValueError, "tag must be"),
        ([from_array(array, op=9)], ValueError, "op must be"),
        ([ReduceOpDescriptor(address, address, about(8))], ValueError, "give .* operand_desc"),
        ([ReduceOpDescriptor(address, address, about(0))], ValueError, "count must be from 1"),
    ]
    for descriptors, kind, words in wrong:
        with pytest.raises(kind, match=words):
            many_request(descriptors)
    changed = from_array(array)
    changed.reduce_descriptor.count = 7
    with pytest.raises(ValueError, match="7 elements, but the tensor has 8"):
        many_request([changed])


# -- broadcast -----------------------------------------------------------------------------------


def test_request_of_a_broadcast() -> None:
    array = np.ones(4)
    request = broadcast_request(array, root=2, tag=5)
    assert (request.tag, request.asks.descriptor.root) == (5, 2)
    assert request.asks.descriptor.collective is Collective.BROADCAST
    assert request.asks.descriptor.count == 4
    for root, kind, words in (
        (-1, ValueError, "root must be from 0"),
        (None, TypeError, "root must be an integer"),
    ):
        with pytest.raises(kind, match=words):
            broadcast_request(array, root=root, tag=5)  # type: ignore[arg-type]
