"""Questions of people to peers, which the master passes on, and the answers back.

A question does not change the run. A peer that does not answer is of interest, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.connections import ANSWERED, Connections, Outbox
from pccl.machines.master.events import AskParent
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.limits import INQUIRIES_MAX
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import NS_PER_S, PeerId

ANSWER_S_MAX = 3
"""Time that a peer has to answer."""


@dataclass(frozen=True, slots=True)
class _Inquiry:
    connection: int
    peer: PeerId
    kind: EvidenceKind
    deadline_ns: int

    @property
    def is_of_parent(self) -> bool:
        """Whether the shell answers it, and not the peer."""
        return self.kind is EvidenceKind.PROCESS


class Inquiries:
    """The questions that wait for an answer."""

    def __init__(self, membership: Membership, connections: Connections, outbox: Outbox) -> None:
        self._membership = membership
        self._connections = connections
        self._outbox = outbox
        self._open: dict[int, _Inquiry] = {}
        """By query, in the order of their deadlines."""
        self._last_query = 0

    def ask(self, connection: int, request: msg.EvidenceRequest) -> None:
        """Pass a question on to its peer, or refuse it."""
        peer = self._membership.peers.get(request.peer)
        if peer is None or not peer.admitted:
            self._end(connection, f"peer {request.peer} is not a member of the run")
        elif peer.connection is None and request.kind is not EvidenceKind.PROCESS:
            self._end(connection, f"peer {request.peer} has no connection to the master")
        elif len(self._open) >= INQUIRIES_MAX:
            self._end(connection, f"{INQUIRIES_MAX} questions are open; ask again later")
        else:
            self._last_query = self._last_query % (2**32 - 1) + 1
            deadline_ns = self._outbox.now_ns + ANSWER_S_MAX * NS_PER_S
            inquiry = _Inquiry(connection, peer.id, request.kind, deadline_ns)
            self._open[self._last_query] = inquiry
            if request.kind is EvidenceKind.PROCESS:
                self._outbox.add(AskParent(connection, peer.connection, peer.member.name))
            else:
                self._outbox.send(peer, msg.EvidenceQuery(self._last_query, request.kind))

    def waits_on(self, connection: int) -> bool:
        """Whether the question of this connection is open."""
        return any(inquiry.connection == connection for inquiry in self._open.values())

    def answered(self, peer: RegisteredPeer, reply: msg.EvidenceReply) -> None:
        """Pass the answer of a peer back; ignore it if nobody waits for it any more."""
        inquiry = self._open.get(reply.query)
        if inquiry is not None and inquiry.peer == peer.id and not inquiry.is_of_parent:
            del self._open[reply.query]
            self._end(inquiry.connection, reply.refusal, reply.data)

    def look(self) -> None:
        """End, at a tick, the questions that a peer has not answered in time."""
        for query, inquiry in list(self._open.items()):
            peer = self._membership.peers.get(inquiry.peer)
            is_lost = peer is None or peer.connection is None
            if is_lost and not inquiry.is_of_parent:
                why = f"peer {inquiry.peer} has lost its connection to the master"
            elif self._outbox.now_ns >= inquiry.deadline_ns:
                why = f"peer {inquiry.peer} did not answer within {ANSWER_S_MAX} s"
            else:
                continue
            del self._open[query]
            self._end(inquiry.connection, why)

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
        strangers = self._connections.hosts.keys() - self._connections.peers.keys()
        if len(set(asking)) < len(asking) or not strangers.issuperset(asking):
            raise InvariantViolation("a question has no connection of its own", history)

    def _end(self, connection: int, refusal: str, data: bytes = b"") -> None:
        """Answer a question, if the connection is still open."""
        if connection in self._connections.hosts:
            report = msg.EvidenceReport(data, refusal)
            self._connections.part_with(connection, report, ANSWERED)
