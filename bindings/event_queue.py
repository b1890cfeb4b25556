"""``EventQueue``: keeps the events of a replica until it calls the listeners."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pccl import SharedStateSyncInfo
from pccl.bindings.events import Consumer, Event, MembersChanged, StateSynced


class EventQueue:
    """Keeps events until ``deliver``, because a listener takes time, and may be interrupted.

    Args:
        listeners: called with each event, in order.

    Attributes:
        members: ids of the peers in the group, as of the last joint call, ascending.
    """

    def __init__(self, listeners: Consumer) -> None:
        self.members: tuple[int, ...] = ()
        self._listeners = listeners
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def deliver(self) -> None:
        """Call the listeners. After an interruption, the next call delivers the rest."""
        while self._events:
            self._listeners(self._events.popleft())

    def met(self, step: int, peer_id: int, ids: Iterable[int]) -> bool:
        """Add a ``MembersChanged`` event if the members differ from the last call's.

        Args:
            step: number of inner steps that this replica has made.
            peer_id: id of this peer.
            ids: ids of the current members, in any order.

        Returns:
            Whether members have joined or left.
        """
        before, self.members = self.members, tuple(sorted(ids))
        if before == self.members:
            return False
        self.put(
            MembersChanged(
                step=step,
                peer_id=peer_id,
                members=self.members,
                joined=tuple(peer for peer in self.members if peer not in before),
                lost=tuple(peer for peer in before if peer not in self.members),
            )
        )
        return True

    def synced(self, step: int, info: SharedStateSyncInfo, seconds: float) -> None:
        """Add a ``StateSynced`` event: the shared state now equals that of the group."""
        self.put(
            StateSynced(
                step=step,
                revision=info.revision,
                tx_bytes=info.tx_bytes,
                rx_bytes=info.rx_bytes,
                seconds=seconds,
            )
        )
