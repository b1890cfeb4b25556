"""Planted bugs: what the simulator must be able to see.

Each breaks one promise of the library in one place, as a careless change would. A test replays a
recorded seed of each and expects a violation; ``python -m pccl.stress sim --planted NAME`` searches
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from pccl.collectives.received_set import ReceivedSet
from pccl.protocol.operation import Ballot, Commit, Decision, Phase
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.data_plane import DataPlane
from pccl.runtime.transfer import Placement, Transfer
from pccl.transports.lane import Lane


def _commit_before_all_reported(stack: ExitStack) -> None:
    """The master commits as soon as the first member is done."""

    def hasty(ballot: Ballot, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        if ballot.phase is not Phase.STARTED:
            return None
        ballot.phase = Phase.COMMITTED
        return Commit()

    stack.enter_context(patch.object(Ballot, "done", hasty))


def _no_fencing(stack: ExitStack) -> None:
    """A frame is taken for the present operation of its tag, whatever attempt it is of."""

    def find(plane: DataPlane, operation: OperationId) -> Transfer | None:
        for transfer in plane.transfers.values():
            if transfer.operation.tag == operation.tag:
                return transfer
        return None

    stack.enter_context(patch.object(DataPlane, "_find", find))


def _no_restore_after_completion(stack: ExitStack) -> None:
    """After an abort only a peer that had not finished its part restores its input."""
    restore = getattr(Transfer, "_restore")  # noqa: B009

    def careless(transfer: Transfer) -> None:
        if transfer.progress.received < transfer.schedule.incoming_count:
            restore(transfer)

    stack.enter_context(patch.object(Transfer, "_restore", careless))


def _second_copy_added(stack: ExitStack) -> None:
    """A segment that arrives twice counts twice."""
    add = ReceivedSet.add

    def blind(transfer: Transfer, index: int) -> bool:
        return False

    def forgetful(received: ReceivedSet, index: int) -> bool:
        add(received, index)
        return True

    stack.enter_context(patch.object(Transfer, "_is_second_copy", blind))
    stack.enter_context(patch.object(ReceivedSet, "add", forgetful))


def _write_after_return(stack: ExitStack) -> None:
    """A frame that began to arrive is read into the caller's memory to its end."""

    def stubborn(transfer: Transfer, placement: Placement, lane: Lane, received: int) -> memoryview:
        segment = placement.segment
        memory: memoryview = getattr(transfer, "_result_bytes")  # noqa: B009
        return memory[segment.offset + received : segment.offset + segment.length]

    stack.enter_context(patch.object(Transfer, "destination", stubborn))


PLANTED: dict[str, Callable[[ExitStack], None]] = {
    "commit_before_all_reported": _commit_before_all_reported,
    "no_fencing": _no_fencing,
    "no_restore_after_completion": _no_restore_after_completion,
    "second_copy_added": _second_copy_added,
    "write_after_return": _write_after_return,
}


@contextmanager
def planted(name: str | None) -> Generator[None, None, None]:
    """Run with the bug ``name`` in place (None: without any)."""
    with ExitStack() as stack:
        if name is not None:
            PLANTED[name](stack)
        yield
