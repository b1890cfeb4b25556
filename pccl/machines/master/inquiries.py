"""Questions of people to peers, which the master passes on, and the answers back.

A question does not change the run. A peer that does not answer is of interest, too. So a peer is
called silent only if the master has asked it, its connection is still the same, and the time is up.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.connections import ANSWERED, Connections, Outbox
from pccl.machines.master.events import InspectProcess, ProcessInspected, SendAddress, SendStatus
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.restart import Succession
from pccl.machines.reachability import CallerTests, TryCaller
from pccl.machines.ticks import Wakefulness
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import INQUIRIES_MAX
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import NS_PER_S, PeerId

ANSWER_S_MAX = 3
"""Time that a peer has to answer."""


@dataclass(slots=True)
class _Inquiry:
    connection: int
    """Connection from which the question came."""
    peer: PeerId
    asked_on: int | None
    """Connection of the peer on which it was asked; None: the shell inspects its process."""
    deadline_ns: int


class Inquiries:
    """The questions that wait for an answer."""

    def __init__(
        self,
        membership: Membership,
        connections: Connections,
        succession: Succession,
        outbox: Outbox,
    ) -> None:
        self._membership = membership
        self._connections = connections
        self._succession = succession
        self._outbox = outbox
        self._open: dict[int, _Inquiry] = {}
        """By query, in the order of their deadlines."""
        self._last_query = 0
        self._caller_tests = CallerTests(outbox.now_ns)

    def take(self, connection: int, message: msg.Message) -> bool:
        """Answer a question of a process outside the run; return whether it was one."""
        match message:
            case msg.RunQuery():
                answer = self._succession.run_is(message)
                self._connections.part_with(connection, answer, ANSWERED)
            case msg.StatusRequest():
                self._outbox.add(SendStatus(connection))
                self._connections.close(connection, ANSWERED)
            case msg.EvidenceRequest():
                self.ask(connection, message)
            case msg.AddressQuery():
                self.test_caller(connection, message)
            case _:
                return False
        return True

    def test_caller(self, connection: int, query: msg.AddressQuery) -> None:
        """Test the address of a process outside the run, or answer why not."""
        seen = self._connections.callers[connection].host
        test = self._caller_tests.begin(connection, query, seen, self._outbox.now_ns)
        if isinstance(test, TryCaller):
            self._outbox.add(test)
        else:
            self._answer_caller(connection, test, dialled=False, padding=query.padding)

    def caller_tried(self, connection: int, reason: str) -> None:
        """Pass on why the address of a process outside the run cannot be dialled; empty: it can."""
        self._caller_tests.ended(connection)
        self._answer_caller(connection, reason, dialled=True)

    def _answer_caller(
        self, connection: int, reason: str, *, dialled: bool, padding: bytes = b""
    ) -> None:
        """Answer an ``AddressQuery``, unless its sender has left."""
        if connection in self._connections.callers:
            seen = self._connections.callers[connection].host
            self._outbox.add(SendAddress(connection, seen, dialled, reason, padding))
            self._connections.close(connection, ANSWERED)

    def ask(self, connection: int, request: msg.EvidenceRequest) -> None:
        """Pass a question on to its peer, or refuse it."""
        peer = self._membership.peers.get(request.peer)
        is_of_process = request.kind is EvidenceKind.PROCESS
        if refusal := self._without_run():
            self._end(connection, refusal)
        elif peer is None or not peer.admitted:
            self._end(connection, f"peer {request.peer} is not a member of the run")
        elif peer.connection is None and not is_of_process:
            self._end(connection, f"peer {request.peer} has no connection to the master")
        elif len(self._open) >= INQUIRIES_MAX:
            self._end(connection, f"{INQUIRIES_MAX} questions are open; ask again later")
        else:
            self._last_query = query = self._last_query % (2**32 - 1) + 1
            deadline_ns = self._outbox.now_ns + ANSWER_S_MAX * NS_PER_S
            asked_on = None if is_of_process else peer.connection
            self._open[query] = _Inquiry(connection, peer.id, asked_on, deadline_ns)
            if is_of_process:
                self._outbox.add(InspectProcess(query, peer.connection, peer.member.name))
            else:
                self._outbox.send(peer, msg.EvidenceQuery(query, request.kind))

    def check_only(self, connection: int) -> None:
        """Check that a connection whose question is open sends nothing more.

        Raises:
            RemoteProtocolError: its question is open.
        """
        if any(inquiry.connection == connection for inquiry in self._open.values()):
            reason = "an EvidenceRequest must be the only message of its sender"
            raise RemoteProtocolError(reason=reason)

    def answered(self, peer: RegisteredPeer, reply: msg.EvidenceReply) -> None:
        """Pass the answer of a peer back; ignore it if its question has ended."""
        inquiry = self._open.get(reply.query)
        if inquiry is not None and inquiry.peer == peer.id and inquiry.asked_on is not None:
            del self._open[reply.query]
            self._end(inquiry.connection, reply.refusal, reply.data)

    def inspected(self, found: ProcessInspected) -> None:
        """Pass back what the shell knows of a process; ignore it if its question has ended."""
        inquiry = self._open.get(found.query)
        if inquiry is not None and inquiry.asked_on is None:
            del self._open[found.query]
            self._end(inquiry.connection, found.refusal, found.data)

    def look(self, tick: Wakefulness) -> None:
        """End, at a tick, the questions that get no answer."""
        for query, inquiry in list(self._open.items()):
            inquiry.deadline_ns += tick.slept_ns
            is_late = tick.may_judge and self._outbox.now_ns >= inquiry.deadline_ns
            refusal, silent = self._why_over(inquiry, is_late=is_late)
            if refusal:
                del self._open[query]
                self._end(inquiry.connection, refusal, silent=silent)

    def _why_over(self, inquiry: _Inquiry, *, is_late: bool) -> tuple[str, bool]:
        """Return why a question gets no answer, and whether the peer is silent; empty: it may."""
        peer, who = self._membership.peers.get(inquiry.peer), f"peer {inquiry.peer}"
        if refusal := self._without_run():
            return refusal, False
        if peer is None:
            return f"{who} is no longer a member of the run", False
        if inquiry.asked_on is not None and peer.connection is None:
            return f"{who} has lost its connection to the master", False
        if not is_late:
            return "", False
        if inquiry.asked_on is None:
            return f"the process of {who} was not inspected within {ANSWER_S_MAX} s", False
        if peer.connection != inquiry.asked_on:
            return f"{who} has connected to the master again meanwhile; ask again", False
        return f"{who} did not answer within {ANSWER_S_MAX} s", True

    def _without_run(self) -> str:
        """Return why there is no member to ask; empty if this master coordinates a run."""
        if not self._succession.recovering:
            return ""
        return f"this master coordinates no run: {self._succession.waits_for()}"

    def closed(self, connection: int) -> None:
        """Forget the question of a connection that was closed by the other side."""
        for query, inquiry in list(self._open.items()):
            if inquiry.connection == connection:
                del self._open[query]

    def check(self, history: History) -> None:
        """Assert that each question has an open connection of its own.

        Raises:
            InvariantViolation: a connection has several questions, or is closed, or is a peer's.
        """
        asking = [inquiry.connection for inquiry in self._open.values()]
        strangers = self._connections.callers.keys() - self._connections.peers.keys()
        if len(set(asking)) < len(asking) or not strangers.issuperset(asking):
            raise InvariantViolation("a question has no connection of its own", history)

    def _end(
        self, connection: int, refusal: str, data: bytes = b"", *, silent: bool = False
    ) -> None:
        """Answer a question, if the connection is still open."""
        if connection in self._connections.callers:
            report = msg.EvidenceReport(data, refusal, silent)
            self._connections.part_with(connection, report, ANSWERED)
