"""``InnerState``: what the inner optimizer keeps, such as moments, for peers that join late.

With empty moments the first steps of a late peer would go much too far. So it fetches those of one
member with the shared state, where they may differ between members. Otherwise, its learning rate
rises over its first steps.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import pccl
from pccl.bindings.tensors import local, mesh_of

_log = logging.getLogger("pccl.diloco")

WARM_UP_STEPS = 100
"""Steps over which the learning rate of a late peer rises if no member could give its moments."""

_PLAIN = {"foreach": False, "fused": False, "capturable": False}
"""Options of an optimizer that works on a tensor without a device."""

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class InnerState:
    """The inner optimizer's state of one replica, and the copy that it offers to late peers.

    Args:
        inner: the inner optimizer.
        named: the parameters of the run, with their names.
        warm_up: None: a late peer fetches the state of a member. A number: it does not, and its
            learning rate rises over so many steps; equal on all members.

    Attributes:
        warm_up_left: steps that a rising learning rate still has.
        warm_up_of: number of steps in which it rises.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Sequence[tuple[str, torch.Tensor]],
        warm_up: int | None = None,
    ) -> None:
        self._inner = inner
        self._named = tuple(named)
        self._warm_up = warm_up
        self._lock = threading.Lock()
        """Held by the thread that steps the optimizer, copies its state or replaces it."""
        self._is_own = bool(inner.state) and not _is_new(inner)
        self.warm_up_left = self.warm_up_of = 0
        self._has_state = True
        """Whether the optimizer keeps anything, as far as is known."""
        self._kept: list[dict[str, torch.Tensor]] = [{} for _ in named]
        """By parameter: key -> tensor on the host, of the shape and dtype in the optimizer."""
        self._numbers: dict[tuple[int, str], type[float]] = {}
        """Parameter and key -> type of a value that is no tensor."""
        self._held = torch.zeros(len(named), dtype=torch.uint8)
        """By parameter: whether ``_kept`` has been filled."""
        if warm_up is None:
            self._make_room()

    def _make_room(self) -> None:
        try:
            made = _state_after_a_step(self._inner)
            for index, (_, parameter) in enumerate(self._named):
                for key, value in made.get(id(parameter), {}).items():
                    if value is not None:
                        self._kept[index][str(key)] = _room_for(value)
                    if isinstance(value, int | float):
                        self._numbers[index, str(key)] = type(value)
        except Exception as error:  # noqa: BLE001 - an optimizer may raise anything
            self._kept = [{} for _ in self._named]
            _log.info("the state of the inner optimizer can't be given to late peers: %s", error)
        else:
            self._has_state = any(self._kept)

    # -- the shared state --------------------------------------------------------------------------

    def infos(self) -> list[pccl.TensorInfo]:
        """Return the entries for the shared state; none if late peers fetch nothing."""
        if not any(self._kept):
            return []
        given = [("inner state", self._held)]
        given += [
            (f"inner {key}/{name}", value)
            for (name, _), kept in zip(self._named, self._kept, strict=True)
            for key, value in kept.items()
        ]
        return [
            pccl.TensorInfo.from_torch(value, name, allow_content_inequality=True)
            for name, value in given
        ]

    def offer(self) -> None:
        """Copy the optimizer's state for late peers. It waits for an inner step that is running."""
        with self._lock:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the training may use another stream
            for index, ((_, parameter), kept) in enumerate(
                zip(self._named, self._kept, strict=True)
            ):
                state = self._inner.state.get(parameter, {})
                self._held[index] = bool(kept) and all(
                    _fits(state.get(key), value) for key, value in kept.items()
                )
                if self._held[index]:
                    for key, value in kept.items():
                        _fill(value, state[key])

    def entered(self, *, is_late: bool) -> None:
        """Load what was fetched, when this replica has joined the run for the first time.

        Args:
            is_late: whether the run has made steps.
        """
        if self._is_own or not is_late:
            return
        with self._lock:
            if self._load():
                return
        if self._has_state or self._warm_up:
            steps = WARM_UP_STEPS if self._warm_up is None else self._warm_up
            self.warm_up_left = self.warm_up_of = steps
            if self._warm_up is None:
                _log.warning(
                    "no member gave this late peer the state of its inner optimizer, so the "
                    "learning rate rises over %d steps",
                    steps,
                )

    def _load(self) -> bool:
        """Load the fetched state. Return False if there is none, or some of it is impossible."""
        if not self._held.any() or not all(
            _is_possible(key, value)
            for index, kept in enumerate(self._kept)
            for key, value in kept.items()
            if self._held[index]
        ):
            return False
        packed = self._inner.state_dict()
        numbers = _numbers(self._inner)
        state = dict(packed["state"])
        for index, (_, parameter) in enumerate(self._named):
            if self._held[index]:
                state[numbers[id(parameter)]] = {
                    key: self._numbers[index, key](value.item())
                    if (index, key) in self._numbers
                    else _unpacked(parameter, value)
                    for key, value in self._kept[index].items()
                }
        self._inner.load_state_dict({"state": state, "param_groups": packed["param_groups"]})
        return True

    # -- stepping ----------------------------------------------------------------------------------

    @contextmanager
    def stepping(self) -> Generator[None, None, None]:
        """Return a context for an inner step, in which the learning rate is that of a warm-up."""
        with self._lock:
            groups = self._inner.param_groups
            rates = [group["lr"] for group in groups if "lr" in group]
            if not self.warm_up_left or len(rates) < len(groups):
                yield
                return
            share = 1 - self.warm_up_left / (self.warm_up_of + 1)
            try:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate * share
                yield
            finally:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate
            self.warm_up_left -= 1

    # -- checkpoints -------------------------------------------------------------------------------

    def resume(self, warm_up: Sequence[int]) -> None:
        """Keep the state of a checkpoint, with ``warm_up_left`` and ``warm_up_of``."""
        self._is_own = True
        self.warm_up_left, self.warm_up_of = warm_up


def _is_new(inner: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has made no step: some, such as Adagrad, make their state before."""
    return all(float(state.get("step", 1)) == 0 for state in inner.state.values())


def _numbers(inner: torch.optim.Optimizer) -> dict[int, int]:
    """Return the numbers of the parameters in ``state_dict``, by id."""
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(held)}


def _state_after_a_step(inner: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return the state that the optimizer will keep, by id of the parameter.

    Raises:
        Exception: the optimizer cannot make a step with stand-ins.
    """
    if inner.state:
        return {id(parameter): dict(state) for parameter, state in inner.state.items()}
    if parts := _parts_of(inner):  # its step would make theirs
        return {key: one for part in parts for key, one in _state_after_a_step(part).items()}
    try:
        return _state_of_twin(inner, "meta")
    except Exception:  # noqa: BLE001 - an optimizer that reads values fails in its own way
        return _state_of_twin(inner, "cpu")


def _parts_of(inner: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers of which an optimizer consists; none, if it is a plain one."""
    held: list[Any] = []
    for value in vars(inner).values():
        known: object = value
        if isinstance(known, dict):
            held += value.values()
        elif isinstance(known, list | tuple):
            held += value
        else:
            held.append(value)
    return [one for one in held if isinstance(one, torch.optim.Optimizer)]


def _state_of_twin(inner: torch.optim.Optimizer, device: str) -> dict[int, dict[str, Any]]:
    """Return the state of a twin after a step with stand-ins; those on ``meta`` need no memory.

    The twin has the optimizer's settings and attributes, but no hooks.
    """
    twin: Any = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler puts a wrapper there
    twin.__dict__.update({hook: OrderedDict() for hook in _HOOKS})
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    twin.state, twin.param_groups = state, groups
    stand_ins: dict[int, torch.Tensor] = {}
    for group in inner.param_groups:
        params: list[torch.Tensor] = []
        for parameter in group["params"]:
            shard = local(parameter)
            zeros = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
            stand_in = torch.nn.Parameter(zeros, requires_grad=parameter.requires_grad)
            if parameter.requires_grad:
                stand_in.grad = torch.zeros_like(zeros)
            stand_ins[id(parameter)] = stand_in
            params.append(stand_in)
        plain = {key: value for key, value in _PLAIN.items() if key in group}
        groups.append({**group, **plain, "params": params})
    type(inner).step(twin)
    return {key: dict(state.get(stand_in, {})) for key, stand_in in stand_ins.items()}


def _room_for(value: object) -> torch.Tensor:
    """Return zeros on the host for a value of an optimizer's state.

    Raises:
        TypeError: the value is no tensor and no number.
    """
    if isinstance(value, torch.Tensor):
        shard = local(value)
        return torch.zeros(shard.shape, dtype=shard.dtype)
    if isinstance(value, int | float):
        return torch.zeros((), dtype=torch.float64)
    raise TypeError(f"it keeps a {type(value).__name__}, which is no tensor and no number")


def _fits(value: object, kept: torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        shard = local(value)
        return (shard.shape, shard.dtype) == (kept.shape, kept.dtype)
    return isinstance(value, int | float) and kept.dtype == torch.float64 and not kept.shape


def _fill(kept: torch.Tensor, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        kept.copy_(local(value))
    else:
        kept.fill_(value)


def _is_possible(key: str, value: torch.Tensor) -> bool:
    """Whether a fetched value is finite, and a number of steps or a square is not negative."""
    if not bool(torch.isfinite(value).all()):
        return False
    is_signed = key not in ("step", "sum") and "sq" not in key
    return is_signed or bool((value >= 0).all())


def _unpacked(parameter: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return a value for ``load_state_dict``, independent of ``kept``."""
    if mesh_of(parameter) is not None and kept.shape == local(parameter).shape:
        shards = torch.zeros_like(parameter, dtype=kept.dtype)
        local(shards).copy_(kept)
        return shards
    return kept.clone()
