"""``Rounds``: the joint calls of one replica, in the order in which all members make them.

In a round, the members admit newcomers, and synchronize the shared state if a newcomer came. They
average the pseudo-gradients of one fragment, and all take the same outer step. Then they
synchronize the shared state again, so that newcomers can fetch it while the members train.

This module never waits, and uses no socket or thread. :meth:`Rounds.run` is a generator: it yields
an effect, and its driver sends back the result, or throws the error. The optimizer wrapper and the
simulator both drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.bindings.diloco.ledger import ROUNDS_KEPT, Ledger
from pccl.bindings.diloco.round_effects import Average as Average
from pccl.bindings.diloco.round_effects import Connect as Connect
from pccl.bindings.diloco.round_effects import Contribution as Contribution
from pccl.bindings.diloco.round_effects import Effect as Effect
from pccl.bindings.diloco.round_effects import Entered as Entered
from pccl.bindings.diloco.round_effects import Members as Members
from pccl.bindings.diloco.round_effects import NewcomersWait as NewcomersWait
from pccl.bindings.diloco.round_effects import Notice as Notice
from pccl.bindings.diloco.round_effects import Pause as Pause
from pccl.bindings.diloco.round_effects import Reduce as Reduce
from pccl.bindings.diloco.round_effects import ReduceBuffers as ReduceBuffers
from pccl.bindings.diloco.round_effects import RoundCommitted as RoundCommitted
from pccl.bindings.diloco.round_effects import Sync as Sync
from pccl.bindings.diloco.round_effects import Take as Take
from pccl.bindings.diloco.round_effects import Update as Update
from pccl.bindings.diloco.schedule import Schedule
from pccl.errors import (
    Evicted,
    MasterLost,
    NotAdmitted,
    ResyncRequired,
    StateUnavailable,
    TooFewPeers,
)
from pccl.inquiry import RemovalCause

PAUSE_S = 0.5
"""Pause between two checks for peers, while fewer than ``min_peers`` are in the group."""

NEWCOMERS_POLL_S = 0.2
"""How often a replica that has nothing to contribute looks for newcomers to admit."""

WAITS_MAX = 1200
"""Number of pauses, ten minutes in all, for which replicas wait for a peer that has the run's
parameters. Then StateUnavailable ends their training."""

LOSSES_MAX = 3
"""Number of consecutive losses that end the training. A loss is a lost master, or its refusal
of a replica that was cut off."""

STARVED_MAX = 40
"""Number of consecutive synchronizations without a usable source that end the training. Each makes
three attempts of some seconds, so training survives a link that is down for five minutes."""


Steps = Generator[Effect, Any, Any]


class Outer(Protocol):
    """The outer parameters of one replica."""

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run, which is shared like the parameters."""
        ...

    @property
    def samples(self) -> SampleLedger | None:
        """The ledger of the samples, if peers get their samples from the run."""
        ...

    def offer(self) -> None:
        """Copy what only newcomers receive into the shared state."""
        ...

    def nothing(self, fragment: int) -> Any:
        """Return a new contribution of zeros."""
        ...

    def no_buffers(self, fragment: int) -> Any:
        """Return a new contribution without buffers; None: none go with this fragment."""
        ...

    def apply(self, fragment: int, average: Any, buffers: Any) -> tuple[float, float]:
        """Take the outer step of a fragment, and load the sum of the buffers, unless it is None.

        Returns the L2 norms of the average and of the step.
        """
        ...

    def common_buffers(self) -> Any:
        """Return a copy of the common buffers."""
        ...

    def copy(self, fragment: int, target: Any) -> Any:
        """Copy the parameters of a fragment into ``target``, the values of a contribution.

        Returns a copy of the optimizer's state, if local models preview outer steps, else None.
        """
        ...

    def touch(self, fragment: int | None) -> None:
        """Record that the ledger has changed, and the fragment unless it is None."""
        ...


class Rounds:
    """Decides on the joint calls of one replica.

    Args:
        schedule: assigns fragments to rounds.
        outer: the outer parameters of the replica.
        notify: called with each notice; the outer parameters do not change during the call.
        min_peers: number of members that a round waits for.
        has_quorum: whether rounds go on without late members. Then members admit newcomers also
            between two rounds, and a newcomer takes part in the next one.
    """

    def __init__(
        self,
        schedule: Schedule,
        outer: Outer,
        notify: Callable[[Notice], None],
        min_peers: int = 1,
        *,
        has_quorum: bool = False,
    ) -> None:
        self._has_quorum = has_quorum
        self._has_begun = False
        """Whether the last ``update_topology`` brought no newcomers, so that a round follows."""
        self._schedule = schedule
        self._outer = outer
        self._notify = notify
        self._min_peers = min_peers
        self._entry = self._peer = 0
        self._synced: frozenset[int] = frozenset()
        """Ids of the members whose states were equal after the last synchronization."""
        self._members: tuple[int, ...] = ()
        self._is_offered = False
        """Whether newcomers that have left may still come again for the last offer."""
        self._doubt: tuple[int, int, bytes] | None = None
        """Round that is being reduced with work of this replica, and the replica's id and run."""
        self._committed: list[tuple[int, int, bytes]] = []
        """Likewise the last rounds of this entry with this replica's work."""
        self._kept = 2 * schedule.fragments
        """Most rounds that may be unmerged: two of each fragment, because of final rounds."""
        self._losses = 0
        self._must_reset = False
        """Whether the guard has excluded work, and the replica has not been told."""

    def run(self) -> Generator[Effect, Any, None]:
        """Make all joint calls, from joining to leaving.

        Raises:
            PCCLError: a failure from which joining again cannot recover.
        """
        yield from self._enter(Connect())
        while True:
            may_admit = self._has_quorum and not self._has_begun
            contribution: Contribution | NewcomersWait | None = yield Take(may_admit)
            if contribution is None:
                return
            how: Connect | Update = Update()
            try:
                try:
                    if isinstance(contribution, NewcomersWait):
                        yield from self._admit()
                    elif contribution.entry == self._entry:
                        yield from self._round(contribution)
                    # else it dates from before this replica was cut off
                except ResyncRequired:
                    yield from self._catch_up()
                continue
            except ResyncRequired:  # no member offers the state that this replica needs
                how = Connect(again=True)
            except (Evicted, MasterLost) as error:
                self._check_can_rejoin(error)
            del contribution  # its memory is free while this replica joins again
            yield from self._enter(how)

    @property
    def doubt(self) -> int | None:
        """Round with work of this replica whose reduce is open, or was open when it was cut off."""
        return None if self._doubt is None else self._doubt[0]

    # -- entering ----------------------------------------------------------------------------------

    def _enter(self, how: Connect | Update) -> Steps:
        """Join the run, and take part in the round that the members have open, if any."""
        while True:
            try:
                if not (yield from self._gather(how)):
                    return
                how = Update()
                self._give_leases()
                if not (yield from self._sync()):
                    return
                yield from self._follow()
            except ResyncRequired:
                how = Connect(again=True)
            except (Evicted, MasterLost, NotAdmitted) as error:
                if isinstance(how, Connect) and not how.again and not isinstance(error, Evicted):
                    raise
                self._check_can_rejoin(error)
                how = Update()
            else:
                return

    def _catch_up(self) -> Steps:
        """Take the members' state: this replica was late for too long."""
        if (yield from self._sync()):
            yield from self._follow()

    def _follow(self) -> Steps:
        """Tell the replica where the members are, and take part in the round that they opened."""
        self._has_begun = False
        if self._tell_entry():
            yield from self._contribute(self._nothing())

    def _tell_entry(self) -> bool:
        # Look up committed rounds, too: a run that loses all contributors of one continues from
        # before it.
        ledger = self._outer.ledger
        asked = self._committed if self._doubt is None else [*self._committed, self._doubt]
        applied = [mine[0] for mine in asked if ledger.has_applied(*mine)]
        believed = {number for number, *_ in self._committed}
        corrected = {self._schedule.fragment(n) for n in believed.symmetric_difference(applied)}
        self._doubt, self._committed = None, []
        self._is_offered = False
        self._entry += 1
        self._notify(
            Entered(
                self._entry,
                ledger.number,
                ledger.is_open,
                tuple(applied),
                tuple(sorted(corrected)),
                self._must_reset,
            )
        )
        self._must_reset = False
        return ledger.is_open

    def _nothing(self) -> Contribution:
        number = self._outer.ledger.number
        fragment = self._schedule.fragment(number)
        values, buffers = self._outer.nothing(fragment), self._outer.no_buffers(fragment)
        return Contribution(number, fragment, 0.0, values, self._entry, buffers)

    def _check_can_rejoin(self, error: Evicted | MasterLost | NotAdmitted) -> None:
        """Raise ``error`` if joining again cannot help, or LOSSES_MAX is reached.

        If the master is gone, this peer has looked for it for ``master_lost_s`` already.
        """
        self._losses += not isinstance(error, Evicted)
        is_hopeless = isinstance(error, Evicted) and error.cause == RemovalCause.STATE_CONFLICT
        is_hopeless |= isinstance(error, MasterLost) and error.is_gone
        if is_hopeless or self._losses >= LOSSES_MAX:
            raise error

    # -- a round -----------------------------------------------------------------------------------

    def _round(self, contribution: Contribution) -> Steps:
        ledger = self._outer.ledger
        if self._has_quorum:
            while not self._has_begun:
                if not (yield from self._admit()):
                    return
                if contribution.entry != self._entry:
                    return  # the election chose another state: it calls again with work for that
            self._has_begun = False
            is_ours = ledger.number == contribution.number
        else:
            if not (yield from self._gather(Update())):
                return
            is_ours = ledger.number == contribution.number
            if frozenset(self._members) - self._synced:
                ledger.open()  # tells newcomers that a round follows
                if not (yield from self._offer()):
                    return
                is_ours = ledger.is_open and ledger.number == contribution.number
        if is_ours:
            yield from self._contribute(contribution)
        else:  # the election chose the state of other members
            yield from self._follow()

    def _admit(self) -> Steps:
        """Update the members; newcomers get the state, and no round follows. False: give up.

        If there are none, the round has begun: each member goes on with its contribution, once it
        has one. All members see the same newcomers.
        """
        if not (yield from self._gather(Update())):
            return False
        if not frozenset(self._members) - self._synced:
            self._has_begun = True
            return True
        number = self._outer.ledger.number
        if not (yield from self._offer()):
            return False
        if self._outer.ledger.number != number:  # the election chose the state of other members
            yield from self._follow()
        return True

    def _offer(self) -> Steps:
        """Synchronize with newcomers; return False to give up."""
        newcomers = frozenset(self._members) - self._synced
        self._give_leases()
        self._outer.touch(None)
        if not self._is_offered:
            self._outer.offer()
        self._is_offered = True
        if not (yield from self._sync()):
            return False
        # A newcomer that was too slow comes again, and still has pieces of the offer.
        self._is_offered = not self._synced.issuperset(newcomers)
        return True

    def _give_leases(self) -> None:
        """Give samples to newcomers, before the synchronization with them; all members do."""
        if self._outer.samples is not None:
            self._outer.samples.admit(frozenset(self._members) - self._synced)
            self._outer.touch(None)

    def _gather(self, how: Connect | Update) -> Steps:
        """Admit newcomers until the group has enough members; return False to give up.

        All members see the same members, so all make the same decision.
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
        """Synchronize the shared state; return False to give up."""
        waits = starved = 0
        while True:
            try:
                members: Members = yield Sync()
            except StateUnavailable as error:  # peers that have it may become reachable again
                if error.is_for_all:
                    waits += 1
                else:
                    starved += 1
                if waits > WAITS_MAX or starved == STARVED_MAX:
                    raise
                if (yield Pause(PAUSE_S, error.reason)):
                    return False
                # All members must admit a peer that comes back with the state.
                if error.is_for_all and not (yield from self._gather(Update())):
                    return False
            else:
                break
        self._synced = frozenset(members.ids)
        self._outer.ledger.run = members.run
        self._note(members)
        return True

    def _note(self, members: Members) -> None:
        self._peer = members.peer
        if members.ids != self._members:
            self._members = members.ids
            self._notify(members)

    def _contribute(self, contribution: Contribution) -> Steps:
        if contribution.buffers is not None:
            with suppress(TooFewPeers):  # alone: the sum is the own contribution
                leads = self._peer == min(self._members)
                yield ReduceBuffers(contribution.buffers, leads)
        mine = contribution.number, self._peer, self._outer.ledger.run
        self._doubt = mine if contribution.weight else None
        try:
            average: Average = yield Reduce(contribution)
        except TooFewPeers:  # alone: the average is the own contribution
            shares = ((self._peer, contribution.weight),)
            average = Average((self._peer,), contribution.weight, shares=shares)
        except ResyncRequired:  # the members have reduced without this replica
            self._doubt = None
            raise
        fragment, values = contribution.fragment, contribution.values
        norms = self.finish(fragment, values, average, contribution.buffers)
        state = self._outer.copy(fragment, values)
        if contribution.buffers is not None:
            contribution = replace(contribution, buffers=self._outer.common_buffers())
        self._doubt = None
        if average.is_excluded:
            self._must_reset = True
            yield from self._sync()
            yield from self._follow()
            return
        if not average.took_part:
            contribution = replace(contribution, weight=0.0)
        if contribution.weight:
            self._committed = [*self._committed, mine][-self._kept :]
        self._notify(RoundCommitted(contribution, average, norms, state))
        has_synced = yield from self._sync()  # newcomers can now fetch the new state
        ledger = self._outer.ledger
        if has_synced and (ledger.is_open or ledger.number != contribution.number + 1):
            yield from self._follow()  # this replica was late, and the members are further

    def finish(
        self, fragment: int, values: Any, average: Average, buffers: Any = None
    ) -> tuple[float, float]:
        """Take the outer step with an average, as all members and replaying newcomers do.

        If no member has done any work, the parameters stay as they are.

        Args:
            fragment: number of the fragment.
            values: values of the average.
            average: contributors and weight of the average.
            buffers: sum of the buffers; None: none go with this fragment.

        Returns the L2 norms of the average and of the step.
        """
        norms = self._outer.apply(fragment, values, buffers) if average.total_weight else (0.0, 0.0)
        workers = average.contributors if average.workers is None else average.workers
        self._outer.ledger.close(workers)
        if self._outer.samples is not None and fragment == 0:
            # Without a quorum, a member that is not in the outcome was cut off.
            patience = ROUNDS_KEPT if self._has_quorum else 0
            self._outer.samples.close(dict(average.shares), patience)
        self._outer.touch(fragment)
        return norms
