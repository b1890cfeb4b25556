"""``OuterParameters``: a float32 copy of the model on the host, bit-identical on all members.

With the outer optimizer's tensors and the ledger, it is the shared state of the run. All tensors
are updated in place.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import pccl
from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.bindings.diloco.ledger import Ledger
from pccl.bindings.diloco.model.buffers import SharedBuffers
from pccl.bindings.diloco.model.inner_state import InnerState
from pccl.bindings.diloco.model.outer_optimizers import (
    SHOWN_STEPS,
    OuterFactor,
    OuterFactory,
    PlainFactory,
)
from pccl.checks import shown

_log = logging.getLogger("pccl.diloco")

_linalg: Any = torch.linalg  # without types
_cuda: Any = torch.cuda
SAMPLES = 1 << 16
"""Most parameters that the norm of an outer step is taken from; a copy of all takes memory."""


def length(values: torch.Tensor) -> float:
    """Return the L2 norm of a tensor."""
    norm: float = _linalg.vector_norm(values).item()
    return norm


class HostCopies:
    """Copies between the parameters of one fragment and the host, which the training outruns.

    On a CUDA device they run on a stream of their own, with page-locked memory on the host.

    Args:
        tensors: the parameters, on any devices.

    Attributes:
        are_pinned: whether buffers on the host should be page-locked.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.are_pinned = bool(self._devices)
        self._stream: Any = None
        if len(self._devices) == 1:
            (device,) = self._devices
            self._stream = _cuda.Stream(device)
        self._last: Any = None
        """Event after the last copy."""

    @contextmanager
    def reading(
        self, tensors: Sequence[torch.Tensor]
    ) -> Generator[Sequence[torch.Tensor], None, None]:
        """Return a context for reads of the current values of ``tensors``, which it yields.

        On a CUDA device it yields snapshots there, because the training continues; ``wait`` then
        waits for the copies that the context has begun.
        """
        if self._stream is None:
            yield tensors
            for device in self._devices:  # several: the training waits
                _cuda.synchronize(device)
            return
        taken = [tensor.clone() for tensor in tensors]  # also those on the CPU
        self._stream.wait_stream(_cuda.current_stream(self._stream.device))
        with _cuda.stream(self._stream):
            for tensor in taken:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            yield taken
            self._last = self._stream.record_event()

    def wait(self) -> None:
        """Wait until the host has what ``reading`` has read. Any thread may call it."""
        if self._last is not None:
            self._last.synchronize()

    def settle(self) -> None:
        """Wait for all copies of the calling thread, so that it may use the memory on the host."""
        with self.reading(()):
            pass
        self.wait()


class OuterFragment:
    """The outer parameters of one fragment, and their optimizer.

    Args:
        names: names of the parameters.
        tensors: the parameters of the local model, of any float dtype, on any device.
        factory: makes the optimizer.

    Attributes:
        copies: makes copies between the host and the devices of the parameters.
        flat: all values in sequence, shape (n,); float64 if a parameter is, otherwise float32.
        optimizer: the outer optimizer; its parameters are views of ``flat``.
    """

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], factory: OuterFactory
    ) -> None:
        self.names = tuple(names)
        self._shapes = [tensor.shape for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self.copies = HostCopies(tensors)
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self._dtype = torch.float64 if wide else torch.float32
        self.flat = self.empty()
        self._load(tensors)
        takes_names = "names" in inspect.signature(factory).parameters
        given: Any = factory
        self._factory: PlainFactory = partial(given, names=self.names) if takes_names else given
        self._parameters = [torch.nn.Parameter(view) for view in self.views(self.flat)]
        self.optimizer = self._factory(list(self._parameters))
        _check_covers(self.optimizer, self._parameters)
        self._rates = [group.get("lr") for group in self.optimizer.param_groups]
        self._make_state()
        self._load(tensors)

    def empty(self) -> torch.Tensor:
        """Return a new buffer like ``flat``, page-locked if the model is on a CUDA device."""
        pinned = self.copies.are_pinned
        return torch.empty(sum(self._sizes), dtype=self._dtype, pin_memory=pinned)

    def copy(self) -> torch.Tensor:
        """Return a copy of ``flat``."""
        return self.empty().copy_(self.flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor, shaped like the parameters."""
        parts = torch.split(flat, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters with their names, in the dtypes of the local model."""
        views = zip(self.views(self.flat), self._dtypes, strict=True)
        return list(zip(self.names, (view.to(dtype) for view, dtype in views), strict=True))

    def _load(self, tensors: Sequence[torch.Tensor]) -> None:
        for view, tensor in zip(self.views(self.flat), tensors, strict=True):
            view.copy_(tensor)

    def _make_state(self) -> None:
        """Make the optimizer create its tensors now, so that they can be shared.

        An optimizer creates them in its first step. This method undoes that step: each tensor gets
        its first value again, mostly 0. Afterwards, ``flat`` is to be loaded again.
        """
        for parameter in self._parameters:
            held = self.optimizer.state.get(parameter, {})
            self.optimizer.state[parameter] = _FirstValues(held)
            parameter.grad = torch.zeros_like(parameter)
        self.flat.zero_()  # so that weight decay leaves no trace
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        for _, key, value in self.state_entries():
            if not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"the outer optimizer keeps {key!r} as a {type(value).__name__}, which can't "
                    "be shared with newcomers; use one that keeps its state in tensors, such as "
                    "torch.optim.SGD, Adam or AdamW"
                )
        for parameter in self._parameters:
            made = self.optimizer.state[parameter]
            for key, value in made.first.items():
                made[key].copy_(value)
            self.optimizer.state[parameter] = dict(made)

    @property
    def settings(self) -> str:
        """Name and settings of the optimizer, as text; of each param group, if they differ."""
        groups = [
            ", ".join(f"{key}={value}" for key, value in sorted(group.items()) if key != "params")
            for group in self.optimizer.param_groups
        ]
        return f"{type(self.optimizer).__name__}({'; '.join(dict.fromkeys(groups))})"

    def scale_rate(self, factor: float) -> None:
        """Set the learning rate of each param group to a multiple of its first value."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor

    def state_entries(self) -> list[tuple[str, str, Any]]:
        """Return the optimizer's state: parameter name, key and value of each non-None entry."""
        return [
            (name, key, value)
            for name, parameter in zip(self.names, self._parameters, strict=True)
            for key, value in self.optimizer.state[parameter].items()
            if value is not None
        ]

    def load_state(self, saved: dict[str, Any]) -> None:
        """Load the optimizer's state in place, because its tensors are shared.

        The settings stay those of the program, which must be equal on all members. What the
        optimizer does not keep with these settings, such as a momentum, is dropped.
        """
        held = [one for group in self.optimizer.param_groups for one in group["params"]]
        for number, parameter in enumerate(held):
            for key, value in saved["state"].get(number, {}).items():
                own = self.optimizer.state[parameter].get(key)
                if value is not None and own is not None:
                    own.copy_(value)

    def changed_settings(self, saved: dict[str, Any], ignored: Collection[str]) -> list[str]:
        """Return, as text, the settings that differ from those of a saved optimizer."""
        groups = zip(self.optimizer.param_groups, saved["param_groups"], strict=False)
        return [
            f"{key}={old[key]} instead of {value}"
            for group, old in groups
            for key, value in group.items()
            if key in old and key not in ignored and str(old[key]) != str(value)
        ]

    def step(self, average: torch.Tensor) -> float:
        """Take an outer step.

        Args:
            average: average of all members' pseudo-gradients, shape (n,).

        Returns:
            The step's L2 norm, as ``SAMPLES`` evenly spaced parameters tell it.
        """
        some = self.flat[:: -(-len(self.flat) // SAMPLES)]
        before = some.clone()
        for parameter, gradient in zip(self._parameters, self.views(average), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None
        return length(before.sub_(some)) * math.sqrt(len(self.flat) / len(some))

    def copy_state(self) -> list[dict[str, Any]]:
        """Return a copy of the optimizer's state, for ``preview``; one dict for each parameter."""
        return [
            {key: value.clone() for key, value in held.items() if value is not None}
            for held in map(self.optimizer.state.__getitem__, self._parameters)
        ]

    def preview(
        self, values: torch.Tensor, state: Sequence[dict[str, Any]], gradient: torch.Tensor
    ) -> None:
        """Take an outer step on copies, and leave the fragment as it is. Any thread may call it.

        Args:
            values: outer parameters, shape (n,), which become those after the step.
            state: a result of ``copy_state``, which is used up.
            gradient: the pseudo-gradient, shape (n,).
        """
        parameters = [torch.nn.Parameter(view) for view in self.views(values)]
        optimizer = self._factory(list(parameters))
        for parameter, held, view in zip(parameters, state, self.views(gradient), strict=True):
            optimizer.state[parameter] = held
            parameter.grad = view
        for group, current in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in current.items() if key == "lr"})
        optimizer.step()

    def infos(self) -> list[pccl.TensorInfo]:
        """Return the entries of this fragment for the shared state."""
        entries = [
            pccl.TensorInfo.from_torch(view, f"outer/{name}")
            for name, view in zip(self.names, self.views(self.flat), strict=True)
        ]
        return entries + [
            pccl.TensorInfo.from_torch(value.detach(), f"{key}/{name}")
            for name, key, value in self.state_entries()
        ]


class OuterParameters:
    """The outer parameters of all fragments, and the shared state.

    Args:
        fragments: the fragments, in order.
        agreed: other settings that must be equal on all members, as text. They are in the name of
            an entry, so a peer with other settings gets an error when it joins.
        buffers: the buffers of the model, which go with the last fragment.
        inner: the inner optimizer's state, for late peers.
        previews: whether local models preview outer steps.
        factor: schedule of the outer learning rate; None: it is constant.
        samples: ledger of the samples, and its name; None: peers have samples of their own.
    """

    def __init__(
        self,
        fragments: Sequence[OuterFragment],
        agreed: str = "",
        buffers: SharedBuffers | None = None,
        inner: InnerState | None = None,
        *,
        previews: bool = False,
        factor: OuterFactor | None = None,
        samples: tuple[SampleLedger, str] | None = None,
    ) -> None:
        self.samples = None if samples is None else samples[0]
        self.inner = inner
        self._factor = factor
        self.fragments = tuple(fragments)
        self.buffers = buffers or SharedBuffers(())
        self._previews = previews
        self.record = np.zeros(Ledger.SIZE, np.int64)
        self.ledger = Ledger(self.record)
        infos = [fragment.infos() for fragment in self.fragments]
        infos[-1] += self.buffers.infos()
        self._names = [tuple(info.name for info in part) for part in infos]
        settings = dict.fromkeys(fragment.settings for fragment in self.fragments)
        if factor is not None:
            shown_factors = " ".join(f"{factor(step):.4g}" for step in SHOWN_STEPS)
            agreed += f", outer lr times {shown_factors}"
        self._book = ", ".join(filter(None, ["ledger", *settings, agreed]))
        # First, so that a member with other settings gets an error that names this entry.
        books = [pccl.TensorInfo.from_numpy(self.record, self._book)]
        if samples is not None:
            books.append(pccl.TensorInfo.from_numpy(samples[0].record, samples[1]))
        self._books = [one.name for one in books]
        entries = books + [info for part in infos for info in part]
        offered = inner.infos() if inner is not None else []
        self._offered = [info.name for info in offered]
        entries += offered
        self.state = pccl.SharedState(entries, track_touched=True)

    @property
    def has_momentum(self) -> bool:
        """Whether an outer optimizer is SGD with momentum."""
        return any(
            group.get("momentum")
            for fragment in self.fragments
            for group in fragment.optimizer.param_groups
        )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parameters, optimizer states, the ledgers and the revision."""
        return {
            "revision": self.state.revision,
            "ledger": torch.tensor(self.record),
            "samples": None if self.samples is None else torch.tensor(self.samples.record),
            "values": [fragment.flat.clone() for fragment in self.fragments],
            "optimizers": [
                copy.deepcopy(fragment.optimizer.state_dict()) for fragment in self.fragments
            ],
            "buffers": self.buffers.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, in place."""
        self.state.revision = saved["revision"]
        self.record[:] = saved["ledger"].cpu().numpy()
        if self.samples is not None and saved.get("samples") is not None:
            self.samples.record[:] = saved["samples"].cpu().numpy()
        for fragment, values, optimizer in zip(
            self.fragments, saved["values"], saved["optimizers"], strict=True
        ):
            fragment.flat.copy_(values)
            fragment.load_state(optimizer)
        self._say_what_changes(saved["optimizers"])
        for number in range(len(self.fragments)):
            self._set_rate(number, self.ledger.number)
        self.buffers.load_state_dict(saved.get("buffers"))
        self.state.touch()

    def _say_what_changes(self, saved: Sequence[dict[str, Any]]) -> None:
        ignored = ("params",) if self._factor is None else ("params", "lr")
        pairs = zip(self.fragments, saved, strict=True)
        changed = dict.fromkeys(
            text for fragment, old in pairs for text in fragment.changed_settings(old, ignored)
        )
        if changed:
            _log.warning(
                "the outer optimizer of the checkpoint had %s; training continues with this "
                "program's settings. To keep the old ones, give all peers an outer= with them",
                ", ".join(changed),
            )

    def published(self) -> pccl.SharedState:
        """Return what readers outside the run get: parameters and buffers, by their names."""
        named = [pair for fragment in self.fragments for pair in fragment.weights()]
        infos = [pccl.TensorInfo.from_torch(tensor, name) for name, tensor in named]
        state = pccl.SharedState(infos + self.buffers.infos(""))
        state.revision = self.ledger.number // len(self.fragments)
        return state

    def offer(self) -> None:
        """Copy the inner optimizer's state into the shared state, for late peers."""
        if self.inner is not None and self._offered:
            self.inner.offer()
            self.state.touch(*self._offered)

    def nothing(self, fragment: int) -> torch.Tensor:
        """Return a new contribution of zeros."""
        return self.fragments[fragment].empty().zero_()

    def no_buffers(self, fragment: int) -> torch.Tensor | None:
        """Return a new contribution without buffers; None: none go with this fragment."""
        return self.buffers.nothing() if self._has_buffers(fragment) else None

    def apply(
        self, fragment: int, average: torch.Tensor, buffers: torch.Tensor | None = None
    ) -> tuple[float, float]:
        """Step the outer optimizer with the average, and load the sum of the buffers, if any.

        Returns:
            The L2 norms of the average and of the step.
        """
        norm, number = length(average), self.ledger.number
        self._set_rate(fragment, number)
        step_norm = self.fragments[fragment].step(average)
        self._set_rate(fragment, number + 1)  # for a preview
        if buffers is not None:
            self.buffers.apply(buffers)
        return norm, step_norm

    def _set_rate(self, fragment: int, number: int) -> None:
        """Set the learning rate of a fragment's first outer step from round ``number`` on.

        It depends on the ledger alone, so newcomers and checkpoints follow the schedule.
        """
        if self._factor is not None:
            count = len(self.fragments)
            turn = (number + (fragment - number) % count) // count
            self.fragments[fragment].scale_rate(self._factor(turn))

    def copy(self, fragment: int, target: torch.Tensor) -> list[dict[str, Any]] | None:
        """Copy the outer parameters into ``target``; for previews, return the optimizer's state."""
        target.copy_(self.fragments[fragment].flat)
        return self.fragments[fragment].copy_state() if self._previews else None

    def common_buffers(self) -> list[torch.Tensor]:
        """Return copies of the common buffers."""
        return self.buffers.copies()

    def _has_buffers(self, fragment: int) -> bool:
        return bool(self.buffers) and fragment == len(self.fragments) - 1

    def touch(self, fragment: int | None) -> None:
        """Mark the ledgers, and the fragment unless it is None, as changed in the shared state."""
        self.state.touch(*self._books)
        if fragment is not None:
            self.state.touch(*self._names[fragment])


class _FirstValues(dict[str, Any]):
    """The optimizer's state of one parameter, which keeps the first value of each tensor."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, torch.Tensor] = {}
        for key, value in held.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and key not in self.first:
            self.first[key] = value.clone()
        super().__setitem__(key, value)


def _check_covers(optimizer: object, parameters: Sequence[torch.Tensor]) -> None:
    """Raise unless ``optimizer`` is an optimizer of exactly ``parameters``."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"outer must make a torch.optim.Optimizer, not {shown(optimizer)}")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held != {id(parameter) for parameter in parameters}:
        raise ValueError(
            "outer must make an optimizer for exactly the parameters that it gets, as in "
            "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
