"""What late peers get of the inner optimizer's state, and what they do without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gpt.optimizers import Joined  # noqa: E402
from pccl.bindings.diloco.model.inner_state import InnerState  # noqa: E402

SHAPES = ((3, 2), (4,))


Optimizer: Any = torch.optim.Optimizer


class Counting(Optimizer):  # type: ignore[misc]
    """It counts steps in a number, and keeps a tensor of another shape than the parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        Optimizer.__init__(self, params, {"lr": lr})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["count"] = state.get("count", 0) + 1
                state["norm"] = state.get("norm", torch.zeros(1)) + one.grad.norm()
                one.sub_(one.grad, alpha=group["lr"] / state["count"] / float(1 + state["norm"]))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "numbers": Counting,
    "several": lambda p: Joined(
        torch.optim.SGD(p[:1], lr=0.5, momentum=0.9), torch.optim.Adam(p[1:], lr=0.1)
    ),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
}


class Replica:
    """Parameters, and their optimizer."""

    def __init__(self, make: Callable[[Any], Any], warm_up: int | None = None) -> None:
        random = torch.Generator().manual_seed(1)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=random)) for s in SHAPES]
        self.inner = make(self.params)
        named = [(str(number), one) for number, one in enumerate(self.params)]
        self.state = InnerState(self.inner, named, warm_up)

    def step(self, number: int, which: Iterable[int] = (0, 1)) -> None:
        random = torch.Generator().manual_seed(100 + number)
        for index, one in enumerate(self.params):
            gradient = torch.randn(one.shape, generator=random)
            one.grad = gradient if index in which else None
        with self.state.stepping():
            self.inner.step()

    def fetch(self, other: Replica) -> None:
        """As a synchronization does."""
        mine, theirs = self.state.infos(), other.state.infos()
        assert [(one.name, one.numel, one.dtype) for one in mine] == [
            (one.name, one.numel, one.dtype) for one in theirs
        ]
        assert all(one.allow_content_inequality for one in mine)
        for here, there in zip(mine, theirs, strict=True):
            target: Any = here.tensor
            target.copy_(there.tensor)

    def values(self) -> list[Any]:
        return [one.detach().clone() for one in self.params]


def equal(one: list[Any], two: list[Any]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_late_peer_goes_on_as_the_member_bit_for_bit(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The reference is a copy of the member's optimizer, made by torch."""
    member, late = Replica(OPTIMIZERS[name]), Replica(OPTIMIZERS[name])
    for number in range(3):
        member.step(number)
    member.state.offer()
    twin = [torch.nn.Parameter(one.clone()) for one in member.values()]
    reference = OPTIMIZERS[name](twin)
    reference.load_state_dict(copy.deepcopy(member.inner.state_dict()))
    late.fetch(member)
    for mine, theirs in zip(late.params, member.values(), strict=True):
        mine.data.copy_(theirs)
    late.state.entered(is_late=True)
    member.step(3)  # the copy is independent
    for number in range(7, 10):
        late.step(number)
        for mine, other in zip(late.params, twin, strict=True):
            other.grad = mine.grad.clone()
        reference.step()
        assert equal(late.values(), [one.detach() for one in twin])
    assert not caplog.records


def test_the_optimizer_is_not_touched_to_learn_what_it_keeps() -> None:
    called: list[str] = []

    def hook(*_: object) -> None:
        called.append("hook")

    def make(params: Any) -> Any:
        inner = torch.optim.Adam(params, lr=0.1)
        inner.register_step_pre_hook(hook)
        torch.optim.lr_scheduler.StepLR(inner, 1)
        return inner

    one = Replica(make)
    names = [info.name for info in one.state.infos()]
    assert names[0] == "inner state"
    assert set(names[1:]) == {
        f"inner {key}/{number}" for key in ("step", "exp_avg", "exp_avg_sq") for number in (0, 1)
    }
    assert not called
    assert not one.inner.state
    assert all(parameter.grad is None for parameter in one.params)
    assert [group["lr"] for group in one.inner.param_groups] == [0.1]


def test_an_optimizer_that_holds_others_is_not_stepped_to_learn_what_they_keep() -> None:
    def make(params: Any) -> Any:
        for one in params:
            one.grad = torch.ones_like(one)
        return OPTIMIZERS["several"](params)

    before, after = Replica(adam), Replica(make)
    assert equal(before.values(), after.values())
    assert not after.inner.state
    names = {info.name for info in after.state.infos()}
    assert {"inner momentum_buffer/0", "inner exp_avg/1"} <= names


def adam(params: Any) -> Any:
    return torch.optim.Adam(params, lr=0.1)


def test_a_parameter_without_state_stays_without() -> None:
    member, late = Replica(adam), Replica(adam)
    member.step(0, which=[1])
    member.state.offer()
    late.fetch(member)
    late.state.entered(is_late=True)
    assert list(late.inner.state) == [late.params[1]]
    assert not late.state.warm_up_left


def test_a_member_without_state_gives_none(caplog: pytest.LogCaptureFixture) -> None:
    member, late = Replica(adam), Replica(adam)
    member.state.offer()
    late.fetch(member)
    late.state.entered(is_late=True)
    assert not late.inner.state
    assert late.state.warm_up_left == 100
    assert "no member gave this late peer the state of its inner optimizer" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"), [("exp_avg", math.nan), ("exp_avg_sq", -1.0), ("step", -1.0)]
)
def test_impossible_values_are_not_loaded(key: str, value: float) -> None:
    member, late = Replica(adam), Replica(adam)
    member.step(0)
    member.state.offer()
    late.fetch(member)
    (entry,) = (info for info in late.state.infos() if info.name == f"inner {key}/1")
    held: Any = entry.tensor
    held.fill_(value)
    late.state.entered(is_late=True)
    assert not late.inner.state
    assert late.state.warm_up_left == 100


def test_state_of_a_checkpoint_is_kept() -> None:
    member, late = Replica(adam), Replica(adam)
    for number in range(3):
        member.step(number)
    member.state.offer()
    late.step(0)
    before = copy.deepcopy(late.inner.state_dict()["state"])
    late.state.resume((0, 0))
    late.fetch(member)
    late.state.entered(is_late=True)
    after = late.inner.state_dict()["state"]
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])


def test_what_cannot_be_given_is_not_asked_for() -> None:
    def of_closures(params: Any) -> Any:
        return torch.optim.LBFGS(params)

    one = Replica(of_closures)
    assert one.state.infos() == []
    one.state.entered(is_late=True)
    assert one.state.warm_up_left == 100


def test_an_optimizer_without_state_needs_none() -> None:
    def plain(params: Any) -> Any:
        return torch.optim.SGD(params, lr=1.0)

    one = Replica(plain)
    assert one.state.infos() == []
    one.state.entered(is_late=True)
    assert one.state.warm_up_left == 0


@pytest.mark.parametrize("is_late", [True, False])
def test_a_warm_up(*, is_late: bool) -> None:
    """SGD moves by the rate, so the moves are the rates."""

    def plain(params: Any) -> Any:
        return torch.optim.SGD(params, lr=1.0)

    one = Replica(plain, warm_up=3)
    assert one.state.infos() == []
    one.state.entered(is_late=is_late)
    moves: list[float] = []
    for number in range(5):
        before = one.values()[0]
        if number == 1:
            one.inner.param_groups[0]["lr"] = 2.0  # by a scheduler
        one.step(number)
        moves.append(((before - one.values()[0]) / one.params[0].grad).mean().item())
    wanted = [1 / 4, 2 * 2 / 4, 2 * 3 / 4, 2.0, 2.0] if is_late else [1.0, 2.0, 2.0, 2.0, 2.0]
    assert moves == pytest.approx(wanted, rel=1e-5)
    assert one.inner.param_groups[0]["lr"] == 2.0


def test_a_step_that_fails_leaves_the_rate() -> None:
    one = Replica(adam, warm_up=3)
    one.state.entered(is_late=True)
    with pytest.raises(ZeroDivisionError), one.state.stepping():
        raise ZeroDivisionError
    assert one.inner.param_groups[0]["lr"] == 0.1
    assert one.state.warm_up_left == 3
