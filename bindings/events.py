"""The events of training over ``pccl``: one dataclass for each kind of training event.

:class:`~pccl.bindings.diloco.DiLoCo` and :class:`~pccl.bindings.gradient_averager.GradientAverager`
call the consumers in ``on_event``. A consumer is a function of one event; the library has some in
:mod:`pccl.bindings.consumers`. The training thread calls it between two inner steps, so the
consumer must return soon.

Consumers also get the events of the peer (:mod:`pccl.observe.events`): a lost master, a long wait,
a member that is gone and why. Those have no ``step``, and joint calls that succeed are left out.

If a consumer raises, the library logs the error and stops calling the consumer; training continues.
To stop on an event, set a flag that the program's own loop reads.

``step`` is the number of inner steps that this replica had made, including steps before a
checkpoint. With ``GradientAverager``, it is the number of steps of the run. Curves over ``step`` do
not align between peers that joined at different times. ``tx_bytes`` and ``rx_bytes`` are the bytes
that this process sent and received. A peer id is an int that names one incarnation of a process.

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

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pccl.observe.events import PeerReport

__all__ = [
    "Consumer",
    "Event",
    "GradientsAveraged",
    "InnerStep",
    "MembersChanged",
    "OuterStep",
    "PeerReport",
    "RoundsMissed",
    "StateSynced",
    "TrainsAlone",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """This replica made an inner step.

    Attributes:
        step: number of the step; the first is 1.
        seconds: seconds since the previous inner step; NaN for the first of this process.
    """

    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """This replica merged the average of one fragment's pseudo-gradients into its model.

    Together ``hidden_s`` and ``exposed_s`` are about ``reduce_s``.

    Attributes:
        step: the inner step after which the merge took place.
        number: number of the outer step in the run; the first is 1.
        fragment: number of the fragment, from 0.
        contributors: the peers in the average, ascending; a newcomer contributes nothing at first.
        own_weight: weight of this peer: tokens, samples or steps; 0 if it is no contributor.
        total_weight: the sum of all contributors' weights.
        tx_bytes: bytes sent for the average.
        rx_bytes: bytes received for the average.
        reduce_s: seconds that the reduce took.
        hidden_s: seconds of the reduce during which the training thread computed.
        exposed_s: seconds that the training thread waited for the average.
        pseudo_gradient_norm: L2 norm of this peer's pseudo-gradient.
        mean_norm: L2 norm of the average.
        step_norm: L2 norm of the outer step, estimated from 65,536 parameters.
        cosine: of this peer's pseudo-gradient to the average; NaN if it has no work in it.
        noise_scale: number of pseudo-gradients whose mean has as much noise as signal, in the
            training so far: when it is well below the number of contributors, more of them help
            little. A rough estimate; average it over many rounds. NaN with one contributor.
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
    step_norm: float = math.nan
    cosine: float = math.nan
    noise_scale: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged:
    """Members joined or left the group.

    Attributes:
        step: inner steps made when this peer saw the change.
        peer_id: id of this peer.
        members: ids of the members now, including this peer, ascending.
        joined: ids of the new members.
        lost: ids of the former members: they left, died or were removed.
    """

    step: int
    peer_id: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSynced:
    """A synchronization made the shared state of this peer equal to that of the group.

    Attributes:
        step: inner steps made at that time.
        revision: new revision of the shared state.
        tx_bytes: bytes sent to outdated members.
        rx_bytes: bytes fetched from other members.
        seconds: seconds that the synchronization took.
    """

    step: int
    revision: int
    tx_bytes: int
    rx_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsMissed:
    """The group has made outer steps while this replica was away; it now has their result.

    Attributes:
        step: inner steps made when this replica was back.
        number: outer steps that the run has made; with ``GradientAverager``: its steps.
        missed: how many of them were made since this replica lost contact, and without its work.
    """

    step: int
    number: int
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainsAlone:
    """This peer is alone in its group. It keeps training, and newcomers get its parameters.

    Attributes:
        step: inner steps made when this peer noticed.
    """

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsAveraged:
    """This peer replaced the gradients of one step by their average over the peers.

    Attributes:
        step: the step whose gradients were averaged.
        contributors: the peers whose gradients are in all averages of the step, ascending.
        tx_bytes: bytes sent for the average.
        rx_bytes: bytes received for the average.
        hidden_s: seconds of reducing that overlapped the backward pass.
        exposed_s: seconds that the training thread waited for the rest.
    """

    step: int
    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int
    hidden_s: float
    exposed_s: float


Event: TypeAlias = (
    InnerStep
    | OuterStep
    | MembersChanged
    | StateSynced
    | RoundsMissed
    | TrainsAlone
    | GradientsAveraged
    | PeerReport
)
"""Every event that a consumer gets."""

Consumer: TypeAlias = Callable[[Event], None]
"""A function for ``on_event``. If it raises, the error is logged and the function is dropped."""
