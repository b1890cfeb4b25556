"""Finals that a majority of the members has to store before the master sends them.

A sole master has no such finals. Members that follow a standby may lead it to another decision,
before the first master notices their loss. So the master first *proposes* to all members each final
that another master could contradict. It sends the final once a majority follows the term of the
proposal and has stored it (``majority`` counts).

So there is only one outcome, as in Viewstamped Replication (Liskov & Cowling, 2012) and in Paxos:

* A successor needs a majority. So for each final that was sent, at least one member reports the
  proposal, and the successor adopts it. If no member reports a proposal, its final was not sent,
  and will not be: the majority ignores the lower term from now on.
* The successor removes members that have not reported, so no older proposal appears later.
* A member that knows a roster knows every proposal that was not settled when the roster was made.
  For that, proposals precede rosters and admissions on every connection. So the same holds after
  any change of the membership.
* A final needs no proposal if it follows from the members' own state. One such final is the commit
  of a collective that all members of its view have reported done, because done reports are final.
  The other one is an abort in a view that a ratified roster has closed. Once a roster closes a
  view, done reports no longer prove anything. So the master proposes unsettled commits before it
  sends that roster.

State only: ``Ratification`` sends and counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import OperationId, RoundId


class Proposals:
    """The proposals of this term that are not settled, in order."""

    def __init__(self) -> None:
        self._open: dict[OperationId | RoundId | int, msg.Proposed] = {}
        """By the subject of the decision, or by place if there is no decision."""
        self._last = 0

    def __contains__(self, key: OperationId | RoundId) -> bool:
        return key in self._open

    def add(
        self, final: msg.OperationEnded | msg.RoundClosed, expected: Expected = NOTHING_EXPECTED
    ) -> None:
        """Propose a final; ``expected``: the group's expected shared state after it."""
        self._last += 1
        if isinstance(final, msg.OperationEnded):
            proposed = msg.Proposed(self._last, final, None, expected)
            self._open[final.operation] = proposed
        else:
            self._open[final.round] = msg.Proposed(self._last, None, final)

    def ask(self) -> None:
        """Propose nothing, so that a majority shows that it follows this master."""
        self._last += 1
        self._open[self._last] = msg.Proposed(self._last, None, None)

    def answered(self) -> None:
        """Drop the proposals of nothing, because a majority has acknowledged them."""
        for key in [key for key in self._open if isinstance(key, int)]:
            del self._open[key]

    def settle(self, keys: Iterable[OperationId | RoundId]) -> None:
        """Drop proposals, because every member concerned has acknowledged their finals."""
        for key in keys:
            self._open.pop(key, None)

    def after(self, place: int) -> list[msg.Proposed]:
        """Return the proposals that a member lacks if it has stored all up to ``place``."""
        newest_first = reversed(self._open.values())
        return list(takewhile(lambda proposed: proposed.place > place, newest_first))[::-1]

    @property
    def last(self) -> int:
        """The place of the last proposal; a member that has stored it lacks none."""
        return next((proposed.place for proposed in reversed(self._open.values())), 0)
