"""Averages in flight, until every one of them has an outcome.

Outcomes are the same for all members: each average is committed for everybody, with the same
contributors, or aborted for everybody. So what is launched again after a loss is the same on all
survivors, too, if they look at no outcome before all are launched; that is what ``wait`` is for.
When somebody dies after some averages were committed, these have his values in them and the others
have not. Each is a mean over its own contributors, the same bits everywhere.
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
    ResyncRequired,
    TooFewPeers,
)

OUT_OF_STEP = (Evicted, MasterLost, OutcomeUnknown, ResyncRequired)
"""The others go on without this peer, or may have taken what it has not."""


@dataclass(slots=True)
class _BucketFlight:
    values: Tensor
    tag: int
    options: QuantizationOptions | None
    handle: AsyncReduceHandle | None = None
    info: ReduceInfo | None = None


@dataclass(frozen=True, slots=True)
class BucketOutcome:
    """How the averages of one step went.

    Attributes:
        contributors: who is in all of them, ascending; some may have more.
        tx_bytes: sent for them.
        rx_bytes: received for them.
    """

    contributors: tuple[int, ...]
    tx_bytes: int
    rx_bytes: int


class Reductions:
    """The averages of one step, all of them in place.

    Args:
        comm: connected.
    """

    def __init__(self, comm: pccl.Communicator) -> None:
        self._comm = comm
        self._flights: list[_BucketFlight] = []
        self._out_of_step = False

    @property
    def are_open(self) -> bool:
        """Something was launched and not waited for."""
        return bool(self._flights)

    def launch(self, values: Tensor, tag: int, options: QuantizationOptions | None) -> None:
        """Begin to average ``values``, contiguous and on the CPU; borrowed until ``wait``."""
        flight = _BucketFlight(values, tag, options)
        self._flights.append(flight)
        self._start(flight)

    def wait(self) -> BucketOutcome | None:
        """Wait until all averages are there, over whoever is left; alone, values stay as they are.

        May be called again after Ctrl-C.

        Returns:
            None: this peer is out of step with the others. What the tensors hold is worth nothing.

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
        if self._out_of_step:
            self._out_of_step = False
            return None
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
        if self._out_of_step or self._comm.world_size == 1:
            return
        try:
            flight.handle = self._comm.all_reduce_async(
                flight.values, op=ReduceOp.AVG, tag=flight.tag, quantization_options=flight.options
            )
        except TooFewPeers:
            pass
        except OUT_OF_STEP:
            self._out_of_step = True
        except NotConnected as error:
            if not isinstance(error.__cause__, MembershipError):
                raise
            self._out_of_step = True  # the loss was told to another user of the communicator

    def _aborted(self, flights: list[_BucketFlight]) -> list[_BucketFlight]:
        """Wait for all of them; those that have to be launched again."""
        again: list[_BucketFlight] = []
        for flight in flights:
            if flight.handle is None or flight.info is not None:
                continue
            try:
                flight.info = flight.handle.result()
            except TooFewPeers:
                pass
            except OUT_OF_STEP:
                self._out_of_step = True
            except (DescriptorMismatch, LockstepError):
                self._flights = []  # whoever asked for something else may not come to the others
                raise
            except CollectiveAborted:
                again.append(flight)
        return [] if self._out_of_step else again
