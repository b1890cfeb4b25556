"""The outer parameters: what is shared, how they step, and which outer optimizers can be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco.model.outer import OuterFragment, OuterParameters  # noqa: E402
from pccl.bindings.diloco.model.outer_optimizers import nesterov, outer_factor  # noqa: E402

SHAPES = ((2, 3), (4,), ())
NAMES = ("first", "second", "third")


def listed(tensor: Any) -> list[Any]:
    """Its values."""
    values: list[Any] = tensor.tolist()
    return values


def tensors(seed: int = 1) -> list[Any]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def averages(count: int) -> list[Any]:
    random = torch.Generator().manual_seed(2)
    return [torch.randn(11, generator=random) for _ in range(count)]


FACTORIES: dict[str, Callable[[list[Any]], Any]] = {
    "default": nesterov,
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_any_optimizer_steps_as_it_would_without_a_run(name: str) -> None:
    fragment = OuterFragment(NAMES, tensors(), FACTORIES[name])
    alone = [torch.nn.Parameter(tensor.clone()) for tensor in tensors()]
    optimizer = FACTORIES[name](alone)
    for average in averages(7):
        fragment.step(average.clone())
        alone[0].grad = average[:6].view(2, 3).clone()
        alone[1].grad = average[6:10].clone()
        alone[2].grad = average[10].clone()
        optimizer.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in alone])
        assert torch.equal(fragment.flat, expected)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_new_optimizer_has_changed_nothing_and_shares_all_its_tensors(name: str) -> None:
    fragment = OuterFragment(NAMES, tensors(), FACTORIES[name])
    assert torch.equal(fragment.flat, torch.cat([tensor.flatten() for tensor in tensors()]))
    before = {(name, key): value.data_ptr() for name, key, value in fragment.state_entries()}
    fragment.step(averages(1)[0])
    after = {(name, key): value.data_ptr() for name, key, value in fragment.state_entries()}
    assert after == before
    assert {info.name for info in fragment.infos()} == (
        {f"outer/{name}" for name in NAMES} | {f"{key}/{name}" for name, key in before}
    )


def test_the_momentum_of_the_default_is_there_from_the_start() -> None:
    fragment = OuterFragment(NAMES, tensors(), nesterov)
    entries = fragment.state_entries()
    assert [(name, key) for name, key, _ in entries] == [
        (name, "momentum_buffer") for name in NAMES
    ]
    assert [value.abs().sum().item() for _, _, value in entries] == [0.0, 0.0, 0.0]


def test_it_is_of_memory_of_its_own() -> None:
    model = tensors()
    fragment = OuterFragment(NAMES, model, nesterov)
    kept = [tensor.clone() for tensor in model]
    fragment.step(averages(1)[0])
    assert all(map(torch.equal, model, kept))


@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    [
        ((torch.bfloat16, torch.float16), torch.float32),
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.float64, torch.bfloat16), torch.float64),
    ],
)
def test_it_is_as_precise_as_needed(dtypes: tuple[Any, ...], dtype: Any) -> None:
    model = [torch.full((2,), 1.5, dtype=one) for one in dtypes]
    fragment = OuterFragment(("a", "b"), model, nesterov)
    assert fragment.flat.dtype == dtype
    assert listed(fragment.flat) == [1.5] * 4
    assert fragment.empty().dtype == dtype


def of_one(parameters: list[Any]) -> Any:
    return torch.optim.SGD(parameters[:1], lr=1.0)


def of_one_more(parameters: list[Any]) -> Any:
    return torch.optim.SGD([*parameters, torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def of_copies(parameters: list[Any]) -> Any:
    return torch.optim.SGD([one.clone() for one in parameters], lr=1.0)


def counting(parameters: list[Any]) -> Any:
    """Makes an optimizer that keeps a number which is no tensor."""
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer.state[parameters[0]]["count"] = 0
    return optimizer


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (of_one, "exactly the parameters that it gets"),
        (of_one_more, "exactly the parameters that it gets"),
        (of_copies, "can't optimize a non-leaf Tensor"),
        (counting, "keeps 'count' as a int, which can't be shared"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused(
    factory: Callable[[list[Any]], Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        OuterFragment(NAMES, tensors(), factory)


# -- all fragments -------------------------------------------------------------------------------


def outer_parameters(name: str = "adam") -> OuterParameters:
    first, second, third = tensors()
    return OuterParameters(
        [
            OuterFragment(NAMES[:2], [first, second], FACTORIES[name]),
            OuterFragment(NAMES[2:], [third], FACTORIES[name]),
        ]
    )


def test_a_step_of_a_fragment_leaves_the_others_alone() -> None:
    outer = outer_parameters("sgd")
    before = [fragment.flat.clone() for fragment in outer.fragments]
    average = torch.tensor([3.0, 0, 0, 4, 0, 0, 0, 0, 0, 0])
    assert outer.apply(0, average) == (5.0, 5.0)
    assert torch.equal(outer.fragments[0].flat, before[0] - average)
    assert torch.equal(outer.fragments[1].flat, before[1])
    target = torch.empty(10)
    outer.copy(0, target)
    assert torch.equal(target, before[0] - average)
    assert listed(outer.nothing(1)) == [0.0]


@pytest.mark.parametrize("name", ["default", "adam", "nadam"])
def test_a_saved_state_goes_on_in_another(name: str) -> None:
    one, two = outer_parameters(name), outer_parameters(name)
    first, second = averages(2)
    one.apply(0, first[:10].clone())
    one.apply(1, first[10:].clone())
    one.ledger.close([4, 2])
    one.state.revision = 7
    saved = one.state_dict()
    pointers = [value.data_ptr() for *_, value in two.fragments[0].state_entries()]
    one.apply(0, second[:10].clone())  # what is saved is a copy
    two.load_state_dict(saved)
    assert two.state.revision == 7
    assert (two.ledger.number, two.ledger.has_applied(0, 4, b"")) == (1, True)
    assert [value.data_ptr() for *_, value in two.fragments[0].state_entries()] == pointers
    two.apply(0, second[:10].clone())
    for mine, theirs in zip(one.fragments, two.fragments, strict=True):
        assert torch.equal(mine.flat, theirs.flat)
        for (*_, value), (*_, other) in zip(
            mine.state_entries(), theirs.state_entries(), strict=True
        ):
            assert torch.equal(value, other)


@pytest.mark.parametrize("now", ["default", "sgd", "adam"])
def test_a_checkpoint_of_another_outer_optimizer(now: str, caplog: Any) -> None:
    """Its state is dropped if there is no place for it, and the log says what has changed."""
    one, two = outer_parameters("default"), outer_parameters(now)
    one.apply(0, averages(1)[0][:10].clone())
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.fragments[0].flat, two.fragments[0].flat)
    said = [record.getMessage() for record in caplog.records]
    if now == "default":
        assert said == []
    else:
        (text,) = said
        assert text.count("lr=0.7 instead of") == 1
        assert ("momentum=0.9 instead of 0" in text) == (now == "sgd")
    average = averages(1)[0][:10]
    before = two.fragments[0].flat.clone()
    two.apply(0, average.clone())
    if now == "sgd":
        assert torch.equal(two.fragments[0].flat, before - average)


def test_a_preview_is_an_outer_step_that_leaves_the_outer_parameters_alone() -> None:
    fragment = OuterFragment(["a", "b"], [torch.tensor([8.0, 4.0]), torch.tensor([2.0])], nesterov)
    fragment.step(torch.tensor([1.0, 2.0, 4.0]))
    # By hand, for SGD with lr 0.7 and Nesterov momentum 0.9: momentum m = 0.9 m + g, then
    # p = p - 0.7 (g + 0.9 m). The first step has m = g, so it subtracts 0.7 * 1.9 g.
    after = [8 - 1.33 * 1, 4 - 1.33 * 2, 2 - 1.33 * 4]
    assert listed(fragment.flat) == pytest.approx(after)
    kept, held = fragment.flat.clone(), fragment.copy_state()
    values, gradient = fragment.flat.clone(), torch.tensor([2.0, 0.0, -1.0])
    fragment.preview(values, fragment.copy_state(), gradient)
    moved = [0.7 * (g + 0.9 * (0.9 * m + g)) for g, m in ((2.0, 1.0), (0.0, 2.0), (-1.0, 4.0))]
    assert listed(values) == pytest.approx([a - b for a, b in zip(after, moved, strict=True)])
    assert torch.equal(fragment.flat, kept)
    for one, other in zip(held, fragment.copy_state(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])
    fragment.step(gradient)
    assert torch.equal(fragment.flat, values)


# -- rates and settings --------------------------------------------------------------------------


def two_groups(parameters: list[Any], names: tuple[str, ...] = NAMES) -> Any:
    """Parameters whose names begin with t have a rate of their own, in a group before the others'.

    As a factory it gets the names, and as a reference for it all of them.
    """
    groups: list[list[Any]] = [[], []]
    for parameter, name in zip(parameters, names, strict=True):
        groups[not name.startswith("t")].append(parameter)
    given: list[dict[str, Any]] = [{"params": groups[0], "lr": 0.25}, {"params": groups[1]}]
    return torch.optim.SGD([one for one in given if one["params"]], lr=1.0, momentum=0.5)


def halving(step: int) -> float:
    return 0.5**step


def test_the_rate_follows_a_schedule_and_a_checkpoint_resumes_it() -> None:
    def made() -> OuterParameters:
        fragment = OuterFragment(NAMES, tensors(), two_groups)
        return OuterParameters([fragment], factor=outer_factor(halving))

    alone = [torch.nn.Parameter(tensor.clone()) for tensor in tensors()]
    optimizer = two_groups(alone)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halving)
    one = made()
    for number, average in enumerate(averages(6)):
        if number == 3:
            saved, one = one.state_dict(), made()
            one.load_state_dict(saved)
        one.apply(0, average.clone())
        one.ledger.close([1])
        for parameter, part in zip(alone, torch.split(average, [6, 4, 1]), strict=True):
            parameter.grad = part.view(parameter.shape).clone()
        optimizer.step()
        scheduler.step()
        expected = torch.cat([parameter.detach().flatten() for parameter in alone])
        assert torch.equal(one.fragments[0].flat, expected)


def test_the_rate_of_a_preview_is_that_of_the_next_outer_step() -> None:
    fragment = OuterFragment(NAMES, tensors(), FACTORIES["sgd"])
    outer = OuterParameters([fragment], factor=outer_factor(halving))
    outer.apply(0, torch.zeros(11))
    outer.ledger.close([1])
    values, before = fragment.copy(), fragment.copy()
    fragment.preview(values, fragment.copy_state(), torch.ones(11))
    assert torch.equal(values, before - 0.5)
    outer.apply(0, torch.ones(11))
    assert torch.equal(values, fragment.flat)


def test_each_fragment_has_outer_steps_of_its_own() -> None:
    parts = [OuterFragment((name,), [torch.zeros(1)], FACTORIES["sgd"]) for name in "ab"]
    outer = OuterParameters(parts, factor=outer_factor(halving))
    for number in range(4):
        outer.apply(number % 2, torch.ones(1))
        outer.ledger.close([1])
    assert [listed(part.flat) for part in parts] == [[-1.5], [-1.5]]


def test_all_settings_are_in_the_shared_state() -> None:
    first, second, third = tensors()
    parts = [
        OuterFragment(NAMES[:2], [first, second], two_groups),
        OuterFragment(NAMES[2:], [third], two_groups),
    ]
    outer = OuterParameters(parts, "min_peers=1", factor=outer_factor(halving))
    (entry, *_) = outer.state.tensor_infos
    assert entry.name.count("SGD(") == 2
    assert "lr=0.25" in entry.name
    assert entry.name.endswith("min_peers=1, outer lr times 1 0.5 0.0009766 7.889e-31 9.333e-302 0")


def falling(step: int) -> float:
    return 1 - step


@pytest.mark.parametrize(
    ("asked", "error"), [(0.5, TypeError), (str, TypeError), (falling, ValueError)]
)
def test_a_schedule_must_give_numbers(asked: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"outer_lr_lambda must be a function|a factor must be"):
        outer_factor(asked)
