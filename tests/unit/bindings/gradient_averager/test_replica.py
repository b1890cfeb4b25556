"""Model and optimizer as one shared state; here one replica takes it over by plain copying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

from pccl.bindings.gradient_averager.replica import AveragedReplica  # noqa: E402

Make = Callable[[Any], Any]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "counts by itself": lambda p: Counting(p, lr=0.1),
}


class Counting(Optimizer):
    """One that keeps a number of its own for each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state: dict[str, Any] = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter -= group["lr"] / state["count"] * parameter.grad


class Trainee:
    """A replica whose gradients depend on weights and on the number of the step."""

    def __init__(self, make: Make, seed: int, **options: Any) -> None:
        torch.default_generator.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = make(self.model.parameters())
        self.schedulers = [torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)]
        given: dict[str, Any] = {"shared": {}, "stateful": {"lr": self.schedulers[0]}, **options}
        self.replica = AveragedReplica(self.model, self.optimizer, **given)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for number, parameter in enumerate(self.model.parameters()):
                steepness = 0.1 * (self.replica.steps + number + 1)
                parameter.grad = steepness * parameter.detach() + 0.01
            self.optimizer.step()
            self.replica.stepped()
            self.schedulers[0].step()

    def take_over(self, elder: Trainee) -> None:
        elder.replica.publish()
        self.replica.publish()
        theirs, own = elder.replica.state.tensor_infos, self.replica.state.tensor_infos
        for there, here in zip(theirs, own, strict=True):
            assert (there.name, there.dtype, there.shape) == (here.name, here.dtype, here.shape)
            mine: Any = here.tensor
            mine.copy_(there.tensor)
        self.replica.adopt()

    def weights(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at_step", [0, 1, 4])
def test_who_takes_over_goes_on_alike(name: str, at_step: int) -> None:
    elder, newcomer = (Trainee(OPTIMIZERS[name], seed) for seed in (1, 2))
    elder.train(at_step)
    newcomer.take_over(elder)
    assert newcomer.replica.steps == at_step
    assert newcomer.weights() == elder.weights()
    elder.train(4)
    newcomer.train(4)
    assert newcomer.weights() == elder.weights()
    assert newcomer.optimizer.param_groups[0]["lr"] == elder.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_being_shared_changes_nothing(name: str) -> None:
    """The first steps are those of the optimizer alone, bit for bit."""
    trainee = Trainee(OPTIMIZERS[name], seed=1)
    torch.default_generator.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for step in range(5):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = 0.1 * (step + number + 1) * parameter.detach() + 0.01
        optimizer.step()
        scheduler.step()
        trainee.replica.publish()
        trainee.train(1)
    assert trainee.weights() == [p.detach().numpy().tobytes() for p in model.parameters()]


def test_the_tensors_stay_where_they_are() -> None:
    trainee = Trainee(OPTIMIZERS["asgd"], seed=1)
    before = {info.name: info.data_ptr for info in trainee.replica.state.tensor_infos}
    trainee.train(3)
    first = next(trainee.model.parameters())
    state: Any = trainee.optimizer.state[first]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    assert tensors
    for key, tensor in tensors.items():
        assert tensor.data_ptr() == before[f"optimizer.0.weight.{key}"]


def test_a_state_that_was_loaded_meanwhile_is_taken_in() -> None:
    elder, newcomer = (Trainee(OPTIMIZERS["adam"], seed) for seed in (1, 2))
    elder.train(3)
    loaded = Trainee(OPTIMIZERS["adam"], seed=3)
    loaded.model.load_state_dict(elder.model.state_dict())
    loaded.optimizer.load_state_dict(elder.optimizer.state_dict())
    loaded.schedulers[0].load_state_dict(elder.schedulers[0].state_dict())
    loaded.replica.steps = 3
    newcomer.take_over(loaded)
    elder.train(2)
    newcomer.train(2)
    assert newcomer.weights() == elder.weights()


def test_buffers_are_each_members_own() -> None:
    replica = Trainee(OPTIMIZERS["sgd"], seed=1).replica
    own = [i.name for i in replica.state.tensor_infos if i.allow_content_inequality]
    assert own == ["model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"]


def test_what_is_shared_besides_and_dtypes_that_the_wire_does_not_know() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    replica = Trainee(OPTIMIZERS["sgd"], seed=1, shared={"mask": mask}).replica
    info = replica.state.tensor_infos[0]
    assert (info.name, info.numel, info.data_ptr) == ("shared.mask", 4, mask.data_ptr())


def test_tied_weights_are_shared_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    replica = AveragedReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, {})
    names = [info.name for info in replica.state.tensor_infos]
    assert names == ["model.0.weight", "model.0.bias", "model.1.bias", "numbers", "position"]


def test_revisions_begin_with_the_steps_that_were_taken() -> None:
    trainee = Trainee(OPTIMIZERS["sgd"], seed=1)
    trainee.train(5)
    assert trainee.replica.begin_anew().revision == 5
    assert trainee.replica.state.lineage is None


def test_a_scheduler_that_is_made_later_counts() -> None:
    trainee = Trainee(OPTIMIZERS["sgd"], seed=1, stateful={})
    before = trainee.replica.state
    torch.optim.lr_scheduler.ExponentialLR(trainee.optimizer, 0.5)
    trainee.optimizer.param_groups[0]["warmup"] = 3
    trainee.replica.publish()
    assert trainee.replica.state is not before


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(ValueError, match="a trial step of a copy of LBFGS"):
        Trainee(lambda p: torch.optim.LBFGS(p), seed=1, stateful={})


def test_state_that_is_no_tensor_is_refused() -> None:
    class Odd(Counting):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["seen"] = [1, 2]

    with pytest.raises(ValueError, match="keeps a list as 'seen'"):
        Trainee(lambda p: Odd(p, lr=0.1), seed=1)


def test_parameters_that_are_not_contiguous_are_refused() -> None:
    model: Any = nn.Conv2d(2, 2, 3)
    model = model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"'model\.weight' is not contiguous"):
        AveragedReplica(model, torch.optim.SGD(model.parameters(), lr=0.1), {}, {})
