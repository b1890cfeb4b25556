"""Radial-directional averages against the formulas, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco.model.averaging import RadialFragment, radial_averages  # noqa: E402
from pccl.bindings.diloco.model.local_model import LocalFragment  # noqa: E402
from pccl.bindings.diloco.model.outer_optimizers import nesterov  # noqa: E402

Array = npt.NDArray[np.float32]

SIZES = (5, 70_001, 1, 40)
WEIGHTS = (3.0, 0.5, 8.0)


def views(flat: Any) -> list[Any]:
    return list(torch.split(flat, SIZES))


def halves(flat: Any) -> list[Any]:
    return [flat[:2], flat[2:]]


def values(tensor: Any) -> list[float]:
    return [float(value) for value in tensor]


def norm(values: Array) -> float:
    """The order of additions is that of ``exact_norm``."""
    lanes = np.zeros(1 << 16)
    for start in range(0, len(values), len(lanes)):
        part = values[start : start + len(lanes)].astype(np.float64)
        lanes[: len(part)] += part * part
    return math.sqrt(math.fsum(lanes))


def drawn(seed: int) -> list[Array]:
    generator = np.random.default_rng(seed)
    scales = (1e-3, 1.0, 50.0, 0.2)
    return [
        (generator.standard_normal(size) * scale).astype(np.float32)
        for size, scale in zip(SIZES, scales, strict=True)
    ]


def expected(works: Sequence[Sequence[Array]], plain: int) -> list[Array]:
    """Formulas of RDA, with the roundings of a mean in float32 whose weights are not alike."""
    total = math.fsum(WEIGHTS) / 8
    factors = [np.float32(weight / 8) for weight in WEIGHTS]
    found: list[Array] = []
    for index, size in enumerate(SIZES):
        lengths = [norm(work[index]) for work in works]
        shown = [
            work[index] * np.float32(1.0 if index == plain else math.sqrt(size) / length)
            for work, length in zip(works, lengths, strict=True)
        ]
        mean = sum(one * factor for one, factor in zip(shown, factors, strict=True))
        mean = (np.asarray(mean) / np.float32(total)).astype(np.float32)
        radius = sum(length * weight / 8 for length, weight in zip(lengths, WEIGHTS, strict=True))
        scale = np.float32(1.0 if index == plain else radius / total / norm(mean))
        found.append(mean * scale)
    return found


def average(radial: RadialFragment, works: Sequence[Any]) -> Any:
    """What members do, with sums in the order of the ranks, as ``weighting`` defines them."""
    lengths = [radial.lengths(work) for work in works]
    out = [
        radial.directions(work, length, torch.empty_like(work))
        for work, length in zip(works, lengths, strict=True)
    ]
    total = math.fsum(WEIGHTS) / 8
    mean: Any = sum(one * (weight / 8) for one, weight in zip(out, WEIGHTS, strict=True))
    radii: Any = sum(one * (weight / 8) for one, weight in zip(lengths, WEIGHTS, strict=True))
    mean, radii = mean / total, radii / total
    radial.combine(mean, radii)
    return mean


def test_averages_have_the_bits_of_the_formulas() -> None:
    works = [drawn(seed) for seed in range(3)]
    radial = RadialFragment(views, (False, False, False, True))
    found = average(radial, [torch.as_tensor(np.concatenate(work)) for work in works])
    for mine, theirs in zip(views(found), expected(works, plain=3), strict=True):
        assert mine.numpy().tobytes() == theirs.tobytes()


def test_the_length_is_the_mean_length() -> None:
    works = [drawn(seed) for seed in range(3)]
    radial = RadialFragment(views, (False,) * 4)
    found = average(radial, [torch.as_tensor(np.concatenate(work)) for work in works])
    for index, mine in enumerate(views(found)):
        radius = sum(w * norm(work[index]) for w, work in zip(WEIGHTS, works, strict=True))
        assert norm(mine.numpy()) == pytest.approx(radius / sum(WEIGHTS), rel=1e-5)


def test_equal_work_is_its_own_average() -> None:
    work = torch.as_tensor(np.concatenate(drawn(1)))
    radial = RadialFragment(views, (False, True, False, False))
    assert torch.allclose(average(radial, [work] * 3), work, rtol=1e-6)


@pytest.mark.parametrize("tiny", [0.0, 1e-44])
def test_a_parameter_without_work_has_no_direction(tiny: float) -> None:
    radial = RadialFragment(halves, (False, False))
    work = torch.tensor([tiny, 0.0, 3.0, 4.0])
    lengths = radial.lengths(work)
    shown = radial.directions(work, lengths, torch.empty(4))
    assert values(shown) == pytest.approx([0.0, 0.0, 0.6 * math.sqrt(2), 0.8 * math.sqrt(2)])
    radial.combine(shown, lengths)
    assert values(shown) == pytest.approx([0.0, 0.0, 3.0, 4.0])
    assert values(radial.no_lengths()) == [0.0, 0.0]


def test_directions_that_cancel_out_make_no_step() -> None:
    radial = RadialFragment(lambda flat: [flat], (False,))
    mean = torch.zeros(3)
    radial.combine(mean, torch.tensor([2.0], dtype=torch.float64))
    assert values(mean) == [0.0] * 3


def test_broken_work_stays_broken() -> None:
    radial = RadialFragment(lambda flat: [flat], (False,))
    for value in (math.nan, math.inf):
        work = torch.tensor([1.0, value])
        lengths = radial.lengths(work)
        assert not math.isfinite(lengths.item())
        assert not radial.directions(work, lengths, torch.empty(2)).isfinite().all()


def test_the_norm_of_the_lengths_is_that_of_the_work() -> None:
    work = np.concatenate(drawn(2))
    lengths = RadialFragment(views, (False,) * 4).lengths(torch.as_tensor(work))
    assert norm(lengths.numpy()) == pytest.approx(norm(work), rel=1e-12)


def part(*tensors: Any) -> LocalFragment:
    return LocalFragment([(str(n), tensor) for n, tensor in enumerate(tensors)], nesterov)


def test_embeddings_take_the_mean() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    embedding, linear = model[0].weight, model[1].weight
    radial, text = radial_averages(
        "radial-directional", model, [part(linear), part(embedding, linear)], 1
    )
    assert [one.are_plain for one in radial] == [[False], [True, False]]
    assert text == ", averaging=radial-directional except 1 embeddings"
    assert radial_averages("mean", None, [part(linear)], 8) == ([], "")


@pytest.mark.parametrize(
    ("averaging", "params", "shards", "error", "words"),
    [
        ("rda", None, 1, ValueError, "averaging must be 'mean' or 'radial-directional', not 'rda'"),
        (None, None, 1, ValueError, "averaging must be"),
        ("radial-directional", [], 1, TypeError, "needs the model itself as params"),
        ("radial-directional", torch.nn.Linear(1, 1), 2, ValueError, "needs whole parameters"),
    ],
)
def test_wrong_arguments(
    averaging: object, params: object, shards: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        radial_averages(averaging, params, [], shards)
