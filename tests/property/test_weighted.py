"""Weighted averages: over all dtypes and algorithms, against the definition in exact fractions."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.collectives.layout import Segment
from pccl.collectives.quantization import make_codec
from pccl.collectives.reductions import Scratch
from pccl.collectives.schedules.direct import PUBLISH, DirectSchedule
from pccl.collectives.schedules.ring import RingSchedule
from pccl.collectives.weighting import scale, total_weight, weigh
from pccl.error_feedback import ErrorFeedback
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import FrameKind
from pccl.protocol.guards.contributions import ContributionGuard, GuardAction
from pccl.protocol.types import (
    UNQUANTIZED,
    WEIGHT_MAX,
    Algorithm,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.protocol.vocabulary.mesh_plan import MeshPlan
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.memory import Memory
from pccl.stress.sim.fold import differences, fold, weighed
from tests.support.memory_ring import (
    ALGORITHMS,
    OPERATION,
    Array,
    Ring,
    Travelling,
    all_reduce,
    lend,
    random_values,
)

FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)

WEIGHTS = st.sampled_from([0.0, 1.0, 3.0, 0.1, 65537.0, 2.5e6]) | st.floats(0, 1e9)


def average(
    inputs: list[Array],
    weights: list[float],
    algorithm: Algorithm,
    rng: random.Random,
    quantization: Quantization = UNQUANTIZED,
    owed: list[ErrorFeedback] | None = None,
) -> Array:
    """What all ranks come to; they come to the same, and leave what they have lent for reading."""
    data_type = DataType.from_numpy_dtype(inputs[0].dtype)
    ring = Ring(len(inputs), 16 * data_type.itemsize, rng)
    ring.weights = tuple(weights)
    plain = all_reduce(data_type, ReduceOp.AVG, len(inputs[0]), algorithm, quantization)
    return ring.reduce(replace(plain, weighted=bool(weights)), inputs, owed)


# -- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "factors", "divisor"),
    [
        ((1.0, 1.0, 1.0), [1, 1, 1], 3),
        ((100.0, 100.0), [1, 1], 2),
        ((100.0, 0.0, 100.0), [1, 0, 1], 2),
        ((3.0, 1.0), [0.75, 0.25], 1),
        ((4.0, 1.0), [1, 0.25], 1.25),
        ((4.0, 0.0, 4.0), [1, 0, 1], 2),
        ((0.25, 0.125), [1, 0.5], 1.5),
        ((0.0, 0.0), [0, 0], 1),
        ((1e300, 1.0), [1e300 / 2.0**997, 2.0**-997], 1e300 / 2.0**997),
        ((5e-324,), [1], 1),
    ],
)
def test_weights_are_divided_by_a_power_of_two_or_what_they_all_are(
    weights: tuple[float, ...], factors: list[float], divisor: float
) -> None:
    made = [weigh(weights, rank) for rank in range(len(weights))]
    assert [one.factor for one in made] == factors
    assert {(one.divisor, one.world_size) for one in made} == {(divisor, len(weights))}


@given(st.lists(st.floats(1e-200, WEIGHT_MAX), min_size=1, max_size=9))
def test_the_largest_factor_is_at_most_one_and_nothing_is_rounded(weights: list[float]) -> None:
    made = [weigh(tuple(weights), rank) for rank in range(len(weights))]
    assert 0.5 < max(one.factor for one in made) <= 1
    if min(weights) / max(weights) > 1e-290:
        pairs = zip(weights, made, strict=True)
        assert len({Fraction(weight) / Fraction(one.factor) for weight, one in pairs}) == 1


def test_as_many_of_the_largest_weights_as_there_can_be_have_a_sum() -> None:
    assert total_weight((WEIGHT_MAX,) * 4000) == pytest.approx(4000 * WEIGHT_MAX)
    assert total_weight((0.1,) * 10) == 1.0
    assert total_weight(()) is None


@pytest.mark.parametrize("data_type", FLOATS)
def test_what_has_no_weight_is_zeros_whatever_it_is(data_type: DataType) -> None:
    values = np.array([math.nan, math.inf, -1.0, -0.0]).astype(data_type.to_numpy_dtype())
    scale(values, 0.0, values)
    assert values.tobytes() == bytes(values.nbytes)


# -- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data_type", FLOATS)
@settings(max_examples=40)
@given(
    st.sampled_from(ALGORITHMS),
    st.lists(WEIGHTS, min_size=2, max_size=7),
    st.integers(1, 40),
    st.randoms(use_true_random=True),
)
def test_it_is_near_the_definition_in_fractions(
    data_type: DataType, algorithm: Algorithm, weights: list[float], count: int, rng: random.Random
) -> None:
    """Each contribution is rounded once, and so is each sum: N + 1 roundings on the way."""
    dtype = data_type.to_numpy_dtype()
    inputs = [np.array([rng.uniform(-9, 9) for _ in range(count)]).astype(dtype) for _ in weights]
    result = average(inputs, weights, algorithm, rng)
    shares = list(map(Fraction, weights))
    total = sum(shares, Fraction())
    finfo: Any = ml_dtypes.finfo  # typed in part only
    info = finfo(dtype)
    tiny = Fraction(float(info.smallest_subnormal)) * 2 * (len(weights) + 1)
    for index in range(count):
        terms = [s * Fraction(float(x[index])) for s, x in zip(shares, inputs, strict=True)]
        exact = sum(terms, Fraction()) / (total or 1)
        size = sum(map(abs, terms), Fraction()) / (total or 1)
        slack = size * Fraction(float(info.eps)) * (len(weights) + 3) + tiny
        assert abs(Fraction(float(result[index])) - exact) <= slack


@pytest.mark.parametrize("data_type", FLOATS)
@settings(max_examples=40)
@given(
    st.sampled_from((Algorithm.RING, Algorithm.STAR)),
    st.lists(WEIGHTS, min_size=2, max_size=7),
    st.integers(1, 40),
    st.randoms(use_true_random=True),
)
def test_ring_and_star_add_in_rank_order(
    data_type: DataType, algorithm: Algorithm, weights: list[float], count: int, rng: random.Random
) -> None:
    """Any bits at all: NaN and infinity are among them."""
    inputs = [random_values(data_type, count, rng) for _ in weights]
    result = average(inputs, weights, algorithm, rng)
    firsts = [0] if algorithm is Algorithm.STAR else None
    scaled, divisor = weighed(inputs, weights)
    assert differences(result, fold(scaled, ReduceOp.AVG, firsts, divisor), ReduceOp.AVG) == []


@pytest.mark.parametrize("data_type", FLOATS)
@pytest.mark.parametrize("weight", [1.0, 2.0**-40, 1048576.0])
def test_equal_weights_make_the_plain_average(data_type: DataType, weight: float) -> None:
    inputs = [random_values(data_type, 100, random.Random(n)) for n in range(5)]
    for algorithm in ALGORITHMS:
        plain = average(inputs, [], algorithm, random.Random(4))
        same = average(inputs, [weight] * 5, algorithm, random.Random(4))
        assert plain.tobytes() == same.tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data_type", FLOATS)
def test_weights_as_large_as_numbers_of_tokens_overflow_nothing(
    data_type: DataType, algorithm: Algorithm
) -> None:
    inputs = [np.full(50, value).astype(data_type.to_numpy_dtype()) for value in (60000, 30000)]
    result = average(inputs, [3e9, 3e9], algorithm, random.Random(1))
    assert result.astype(np.float64) == pytest.approx(45000, rel=2**-7)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data_type", FLOATS)
def test_who_has_done_nothing_does_not_count(data_type: DataType, algorithm: Algorithm) -> None:
    dtype = data_type.to_numpy_dtype()
    inputs = [np.full(30, value).astype(dtype) for value in (2.0, math.nan, 6.0)]
    result = average(inputs, [1.0, 0.0, 3.0], algorithm, random.Random(2))
    assert result.astype(np.float64).tolist() == [5.0] * 30


@settings(max_examples=60)
@given(
    st.sampled_from(FLOATS),
    st.sampled_from(ALGORITHMS),
    st.lists(st.sampled_from([0.0, 0.0, 2.0]), min_size=2, max_size=6).filter(any),
    st.sampled_from([WireFormat.NONE, WireFormat.INT8, WireFormat.SPARSE]),
    st.randoms(use_true_random=True),
)
def test_a_contribution_of_weight_zero_is_never_read(
    data_type: DataType,
    algorithm: Algorithm,
    weights: list[float],
    wire: WireFormat,
    rng: random.Random,
) -> None:
    """Whatever it is, and whatever arrives in its place: -0.0 stays -0.0, and NaN stays out."""
    dtype, count = data_type.to_numpy_dtype(), rng.randint(1, 60)
    values = np.zeros(count) if wire.bits else np.where(np.arange(count) % 3, -0.0, 2.5)
    inputs = [np.where(w, values, math.nan).astype(dtype) for w in weights]
    ring = MutedRing(len(weights), 16 * data_type.itemsize, rng)
    ring.weights = tuple(weights)
    quantization = Quantization(wire, 8) if wire.bits else UNQUANTIZED
    what = all_reduce(data_type, ReduceOp.AVG, count, algorithm, quantization)
    result = ring.reduce(replace(what, weighted=True), inputs)
    assert result.tobytes() == values.astype(dtype).tobytes()


class MutedRing(Ring):
    """Frames whose values are only those of ranks of weight 0 arrive as NaN."""

    def _deliver(self, frame: Travelling) -> None:
        header = frame.header
        size, schedule = len(self.peers), self._schedule(frame.target)
        origins: Collection[int] = (frame.source,)
        partial_steps = 1
        if isinstance(schedule, RingSchedule):
            origins = range(frame.source - header.step, frame.source + 1)
            partial_steps = size - 1
        elif isinstance(schedule, DirectSchedule):
            origins, partial_steps = schedule.stands_for(frame.source), PUBLISH
        is_muted = not any(self.weights[rank % size] for rank in origins)
        if header.kind is FrameKind.DATA and header.step < partial_steps and is_muted:
            frame.payload = b"\xff" * header.length
        super()._deliver(frame)

    def _schedule(self, rank: int) -> Any:
        transfer: Any = self.planes[rank].transfers[OPERATION]
        return transfer.schedule


@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.BFLOAT16])
def test_a_contribution_of_weight_zero_leaves_its_residual_for_later(data_type: DataType) -> None:
    """In a mesh, a rank rounds its own contribution, and the results that it owns."""
    values = np.random.default_rng(3).normal(size=(3, 90)).astype(data_type.to_numpy_dtype())
    owed = [ErrorFeedback() for _ in range(3)]
    residuals: list[Array] = []
    for weights in ([1.0, 1.0, 1.0], [1.0, 0.0, 1.0]):
        rng, coded = random.Random(5), Quantization(WireFormat.INT4, 16)
        average(list(values), weights, Algorithm.MESH, rng, coded, owed)
        residuals.append(owed[1].state_dict()["w"].copy())
    assert np.any(residuals[0][:30])
    for foreign in (slice(0, 30), slice(60, 90)):
        assert residuals[1][foreign].tobytes() == residuals[0][foreign].tobytes()


# -- guarded -----------------------------------------------------------------------------------


def guarded_ring(
    algorithm: Algorithm,
    data_type: DataType,
    spoilt: dict[int, float],
    weights: list[float],
    infinite: frozenset[int] = frozenset(),
    *,
    wire: WireFormat = WireFormat.NONE,
    seed: int = 4,
    sites: tuple[int, ...] = (),
) -> tuple[Ring, list[tuple[Array, Array]], list[Array]]:
    """Reduce 60 values of each rank with a guard, one of them ``spoilt``; do not end it."""
    rng = random.Random(seed)
    inputs = [np.full(60, 1 + rank).astype(data_type.to_numpy_dtype()) for rank in range(4)]
    for rank, value in spoilt.items():
        inputs[rank][37] = value
    ring = Ring(4, 16 * data_type.itemsize, rng, local=False)
    ring.weights, ring.infinite = tuple(weights), infinite
    ring.mesh = MeshPlan((), sites)  # in a mesh, rank 2 owns the spoilt value
    quantization = UNQUANTIZED if wire is WireFormat.NONE else Quantization(wire, 8)
    what = all_reduce(data_type, ReduceOp.AVG, 60, algorithm, quantization)
    buffers = lend(inputs, rng)
    ring.post(replace(what, weighted=True, guard=GUARD), buffers)
    ring.run()
    return ring, buffers, inputs


GUARD = ContributionGuard(GuardAction.EXCLUDE, GuardAction.WARN, 8.0, 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.BFLOAT16])
@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", [WireFormat.NONE, WireFormat.FLOAT16, WireFormat.SPARSE])
def test_a_member_that_lies_about_nan_is_named_and_there_is_no_result(
    algorithm: Algorithm, data_type: DataType, lie: float, wire: WireFormat
) -> None:
    """In a ring, rank 3 adds it to a sum, and the next rank notices."""
    if wire is WireFormat.FLOAT16 and data_type is DataType.BFLOAT16:
        return
    ring, buffers, inputs = guarded_ring(algorithm, data_type, {3: lie}, [1.0] * 4, wire=wire)
    assert set(ring.refused.values()) == {ring.peers[3]}
    assert ring.done.keys().isdisjoint(ring.refused)
    ring.check_abort(inputs, buffers)


@pytest.mark.parametrize(("algorithm", "owner"), [(Algorithm.MESH, 2), (Algorithm.STAR, 0)])
@pytest.mark.parametrize("seed", range(8))
def test_an_owner_without_weight_is_not_named_in_the_place_of_the_liar(
    algorithm: Algorithm, owner: int, seed: int
) -> None:
    """In place, its own values would be what is left of a sum that lacks the liar's part."""
    weights = [float(rank != owner) for rank in range(4)]
    ring, buffers, inputs = guarded_ring(
        algorithm, DataType.FLOAT, {3: math.nan, owner: -math.inf}, weights, seed=seed
    )
    assert ring.refused == {owner: ring.peers[3]}
    assert not ring.done
    ring.check_abort(inputs, buffers)


@pytest.mark.parametrize("sites", [(0, 1, 1, 0), (0, 0, 1, 0), (0, 1, 2, 1), (0, 0, 0, 1)])
@pytest.mark.parametrize("liar", range(4))
@pytest.mark.parametrize("wire", [WireFormat.NONE, WireFormat.FLOAT16])
def test_a_liar_is_named_in_a_mesh_of_sites(
    sites: tuple[int, ...], liar: int, wire: WireFormat
) -> None:
    """Who collects for a site sends no sum with it, so the owner does not name the wrong one."""
    for muted in {0, 1, 2, 3} - {liar}:
        weights = [float(rank != muted) for rank in range(4)]
        spoilt = {liar: math.nan, muted: math.inf}
        ring, buffers, inputs = guarded_ring(
            Algorithm.MESH, DataType.FLOAT, spoilt, weights, wire=wire, sites=sites
        )
        assert set(ring.refused.values()) == {ring.peers[liar]}
        assert ring.done.keys().isdisjoint(ring.refused)
        ring.check_abort(inputs, buffers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_was_declared_or_is_muted_is_not_checked(algorithm: Algorithm) -> None:
    declared = frozenset({2})
    ring, buffers, _ = guarded_ring(
        algorithm, DataType.FLOAT, {2: math.nan, 1: math.inf}, [1.0, 0.0, 1.0, 1.0], declared
    )
    assert not ring.refused
    ring.check_done()
    assert np.isnan(buffers[0][1]).tolist() == [index == 37 for index in range(60)]


@pytest.mark.parametrize("weights", [[1.0] * 4, [1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
def test_in_a_ring_only_the_next_rank_accuses_a_liar(weights: list[float]) -> None:
    """Values 30 to 44 begin at rank 2 and end at rank 1: its own are in the result alone."""
    for liar in range(4):
        ring, buffers, inputs = guarded_ring(
            Algorithm.RING, DataType.FLOAT, {liar: math.nan}, weights
        )
        seen = bool(weights[liar])
        assert ring.refused == ({(liar + 1) % 4: ring.peers[liar]} if seen else {})
        if ring.refused:
            assert not ring.done.keys() & ring.refused.keys()
            ring.check_abort(inputs, buffers)


@pytest.mark.parametrize("liar", range(4))
def test_a_declared_nan_in_a_sum_hides_those_after_it(liar: int) -> None:
    ring, _, _ = guarded_ring(
        Algorithm.RING, DataType.FLOAT, {liar: math.nan}, [1.0] * 4, frozenset({liar})
    )
    assert not ring.refused
    ring.check_done()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_if_nobody_has_done_anything_the_result_is_zeros(algorithm: Algorithm) -> None:
    inputs = [np.array([1, -1, math.inf, math.nan] * 9, np.float32) for _ in range(3)]
    result = average(inputs, [0.0] * 3, algorithm, random.Random(2))
    assert result.tobytes() == bytes(result.nbytes)


@settings(max_examples=80)
@given(
    st.sampled_from(FLOATS),
    st.sampled_from(ALGORITHMS),
    st.lists(WEIGHTS, min_size=2, max_size=5),
    st.integers(1, 30),
    st.integers(0, 150),
    st.booleans(),
    st.randoms(use_true_random=True),
)
def test_an_abort_at_any_moment_leaves_every_input_as_it_was(
    data_type: DataType,
    algorithm: Algorithm,
    weights: list[float],
    count: int,
    moment: int,
    quantized: bool,
    rng: random.Random,
) -> None:
    inputs = [random_values(data_type, count, rng) for _ in weights]
    buffers = lend(inputs, rng)
    ring = Ring(len(weights), 16 * data_type.itemsize, rng)
    ring.weights = tuple(weights)
    quantization = Quantization(WireFormat.INT8, 8) if quantized else UNQUANTIZED
    plain = all_reduce(data_type, ReduceOp.AVG, count, algorithm, quantization)
    ring.post(replace(plain, weighted=True), buffers)
    ring.run(moment)
    ring.check_abort(inputs, buffers)


# -- quantized ---------------------------------------------------------------------------------


@settings(max_examples=80)
@given(
    st.sampled_from((DataType.FLOAT, DataType.DOUBLE)),
    st.sampled_from(ALGORITHMS),
    st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=2, max_size=6),
    st.integers(1, 90),
    st.randoms(use_true_random=True),
)
def test_a_quantized_one_is_near_the_truth(
    data_type: DataType, algorithm: Algorithm, weights: list[float], count: int, rng: random.Random
) -> None:
    """Steps are 1/127 of sums of contributions of which none is above the largest factor, 1."""
    dtype = data_type.to_numpy_dtype()
    inputs = [np.array([rng.uniform(-1, 1) for _ in range(count)]).astype(dtype) for _ in weights]
    result = average(inputs, weights, algorithm, rng, Quantization(WireFormat.INT8, 8))
    total = math.fsum(weights)
    truth = np.zeros(count)
    for own, weight in zip(inputs, weights, strict=True):
        truth += own.astype(np.float64) * (weight / total if total else 0.0)
    largest = max(weights) / total if total else 0.0  # of a contribution to the mean, at most
    hops = len(weights) * (len(weights) if algorithm is Algorithm.RING else 1)
    slack = (2 * largest * hops + 1) * 0.51 / 127 + 1e-5
    assert np.abs(result.astype(np.float64) - truth).max() <= slack


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data_type", [DataType.FLOAT, DataType.BFLOAT16])
def test_what_is_owed_does_not_depend_on_the_next_weight(
    data_type: DataType, algorithm: Algorithm
) -> None:
    """Weights change a thousandfold, and are 0 at times: all the same, what the results have lost
    so far is a rounding or two of the last round, and does not add up."""
    world_size, count, rounds = 4, 200, 24
    draw = np.random.default_rng(7)
    owed = [ErrorFeedback() for _ in range(world_size)]
    lost = {"with": np.zeros(count), "without": np.zeros(count)}
    for turn in range(rounds):
        weights = [float(w) for w in 10.0 ** draw.uniform(-1, 2, world_size)]
        weights[turn % world_size] = 0.0
        values = draw.normal(size=(world_size, count)).astype(data_type.to_numpy_dtype())
        truth = np.average(values.astype(np.float64), axis=0, weights=weights)
        for kind, total in lost.items():
            result = average(
                list(values),
                weights,
                algorithm,
                random.Random(turn),
                Quantization(WireFormat.INT4, 16),
                owed if kind == "with" else None,
            )
            total += truth - result.astype(np.float64)
    off = {kind: float(np.sqrt(np.mean(total**2))) for kind, total in lost.items()}
    assert off["with"] <= off["without"] / 3
    debts = sum(each.state_dict()["w"].astype(np.float64) for each in owed) / world_size
    assert np.abs(debts - lost["with"]).max() < (1e-4 if data_type is DataType.FLOAT else 0.2)


def test_what_the_dtype_cannot_hold_is_owed_in_units_of_an_average_contribution() -> None:
    """Weights 3 and 1: factors 3/4 and 1/4, so a contribution of average weight has 1/2."""
    values = np.array([1.0078125, 3.0]).astype(ml_dtypes.bfloat16)  # 3/4 of the first is none
    owed = ErrorFeedback()
    residual = owed.begin("w", 2, DataType.BFLOAT16)
    plain, wide = (
        make_codec(Quantization(WireFormat.INT8, 8), data_type, Scratch())
        for data_type in (DataType.BFLOAT16, DataType.FLOAT)
    )
    result = Memory([np.empty_like(values)])
    coding = Coding(plain, wide, result, residual, OPERATION, 0, 2, stochastic=False)
    coding.weigh(weigh((3.0, 1.0), 0))
    own = coding.own(Segment(0, 0, 4, 4), values).astype(np.float64)
    lost = 0.75 * values.astype(np.float64) - own
    assert lost[0] != 0
    assert residual.staged.tolist() == (lost / 0.5).tolist()
