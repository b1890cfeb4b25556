"""Outer optimizers that clip the average."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pccl.bindings.diloco import clipped  # noqa: E402
from pccl.bindings.diloco.model.outer import OuterFragment  # noqa: E402
from pccl.bindings.diloco.model.outer_optimizers import exact_norm, outer_factory  # noqa: E402
from pccl.bindings.diloco.schedule import Schedule  # noqa: E402


def plain(parameters: list[Any]) -> Any:
    return torch.optim.SGD(parameters, lr=1.0)


@pytest.mark.parametrize(
    ("average", "step"),
    [([3.0, 4.0], [1.5, 2.0]), ([0.3, 0.4], [0.3, 0.4]), ([0.0, 0.0], [0.0, 0.0])],
)
def test_an_average_is_scaled_down_to_the_norm(average: list[float], step: list[float]) -> None:
    names, tensors = ("a", "b"), [torch.zeros(1), torch.zeros(1)]
    fragment = OuterFragment(names, tensors, clipped(plain, max_norm=2.5))
    fragment.step(torch.tensor(average))
    moved: Any = -fragment.flat
    assert moved.tolist() == pytest.approx(step)
    assert "max_norm=2.5" in fragment.settings, "members with another one are told"


def test_a_preview_is_clipped_too() -> None:
    fragment = OuterFragment(("a",), [torch.zeros(2)], clipped(plain, max_norm=1.0))
    values = torch.zeros(2)
    fragment.preview(values, fragment.copy_state(), torch.tensor([0.0, 4.0]))
    assert values.tolist() == [0.0, -1.0]


@pytest.mark.parametrize("limits", [(1.0, 5.0), (5.0, 1.0)])
def test_of_two_limits_the_lower_one_holds(limits: tuple[float, float]) -> None:
    outer = clipped(clipped(plain, max_norm=limits[0]), max_norm=limits[1])
    fragment = OuterFragment(("a",), [torch.zeros(2)], outer)
    values = torch.zeros(2)
    fragment.preview(values, fragment.copy_state(), torch.tensor([3.0, 4.0]))
    assert values.tolist() == pytest.approx([-0.6, -0.8])


@pytest.mark.parametrize(
    ("size", "delay", "lr", "momentum"),
    [
        (9_999_999, 0, 0.7, 0.6),
        (9_999_999, 5, 1.0, 0.0),
        (9_999_999, 100, 1.0, 0.0),
        (10_000_000, 0, 0.7, 0.9),
        (10_000_000, 5, 0.7, 0.9),
    ],
)
@pytest.mark.parametrize("norms", [(), (1.0,), (2.0, 1.0)])
def test_the_default_depends_on_size_and_delay(
    size: int, delay: int, lr: float, momentum: float, norms: tuple[float, ...]
) -> None:
    outer = None
    for norm in norms:
        outer = clipped(outer, max_norm=norm)
    make: Any = outer_factory(outer, size, Schedule(delay=delay))
    (group,) = make([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (lr, momentum, momentum > 0)
    assert group.get("max_norm") == (1.0 if norms else None)


def test_alone_the_optimizer_of_the_paper_is_clipped_by_default() -> None:
    make: Any = clipped(max_norm=1.0)
    made = make([torch.nn.Parameter(torch.zeros(1))])
    assert (made.param_groups[0]["lr"], made.param_groups[0]["momentum"]) == (0.7, 0.9)


def test_a_factory_with_names_gets_them() -> None:
    seen: list[list[str]] = []

    def named(parameters: list[Any], names: tuple[str, ...]) -> Any:
        seen.append(list(names))
        return plain(parameters)

    OuterFragment(("a", "b"), [torch.zeros(1), torch.zeros(1)], clipped(named, max_norm=1.0))
    assert seen == [["a", "b"]]


def test_the_norm_is_exact_to_the_last_bit() -> None:
    drawn = torch.randn(70_000, generator=torch.Generator().manual_seed(3))
    squares = sum(Fraction(value) ** 2 for value in drawn.tolist())
    # Each of 65,536 sums has at most two terms, so each is rounded once at most.
    assert exact_norm([drawn]) == pytest.approx(math.sqrt(squares), rel=2**-52)
    halves = [drawn[:35_000], drawn[35_000:]]
    assert exact_norm(halves) == pytest.approx(exact_norm([drawn]), rel=2**-50)
    assert exact_norm([torch.tensor([math.nan])]) != 0
    assert exact_norm([]) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_norm": 0}, ValueError, "max_norm must be above 0"),
        ({"max_norm": -1}, ValueError, "max_norm must be at least 0"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number"),
        ({"outer": 3, "max_norm": 1}, TypeError, "outer must be a function"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        clipped(**arguments)
