"""``JointCaller``: a thread that makes all joint calls of one replica, in order.

The training thread passes contributions to it, and reads the news of their rounds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import pccl
from pccl.bindings.arguments import claim, release
from pccl.bindings.diloco.replica_calls import JointNews, ReplicaCall, ReplicaCalls
from pccl.bindings.diloco.rounds import (
    NEWCOMERS_POLL_S,
    Contribution,
    NewcomersWait,
    Pause,
    Take,
)
from pccl.errors import MembershipError, NotConnected

_log = logging.getLogger("pccl.diloco")

SAY_EVERY_S = 10.0
"""Shortest time between two log lines about a wait."""

_INTERRUPT_POLL_S = 0.2
"""How often a waiting thread wakes up: a signal just before the thread blocks does not wake it."""


class JointCaller:
    """A thread that makes the joint calls of one replica.

    Args:
        comm: communicator of the run, connected or not.
        calls: the joint calls.

    Raises:
        ValueError: another object makes the joint calls of ``comm``.
    """

    def __init__(self, comm: pccl.Communicator, calls: ReplicaCalls) -> None:
        self._comm = comm
        self._calls = calls
        self._changed = threading.Condition()
        self._contributions: deque[Contribution | None] = deque()
        self._news: deque[JointNews] = deque()
        self._said_s = -math.inf
        self._failure: BaseException | None = None
        self._is_idle = self._has_ended = self._is_closing = self._is_held = False
        calls.tell = self._tell
        self._thread = threading.Thread(target=self._run, name="pccl-diloco", daemon=True)
        claim(comm, self, "DiLoCo")

    # -- the training thread -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which joins the run."""
        self._calls.resume()
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
        return self._calls.has_quorum

    @property
    def is_awaited(self) -> bool:
        """Whether members wait for this replica in the next round, or left it out.

        A quorum does, or a member that leaves. False while a contribution is on its way.
        """
        return self._is_idle and self._comm.is_awaited

    def expect_notice(self, has_work: Callable[[], bool]) -> None:
        """Let SIGTERM give this replica notice; see ``Communicator.expect_notice``."""
        self._comm.expect_notice(has_work)

    @property
    def is_leaving(self) -> bool:
        """Whether SIGTERM has given notice."""
        return self._comm.is_leaving

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

    @contextmanager
    def settled(self) -> Generator[None, None, None]:
        """Wait until no call is open and no contribution is queued, or the run has ended.

        In the context, the shared state stays unchanged until a ``put``: no newcomer is admitted,
        because the synchronization after that may bring a newer state.
        """
        self._is_held = True
        try:
            with self._changed:
                while not (self._is_idle or self._has_ended):  # `put` may follow the end
                    self._changed.wait(_INTERRUPT_POLL_S)
            yield
        finally:
            self._is_held = False

    def is_in_doubt(self, number: int) -> bool:
        """Whether a lost membership ended this replica's run during the reduce of the round."""
        return isinstance(self._failure, MembershipError) and number == self._calls.doubt

    def close(self, *, abandon: bool) -> None:
        """Make no more calls, close the communicator, and wait for the thread.

        Args:
            abandon: interrupt the open call instead of waiting for it.
        """
        self.stop()
        has_begun = self._thread.ident is not None
        is_coming = (
            has_begun and not self._calls.has_entered
        )  # its wait may never end; no member needs it
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
        steps = self._calls.run()
        with suppress(StopIteration):
            asked = next(steps)
            while True:
                try:
                    outcome = self._carry_out(asked)
                except pccl.PCCLError as error:
                    asked = steps.throw(error)
                else:
                    asked = steps.send(outcome)

    def _carry_out(self, asked: ReplicaCall | Take | Pause) -> object:
        match asked:
            case ReplicaCall(method, arguments, options):
                return getattr(self._comm, method)(*arguments, **options)
            case Take():
                return self._take(asked)
            case Pause():
                self._say_what_is_missing(asked)
                with self._changed:
                    return self._changed.wait_for(lambda: self._is_closing, asked.seconds)

    def _take(self, take: Take) -> Contribution | NewcomersWait | None:
        with self._changed:
            self._is_idle = not self._contributions
            self._changed.notify_all()
            while not self._contributions:
                if take.or_newcomers and self._comm.newcomers_wait and not self._is_held:
                    self._is_idle = False
                    return NewcomersWait()
                self._changed.wait(NEWCOMERS_POLL_S if take.or_newcomers else None)
            return self._contributions.popleft()

    def _say_what_is_missing(self, pause: Pause) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            _log.warning("DiLoCo waits for %s", self._calls.missing(pause))

    def _tell(self, news: JointNews) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()
