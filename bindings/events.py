"""What training over ``pccl`` has to tell: one dataclass for each kind of event.

:class:`~pccl.bindings.diloco.DiLoCo` and :class:`~pccl.bindings.gradient_averager.GradientAverager`
call whoever was given to them as ``on_event``. A consumer is anything that takes an event; those
that come with the library are in :mod:`pccl.bindings.consumers`. It is called on the training
thread, between two inner steps, and has to return soon: while it is busy, nothing is trained.

A consumer that raises is logged once, with its error, and not called any more; training goes on. A
program that is to stop on an event sets a flag that its own loop reads.

``step`` is the number of inner steps that this replica had made, those before a checkpoint
included (with ``GradientAverager``: that the run had made). Curves of peers that have come at
different times don't line up by it. ``tx_bytes`` and ``rx_bytes`` are what this process sent and
received for the event alone. A peer id names one incarnation of a process; it is an int.

    def tell(event: Event) -> None:
        match event:
            case MembersChanged(lost=lost) if lost:
                print("gone:", lost)
            case OuterStep(number=number, exposed_s=exposed_s):
                print(f"outer step {number}, waited {exposed_s:.2f} s")
            case _:
                pass
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Consumer",
    "Event",
    "GradientsAveraged",
    "InnerStep",
    "MembersChanged",
    "OuterStep",
    "StateSynced",
    "TrainsAlone",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """One inner step was made.

    Attributes:
        step: its number; the first is 1.
        seconds: since the inner step before; NaN for the first of this process.
    """

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """The average of one fragment's pseudo-gradients was merged into the model.

    Together ``hidden_s`` and ``exposed_s`` are about ``reduce_s``.

    Attributes:
        step: after which inner step.
        number: its number in the run; the first is 1.
        fragment: which part of the parameters, from 0 on; 0 if there is only one.
        contributors: the peers that took part, ascending; who has just come has added nothing.
        own_weight: what the own one counted for: tokens, samples or steps; 0 if this peer is no
            contributor.
        total_weight: the sum of all contributors' weights.
        tx_bytes: sent for it.
        rx_bytes: received for it.
        reduce_s: how long the reduce took, in seconds.
        hidden_s: how much of that the training thread went on computing.
        exposed_s: how long the training thread waited for it.
        pseudo_gradient_norm: L2 norm of the own pseudo-gradient.
        mean_norm: L2 norm of the average.
    """

    step: int
    number: int
    fragment: int
    contributors: tuple[int, ...]
    own_weight: float
    total_weight: float
    tx_bytes: int
    rx_bytes: int
    reduce_s: float
    hidden_s: float
    exposed_s: float
    pseudo_gradient_norm: float
    mean_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """The group is not what it was.

    Attributes:
        step: when it was seen.
        peer_id: one's own.
        members: who is in the group now, oneself included, ascending.
        joined: who was not before.
        lost: who is no longer: it left, died or was removed.
    """

    step: int
    peer_id: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSynced:
    """Outer parameters and momentum are what the group's are.

    Attributes:
        step: when.
        revision: of the shared state, now.
        tx_bytes: sent to those that were behind.
        rx_bytes: fetched because they differed.
        seconds: how long the synchronization took.
    """

    step: int
    revision: int
    tx_bytes: int
    rx_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainsAlone:
    """Nobody else is in the group; training goes on here, and whoever joins gets what it made.

    Attributes:
        step: when it was seen.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsAveraged:
    """The gradients of one step were replaced by their average over the peers.

    Attributes:
        step: the step whose gradients were averaged.
        contributors: the peers whose gradients are in the average, ascending.
        tx_bytes: bytes sent for the average.
        rx_bytes: bytes received for the average.
        hidden_s: seconds of reducing that overlapped the backward pass.
        exposed_s: how long the training thread waited for the rest.
    """

    step: int
    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int
    hidden_s: float
    exposed_s: float


Event: TypeAlias = (
    InnerStep | OuterStep | MembersChanged | StateSynced | TrainsAlone | GradientsAveraged
)

Consumer: TypeAlias = Callable[[Event], None]
"""Whom ``on_event`` takes. If it raises, it is logged once and dropped."""
