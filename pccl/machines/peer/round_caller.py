"""``RoundCaller``: one process's part in the joint decisions of the run.

A caller may leave a round; the request stands, and the next call of its kind takes the answer.
``PeerMachine`` builds operations on it.
"""

from __future__ import annotations

from abc import abstractmethod

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.calls import DeferredCalls, JointCall
from pccl.machines.peer.membership import Standing
from pccl.machines.peer.participant import Participant
from pccl.machines.peer.rounds import OpenRound, OpenRounds
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import RoundKind


class RoundCaller(Participant):
    """A participant that makes joint calls, apart from operations.

    Args:
        timing: deadlines.
        now_ns: the present.
        former_loss: how the incarnation before this one ended; None: there was none.
    """

    def __init__(
        self, timing: Timing, now_ns: int, former_loss: errors.PCCLError | None = None
    ) -> None:
        super().__init__(timing, now_ns, former_loss)
        self._rounds = OpenRounds()
        self._admission_unused = False
        """Whether the round that admitted this peer satisfies the next ``update_topology``."""
        self._deferred = DeferredCalls()

    @property
    def in_round(self) -> bool:
        """Whether the caller waits for the answer of a round."""
        return any(current.call is not None for current in self._rounds)

    # -- what operations have to do with it -------------------------------------------------------

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether operations are open for callers, or have outcomes that nobody has looked at."""

    @abstractmethod
    def _may_call(self, event: ev.RoundCall) -> bool:
        """Whether the call can be made now; otherwise it was answered, or is kept for later."""

    @abstractmethod
    def _retry_deferred(self) -> None:
        """Make the calls that were kept for later."""

    # -- rounds ------------------------------------------------------------------------------------

    def _has_caught_up(self, event: JointCall) -> bool:
        """See what the others see, or defer the call until that can be.

        The caller may have left a round that the others have had, or will have, with him; their
        collectives would wait for each other in different views.
        """
        left = self._rounds.get(RoundKind.OPTIMIZE_TOPOLOGY)
        if left is not None and left.call is None and left.answer is not None:
            self._membership.follow(left.answer.roster_version)  # the next call gets the answer
            self._deferred.see_anew()
        left = self._rounds.get(RoundKind.UPDATE_TOPOLOGY)
        if left is None or left.call is not None:
            return True
        if left.answer is None:
            self._deferred.add(event)
            return False
        self._take_answer(left, left.answer)
        self._deferred.see_anew()
        return True

    def _on_round_call(self, event: ev.RoundCall) -> None:
        if not self._may_call(event):
            return
        if self._is_busy and event.kind is not RoundKind.PEERS_PENDING:
            self._out.raise_(event.call, words.operations_open())
            return
        satisfied = event.kind is RoundKind.UPDATE_TOPOLOGY and self._admission_unused
        self._admission_unused = False
        if satisfied:
            self._rounds.forget_last(event.kind)
            self._out.return_(event.call, None)
            return
        if event.kind is RoundKind.OPTIMIZE_TOPOLOGY:
            if not self._has_caught_up(event):
                return
            if self._membership.is_alone:
                self._out.raise_(event.call, words.alone_in_the_run())
                return
        current = self._rounds.get(event.kind)
        if current is None:
            current = self._rounds.open(event.kind, event.call)
            self._out.send(msg.RoundRequest(current.id))
        elif current.call is not None:
            self._out.raise_(event.call, words.same_call_twice(event.kind.call_name))
        else:
            current.call = event.call
            if current.answer is not None:
                self._return_round(current, current.answer)

    def _on_left_answered(self, kind: RoundKind) -> None:
        """The next call of the kind gets what the caller has not noticed."""
        if self.own.standing is Standing.MEMBER and not self._rounds.put_back(kind):
            self._admission_unused = kind is RoundKind.UPDATE_TOPOLOGY

    def _on_left_admitted(self) -> None:
        """The caller of ``connect`` left, and this peer was admitted: leave the run.

        Otherwise the other members would wait for a member that makes no calls.
        """
        if self.own.standing is Standing.MEMBER:
            self._lose(words.left_join("the caller left"), goodbye=True)

    def _on_round_closed(self, message: msg.RoundClosed) -> None:
        self._finals.see(message)
        current = self._rounds.answer(message)
        if current is None:
            self._rounds.skip(message.round)
            self._heartbeats.acknowledge(message.round)
            return
        if current.call is not None:
            self._return_round(current, message)
        self._retry_deferred()

    def _return_round(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        assert current.call is not None
        self._take_answer(current, answer)
        if answer.lockstep:
            self._out.raise_(current.call, errors.LockstepError(reason=answer.lockstep))
            return
        asked = current.id.kind is RoundKind.PEERS_PENDING
        self._out.return_(current.call, answer.pending if asked else None)

    def _take_answer(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        self._rounds.close(current)
        self._heartbeats.acknowledge(current.id)
        if current.id.kind is RoundKind.UPDATE_TOPOLOGY:
            self._membership.see(answer.roster_version)
        elif current.id.kind is RoundKind.OPTIMIZE_TOPOLOGY:
            self._membership.follow(answer.roster_version)

    def _report_wait(self, text: str, waited_s: int) -> None:
        if text:
            self._out.add(ev.ReportWait(text, waited_s))
