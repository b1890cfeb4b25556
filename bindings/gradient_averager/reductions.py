"""The reduces of one step, until each has an outcome.

All members get the same outcome of a reduce: either committed with the same contributors, or
aborted. So after a loss, all survivors launch the same reduces again, if each launches all reduces
before it reads an outcome. ``wait`` ensures that.

If a peer dies after some reduces were committed, only these contain its values. A mean over its own
contributors has the same bits on all members, so it may stay. Where all reduces must be over the
same contributors, as for sums that are divided by a fixed number, they are repeated without the
dead peer: for this they leave their inputs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pccl import AsyncReduceHandle, QuantizationOptions, ReduceInfo, ReduceOp
from pccl.errors import (
    CollectiveAborted,
    DescriptorMismatch,
    Evicted,
    MasterLost,
    MembershipError,
    NotConnected,
    OutcomeUnknown,
    PCCLError,
    ResyncRequired,
    TooFewPeers,
)

OUT_OF_STEP = (Evicted, MasterLost, OutcomeUnknown, ResyncRequired)
"""Errors after which the other members may continue, or have continued, without this peer."""


class Reducer(Protocol):
    """A communicator, or the live members of a process group."""

    @property
    def peer_id(self) -> int:
        """Id of this peer."""
        ...

    @property
    def world_size(self) -> int:
        """Number of members."""
        ...

    def all_reduce_async(
        self,
        send: Tensor,
        *,
        recv: Tensor | None = ...,
        op: ReduceOp = ...,
        tag: int = ...,
        quantization_options: QuantizationOptions | None = ...,
        timeout_s: float | None = ...,
        weight: float | None = ...,
    ) -> AsyncReduceHandle:
        """Start a reduce."""
        ...


@dataclass(slots=True)
class _BucketFlight:
    values: Tensor
    tag: int
    options: QuantizationOptions | None
    into: Tensor | None
    timeout_s: float | None
    weight: float | None
    handle: AsyncReduceHandle | None = None
    info: ReduceInfo | None = None


@dataclass(frozen=True, slots=True)
class BucketOutcome:
    """The outcome of one step's reduces.

    Attributes:
        contributors: ids of the peers that are in all results, ascending.
        tx_bytes: bytes sent for the results.
        rx_bytes: bytes received for the results.
        weights: weights in the weighted reduce, if there is one, of at least the contributors.
    """

    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int
    weights: Mapping[int, float]


class Reductions:
    """The reduces of one step.

    Args:
        comm: reduces; connected.
        op: how.
    """

    def __init__(self, comm: Reducer, op: ReduceOp = ReduceOp.AVG) -> None:
        self._comm, self._op = comm, op
        self._flights: list[_BucketFlight] = []
        self._loss: PCCLError | None = None

    @property
    def are_open(self) -> bool:
        """Whether a reduce was launched since the last complete ``wait``."""
        return bool(self._flights)

    def launch(
        self,
        values: Tensor,
        tag: int,
        options: QuantizationOptions | None = None,
        into: Tensor | None = None,
        timeout_s: float | None = None,
        weight: float | None = None,
    ) -> None:
        """Begin to reduce ``values``, a contiguous CPU tensor; do not use it until ``wait``.

        Args:
            values: the tensor.
            tag: tag of the reduce.
            options: wire format.
            into: where the result goes, so that the reduce can be repeated over other members.
                None: into ``values``.
            timeout_s: longest time of the reduce, and of each repetition, in seconds.
            weight: weight of the values in the average; None: no weights.
        """
        flight = _BucketFlight(values, tag, options, into, timeout_s, weight)
        self._start(flight)
        self._flights.append(flight)

    def wait(self) -> BucketOutcome | PCCLError:
        """Wait until all results are complete; a peer that is alone keeps its values.

        May be called again after Ctrl-C.

        Returns:
            The outcome; or the loss of this peer's membership, after which the values are
            worthless.

        Raises:
            DescriptorMismatch, LockstepError: the peers do not run the same program.
            DeadlineExceeded: a reduce took longer than its ``timeout_s``.
        """
        undecided = self._flights
        try:
            while undecided:
                undecided = self._aborted(undecided) or self._over_others()
                for flight in undecided:
                    self._start(flight)
        except Exception:
            self._flights = []  # do not wait for the rest: another program may never make them
            raise
        flights, self._flights = self._flights, []
        if self._loss is not None:
            loss, self._loss = self._loss, None
            return loss
        members = set(self._contributors(flights[0])) if flights else {self._comm.peer_id}
        weights: dict[int, float] = {}
        infos = [flight.info for flight in flights if flight.info is not None]
        for flight in flights:
            members.intersection_update(self._contributors(flight))
            if flight.weight is not None:
                own = (flight.weight,)
                found = own if flight.info is None else flight.info.weights
                weights = dict(zip(self._contributors(flight), found, strict=True))
            if flight.info is None and flight.into is not None:
                flight.into.copy_(flight.values)
        return BucketOutcome(
            tuple(sorted(members)),
            sum(info.tx_bytes for info in infos),
            sum(info.rx_bytes for info in infos),
            weights,
        )

    def _contributors(self, flight: _BucketFlight) -> tuple[int, ...]:
        return (self._comm.peer_id,) if flight.info is None else flight.info.contributors

    def _over_others(self) -> list[_BucketFlight]:
        """Return the reduces that can be repeated, and have more contributors than others."""
        if self._loss is not None or not self._flights:
            return []
        fewest = min(map(self._contributors, self._flights), key=len)
        return [
            flight
            for flight in self._flights
            if flight.into is not None and self._contributors(flight) != fewest
        ]

    def _start(self, flight: _BucketFlight) -> None:
        flight.handle = flight.info = None
        if self._loss is not None or self._comm.world_size == 1:
            return
        try:
            flight.handle = self._comm.all_reduce_async(
                flight.values,
                recv=flight.into,
                op=self._op,
                tag=flight.tag,
                quantization_options=flight.options,
                timeout_s=flight.timeout_s,
                weight=flight.weight,
            )
        except TooFewPeers:
            pass
        except OUT_OF_STEP as error:
            self._loss = error
        except NotConnected as error:
            if not isinstance(error.__cause__, MembershipError):
                raise
            self._loss = error.__cause__  # another user of the communicator received the loss

    def _aborted(self, flights: list[_BucketFlight]) -> list[_BucketFlight]:
        """Wait for the reduces in ``flights``; return the aborted ones, to launch them again."""
        again: list[_BucketFlight] = []
        for flight in flights:
            if flight.handle is None or flight.info is not None:
                continue
            try:
                flight.info = flight.handle.result()
            except TooFewPeers:
                pass
            except OUT_OF_STEP as error:
                self._loss = error
            except DescriptorMismatch:
                raise
            except CollectiveAborted:
                again.append(flight)
        return again if self._loss is None else []
