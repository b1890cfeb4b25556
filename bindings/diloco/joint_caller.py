"""``JointCaller``: a thread that makes all joint calls of one replica, in order.

The training thread hands contributions over, and takes the news of what has become of them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

import pccl
from pccl.bindings.compression import Compression
from pccl.bindings.diloco.ledger import Revisions
from pccl.bindings.diloco.outer import OuterParameters
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
    Rounds,
    Sync,
    Take,
    Update,
)
from pccl.bindings.diloco.schedule import Schedule
from pccl.errors import MembershipError, NotConnected


@dataclass(frozen=True, slots=True)
class GroupSynced:
    """A synchronization has moved something."""

    info: pccl.SharedStateSyncInfo
    seconds: float


@dataclass(frozen=True, slots=True)
class JointNews:
    """Something has happened in the joint calls.

    Attributes:
        what: see there.
        at_s: when, of the monotonic clock.
        outer: with ``Entered``: copies of the outer parameters, by fragment.
    """

    what: Notice | GroupSynced
    at_s: float
    outer: list[torch.Tensor] = field(default_factory=lambda: [])


_log = logging.getLogger("pccl.diloco")

SAY_EVERY_S = 10.0
"""That peers are missing."""

_INTERRUPT_POLL_S = 0.2
"""A waiting caller looks up this often: a signal that comes just before it blocks wakes nobody."""

_served: weakref.WeakSet[pccl.Communicator] = weakref.WeakSet()
"""Communicators that serve a DiLoCo, or have."""


class JointCaller:
    """The joint calls of one replica.

    Args:
        comm: of the run; connected, or not yet.
        outer: the shared state.
        schedule: whose turn it is.
        min_peers: to begin with, and to go on with.
        compression: what fragments are reduced with.
        shards: peers of one replica, each in a group of its own with its counterparts.
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        outer: OuterParameters,
        schedule: Schedule,
        min_peers: int,
        compression: Compression,
        shards: int = 1,
    ) -> None:
        self._comm = comm
        self._outer = outer
        self._min_peers = min_peers
        self._compression = compression
        self._shards = shards
        self._rounds = Rounds(schedule, outer, self._notify, min_peers)
        self._changed = threading.Condition()
        self._contributions: deque[Contribution | None] = deque()
        self._news: deque[JointNews] = deque()
        self._said_s = -math.inf
        self._failure: BaseException | None = None
        self._is_idle = self._has_ended = self._is_closing = self._was_in = False
        self._revisions = Revisions(outer.ledger)
        self._thread = threading.Thread(target=self._run, name="pccl-diloco", daemon=True)

    # -- the training thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to join the run.

        Raises:
            ValueError: the communicator serves another one.
        """
        if self._comm in _served:
            raise ValueError(
                "this communicator serves, or has served, another DiLoCo; make a new Communicator"
            )
        _served.add(self._comm)
        if self._outer.state.revision:
            self._revisions.synced(self._outer.state.revision)
        self._thread.start()

    def put(self, contribution: Contribution) -> None:
        """Hand a pseudo-gradient over."""
        with self._changed:
            self._contributions.append(contribution)
            self._is_idle = False
            self._changed.notify_all()

    def news(self) -> list[JointNews]:
        """What has happened since this was asked last, in order."""
        with self._changed:
            news = list(self._news)
            self._news.clear()
            return news

    def wait(self) -> None:
        """Wait until there is news.

        Raises:
            PCCLError: the run can't go on; the message says why.
        """
        with self._changed:
            while not self._news:
                self.check()
                self._changed.wait(_INTERRUPT_POLL_S)

    def check(self) -> None:
        """Raise what has ended the run.

        Raises:
            PCCLError: the run can't go on; the message says why.
        """
        if self._failure is not None:
            raise self._failure
        if self._has_ended:
            raise NotConnected(None, "step", "the optimizer was closed; make a new one")

    def settle(self) -> None:
        """Wait until nothing is under way, or the run can't go on.

        The shared state stays as it is until the next ``put``.
        """
        with self._changed:
            while not (self._is_idle or self._has_ended):  # something may be put after the end
                self._changed.wait(_INTERRUPT_POLL_S)

    def is_in_doubt(self, number: int) -> bool:
        """Whether this replica was cut off for good while the round was being reduced."""
        return isinstance(self._failure, MembershipError) and number == self._rounds.doubt

    def close(self, *, abandon: bool) -> None:
        """Make no more calls.

        Args:
            abandon: also leave the call that is under way, by closing the communicator.
        """
        self.stop()
        has_begun = self._thread.ident is not None
        is_coming = has_begun and not self._was_in  # others may never come; nobody waits for it
        if abandon or is_coming:
            self._comm.close()
        if has_begun:
            self._thread.join()

    def stop(self) -> None:
        """Begin no more calls; don't wait for the one that is under way."""
        with self._changed:
            self._is_closing = True
            self._contributions.clear()
            self._contributions.append(None)
            self._changed.notify_all()

    # -- the other thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._drive()
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._changed:
                self._failure = error
        self._comm.close()  # or the others would wait for this member
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
                    effect = steps.throw(_loss_behind(error))
                else:
                    effect = steps.send(outcome)

    def _carry_out(self, effect: Effect) -> object:
        match effect:
            case Connect():
                self._connect()
                return self._members()
            case Update():
                self._comm.update_topology()
                return self._members()
            case Sync():
                return self._sync()
            case Take():
                return self._take()
            case Reduce(contribution):
                return self._reduce(contribution)
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
                "left for good, start another master",
                why,
            )
        else:
            there, wanted = len(self._comm.members()), self._min_peers
            _log.warning(
                "DiLoCo waits for peers: %d are in the group, min_peers is %d%s",
                *(there, wanted, "" if self._shards == 1 else ", and all shards must be there"),
            )

    def _connect(self) -> None:
        try:
            _ = self._comm.peer_id
        except NotConnected:
            self._comm.connect(
                min_peers=self._min_peers,
                shared_state=self._outer.state,
                on_reduction=self._replay,
            )

    def _sync(self) -> Members:
        state = self._outer.state
        state.revision = self._revisions.next()
        began_s = time.monotonic()
        info = self._comm.sync_shared_state(state, resume="advanced")
        self._revisions.synced(info.revision)
        if info.tx_bytes or info.rx_bytes:
            self._notify(GroupSynced(info, time.monotonic() - began_s))
        return Members(self._comm.peer_id, info.members)

    def _take(self) -> Contribution | None:
        with self._changed:
            self._is_idle = not self._contributions
            self._changed.notify_all()
            while not self._contributions:
                self._changed.wait()
            contribution = self._contributions.popleft()
        if contribution is None:
            return None
        # It is reduced in place, and the training thread may need the work once more.
        room = self._outer.fragments[contribution.fragment].empty()
        return replace(contribution, values=room.copy_(contribution.values))

    def _reduce(self, contribution: Contribution) -> Average:
        # Without work it neither owes nor pays.
        name = _name(contribution.fragment) if contribution.weight else None
        info = self._comm.all_reduce(
            contribution.values,
            op=pccl.ReduceOp.AVG,
            tag=contribution.fragment + 1,
            quantization_options=self._compression.options(name),
            weight=contribution.weight,
            observable=True,
            retry=True,
        )
        total_weight = info.total_weight or 0.0
        return Average(info.contributors, total_weight, info.tx_bytes, info.rx_bytes)

    def _replay(self, seen: pccl.ObservedReduction) -> None:
        """A newcomer that is not admitted yet does what the members do."""
        average = Average(seen.contributors, seen.total_weight or 0.0)
        self._rounds.finish(seen.tag - 1, torch.as_tensor(seen.values), average)

    def _members(self) -> Members:
        comm = self._comm
        return Members(comm.peer_id, tuple(one.peer_id for one in comm.members()), self._is_whole)

    @property
    def _is_whole(self) -> bool:
        """Whether each replica has all of its shards: groups of the same size, one for each."""
        if self._shards == 1:
            return True
        peers = self._comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)
        largest = self._comm.get_attribute(pccl.Attribute.LARGEST_PEER_GROUP_WORLD_SIZE)
        return peers == self._shards * largest

    def _notify(self, notice: Notice | GroupSynced) -> None:
        outer: list[torch.Tensor] = []
        if isinstance(notice, Entered):
            self._was_in = True
            outer = [fragment.flat.clone() for fragment in self._outer.fragments]
            for number in notice.corrected:
                self._compression.feedback.forget(_name(number))
        with self._changed:
            self._news.append(JointNews(notice, time.monotonic(), outer))
            self._changed.notify_all()


def _name(fragment: int) -> str:
    return f"fragment {fragment}"


def _loss_behind(error: pccl.PCCLError) -> BaseException:
    """The loss of the own place, also where another user of the communicator was told of it."""
    cause = error.__cause__
    is_told = isinstance(error, NotConnected) and isinstance(cause, MembershipError)
    return cause if is_told and cause is not None else error
