"""The model and its optimizer as one shared state, bit-identical on all peers.

It contains the parameters, the optimizer's state, the number of steps, and the numbers of parameter
groups, learning-rate schedulers and similar objects. It also contains the buffers, but these may
differ between members, because running statistics depend on local data.

An optimizer creates its state in its first step, but a shared state must name its tensors before.
So a *copy* of the optimizer makes a step on zeros, which shows the tensors, and memory for them is
allocated. The optimizer itself does not change. Its own first step creates its state, which is then
moved into that memory. (The trial state would be wrong for the momentum of SGD with dampening.)
A newcomer that joins later gets its optimizer state from the shared state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pccl import DataType, SharedState, TensorInfo
from pccl.bindings.gradient_averager.leaves import numbers_of, with_numbers
from pccl.bindings.tensors import own_name


class AveragedReplica:
    """A model, its optimizer, and the number of their steps, as a shared state.

    Args:
        model: the model, of which parameters and buffers are shared.
        optimizer: the optimizer of the model's parameters.
        shared: further tensors that must be equal on all peers, by name.
        stateful: objects with ``state_dict`` and ``load_state_dict``, whose numbers are shared.

    Attributes:
        steps: number of steps taken so far.
        model: the model.

    Raises:
        ValueError, TypeError: an argument cannot be shared; the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shared: Mapping[str, Tensor],
        stateful: Mapping[str, Any],
    ) -> None:
        self.steps = 0
        self._in_step = False
        self.model = model
        self._optimizer: Any = optimizer  # torch types it only in part
        self._shared = dict(shared)
        self._stateful = dict(stateful)
        self._names: dict[Tensor, str] = {p: own_name(n) for n, p in model.named_parameters()}
        self._tensors: dict[tuple[Tensor, str], Tensor] = {}
        self._number_keys: list[tuple[Tensor, str]] = []
        self._find_state()
        self._position = torch.zeros(1, dtype=torch.int64)
        self._numbers = torch.zeros(0, dtype=torch.float64)
        self._read()
        self.state = self.begin_anew()

    def begin_anew(self) -> SharedState:
        """Return a new shared state, which no synchronization has seen.

        Its revision is the number of steps: in a new group, the member with most steps wins. In a
        group that has synchronized before, a member with a new state is a newcomer.
        """
        self._in_step = False
        infos = [
            _entry(tensor, f"shared.{name}", every_own=False)
            for name, tensor in self._shared.items()
        ]
        for parameter, name in self._names.items():
            infos.append(_entry(parameter, f"model.{name}", every_own=False))
        for name, buffer in self.model.named_buffers():
            infos.append(_entry(buffer, f"model.{own_name(name)}", every_own=True))
        for (parameter, key), tensor in self._tensors.items():
            name = f"optimizer.{self._names[parameter]}.{key}"
            infos.append(_entry(tensor, name, every_own=False))
        numbers = torch.tensor(list(self._all_numbers()), dtype=torch.float64)
        self._numbers = numbers
        infos.append(_entry(numbers, "numbers", every_own=False))
        infos.append(_entry(self._position, "position", every_own=False))
        self.state = SharedState(infos)
        self.state.revision = self.steps
        return self.state

    def publish(self) -> None:
        """Copy the optimizer's state and all numbers into the shared state, before a sync."""
        self._read()
        numbers = torch.tensor(list(self._all_numbers()), dtype=torch.float64)
        if numbers.shape != self._numbers.shape:
            if self.state.lineage is not None:
                raise RuntimeError(
                    f"the optimizer and schedulers had {len(self._numbers)} numbers to share, but "
                    f"now have {len(numbers)}; create all of them before the first update()"
                )
            self.begin_anew()
        self._numbers.copy_(numbers)

    def adopt(self) -> None:
        """Load the optimizer's state and all numbers from the shared state, after a sync."""
        position = int(self._position.item())
        self.steps = position // 2
        if position % 2:
            for (parameter, key), tensor in self._tensors.items():
                self._optimizer.state[parameter][key] = tensor
            for parameter, key in self._number_keys:
                self._optimizer.state[parameter].setdefault(key, 0)
        else:
            for parameter in self._names:
                self._optimizer.state.pop(parameter, None)
        numbers: list[float] = self._numbers.numpy().tolist()
        if numbers != list(self._all_numbers()):
            self._set_numbers(iter(numbers))

    def begin(self) -> None:
        """Record that a step begins, for whose end other members may need this one."""
        self._in_step = True

    def is_in_step(self) -> bool:
        """Whether a step has begun, and not ended."""
        return self._in_step

    def stepped(self) -> None:
        """Record that the optimizer has taken a step with averaged gradients."""
        self._in_step = False
        self.steps += 1
        self._read()

    # -- the optimizer's state ---------------------------------------------------------------------

    def _find_state(self) -> None:
        """Allocate memory for the state that the optimizer has or will create."""
        own = self._optimizer.state
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        is_whole = all(p in own for p in trained if p.requires_grad)
        trial = own if is_whole else self._state_after_a_trial()
        for parameter, entries in trial.items():
            if not isinstance(parameter, Tensor) or parameter not in self._names:
                raise ValueError(
                    f"{type(self._optimizer).__name__} keeps state that belongs to no parameter of "
                    "the model, so it cannot be shared; use an optimizer of torch.optim, or "
                    "all_reduce the gradients yourself"
                )
            for key, value in sorted(entries.items()):
                if isinstance(value, Tensor):
                    there = own[parameter].get(key) if parameter in own else None
                    room = torch.zeros_like(value) if there is None else there
                    self._tensors[parameter, key] = room
                elif isinstance(value, int | float):
                    self._number_keys.append((parameter, key))
                elif value is not None:
                    raise ValueError(
                        f"{type(self._optimizer).__name__} keeps a {type(value).__name__} as "
                        f"{key!r} of a parameter, which cannot be shared with newcomers; use an "
                        "optimizer whose state is tensors and numbers"
                    )

    def _state_after_a_trial(self) -> dict[Any, dict[str, Any]]:
        """Return the state of a copy of the optimizer after a step on zeros."""
        stand_ins: dict[int, Any] = {}
        original: dict[Any, Any] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                stand_in = nn.Parameter(torch.zeros_like(parameter), parameter.requires_grad)
                if parameter.requires_grad:
                    stand_in.grad = torch.zeros_like(parameter)
                stand_ins[id(parameter)] = stand_in
                original[stand_in] = parameter
        try:
            trial = copy.deepcopy(self._optimizer, stand_ins)
            trial.step()
        except Exception as error:
            raise ValueError(
                f"a trial step of a copy of {type(self._optimizer).__name__}, with zero gradients, "
                f"failed ({error}); take a real step before you make the GradientAverager, or use "
                "another optimizer"
            ) from error
        return {original.get(key, key): value for key, value in trial.state.items()}

    def _read(self) -> None:
        """Move the optimizer's state into the shared tensors, and update the position."""
        state = self._optimizer.state
        has_state = False
        for (parameter, key), room in self._tensors.items():
            tensor = state[parameter].get(key) if parameter in state else None
            if tensor is None:
                continue
            has_state = True
            if tensor is not room:
                if tensor.shape != room.shape:
                    raise RuntimeError(
                        f"the state {key!r} of {self._names[parameter]!r} has changed its shape "
                        f"from {tuple(room.shape)} to {tuple(tensor.shape)}; use another optimizer"
                    )
                room.copy_(tensor)
                state[parameter][key] = room
        for parameter, key in self._number_keys:
            has_state = has_state or key in state.get(parameter, ())
        has_state = has_state or (not self._tensors and not self._number_keys and self.steps > 0)
        self._position.fill_(2 * self.steps + has_state)

    # -- numbers -----------------------------------------------------------------------------------

    def _all_numbers(self) -> Iterator[float]:
        for group in self._optimizer.param_groups:
            yield from numbers_of(_settings(group))
        state = self._optimizer.state
        for parameter, key in self._number_keys:
            yield float(state[parameter].get(key, 0) if parameter in state else 0)
        for one in self._stateful.values():
            yield from numbers_of(one.state_dict())

    def _set_numbers(self, numbers: Iterator[float]) -> None:
        for group in self._optimizer.param_groups:
            for key, value in with_numbers(_settings(group), numbers).items():
                if isinstance(group[key], Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        state = self._optimizer.state
        for parameter, key in self._number_keys:
            number = next(numbers)
            if parameter in state:
                state[parameter][key] = with_numbers(state[parameter][key], iter([number]))
        for one in self._stateful.values():
            one.load_state_dict(with_numbers(one.state_dict(), numbers))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group; a tensor (for CUDA graphs) becomes a number."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _entry(tensor: Tensor, name: str, *, every_own: bool) -> TensorInfo:
    """Return an entry of the shared state, without a copy; an unknown dtype becomes bytes."""
    detached = tensor.detach()
    try:
        DataType.from_torch_dtype(detached.dtype)
    except ValueError:
        if detached.is_contiguous():
            detached = detached.reshape(-1).view(torch.uint8)
    return TensorInfo.from_torch(detached, name, allow_content_inequality=every_own)
