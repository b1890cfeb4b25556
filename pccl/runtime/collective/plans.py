"""Plans: what an operation needs that depends only on its request, its ring and the own peer.

Programs repeat the same calls, so plans are kept and used again. A plan holds no memory of a
caller: each call brings its own arrays, of any address. So a plan fits every later operation with
the same request in the same ring, and no operation in another ring.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.collectives.quantization import Codec, make_codec
from pccl.collectives.reductions import Reduction, Scratch
from pccl.collectives.schedules.plan import Schedule, schedule_of
from pccl.machines.peer.eager import fingerprint
from pccl.protocol.data_type import DataType
from pccl.protocol.operation import BlockLengths
from pccl.protocol.types import Descriptor, PeerId
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan

PLANS_MAX = 256
"""Number of plans that are kept."""

HOPS_MAX = 1 << 15
"""Number of hops in all kept plans together. A hop and its share of a plan take about 500 bytes."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operation needs besides its memory, its id and its weights."""

    descriptor: Descriptor
    ring: tuple[PeerId, ...]
    schedule: Schedule
    """Schedule of the own rank."""
    reduction: Reduction
    codec: Codec | None
    """Codec of a quantized operation, for the dtype of the tensor."""
    wide_codec: Codec | None
    """Codec for float32 if the tensor has 16-bit floats, otherwise ``codec``."""
    fingerprint: int
    """See ``eager.fingerprint``."""


class Plans:
    """Makes plans, and keeps a bounded number of them.

    Args:
        segment_bytes: fixed segment size; None: chosen by tensor and world size.
    """

    def __init__(self, segment_bytes: int | None) -> None:
        self._segment_bytes = segment_bytes
        self._kept: dict[
            tuple[Descriptor, tuple[PeerId, ...], PeerId, BlockLengths | None, MeshPlan],
            Plan,
        ] = {}
        """Plans by all that they depend on, the oldest first."""
        self._hops = 0
        """Number of hops in the kept plans."""
        self._scratch = Scratch()
        self._code_scratch = Scratch()

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self,
        descriptor: Descriptor,
        ring: tuple[PeerId, ...],
        own: PeerId,
        blocks: BlockLengths | None = None,
        mesh: MeshPlan = EQUAL_MESH,
    ) -> Plan:
        """Return the plan of an operation; make it if it is not kept.

        Args:
            descriptor: request of the members; its algorithm is settled.
            ring: the members in ring order, at least 2.
            own: id of this peer.
            blocks: the lengths of its blocks in an exchange.
            mesh: shares and sites of the members, for a mesh.

        Raises:
            ValueError: the root of a broadcast is not in the ring.
        """
        key = (descriptor, ring, own, blocks, mesh)
        plan = self._kept.get(key)
        if plan is None:
            plan = self._kept[key] = self._make(*key)
            self._hops += plan.schedule.hop_count
            while len(self._kept) > PLANS_MAX or self._hops > HOPS_MAX:
                oldest = self._kept.pop(next(iter(self._kept)))
                self._hops -= oldest.schedule.hop_count
        return plan

    def _make(
        self,
        descriptor: Descriptor,
        ring: tuple[PeerId, ...],
        own: PeerId,
        blocks: BlockLengths | None,
        mesh: MeshPlan,
    ) -> Plan:
        codec = self._codec(descriptor, descriptor.dtype)
        is_half = descriptor.dtype.itemsize == 2
        wide = self._codec(descriptor, DataType.FLOAT) if is_half else codec
        wire_bytes = codec.encoded_bytes if codec is not None else None
        rank, world_size, weighted = ring.index(own), len(ring), descriptor.weighted
        return Plan(
            descriptor,
            ring,
            schedule_of(
                descriptor, rank, world_size, self._segment_bytes, wire_bytes, blocks, mesh
            ),
            Reduction(
                descriptor.dtype, descriptor.op, world_size, self._scratch, weighted=weighted
            ),
            codec,
            wide,
            fingerprint(descriptor, ring),
        )

    def _codec(self, descriptor: Descriptor, dtype: DataType) -> Codec | None:
        if not descriptor.quantization.active:
            return None
        return make_codec(descriptor.quantization, dtype, self._code_scratch)
