"""``Telling``: what has happened to one replica, as events for its listeners."""

from __future__ import annotations

import math
from collections import deque

from pccl.bindings.diloco.conductor import GroupSynced
from pccl.bindings.diloco.rounds import Members, RoundCommitted
from pccl.bindings.events import (
    Consumer,
    Event,
    InnerStep,
    MembersChanged,
    OuterStep,
    StateSynced,
    TrainsAlone,
)


class Telling:
    """Keeps events until all is done, and tells them then: listening takes time.

    Args:
        listeners: called with all of them, in order.

    Attributes:
        members: ids of the peers in the group, as of the last joint call.
    """

    def __init__(self, listeners: Consumer) -> None:
        self.members: tuple[int, ...] = ()
        self._listeners = listeners
        self._events: deque[Event] = deque()
        self._last_s = math.nan
        self._is_alone = False

    def deliver(self) -> None:
        """Tell what has happened. After an interruption, what is left is told the next time."""
        while self._events:
            self._listeners(self._events.popleft())

    def stepped(self, step: int, now_s: float) -> None:
        """An inner step was made."""
        self._events.append(InnerStep(step=step, seconds=now_s - self._last_s))
        self._last_s = now_s

    def synced(self, step: int, synced: GroupSynced) -> None:
        """The shared state was made equal."""
        self._events.append(
            StateSynced(
                step=step,
                revision=synced.revision,
                tx_bytes=synced.tx_bytes,
                rx_bytes=synced.rx_bytes,
                seconds=synced.seconds,
            )
        )

    def met(self, step: int, now: Members) -> None:
        """Peers have come or gone."""
        before, self.members = self.members, tuple(sorted(now.ids))
        if before == self.members:
            return  # in another order
        self._events.append(
            MembersChanged(
                step=step,
                peer_id=now.peer,
                members=self.members,
                joined=tuple(peer for peer in self.members if peer not in before),
                lost=tuple(peer for peer in before if peer not in self.members),
            )
        )

    def merged(
        self, step: int, committed: RoundCommitted, norm: float, *, took_s: float, exposed_s: float
    ) -> None:
        """An average was merged into the model.

        Args:
            step: after which inner step.
            committed: what came of the round.
            norm: of the own pseudo-gradient.
            took_s: from its beginning to its outcome.
            exposed_s: how long the training thread has waited for it.
        """
        average, contribution = committed.average, committed.contribution
        # With members that have just come, and add nothing yet, it is not.
        is_alone = len(average.contributors) == 1 and len(self.members) == 1
        if is_alone and not self._is_alone:
            self._events.append(TrainsAlone(step=step))
        self._is_alone = is_alone
        self._events.append(
            OuterStep(
                step=step,
                number=contribution.number + 1,
                fragment=contribution.fragment,
                contributors=tuple(sorted(average.contributors)),
                own_weight=contribution.weight,
                total_weight=average.total_weight,
                tx_bytes=average.tx_bytes,
                rx_bytes=average.rx_bytes,
                reduce_s=took_s,
                hidden_s=max(took_s - exposed_s, 0.0),
                exposed_s=exposed_s,
                pseudo_gradient_norm=norm,
                mean_norm=committed.mean_norm,
            )
        )
