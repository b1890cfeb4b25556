"""``EventQueue``: keeps the events of a replica until it calls the listeners."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

import pccl
from pccl import SharedStateSyncInfo
from pccl.bindings.events import (
    Consumer,
    Event,
    MembersChanged,
    OuterStep,
    RoundsMissed,
    StateSynced,
    TrainsAlone,
)
from pccl.observe.events import CallEnded, MembershipLost, PeerReport
from pccl.observe.handoff import KEPT_MAX
from pccl.progress import size


class EventQueue:
    """Keeps events until ``deliver``, because a listener takes time, and may be interrupted.

    ``deliver`` also writes the log lines of events. It forgets the oldest of more than ``KEPT_MAX``
    events, because a program may pause for hours while members come and go.

    Args:
        listeners: called with each event, in order.
        logger: name of the logger.

    Attributes:
        members: ids of the peers in the group, as of the last joint call, ascending.
    """

    def __init__(self, listeners: Consumer, logger: str = "pccl.diloco") -> None:
        self.members: tuple[int, ...] = ()
        self._listeners = listeners
        self._log = logging.getLogger(logger)
        self._events: deque[Event] = deque(maxlen=KEPT_MAX)

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def deliver(self) -> bool:
        """Call the listeners. After an interruption, the next call delivers the rest.

        Returns:
            Whether there was an event.
        """
        has_any = bool(self._events)
        while self._events:
            event = self._events.popleft()
            if (line := _line(event)) is not None:
                self._log.log(*line)
            self._listeners(event)
        return has_any

    def listen_to(self, comm: pccl.Communicator) -> Callable[[], None]:
        """Add the events of a peer, too; return the function that ends that.

        Joint calls that succeed have events of their own here. That the program has left the run is
        no news to it.
        """
        events = self._events  # the peer must not keep the listeners alive, and what they use

        def take(event: PeerReport) -> None:
            match event:
                case CallEnded(outcome="ok") | MembershipLost(cause="CLOSED"):
                    pass
                case _:
                    events.append(event)

        return comm.on_event(take)

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


def _line(event: Event) -> tuple[int, str] | None:
    """Return the level and the text of the log line of an event, or None."""
    match event:
        case OuterStep(number=number, contributors=contributors, exposed_s=exposed_s):
            peers = f"{len(contributors)} contributor{'' if len(contributors) == 1 else 's'}"
            return logging.INFO, f"outer step {number}: {peers}, waited {exposed_s:.2f} s"
        case StateSynced(revision=revision, rx_bytes=rx_bytes, tx_bytes=tx_bytes):
            moved = f"{size(rx_bytes)} received, {size(tx_bytes)} sent, {event.seconds:.2f} s"
            level = logging.INFO if rx_bytes or tx_bytes else logging.DEBUG
            return level, f"synchronized the shared state, revision {revision}: {moved}"
        case TrainsAlone():
            return logging.WARNING, (
                "trains alone: the group has no other member; a newcomer gets these parameters"
            )
        case RoundsMissed(missed=missed, number=number):
            return logging.WARNING, (
                f"the group made {missed} outer steps without this replica; now it has made "
                f"{number}"
            )
        case _:
            return None
