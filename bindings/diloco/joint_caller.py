"""``JointCaller``: a thread that makes all joint calls of one replica, in order.

The training thread passes contributions to it, and reads the news of their rounds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import pccl
from pccl.bindings.arguments import claim, release
from pccl.bindings.compression import Compression
from pccl.bindings.diloco.ledger import Revisions
from pccl.bindings.diloco.outer import OuterParameters, length
from pccl.bindings.diloco.rounds import (
    Average,
    Connect,
    Contribution,
    Effect,
    Entered,
    Members,
    Notice,
    Pause,
    Reduce,
    ReduceBuffers,
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import Schedule
from pccl.descriptors import check_guard
from pccl.errors import MembershipError, NotConnected, TooFewPeers


@dataclass(frozen=True, slots=True)
class GroupSynced:
    """A synchronization has moved data to or from this replica."""

    info: pccl.SharedStateSyncInfo
    seconds: float


@dataclass(frozen=True, slots=True)
class JointNews:
    """An event of the joint calls, for the training thread.

    Attributes:
        what: the event.
        at_s: time of the event, on the monotonic clock.
        outer: with ``Entered``: copies of the outer parameters, by fragment.
        buffers: with ``Entered``: copies of the common buffers.
    """

    what: Notice | GroupSynced
    at_s: float
    outer: list[torch.Tensor] = field(default_factory=lambda: [])
    buffers: list[torch.Tensor] = field(default_factory=lambda: [])


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


_log = logging.getLogger("pccl.diloco")

SAY_EVERY_S = 10.0
"""Shortest time between two log lines about a wait."""

_INTERRUPT_POLL_S = 0.2
"""How often a waiting thread wakes up: a signal just before the thread blocks does not wake it."""


class JointCaller:
    """A thread that makes the joint calls of one replica.

    Args:
        comm: communicator of the run, connected or not.
        outer: the outer parameters, which are the shared state.
        schedule: assigns fragments to rounds.
        min_peers: number of members that every round waits for.
        compression: wire format and error feedback of the reduces.
        shards: number of peers in a replica; the peers with the same shard form a group.
        guard: guard of the reduces; None: no guard.
        quorum: quorum of the calls, and its grace.

    Raises:
        ValueError: another object makes the joint calls of ``comm``.
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        outer: OuterParameters,
        schedule: Schedule,
        min_peers: int,
        compression: Compression,
        shards: int = 1,
        guard: pccl.Guard | str | None = None,
        quorum: QuorumOptions = QuorumOptions(),
    ) -> None:
        self._comm = comm
        self._outer = outer
        self._min_peers = min_peers
        self._compression = compression
        self._shards = shards
        self._guard = guard
        self._quorum = quorum
        checked = None if guard is None else check_guard(guard)
        self._excludes_infinite = (
            checked is not None and checked.not_finite is pccl.GuardAction.EXCLUDE
        )
        self._rounds = Rounds(schedule, outer, self._notify, min_peers)
        self._changed = threading.Condition()
        self._contributions: deque[Contribution | None] = deque()
        self._news: deque[JointNews] = deque()
        self._said_s = -math.inf
        self._failure: BaseException | None = None
        self._is_idle = self._has_ended = self._is_closing = self._was_in = False
        self._revisions = Revisions(outer.ledger)
        self._buffers_tag = len(outer.fragments) + 1
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None
        """The pseudo-gradient that was taken last, and the memory for its average."""
        self._replayed: torch.Tensor | None = None
        """Sum of the buffers of the round that this newcomer replays."""
        self._thread = threading.Thread(target=self._run, name="pccl-diloco", daemon=True)
        claim(comm, self, "DiLoCo")

    # -- the training thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which joins the run."""
        if self._outer.state.revision:
            self._revisions.synced(self._outer.state.revision)
        self._thread.start()

    def put(self, contribution: Contribution) -> None:
        """Queue a pseudo-gradient for its round."""
        with self._changed:
            self._contributions.append(contribution)
            self._is_idle = False
            self._changed.notify_all()

    def news(self) -> list[JointNews]:
        """Return the events since the last call, in order."""
        with self._changed:
            news = list(self._news)
            self._news.clear()
            return news

    @property
    def has_quorum(self) -> bool:
        """Whether rounds go on without members that are late."""
        return self._quorum.members is not None

    @property
    def is_awaited(self) -> bool:
        """Whether members wait for this replica in the next round, or left it out.

        False while a contribution is on its way.
        """
        return self.has_quorum and self._is_idle and self._comm.is_awaited

    def wait(self) -> None:
        """Wait until an event has arrived.

        Raises:
            PCCLError: the run cannot continue; the message says why.
        """
        with self._changed:
            while not self._news:
                self.check()
                self._changed.wait(_INTERRUPT_POLL_S)

    def check(self) -> None:
        """Raise the error that has ended the run, if there is one.

        Raises:
            PCCLError: the run cannot continue; the message says why.
        """
        if isinstance(self._failure, pccl.PCCLError):
            raise self._failure.with_traceback(None)  # its frames are those of another thread
        if self._failure is not None:
            raise self._failure
        if self._has_ended:
            raise NotConnected(None, "step", "the optimizer was closed; make a new one")

    def settle(self) -> None:
        """Wait until no call is open and no contribution is queued, or the run has ended.

        The shared state then stays unchanged until the next ``put``.
        """
        with self._changed:
            while not (self._is_idle or self._has_ended):  # `put` may follow the end
                self._changed.wait(_INTERRUPT_POLL_S)

    def is_in_doubt(self, number: int) -> bool:
        """Whether a lost membership ended this replica's run during the reduce of the round."""
        return isinstance(self._failure, MembershipError) and number == self._rounds.doubt

    def close(self, *, abandon: bool) -> None:
        """Make no more calls, close the communicator, and wait for the thread.

        Args:
            abandon: interrupt the open call instead of waiting for it.
        """
        self.stop()
        has_begun = self._thread.ident is not None
        is_coming = has_begun and not self._was_in  # its wait may never end; no member needs it
        if abandon or is_coming:
            self._comm.close()
        if has_begun:
            self._thread.join()
        release(self._comm, self)

    def stop(self) -> None:
        """Begin no more calls; do not wait for the open one."""
        with self._changed:
            self._is_closing = True
            self._contributions.clear()
            self._contributions.append(None)
            self._changed.notify_all()

    # -- the thread of the joint calls -------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._changed:
                self._failure = error
        self._comm.close()  # otherwise the other members would wait for this one
        with self._changed:
            self._has_ended = self._is_idle = True
            self._changed.notify_all()

    def _drive(self) -> None:
        steps = self._rounds.run()
        with suppress(StopIteration):
            effect = next(steps)
            while True:
                try:
                    outcome = self._carry_out(effect)
                except pccl.PCCLError as error:
                    loss = _loss_behind(error)
                    if isinstance(loss, MembershipError):
                        self._lent = None  # the contribution is dropped: this peer joins again
                    effect = steps.throw(loss)
                else:
                    effect = steps.send(outcome)

    def _carry_out(self, effect: Effect) -> object:
        match effect:
            case Connect(again):
                self._connect(again=again)
                return self._members()
            case Update():
                self._comm.update_topology(**self._quorum.options)
                return self._members()
            case Sync():
                return self._sync()
            case Take():
                return self._take()
            case Reduce(contribution):
                return self._reduce(contribution)
            case ReduceBuffers(sums, leads):
                self._reduce_buffers(sums, leads=leads)
                return None
            case Pause(seconds, why):
                self._say_what_is_missing(why)
                with self._changed:
                    return self._changed.wait_for(lambda: self._is_closing, seconds)

    def _say_what_is_missing(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        if why:
            _log.warning(
                "DiLoCo waits for the run's outer parameters: %s. If all peers that had them have "
                "left and will not return, start another master",
                why,
            )
        else:
            there, wanted = len(self._comm.members()), self._min_peers
            _log.warning(
                "DiLoCo waits for peers: the group has %d members, min_peers is %d%s",
                *(there, wanted, "" if self._shards == 1 else ", and replicas must be complete"),
            )

    def _connect(self, *, again: bool) -> None:
        is_connected = not again
        try:
            _ = self._comm.peer_id
        except NotConnected:
            is_connected = False
        if not is_connected:
            # A replay would overwrite a state that may be newer than that of the members now.
            self._comm.connect(
                min_peers=self._min_peers,
                shared_state=self._outer.state,
                on_reduction=None if again else self._replay,
            )

    def _sync(self) -> Members:
        state = self._outer.state
        state.revision = self._revisions.next()
        began_s = time.monotonic()
        options = self._quorum.options
        info = self._comm.sync_shared_state(state, resume="advanced", **options)
        self._revisions.synced(info.revision)
        if info.tx_bytes or info.rx_bytes:
            self._notify(GroupSynced(info, time.monotonic() - began_s))
        assert state.lineage is not None
        # Late members synchronize later.
        ids = info.members if not options else self._members().ids
        return Members(self._comm.peer_id, ids, run=state.lineage.run)

    def _take(self) -> Contribution | None:
        with self._changed:
            self._is_idle = not self._contributions
            self._changed.notify_all()
            while not self._contributions:
                self._changed.wait()
            contribution = self._contributions.popleft()
        if contribution is None:
            return None
        fragment, work = self._outer.fragments[contribution.fragment], contribution.values
        fragment.copies.wait()
        norm = length(work)
        if contribution.buffers is not None and not math.isfinite(norm):
            contribution.buffers.zero_()  # no contribution: the model is broken
        # The training thread may need the work again, so its average gets memory of its own.
        self._lent = work, fragment.empty()
        return replace(contribution, values=self._lent[1], norm=norm)

    def _reduce(self, contribution: Contribution) -> Average:
        # A contribution without work skips error feedback.
        name = _name(contribution.fragment) if contribution.weight else None
        lent, self._lent = self._lent, None
        average: torch.Tensor = contribution.values
        if lent is not None and lent[1] is average:
            work = lent[0]
        else:  # this replica contributes nothing; zeros that are never written take no memory
            assert not contribution.weight, "work counts as it was taken"
            work = torch.as_tensor(np.zeros(len(average), average.numpy().dtype))
        try:
            info = self._comm.all_reduce(
                work,
                average,
                op=pccl.ReduceOp.AVG,
                tag=contribution.fragment + 1,
                quantization_options=self._compression.options(name),
                weight=contribution.weight,
                guard=self._guard,
                observable=True,
                retry=True,
                **self._quorum.options,
            )
        except TooFewPeers:
            average.copy_(work)
            if not self._excludes_infinite or bool(torch.isfinite(work).all()):
                raise
            return Average((), 0.0, is_excluded=bool(contribution.weight))
        return Average(
            tuple(peer for peer in info.contributors if peer not in info.excluded),
            info.total_weight or 0.0,
            info.tx_bytes,
            info.rx_bytes,
            self._comm.peer_id in info.excluded,
            _workers(info),
            torch.dot(work, average).item() if contribution.weight else math.nan,
            _replicas(info.weights),
            info.took_part,
        )

    def _reduce_buffers(self, sums: torch.Tensor, *, leads: bool) -> None:
        if not leads:
            self._outer.buffers.follow(sums)
        options = self._quorum.options
        result = torch.empty_like(sums) if options else sums
        self._comm.all_reduce(
            sums,
            result,
            op=pccl.ReduceOp.SUM,
            tag=self._buffers_tag,
            observable=True,
            retry=True,
            **options,
        )
        if result is not sums:
            sums.copy_(result)

    def _replay(self, seen: pccl.ObservedReduction) -> None:
        """Take the outer step of a round of the members, while waiting for admission."""
        values = torch.as_tensor(seen.values)
        if seen.tag == self._buffers_tag:
            self._replayed = values
            return
        buffers = self._replayed if seen.tag == len(self._outer.fragments) else None
        self._replayed = None
        average = Average(seen.contributors, seen.total_weight or 0.0, workers=_workers(seen))
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

    def _notify(self, notice: Notice | GroupSynced) -> None:
        outer: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        if isinstance(notice, Entered):
            if not self._was_in and self._outer.inner is not None:  # the training thread waits
                self._outer.inner.entered(is_late=bool(notice.number or notice.is_open))
            self._was_in = True
            self._lent = None
            outer = [fragment.copy() for fragment in self._outer.fragments]
            buffers = self._outer.buffers.copies()
            for number in notice.corrected:
                self._compression.feedback.forget(_name(number))
        with self._changed:
            self._news.append(JointNews(notice, time.monotonic(), outer, buffers))
            self._changed.notify_all()


def _replicas(weights: Sequence[float]) -> float:
    """Return how many replicas of equal weights would average noise as well."""
    squares = sum(weight * weight for weight in weights)
    return sum(weights) ** 2 / squares if squares else 1.0


def _workers(average: pccl.ReduceInfo | pccl.ObservedReduction) -> tuple[int, ...]:
    """Return the peers whose work is in an average."""
    pairs = zip(average.contributors, average.weights, strict=True)
    return tuple(peer for peer, weight in pairs if weight)


def _name(fragment: int) -> str:
    return f"fragment {fragment}"


def _loss_behind(error: pccl.PCCLError) -> BaseException:
    """Return the loss that another user of the communicator received, if any, else ``error``."""
    cause = error.__cause__
    is_told = isinstance(error, NotConnected) and isinstance(cause, MembershipError)
    return cause if is_told and cause is not None else error
