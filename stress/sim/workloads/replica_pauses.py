"""``ReplicaPauses``: how long a process that trains waits for other members."""

from __future__ import annotations

from pccl.bindings.diloco.rounds import Pause
from pccl.protocol.types import NS_PER_S, Roster
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess

_ALONE_MAX = 6
"""Number of pauses after which a process gives up the rest of its replica."""


class ReplicaPauses:
    """The pauses of one life of a process, while members or the rest of its replica are missing.

    Replica i consists of the processes i * shards, i * shards + 1, ..., one in each group.

    Args:
        parts: shared objects of the run.
        process: the process.
    """

    def __init__(self, parts: RunParts, process: PeerProcess) -> None:
        training, training_checkers = parts.scenario.training, parts.checkers.training
        assert training is not None
        assert training_checkers is not None
        self._shards = training.shards
        self._first_ns = 4 * parts.scenario.latency_ns
        self._checkers = training_checkers
        self._index = process.index
        self._count = 0
        """Number of pauses since the last round."""

    def are_whole(self, roster: Roster) -> bool:
        """Whether all replicas are complete, as ``JointCaller`` decides it."""
        return (
            self._shards == 1
            or roster.global_world_size == self._shards * roster.largest_group_size
        )

    def next_ns(self, pause: Pause) -> int:
        """Return the duration of the next pause.

        The first ones before replicas are complete are brief, because runs are.
        """
        asked_ns = round(pause.seconds * NS_PER_S)
        if self._shards == 1 or pause.why:
            return asked_ns
        self._count += 1
        return min(asked_ns, self._first_ns << min(self._count, 30))

    def end(self) -> None:
        """Record that all members were there."""
        self._count = 0

    @property
    def is_replica_gone(self) -> bool:
        """Whether another process of this replica has ended, and none has replaced it soon."""
        first = self._index - self._index % self._shards
        others = range(first, first + self._shards)
        return self._count > _ALONE_MAX and not all(map(self._checkers.is_running, others))
