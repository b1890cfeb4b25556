"""``ReplicaCalls``: turns what ``Rounds`` asks for into calls of a communicator.

It never waits, and uses no thread: :meth:`ReplicaCalls.run` is a generator like ``Rounds.run``. The
optimizer wrapper drives it with the blocking communicator, and the simulated storm with tasks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

import pccl
from pccl.bindings.compression import Compression
from pccl.bindings.data.reader import PeerLease, lease_of
from pccl.bindings.diloco.ledger import Revisions
from pccl.bindings.diloco.model.averaging import RadialFragment
from pccl.bindings.diloco.model.outer import OuterParameters, length
from pccl.bindings.diloco.rounds import (
    Average,
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    NewcomersWait,
    Notice,
    Pause,
    Reduce,
    ReduceBuffers,
    RoundCommitted,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import Schedule
from pccl.checks import check_quorum
from pccl.descriptors import check_guard
from pccl.errors import MembershipError, NotConnected, TooFewPeers


@dataclass(frozen=True, slots=True)
class GroupSynced:
    """A synchronization has moved data to or from this replica."""

    info: pccl.SharedStateSyncInfo
    seconds: float


@dataclass(frozen=True, slots=True)
class JointNews:
    """An event of the joint calls, for the training loop.

    Attributes:
        what: the event.
        at_s: time of the event, on the clock of the replica.
        outer: with ``Entered``: copies of the outer parameters, by fragment.
        buffers: with ``Entered``: copies of the common buffers.
        lease: with ``Entered`` and ``RoundCommitted``: the samples of this peer, if it gets them
            from the run.
    """

    what: Notice | GroupSynced
    at_s: float
    outer: list[torch.Tensor] = field(default_factory=lambda: [])
    buffers: list[torch.Tensor] = field(default_factory=lambda: [])
    lease: PeerLease | None = None


@dataclass(frozen=True, slots=True)
class QuorumOptions:
    """The quorum of the joint calls.

    Attributes:
        members: ``quorum`` of ``Communicator.all_reduce``; None: all members.
        grace_s: as there.
    """

    members: int | float | None = None
    grace_s: float | str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a joint call."""
        return {} if self.members is None else {"quorum": self.members, "grace_s": self.grace_s}


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A call of a method of the communicator, for the driver to make."""

    method: str
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=lambda: {})


class MemberSource(Protocol):
    """What a communicator tells without waiting."""

    @property
    def peer_id(self) -> int:
        """Id of this peer; raises NotConnected before it is a member."""
        ...

    def members(self) -> Sequence[Any]:
        """Return the members of the group, each with its ``peer_id``."""
        ...

    def get_attribute(self, attribute: pccl.Attribute | str) -> int:
        """Return a size of the run."""
        ...


Calls = Generator[ReplicaCall | Take | Pause, Any, Any]


class ReplicaCalls:
    """The joint calls of one replica.

    Args:
        comm: communicator of the run, connected or not; the driver makes its calls.
        outer: the outer parameters, which are the shared state.
        schedule: assigns fragments to rounds.
        min_peers: number of members that every round waits for.
        compression: wire format and error feedback of the reduces.
        shards: number of peers in a replica; the peers with the same shard form a group.
        guard: guard of the reduces; None: no guard.
        quorum: quorum of the calls, and its grace; None: all calls wait for all members.
        clock: returns the current time in seconds.
        radial: for each fragment, its radial-directional averages; empty: rounds take the mean.
        publish_every: outer steps between two published versions; 0: nothing is published.

    Attributes:
        tell: called with each event; the driver sets it before ``run``.
        has_entered: whether the replica has been in the run.
    """

    def __init__(
        self,
        comm: MemberSource,
        outer: OuterParameters,
        schedule: Schedule,
        min_peers: int,
        compression: Compression,
        shards: int = 1,
        guard: pccl.Guard | str | None = None,
        quorum: QuorumOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
        radial: Sequence[RadialFragment] = (),
        publish_every: int = 0,
    ) -> None:
        self.tell: Callable[[JointNews], None]
        self.has_entered = False
        self._comm = comm
        self._outer = outer
        self._min_peers = min_peers
        self._compression = compression
        self._shards = shards
        self._guard = guard
        self._quorum = {} if quorum is None else quorum.options
        self._clock = clock
        self._radial = tuple(radial)
        self._publish_rounds = publish_every * len(outer.fragments)
        self._must_publish = False
        checked = None if guard is None else check_guard(guard)
        self._excludes_infinite = (
            checked is not None and checked.not_finite is pccl.GuardAction.EXCLUDE
        )
        has_quorum = bool(self._quorum)
        self._rounds = Rounds(schedule, outer, self._notify, min_peers, has_quorum=has_quorum)
        self._revisions = Revisions(outer.ledger)
        self._buffers_tag = len(outer.fragments) + 1
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None
        """The pseudo-gradient that was taken last, and the memory for its average."""
        self._replayed: torch.Tensor | None = None
        """Sum of the buffers of the round that this newcomer replays."""
        self._replayed_lengths: torch.Tensor | None = None
        """Likewise the mean lengths."""

    @property
    def doubt(self) -> int | None:
        """Round with work of this replica whose reduce is open, or was open when it was cut off."""
        return self._rounds.doubt

    @property
    def has_quorum(self) -> bool:
        """Whether rounds go on without members that are late."""
        return bool(self._quorum)

    def resume(self) -> None:
        """Record that the outer parameters are those of a checkpoint, if they have a revision."""
        if self._outer.state.revision:
            self._revisions.synced(self._outer.state.revision)

    def run(self) -> Calls:
        """Make all joint calls, from joining to leaving.

        The driver makes each call, and sends back its result or throws its ``PCCLError``. To
        ``Take`` it sends one of the results of that effect; to a ``Pause``, whether the
        replica leaves.

        Raises:
            PCCLError: a failure from which joining again cannot recover.
        """
        steps = self._rounds.run()
        try:
            effect = next(steps)
            while True:
                try:
                    outcome = yield from self._carry_out(effect)
                except pccl.PCCLError as error:
                    loss = _loss_behind(error)
                    if isinstance(loss, MembershipError):
                        self._lent = None  # the contribution is dropped: this peer joins again
                    effect = steps.throw(loss)
                else:
                    effect = steps.send(outcome)
        except StopIteration:
            return

    def missing(self, pause: Pause) -> str:
        """Return for a person what the run waits for in a pause."""
        if pause.why:
            return (
                f"the run's outer parameters: {pause.why}. If all peers that had them have left "
                "and will not return, start another master"
            )
        shards = "" if self._shards == 1 else ", and replicas must be complete"
        there = len(self._comm.members())
        return f"peers: the group has {there} members, min_peers is {self._min_peers}{shards}"

    def _carry_out(self, effect: Effect) -> Calls:
        match effect:
            case Connect(again):
                yield from self._connect(again=again)
                return self._members()
            case Update():
                yield ReplicaCall("update_topology", options=self._quorum)
                return self._members()
            case Sync():
                if self._must_publish:  # the parameters are still those of the round
                    self._must_publish = False
                    with suppress(NotConnected):  # then the synchronization says why
                        yield ReplicaCall("publish", (self._outer.published(),))
                return (yield from self._sync())
            case Take():
                return self._lend((yield effect))
            case Reduce(contribution):
                return (yield from self._reduce(contribution))
            case ReduceBuffers(sums, leads):
                return (yield from self._reduce_buffers(sums, leads=leads))
            case Pause():
                return (yield effect)

    def _connect(self, *, again: bool) -> Calls:
        is_connected = not again
        try:
            _ = self._comm.peer_id
        except NotConnected:
            is_connected = False
        if not is_connected:
            # A replay would overwrite a state that may be newer than that of the members now.
            options = {
                "min_peers": self._min_peers,
                "shared_state": self._outer.state,
                "on_reduction": None if again else self._replay,
            }
            yield ReplicaCall("connect", options=options)

    def _sync(self) -> Calls:
        state = self._outer.state
        state.revision = self._revisions.next()
        began_s = self._clock()
        options = {"resume": "advanced", **self._quorum}
        info: pccl.SharedStateSyncInfo = yield ReplicaCall("sync_shared_state", (state,), options)
        self._revisions.synced(info.revision)
        if info.tx_bytes or info.rx_bytes:
            self._notify(GroupSynced(info, self._clock() - began_s))
        assert state.lineage is not None
        # Late members synchronize later.
        ids = self._members().ids if self._quorum else info.members
        return Members(self._comm.peer_id, ids, run=state.lineage.run)

    def _lend(
        self, contribution: Contribution | NewcomersWait | None
    ) -> Contribution | NewcomersWait | None:
        if not isinstance(contribution, Contribution):
            return contribution
        fragment, work = self._outer.fragments[contribution.fragment], contribution.values
        fragment.copies.wait()
        norm = length(work)
        if contribution.buffers is not None and not math.isfinite(norm):
            contribution.buffers.zero_()  # no contribution: the model is broken
        # The training loop may need the work again, so its average gets memory of its own.
        self._lent = work, fragment.empty()
        return replace(contribution, values=self._lent[1], norm=norm)

    def _reduce(self, contribution: Contribution) -> Calls:
        lent, self._lent = self._lent, None
        average: torch.Tensor = contribution.values
        if lent is not None and lent[1] is average:
            work = lent[0]
        else:  # this replica contributes nothing
            assert not contribution.weight, "work counts as it was taken"
            work = _zeros_like(average)
        infos: list[pccl.ReduceInfo]
        try:
            if self._radial:
                infos = yield from self._reduce_radially(contribution, work, average)
            else:
                infos = [(yield from self._mean(contribution, work, average, guard=self._guard))]
        except TooFewPeers:
            average.copy_(work)
            if not self._excludes_infinite or bool(torch.isfinite(work).all()):
                raise
            shares = ((self._comm.peer_id, 0.0),)
            return Average((), 0.0, is_excluded=bool(contribution.weight), shares=shares)
        info = infos[-1]
        excluded = {peer for one in infos for peer in one.excluded}
        return Average(
            tuple(peer for peer in info.contributors if peer not in excluded),
            info.total_weight or 0.0,
            sum(one.tx_bytes for one in infos),
            sum(one.rx_bytes for one in infos),
            self._comm.peer_id in excluded,
            _workers(info),
            torch.dot(work, average).item() if contribution.weight else math.nan,
            1.0 if self._radial else _replicas(info.weights),
            all(one.took_part for one in infos),
            _shares(info),
        )

    def _reduce_radially(
        self, contribution: Contribution, work: torch.Tensor, average: torch.Tensor
    ) -> Calls:
        """Reduce the lengths, with the guard, then the directions of the members in them."""
        radial, weight = self._radial[contribution.fragment], contribution.weight
        lengths = radial.lengths(work) if weight else radial.no_lengths()
        mean = torch.empty_like(lengths)
        first: pccl.ReduceInfo = yield self._all_reduce(
            lengths,
            mean,
            op=pccl.ReduceOp.AVG,
            tag=self._buffers_tag + 1 + contribution.fragment,
            weight=weight,
            guard=self._guard,
        )
        if not first.took_part or self._comm.peer_id in first.excluded:
            weight = 0.0
        directions = _zeros_like(average)
        if weight:
            radial.directions(work, lengths, directions)
        known = replace(contribution, weight=weight)
        second = yield from self._mean(known, directions, average, guard=None)
        radial.combine(average, mean)
        return [first, second]

    def _mean(
        self,
        contribution: Contribution,
        values: torch.Tensor,
        average: torch.Tensor,
        *,
        guard: pccl.Guard | str | None,
    ) -> Calls:
        # A contribution without work skips error feedback.
        name = self._name(contribution.fragment) if contribution.weight else None
        return (
            yield self._all_reduce(
                values,
                average,
                op=pccl.ReduceOp.AVG,
                tag=contribution.fragment + 1,
                quantization_options=self._compression.options(name),
                weight=contribution.weight,
                guard=guard,
            )
        )

    def _all_reduce(
        self, values: torch.Tensor, result: torch.Tensor, **options: Any
    ) -> ReplicaCall:
        options = {**options, "observable": True, "retry": True, **self._quorum}
        return ReplicaCall("all_reduce", (values, result), options)

    def _reduce_buffers(self, sums: torch.Tensor, *, leads: bool) -> Calls:
        if not leads:
            self._outer.buffers.follow(sums)
        result = torch.empty_like(sums) if self._quorum else sums
        yield self._all_reduce(sums, result, op=pccl.ReduceOp.SUM, tag=self._buffers_tag)
        if result is not sums:
            sums.copy_(result)

    def _replay(self, seen: pccl.ObservedReduction) -> None:
        """Take the outer step of a round of the members, while waiting for admission."""
        values = torch.as_tensor(seen.values)
        if seen.tag == self._buffers_tag:
            self._replayed = values
            return
        if seen.tag > self._buffers_tag:
            self._replayed_lengths = values
            return
        if self._radial:
            assert self._replayed_lengths is not None, "lengths come before directions"
            self._radial[seen.tag - 1].combine(values, self._replayed_lengths)
        buffers = self._replayed if seen.tag == len(self._outer.fragments) else None
        self._replayed = None
        total, shares = seen.total_weight or 0.0, _shares(seen)
        average = Average(seen.contributors, total, workers=_workers(seen), shares=shares)
        self._rounds.finish(seen.tag - 1, values, average, buffers)

    def _members(self) -> Members:
        comm = self._comm
        return Members(comm.peer_id, tuple(one.peer_id for one in comm.members()), self._is_whole)

    @property
    def _is_whole(self) -> bool:
        """Whether each replica has all its shards: all groups exist and have equal sizes."""
        if self._shards == 1:
            return True
        peers = self._comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)
        largest = self._comm.get_attribute(pccl.Attribute.LARGEST_PEER_GROUP_WORLD_SIZE)
        return peers == self._shards * largest

    def _name(self, fragment: int) -> str:
        """Return the name of a fragment's residuals."""
        return f"{'directions' if self._radial else 'fragment'} {fragment}"

    def _notify(self, notice: Notice | GroupSynced) -> None:
        outer: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        if isinstance(notice, Entered):
            if not self.has_entered and self._outer.inner is not None:  # the training loop waits
                self._outer.inner.entered(is_late=bool(notice.number or notice.is_open))
            self.has_entered = True
            self._lent = None
            outer = [fragment.copy() for fragment in self._outer.fragments]
            buffers = self._outer.buffers.copies()
            for number in notice.corrected:
                self._compression.feedback.forget(self._name(number))
        if isinstance(notice, RoundCommitted) and self._publish_rounds:
            self._must_publish = self._outer.ledger.number % self._publish_rounds == 0
        samples, lease = self._outer.samples, None
        if samples is not None and isinstance(notice, Entered | RoundCommitted):
            lease = lease_of(samples, self._comm.peer_id)
        self.tell(JointNews(notice, self._clock(), outer, buffers, lease))


def agreed_settings(
    guard: pccl.Guard | str, quorum: int | float | None, grace_s: float | str
) -> str:
    """Check settings of the calls that are equal on all members, and return those not usual.

    Members compare the text when one joins. Otherwise the first reduce would fail for all of them.

    Raises:
        TypeError, ValueError: a setting cannot be used; the message says why.
    """
    checked, needed = check_guard(guard), check_quorum(quorum, grace_s)
    is_usual = checked == check_guard(pccl.Guard())
    text = "" if is_usual else f", guard {'off' if checked is None else checked}"
    return text if needed is None else f"{text}, {needed}"


def _replicas(weights: Sequence[float]) -> float:
    """Return how many replicas of equal weights would average noise as well."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares if squares else 1.0


def _workers(average: pccl.ReduceInfo | pccl.ObservedReduction) -> tuple[int, ...]:
    """Return the peers whose work is in an average."""
    return tuple(peer for peer, weight in _shares(average) if weight)


def _shares(average: pccl.ReduceInfo | pccl.ObservedReduction) -> tuple[tuple[int, float], ...]:
    """Return the weights in an average, by peer."""
    return tuple(zip(average.contributors, average.weights, strict=True))


def _zeros_like(values: torch.Tensor) -> torch.Tensor:
    """Return zeros, which take no memory as long as they are never written."""
    return torch.as_tensor(np.zeros(len(values), values.numpy().dtype))


def _loss_behind(error: pccl.PCCLError) -> BaseException:
    """Return the loss that another user of the communicator received, if any, else ``error``."""
    cause = error.__cause__
    is_told = isinstance(error, NotConnected) and isinstance(cause, MembershipError)
    return cause if is_told and cause is not None else error
