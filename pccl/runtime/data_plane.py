"""Gives every frame its memory and its meaning: the frames of all links meet the transfers here.

* A frame of a posted operation goes straight into the caller's result.
* A frame of an operation that may still be posted goes to the link's bounded early store.
* Everything else (older views, operations that have ended, second copies) is drained.

Fencing is by construction: a frame names its operation completely, so a frame of an aborted attempt
finds no transfer, whatever else goes on under the same tag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pccl.collectives.plan import plan
from pccl.collectives.reductions import Reduction, Scratch
from pccl.protocol.early_store import EarlyStore
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Progress
from pccl.protocol.types import Collective, Descriptor, OperationId, PeerId
from pccl.runtime.operand import Operand, nothing
from pccl.runtime.transfer import Placement, Transfer
from pccl.transports.lane import Lane
from pccl.transports.link import Link

_log = logging.getLogger("pccl.link")

_DISCARD_BYTES = 256 << 10
_BITMAP_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class _Kept:
    """A frame that is received into memory of its own: an early one, or a bitmap."""

    payload: bytearray
    early: EarlyStore | None


class DataPlane:
    """All running transfers of one peer.

    Args:
        link_to: the link to a peer (which may be down).
        may_come: whether an operation that is not posted may still be.
        on_done: called with the digest when an own result is complete.
        segment_bytes: fixed segment size; None: chosen by tensor and world size. All members of a
            run must agree.
    """

    def __init__(
        self,
        link_to: Callable[[PeerId], Link],
        may_come: Callable[[OperationId], bool],
        on_done: Callable[[OperationId, bytes], None],
        segment_bytes: int | None,
    ) -> None:
        self.transfers: dict[OperationId, Transfer] = {}
        self._link_to = link_to
        self._may_come = may_come
        self._on_done = on_done
        self._segment_bytes = segment_bytes
        self._early: dict[PeerId, EarlyStore] = {}
        self._scratch = Scratch()
        self._discard = memoryview(bytearray(_DISCARD_BYTES))

    # -- what the engine does ------------------------------------------------------------------

    def post(
        self,
        operation: OperationId,
        descriptor: Descriptor,
        operand: Operand | None,
        ring: tuple[PeerId, ...],
        own: PeerId,
    ) -> None:
        """Lend the buffers of a call to an operation; frames find them from now on.

        Args:
            operation: its id.
            descriptor: what the members asked for.
            operand: the buffers, of the descriptor's dtype and count; a broadcast is in place. None
                for a barrier.
            ring: the members in ring order, at least 2.
            own: this peer.

        Raises:
            ValueError: the root of a broadcast is not in the ring.
        """
        if operand is None:
            assert descriptor.collective is Collective.BARRIER
            operand = nothing(descriptor.dtype)
        assert operand.data_type is descriptor.dtype
        assert operand.send.size == descriptor.count
        assert operand.in_place or descriptor.collective is not Collective.BROADCAST
        schedule = plan(descriptor, ring.index(own), len(ring), self._segment_bytes)
        transfer = Transfer(
            operation,
            Reduction(descriptor.dtype, descriptor.op, len(ring), self._scratch),
            operand,
            schedule,
            ring[schedule.upstream],
            self._link_to(ring[schedule.downstream]),
            self._on_done,
        )
        self.transfers[operation] = transfer
        self._replay_early(transfer)

    def begin(self, operation: OperationId) -> None:
        """The operation has started."""
        self.transfers[operation].begin()

    def detach(self, operation: OperationId) -> None:
        """The caller leaves an operation that is complete here; its buffers are free after this."""
        self.transfers[operation].detach()

    def end(self, operation: OperationId, *, committed: bool) -> Transfer:
        """The operation is over for this peer; its buffers are free when this returns."""
        transfer = self.transfers.pop(operation)
        transfer.end(committed=committed)
        return transfer

    def forget_early(self) -> None:
        """Drop early frames of operations that can no longer come."""
        for store in self._early.values():
            for operation in store.operations():
                if not self._may_come(operation):
                    store.discard(operation)

    def expect_peer(self, peer: PeerId) -> None:
        """This peer may send ahead of operations from now on."""
        self._early.setdefault(peer, EarlyStore())

    def forget_peer(self, peer: PeerId) -> None:
        """Nobody needs this peer any more."""
        self._early.pop(peer, None)

    def link_changed(self, peer: PeerId) -> None:
        """The link to ``peer`` was lost or made anew."""
        for transfer in list(self.transfers.values()):
            if transfer.downstream.peer == peer:
                transfer.link_changed()

    def waits_for(self, peer: PeerId) -> bool:
        """Whether a running transfer needs something from ``peer``: segments, or an answer."""
        return any(
            (t.begun and t.upstream == peer and t.lacking) or t.awaits_answer_from(peer)
            for t in self.transfers.values()
        )

    def ask_if_idle(self, now_ns: int, patience_ns: int) -> None:
        """Make sure that what idle transfers have sent has arrived; called at every tick."""
        for transfer in self.transfers.values():
            transfer.ask_if_idle(now_ns, patience_ns)

    def progress(self) -> tuple[Progress, ...]:
        """How far the posted operations are."""
        return tuple(transfer.progress for transfer in self.transfers.values())

    # -- what lanes do -------------------------------------------------------------------------

    def frame_started(self, peer: PeerId, lane: Lane, header: FrameHeader) -> None:
        """Decide where the frame goes.

        Raises:
            RemoteProtocolError: the sender may not send this.
        """
        lane.context = None
        transfer = self._find(header.operation)
        match header.kind:
            case FrameKind.DATA if transfer is not None:
                if transfer.upstream != peer:
                    reason = f"peer {peer} is not upstream in {header.operation}"
                    raise RemoteProtocolError(func="lane", reason=reason)
                lane.context = transfer.place(lane, header)
            case FrameKind.DATA if self._may_come(header.operation):
                store = self._early.get(peer)
                if store is None:
                    reason = f"peer {peer} sends ahead of {header.operation}, and is no member"
                    raise RemoteProtocolError(func="lane", reason=reason)
                lane.context = _Kept(store.reserve(header), store)
            case FrameKind.HAVE:
                if header.length > _BITMAP_BYTES_MAX:
                    raise RemoteProtocolError(func="lane", reason="oversized bitmap")
                lane.context = _Kept(bytearray(header.length), None)
            case FrameKind.QUERY if header.length:
                raise RemoteProtocolError(func="lane", reason="a query carries no payload")
            case _:
                pass

    def frame_buffer(self, lane: Lane, header: FrameHeader, received: int) -> memoryview:
        """Memory for the next bytes; asked before every read."""
        context = lane.context
        if isinstance(context, Placement):
            place = context.transfer.destination(context, lane, received)
            if place is not None:
                return place
        elif isinstance(context, _Kept):
            return memoryview(context.payload)[received:]
        return self._discard[: header.length - received]

    def frame_received(self, peer: PeerId, lane: Lane, header: FrameHeader) -> None:
        """The payload is complete.

        Raises:
            RemoteProtocolError: it makes no sense.
        """
        context, lane.context = lane.context, None
        if isinstance(context, Placement):
            context.transfer.complete(context, lane)
        elif isinstance(context, _Kept):
            if context.early is not None:
                context.early.put(header, context.payload)
                self._settle_early(context.early, header.operation)
            else:
                transfer = self._find(header.operation)
                if transfer is not None and transfer.downstream.peer == peer:
                    transfer.have(memoryview(context.payload))
        elif header.kind is FrameKind.QUERY:
            self._answer_query(peer, header.operation)

    def lane_lost(self, lane: Lane) -> None:
        """A lane is gone; what it was receiving never comes."""
        context, lane.context = lane.context, None
        header = lane.receiving
        if isinstance(context, _Kept) and context.early is not None and header is not None:
            context.early.release(header)

    def _find(self, operation: OperationId) -> Transfer | None:
        """The transfer that a frame belongs to: the very operation, not one with its tag."""
        return self.transfers.get(operation)

    def _answer_query(self, peer: PeerId, operation: OperationId) -> None:
        transfer = self._find(operation)
        if transfer is not None and transfer.upstream == peer:
            bitmap = transfer.bitmap()
            header = FrameHeader(FrameKind.HAVE, operation, 0, 0, len(bitmap))
            self._link_to(peer).send_newest(header, bitmap)

    # -- early frames --------------------------------------------------------------------------

    def _settle_early(self, store: EarlyStore, operation: OperationId) -> None:
        """A frame that began early is complete: its operation may be posted by now, or over."""
        transfer = self._find(operation)
        if transfer is not None:
            self._replay_early(transfer)
        elif not self._may_come(operation):
            store.discard(operation)

    def _replay_early(self, transfer: Transfer) -> None:
        store = self._early.get(transfer.upstream)
        if store is None:
            return
        try:
            for header, payload in store.take(transfer.operation):
                transfer.take_early(header, payload)
        except RemoteProtocolError as error:
            _log.warning("closed the link to peer %d: %s", transfer.upstream, error.reason)
            self._link_to(transfer.upstream).close()
