"""Finals that a majority of the members has to store before anybody is told them.

With one master there are none. With a standby, the members that follow it may have reached a state
from which it decides otherwise, while the first master has not heard that they are gone. So a final
that another master could contradict is *proposed* to all members first, and told once a majority
follows the term in which it was proposed and has stored it (``majority`` counts).

That gives one outcome, as in Viewstamped Replication (Liskov & Cowling, 2012) and in Paxos:

* Whoever takes over hears a majority, and so at least one member that has stored each final that
  was told. It adopts every proposal that it hears of. If it hears of none, none was told; nor will
  one be, because this majority takes nothing from the lower term any more.
* A member of which it has not heard is removed, so no older proposal comes to light later.
* Whoever knows a roster knows every proposal that was not settled when it was made: proposals are
  sent before rosters and admissions, on every connection. So the same holds after any change of
  the membership.
* Not proposed is what follows from the members' own state, for any master that a majority follows:
  a commit of a collective that all members of its view have reported done (done is never taken
  back), and an abort in a view that a ratified roster has closed. Once a roster closes the view,
  nothing follows from done reports any more; so commits that are not settled then are proposed
  before that roster is told.

State only: ``Ratification`` sends and counts.
"""

from __future__ import annotations

from itertools import takewhile

from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import OperationId, RoundId


class Proposals:
    """What was proposed in this term and is not settled, in order."""

    def __init__(self) -> None:
        self._open: dict[OperationId | RoundId, msg.Proposed] = {}
        self._last = 0

    def __contains__(self, key: OperationId | RoundId) -> bool:
        return key in self._open

    def add(
        self, final: msg.OperationEnded | msg.RoundClosed, expected: Expected = NOTHING_EXPECTED
    ) -> None:
        """Propose a final; ``expected``: of the group's shared state, once it is told."""
        self._last += 1
        if isinstance(final, msg.OperationEnded):
            proposed = msg.Proposed(self._last, final, None, expected)
            self._open[final.operation] = proposed
        else:
            self._open[final.round] = msg.Proposed(self._last, None, final)

    def settle(self, key: OperationId | RoundId) -> None:
        """Everybody concerned has acknowledged it: nobody will ask."""
        self._open.pop(key, None)

    def after(self, place: int) -> list[msg.Proposed]:
        """What a member lacks that has stored everything up to that place."""
        newest_first = reversed(self._open.values())
        return list(takewhile(lambda proposed: proposed.place > place, newest_first))[::-1]

    @property
    def last(self) -> int:
        """The place that a member has to have stored to lack nothing."""
        return next((proposed.place for proposed in reversed(self._open.values())), 0)
