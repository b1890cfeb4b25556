"""Gives every received frame its sink, and owns the running transfers.

* A frame of a posted operation goes straight into the caller's result.
* A frame of an operation that may still be posted goes to the link's bounded early store.
* All other frames are discarded: early frames for another descriptor, frames of older views or of
  ended operations, second copies.

A frame carries the full id of its operation. So a frame of an aborted attempt is discarded, even if
another operation uses the same tag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pccl.collectives.bitmap import to_bitmap
from pccl.collectives.residual import Residual
from pccl.collectives.schedules.direct import DirectSchedule
from pccl.collectives.schedules.exchange import ExchangeSchedule
from pccl.collectives.schedules.gather import GatherSchedule
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.guards.early_store import EarlyStore
from pccl.protocol.limits import ANNOUNCE_BYTES_MAX, FLOWS_MAX
from pccl.protocol.messages import Progress
from pccl.protocol.operation import BlockLengths, Eager
from pccl.protocol.types import Collective, Descriptor, OperationId, PeerId, ReduceOp
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan
from pccl.runtime.collective.buffers import Buffers
from pccl.runtime.collective.coding import Coding
from pccl.runtime.collective.operand import Operand, nothing
from pccl.runtime.collective.plans import Plan, Plans
from pccl.runtime.collective.transfers.chain import ChainTransfer
from pccl.runtime.collective.transfers.direct import DirectTransfer
from pccl.runtime.collective.transfers.exchange import ExchangeTransfer
from pccl.runtime.collective.transfers.gather import GatherTransfer
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.runtime.collective.weighted_ranks import OnNotFinite
from pccl.transports.base import LocalMemory
from pccl.transports.link import Lane, Link
from pccl.transports.sinks import Collect, Drain, Sink

_log = logging.getLogger("pccl.link")


class DataPlane:
    """All running transfers of one peer.

    Args:
        link_to: returns the link to a peer, which may be down.
        may_come: whether an operation that is not posted may still be posted.
        on_done: called with operation and digest when the result of this peer is complete.
        segment_bytes: fixed segment size; None: chosen by tensor and world size. All members of a
            run must agree.
        memory: memory that processes of this machine share; None: all segments are sent.
        on_not_finite: called with a member whose contribution is not finite although declared so.
    """

    def __init__(
        self,
        link_to: Callable[[PeerId], Link],
        may_come: Callable[[OperationId], bool],
        on_done: Callable[[OperationId, bytes], None],
        segment_bytes: int | None,
        memory: LocalMemory | None = None,
        on_not_finite: OnNotFinite | None = None,
    ) -> None:
        self.transfers: dict[OperationId, Transfer] = {}
        self._link_to = link_to
        self._may_come = may_come
        self._on_done = on_done
        self._on_not_finite = on_not_finite
        self._memory = memory
        self._plans = Plans(segment_bytes)
        self._early: dict[PeerId, EarlyStore] = {}
        self._started: dict[OperationId, Transfer] = {}
        """Transfers of started operations: all members have requested them."""
        self._buffers = Buffers()

    # -- what the engine does ------------------------------------------------------------------

    def post(
        self,
        operation: OperationId,
        descriptor: Descriptor,
        operand: Operand | None,
        ring: tuple[PeerId, ...],
        own: PeerId,
        residual: Residual | None = None,
        blocks: BlockLengths | None = None,
        mesh: MeshPlan = EQUAL_MESH,
    ) -> tuple[PeerId, ...]:
        """Post the buffers of a call for an operation, so that frames are read into them.

        Args:
            operation: id of the operation.
            descriptor: request of the members.
            operand: buffers of the descriptor's dtype and count, in an exchange of the lengths in
                ``blocks``; a broadcast is in place. None for a barrier.
            ring: the members in ring order, at least 2.
            own: id of this peer.
            residual: residual of a reduce with error feedback.
            blocks: the lengths of the own blocks in an exchange.
            mesh: shares and sites of the members, for a mesh.

        Returns:
            The peers whose links the operation will use.

        Raises:
            ValueError: the root of a broadcast is not in the ring.
        """
        if operand is None:
            assert descriptor.collective is Collective.BARRIER
            operand = nothing(descriptor.dtype)
        assert operand.data_type is descriptor.dtype
        assert blocks is not None or operand.count == descriptor.count
        assert operand.in_place or descriptor.collective is not Collective.BROADCAST
        plan = self._plans.find(descriptor, ring, own, blocks, mesh)
        transfer = self._make_transfer(operation, plan, operand, residual)
        transfer.weighted.on_not_finite = self._on_not_finite
        self.transfers[operation] = transfer
        self._replay_early(transfer)
        return (*transfer.inlets, *transfer.outlets)

    def _make_transfer(
        self, operation: OperationId, plan: Plan, operand: Operand, residual: Residual | None
    ) -> Transfer:
        descriptor, schedule = plan.descriptor, plan.schedule
        coding = None
        if plan.codec is not None:
            assert plan.wide_codec is not None
            coding = Coding(
                plan.codec,
                plan.wide_codec,
                operand.target,
                residual,
                operation,
                schedule.rank,
                schedule.world_size if descriptor.op is ReduceOp.AVG else 1,
                stochastic=descriptor.quantization.stochastic,
            )
        if isinstance(schedule, ExchangeSchedule):
            return ExchangeTransfer(
                operation,
                plan,
                operand,
                schedule,
                link_to=self._link_to,
                on_done=self._on_done,
                buffers=self._buffers,
                memory=self._memory,
            )
        if isinstance(schedule, DirectSchedule):
            operand = _kept_part(operand, descriptor, schedule)
            return DirectTransfer(
                operation,
                plan,
                operand,
                schedule,
                link_to=self._link_to,
                on_done=self._on_done,
                buffers=self._buffers,
                coding=coding,
                memory=self._memory,
            )
        if isinstance(schedule, GatherSchedule):
            assert coding is not None
            return GatherTransfer(
                operation,
                plan,
                operand,
                schedule,
                link_to=self._link_to,
                on_done=self._on_done,
                buffers=self._buffers,
                coding=coding,
            )
        return ChainTransfer(
            operation,
            plan,
            operand,
            schedule,
            downstream=self._link_to(plan.ring[schedule.downstream]),
            on_done=self._on_done,
            buffers=self._buffers,
            coding=coding,
            memory=self._memory,
        )

    def begin(
        self,
        operation: OperationId,
        *,
        eager: Eager = Eager.NOTHING,
        weights: tuple[float, ...] = (),
        infinite: frozenset[int] = frozenset(),
    ) -> None:
        """Begin to send the data of an operation, unless it is being sent already.

        Args:
            operation: id of the operation.
            eager: what to send although the operation is not known to have started. Nothing: it
                has started.
            weights: weights of all members in ring order, for a weighted average.
            infinite: the ranks that have declared a contribution that is not finite.
        """
        transfer = self.transfers[operation]
        if eager:
            for outlet in transfer.outlets.values():
                outlet.what = transfer.what
                outlet.only_announces = eager is Eager.ANNOUNCEMENTS
        else:
            self._started[operation] = transfer
            for outlet in transfer.outlets.values() if transfer.has_quorum else ():
                outlet.what = transfer.what
            transfer.what = transfer.what if transfer.has_quorum else 0
            for outlet in transfer.outlets.values():
                if outlet.only_announces:
                    outlet.send_held()
        if not transfer.begun:
            transfer.begin(weights=weights, infinite=infinite)

    def close_gap(self, operation: OperationId, upstream: PeerId, size: int) -> bool:
        """Receive missing segments from ``upstream``; the ``size`` ranks after it are lost.

        Returns:
            False if ``upstream`` cannot send all missing segments; then nothing changes.
        """
        transfer = self._chain(operation)
        if transfer.lacks_irreplaceable(size):
            return False
        if transfer.lacking and not self._link_to(upstream).up:
            return False
        transfer.take_from(upstream)
        return True

    def send_across(self, operation: OperationId, downstream: PeerId, size: int) -> None:
        """Send to ``downstream`` from now on, because the ``size`` ranks before it are lost."""
        self._chain(operation).send_across(self._link_to(downstream), size)

    def _chain(self, operation: OperationId) -> ChainTransfer:
        transfer = self.transfers[operation]
        assert isinstance(transfer, ChainTransfer)  # the master repairs nothing else
        return transfer

    def detach(self, operation: OperationId) -> None:
        """Free the buffers of an operation that is complete here, because the caller leaves."""
        self.transfers[operation].detach()

    def end(self, operation: OperationId, *, committed: bool) -> Transfer:
        """End an operation for this peer. Its buffers are free when this returns."""
        transfer = self.transfers.pop(operation)
        self._started.pop(operation, None)
        transfer.end(committed=committed)
        return transfer

    def forget_early(self) -> None:
        """Drop early frames of operations that can no longer be posted."""
        for store in self._early.values():
            for operation in store.operations():
                if not self._may_come(operation):
                    store.discard(operation)

    def expect_peer(self, peer: PeerId) -> None:
        """Accept early frames from ``peer`` from now on."""
        self._early.setdefault(peer, EarlyStore())

    def forget_peer(self, peer: PeerId) -> None:
        """Drop the early frames of ``peer``, and accept no new ones."""
        self._early.pop(peer, None)

    def lane_up(self, peer: PeerId) -> None:
        """Ask ``peer`` about segments that may be lost, because there is a new lane to it."""
        for transfer in self.transfers.values():
            outlet = transfer.outlets.get(peer)
            if outlet is not None:
                outlet.ask()

    def pulls_failed(self, peer: PeerId) -> None:
        """Send what was announced to ``peer`` and what it lacks, because it cannot pull."""
        for transfer in self.transfers.values():
            outlet = transfer.outlets.get(peer)
            if outlet is not None:
                outlet.withdraw()

    def uses(self, peer: PeerId) -> bool:
        """Whether a started transfer lacks segments from ``peer``, or sends segments to it."""
        return any(t.lacks_from(peer) or t.sends_to(peer) for t in self._started.values())

    def progress(self) -> tuple[Progress, ...]:
        """Return the progress of all started operations; at most ``FLOWS_MAX`` flows in total."""
        reports: list[Progress] = []
        room = FLOWS_MAX
        for transfer in self._started.values():
            progress = transfer.progress
            room -= len(progress.flows)
            reports.append(progress if room >= 0 else replace(progress, flows=()))
        return tuple(reports)

    # -- what lanes do -------------------------------------------------------------------------

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink for the payload of a frame.

        Raises:
            RemoteProtocolError: the sender may not send this frame.
        """
        peer = lane.link.peer
        transfer = self.transfers.get(header.operation)
        match header.kind:
            case _ if header.what and transfer is not None and not transfer.accepts(header.what):
                return Drain(header.length)
            case FrameKind.DATA if transfer is not None:
                return transfer.place(peer, header) or Drain(header.length)
            case FrameKind.ANNOUNCE if header.length > ANNOUNCE_BYTES_MAX:
                reason = f"an announcement has {header.length} bytes"
                raise RemoteProtocolError(func="lane", reason=reason)
            case FrameKind.ANNOUNCE if transfer is not None:
                take = partial(self._announced, transfer, lane, header)
                return Collect(bytearray(header.length), take)
            case FrameKind.DATA | FrameKind.ANNOUNCE if self._may_come(header.operation):
                store = self._early_of(peer, header)
                take = partial(self._came_early, store, header)
                return Collect(store.reserve(header), take, partial(store.release, header))
            case FrameKind.QUERY if transfer is not None and peer in transfer.inlets:
                return Collect(bytearray(), partial(self._answer, transfer, lane, header))
            case FrameKind.QUERY if transfer is None and self._may_come(header.operation):
                store = self._early_of(peer, header)
                return Collect(bytearray(), lambda _: store.put_question(header))
            case FrameKind.HAVE if transfer is not None and peer in transfer.outlets:
                if header.length != transfer.outlets[peer].answer_bytes:
                    reason = f"a bitmap of {header.length} bytes does not fit {header.operation}"
                    raise RemoteProtocolError(func="lane", reason=reason)
                return Collect(bytearray(header.length), partial(self._answered, peer, header))
            case _:
                return Drain(header.length)

    def lane_lost(self, lane: Lane) -> None:
        """Ask the peer which segments of a lost lane have arrived."""
        for operation, numbers in lane.carried.items():
            transfer = self.transfers.get(operation)
            if transfer is not None and lane.link.peer in transfer.outlets:
                transfer.outlets[lane.link.peer].lane_lost(numbers)

    def _announced(
        self, transfer: Transfer, lane: Lane, header: FrameHeader, payload: bytearray
    ) -> None:
        """Pull an announced segment, unless its operation has ended meanwhile."""
        if self.transfers.get(header.operation) is transfer:
            lane.pulled(transfer.pull(self._memory, lane.link, header, payload))

    def _answer(
        self, transfer: Transfer, lane: Lane, asked: FrameHeader, _: bytearray | None = None
    ) -> None:
        """Answer a sender's question about which of its segments have arrived."""
        inlet = transfer.inlets.get(lane.link.peer)
        if inlet is None:
            return  # the sender was lost, and another peer sends in its place
        bitmap = to_bitmap(inlet.missing, inlet.route.count)
        header = FrameHeader(FrameKind.HAVE, asked.operation, 0, asked.offset, len(bitmap))
        lane.say(header, bitmap)

    def _answered(self, peer: PeerId, header: FrameHeader, bitmap: bytearray) -> None:
        """Give the outlet a receiver's answer about which segments have arrived."""
        transfer = self.transfers.get(header.operation)
        if transfer is not None and peer in transfer.outlets:  # the operation has not ended
            transfer.outlets[peer].have(header.offset, memoryview(bitmap))

    # -- early frames --------------------------------------------------------------------------

    def _came_early(self, store: EarlyStore, header: FrameHeader, payload: bytearray) -> None:
        """Store a complete early frame; use or drop it if its operation was posted meanwhile."""
        store.put(header, payload)
        operation = header.operation
        transfer = self.transfers.get(operation)
        if transfer is not None:
            self._replay_early(transfer)
        elif not self._may_come(operation):
            store.discard(operation)

    def _early_of(self, peer: PeerId, header: FrameHeader) -> EarlyStore:
        store = self._early.get(peer)
        if store is None:
            reason = f"peer {peer} sent early frames of {header.operation}, but is not a member"
            raise RemoteProtocolError(func="lane", reason=reason)
        return store

    def _replay_early(self, transfer: Transfer) -> None:
        for peer in list(transfer.inlets):
            store = self._early.get(peer)
            if store is None or not store.used_bytes:
                continue
            try:
                for header, payload in store.take(transfer.operation):
                    if not transfer.accepts(header.what):
                        continue
                    if header.kind is FrameKind.ANNOUNCE:
                        link = self._link_to(peer)
                        nbytes = transfer.pull(self._memory, link, header, payload)
                        for lane in link.lanes[:1]:  # the one that carried it is not known
                            lane.pulled(nbytes)
                    else:
                        transfer.take_early(peer, header, payload)
            except RemoteProtocolError as error:
                _log.warning("closed the link to peer %d: %s", peer, error.reason)
                self._link_to(peer).close()
            question = store.take_question(transfer.operation)
            if question is not None and transfer.accepts(question.what):
                for lane in self._link_to(peer).lanes:
                    self._answer(transfer, lane, question)


def _kept_part(operand: Operand, descriptor: Descriptor, schedule: DirectSchedule) -> Operand:
    """Return the operand of a mesh; a member may get only its own chunk, or nothing at all."""
    rank, scatters = schedule.rank, descriptor.collective is Collective.REDUCE_SCATTER
    if not scatters and (descriptor.collective is not Collective.REDUCE or rank == descriptor.root):
        return operand
    itemsize, owned = operand.source.dtype.itemsize, schedule.owned
    first = owned[0].offset // itemsize if owned else 0
    size = sum(segment.length for segment in owned) // itemsize
    return operand.for_chunk(first, size, scratch=not scatters)
