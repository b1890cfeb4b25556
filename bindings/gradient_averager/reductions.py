"""The reduces of one step, until each has an outcome.

All members get the same outcome of a reduce: either committed with the same contributors, or
aborted. So after a loss, all survivors launch the same reduces again, if each launches all reduces
before it reads an outcome. ``wait`` ensures that. If a peer dies after some reduces were
committed, only these contain its values. Each average is a mean over its own contributors, with
the same bits on all members.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import pccl
from pccl import AsyncReduceHandle, QuantizationOptions, ReduceInfo, ReduceOp
from pccl.errors import (
    CollectiveAborted,
    DescriptorMismatch,
    Evicted,
    LockstepError,
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


@dataclass(slots=True)
class _BucketFlight:
    values: Tensor
    tag: int
    options: QuantizationOptions | None
    handle: AsyncReduceHandle | None = None
    info: ReduceInfo | None = None


@dataclass(frozen=True, slots=True)
class BucketOutcome:
    """The outcome of one step's reduces.

    Attributes:
        contributors: ids of the peers that are in all averages, ascending.
        tx_bytes: bytes sent for the averages.
        rx_bytes: bytes received for the averages.
    """

    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int


class Reductions:
    """The reduces of one step, all of them in place.

    Args:
        comm: a connected communicator.
    """

    def __init__(self, comm: pccl.Communicator) -> None:
        self._comm = comm
        self._flights: list[_BucketFlight] = []
        self._loss: PCCLError | None = None

    @property
    def are_open(self) -> bool:
        """Whether a reduce was launched since the last complete ``wait``."""
        return bool(self._flights)

    def launch(self, values: Tensor, tag: int, options: QuantizationOptions | None) -> None:
        """Begin to average ``values``, a contiguous CPU tensor; do not use it until ``wait``."""
        flight = _BucketFlight(values, tag, options)
        self._flights.append(flight)
        self._start(flight)

    def wait(self) -> BucketOutcome | PCCLError:
        """Wait until all averages are complete; a peer that is alone keeps its values.

        May be called again after Ctrl-C.

        Returns:
            The outcome; or the loss of this peer's membership, after which the values are
            worthless.

        Raises:
            DescriptorMismatch, LockstepError: the peers do not run the same program.
        """
        undecided = self._flights
        while undecided:
            undecided = self._aborted(undecided)
            for flight in undecided:
                self._start(flight)
            undecided = [flight for flight in undecided if flight.handle is not None]
        flights, self._flights = self._flights, []
        if self._loss is not None:
            loss, self._loss = self._loss, None
            return loss
        infos = [flight.info for flight in flights if flight.info is not None]
        members = {self._comm.peer_id}
        if infos and len(infos) == len(flights):
            members = set(infos[0].contributors).intersection(*(i.contributors for i in infos))
        return BucketOutcome(
            tuple(sorted(members)),
            sum(info.tx_bytes for info in infos),
            sum(info.rx_bytes for info in infos),
        )

    def _start(self, flight: _BucketFlight) -> None:
        flight.handle = None
        if self._loss is not None or self._comm.world_size == 1:
            return
        try:
            flight.handle = self._comm.all_reduce_async(
                flight.values, op=ReduceOp.AVG, tag=flight.tag, quantization_options=flight.options
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
            except (DescriptorMismatch, LockstepError):
                self._flights = []  # do not wait for the rest: another program may never make them
                raise
            except CollectiveAborted:
                again.append(flight)
        return again if self._loss is None else []
