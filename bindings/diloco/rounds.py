"""``Rounds``: the joint calls of one replica, in the order in which all members make them.

A round is: newcomers are admitted; if somebody has come, the shared state is synchronized; the
pseudo-gradients of one fragment are averaged; everybody takes the same outer step; the shared
state is synchronized again, so that newcomers can fetch it while the members go on training.

Nothing here waits, or knows a socket or a thread: :meth:`Rounds.run` is a generator that yields
what is to be done, and is sent what came of it, or thrown the error. The same text drives the
optimizer wrapper and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

from pccl.bindings.diloco.ledger import Ledger
from pccl.bindings.diloco.schedule import Schedule
from pccl.errors import Evicted, MasterLost, NotAdmitted, StateUnavailable, TooFewPeers
from pccl.inquiry import RemovalCause

PAUSE_S = 0.5
"""Between two looks for peers, while too few are there."""

WAITS_MAX = 1200
"""Such pauses, ten minutes together, in which replicas that have never been in the run wait for
somebody who has what it had got to, before that ends their training."""

LOSSES_MAX = 3
"""Times in a row that the master is lost, or refuses a replica that was cut off, before that ends
the training."""

STARVED_MAX = 40
"""Times in a row that no source gives the shared state, before that ends the training. Each time is
three attempts of some seconds, so a link that is down for five minutes ends nothing."""


# -- what is to be done --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connect:
    """Join the run; fetch the shared state meanwhile. Sent: ``Members``."""


@dataclass(frozen=True, slots=True)
class Update:
    """``update_topology``. Sent: ``Members``."""


@dataclass(frozen=True, slots=True)
class Sync:
    """``sync_shared_state``. Sent: ``Members`` that hold the same now.

    A replica that was in no run yet, and has loaded nothing, comes with revision 0; a run that has
    got beyond that does not go on from it.
    """


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for the next pseudo-gradient. Sent: a ``Contribution``, or None: no more come."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Average what the members contribute, over whoever is left. Sent: ``Average``."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing for a while. Sent: whether to give up, since no more work is to come.

    Attributes:
        seconds: how long.
        why: for people; empty: members are missing.
    """

    seconds: float
    why: str = ""


Effect = Connect | Update | Sync | Take | Reduce | Pause

# -- what comes of it ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Members:
    """Who is in the group.

    Attributes:
        peer: this replica's id.
        ids: of all, in ring order.
        is_whole: whether all replicas that consist of several peers are complete.
    """

    peer: int
    ids: tuple[int, ...]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Contribution:
    """A pseudo-gradient on its way into a round.

    Attributes:
        number: of the round.
        fragment: which part of the model.
        weight: work in it; 0.0: nothing was done.
        values: the pseudo-gradient, shape (n,), float32; the average afterwards: in a round it is
            not the memory in which the replica keeps its work. Whatever the driver reduces.
        entry: the entry into the run that it belongs to; older ones don't count.
    """

    number: int
    fragment: int
    weight: float
    values: Any = field(repr=False)
    entry: int


@dataclass(frozen=True, slots=True)
class Average:
    """What the members have contributed, averaged, is in ``Contribution.values``.

    Attributes:
        contributors: ids of those whose work is in it.
        total_weight: of all of them.
        tx_bytes: sent here.
        rx_bytes: received here.
    """

    contributors: tuple[int, ...]
    total_weight: float
    tx_bytes: int = 0
    rx_bytes: int = 0


# -- what the replica is told ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entered:
    """The replica holds the outer parameters of the run, for the first time or again.

    Attributes:
        entry: number of the entry, from 1.
        number: of the round before which they are.
        is_open: the members are in that round; a contribution of nothing is made for this replica.
        applied: rounds of the entry before, not merged yet, in which this replica's work is. That
            of the others is not in the outer parameters.
        corrected: fragments whose last reduce has ended otherwise than this replica had seen. What
            compression has left out is not what it believes.
    """

    entry: int
    number: int
    is_open: bool
    applied: tuple[int, ...]
    corrected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundCommitted:
    """A round is over; ``contribution.values`` are the outer parameters of its fragment now."""

    contribution: Contribution
    average: Average
    mean_norm: float
    """L2 norm of the average."""


Notice = Entered | RoundCommitted | Members
Steps = Generator[Effect, Any, Any]


class Outer(Protocol):
    """The outer parameters of one replica."""

    @property
    def ledger(self) -> Ledger:
        """Shared, like the parameters."""
        ...

    def nothing(self, fragment: int) -> Any:
        """A contribution of zeros, in memory of its own."""
        ...

    def apply(self, fragment: int, average: Any) -> float:
        """Take the outer step of a fragment; return the L2 norm of the average."""
        ...

    def copy(self, fragment: int, target: Any) -> None:
        """Copy the parameters of a fragment into something that was a contribution."""
        ...

    def touch(self, fragment: int | None) -> None:
        """The ledger has changed, and the fragment, if one is named."""
        ...


class Rounds:
    """One replica.

    Args:
        schedule: which fragment is whose turn.
        outer: its outer parameters.
        notify: told what concerns the training, while the outer parameters do not change.
        min_peers: rounds wait until so many members are there.
    """

    def __init__(
        self,
        schedule: Schedule,
        outer: Outer,
        notify: Callable[[Notice], None],
        min_peers: int = 1,
    ) -> None:
        self._schedule = schedule
        self._outer = outer
        self._notify = notify
        self._min_peers = min_peers
        self._entry = 0
        self._peer = 0
        self._synced: frozenset[int] = frozenset()
        """Ids of those who held the same after the last synchronization."""
        self._members: tuple[int, ...] = ()
        self._doubt: tuple[int, int] | None = None
        """The round that is being reduced with work of this replica, and its id in it."""
        self._committed: list[tuple[int, int]] = []
        """Rounds of this entry with this replica's work, the last few, and its id in each."""
        self._kept = 2 * schedule.fragments
        """As many may not be merged yet: two of each fragment, where the last rounds begin."""
        self._losses = 0

    def run(self) -> Generator[Effect, Any, None]:
        """Everything, from joining to leaving.

        Raises:
            PCCLError: what can't be made good by joining again.
        """
        yield from self._enter(Connect())
        while True:
            contribution: Contribution | None = yield Take()
            if contribution is None:
                return
            if contribution.entry != self._entry:
                continue  # it was taken before this replica was cut off
            try:
                yield from self._round(contribution)
            except (Evicted, MasterLost) as error:
                self._check_can_rejoin(error)
                yield from self._enter(Update())

    @property
    def doubt(self) -> int | None:
        """The round that is being reduced with work of this replica, or was when it was cut off."""
        return None if self._doubt is None else self._doubt[0]

    # -- entering ----------------------------------------------------------------------------------

    def _enter(self, how: Connect | Update) -> Steps:
        """Come into the run, until the round is over that the members are in."""
        while True:
            try:
                if not (yield from self._gather(how)):
                    return
                how = Update()
                if not (yield from self._sync()):
                    return
                is_open = self._tell_entry()
                if is_open:
                    yield from self._contribute(self._nothing())
            except (Evicted, MasterLost, NotAdmitted) as error:
                if isinstance(how, Connect) and not isinstance(error, Evicted):
                    raise
                self._check_can_rejoin(error)
                how = Update()
            else:
                return

    def _tell_entry(self) -> bool:
        # Also what was committed is looked up: a run that goes on without all who were in a round
        # goes on from before it.
        ledger = self._outer.ledger
        asked = self._committed if self._doubt is None else [*self._committed, self._doubt]
        applied = [number for number, peer in asked if ledger.has_applied(number, peer)]
        believed = {number for number, _ in self._committed}
        corrected = {self._schedule.fragment(n) for n in believed.symmetric_difference(applied)}
        self._doubt = None
        self._committed.clear()
        self._entry += 1
        self._notify(
            Entered(
                self._entry,
                ledger.number,
                ledger.is_open,
                tuple(applied),
                tuple(sorted(corrected)),
            )
        )
        return ledger.is_open

    def _nothing(self) -> Contribution:
        number = self._outer.ledger.number
        fragment = self._schedule.fragment(number)
        return Contribution(number, fragment, 0.0, self._outer.nothing(fragment), self._entry)

    def _check_can_rejoin(self, error: Evicted | MasterLost | NotAdmitted) -> None:
        """Raise what joining again would only repeat."""
        self._losses += not isinstance(error, Evicted)
        is_hopeless = isinstance(error, Evicted) and error.cause == RemovalCause.STATE_CONFLICT
        if is_hopeless or self._losses >= LOSSES_MAX:
            raise error

    # -- a round -----------------------------------------------------------------------------------

    def _round(self, contribution: Contribution) -> Steps:
        if not (yield from self._gather(Update())):
            return
        ledger = self._outer.ledger
        is_ours = ledger.number == contribution.number
        if not self._synced.issuperset(self._members):
            ledger.open()  # so whoever has come knows that a round follows
            self._outer.touch(None)
            if not (yield from self._sync()):
                return
            is_ours = ledger.is_open and ledger.number == contribution.number
        if is_ours:
            yield from self._contribute(contribution)
        elif self._tell_entry():  # it was the others' state that was elected
            yield from self._contribute(self._nothing())

    def _gather(self, how: Connect | Update) -> Steps:
        """Admit newcomers until there are enough; return False if it is to be given up.

        All members see alike whether there are enough.
        """
        while True:
            members: Members = yield how
            self._note(members)
            if len(members.ids) >= self._min_peers and members.is_whole:
                self._losses = 0
                return True
            if (yield Pause(PAUSE_S)):
                return False
            how = Update()

    def _sync(self) -> Steps:
        """Synchronize; return False if it is to be given up."""
        waits = starved = 0
        while True:
            try:
                members: Members = yield Sync()
            except StateUnavailable as error:  # its holders are out of reach, perhaps not for long
                if error.is_for_all:
                    waits += 1
                else:
                    starved += 1
                if waits > WAITS_MAX or starved == STARVED_MAX:
                    raise
                if (yield Pause(PAUSE_S, error.reason)):
                    return False
                # A holder that comes back has to be admitted, by all.
                if error.is_for_all and not (yield from self._gather(Update())):
                    return False
            else:
                break
        self._synced = frozenset(members.ids)
        self._note(members)
        return True

    def _note(self, members: Members) -> None:
        self._peer = members.peer
        if members.ids != self._members:
            self._members = members.ids
            self._notify(members)

    def _contribute(self, contribution: Contribution) -> Steps:
        if contribution.weight:
            self._doubt = contribution.number, self._peer
        try:
            average: Average = yield Reduce(contribution)
        except TooFewPeers:  # alone: what is contributed is the average
            average = Average((self._peer,), contribution.weight)
        norm = self.finish(contribution.fragment, contribution.values, average)
        self._outer.copy(contribution.fragment, contribution.values)
        self._doubt = None
        if contribution.weight:
            kept = [*self._committed, (contribution.number, self._peer)]
            self._committed = kept[-self._kept :]
        self._notify(RoundCommitted(contribution, average, norm))
        yield from self._sync()  # newcomers fetch what it is now

    def finish(self, fragment: int, values: Any, average: Average) -> float:
        """What all do with an average, newcomers that only watch included.

        Where nobody has done any work there is nothing to apply.

        Args:
            fragment: which.
            values: the average itself.
            average: whose it is.

        Returns:
            The L2 norm of the average.
        """
        norm = self._outer.apply(fragment, values) if average.total_weight else 0.0
        self._outer.ledger.close(average.contributors)
        self._outer.touch(fragment)
        return norm
