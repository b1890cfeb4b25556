"""Asks a master, or a peer through its master, one question, without joining the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from pccl.protocol.errors import LinkError, NotAdmitted, PCCLError, RemoteProtocolError
from pccl.protocol.guards.allowance import masters_bytes_max
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.messages import (
    AddressIs,
    AddressQuery,
    EvidenceReport,
    EvidenceRequest,
    Message,
    Refused,
    RunIs,
    RunQuery,
    StatusRequest,
)
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials, introduce
from pccl.runtime.control.stream import ControlStream
from pccl.topology.segment_limit import CAREFUL_SEGMENT_BYTES
from pccl.transports.base import Address, Connection, Transport


@dataclass(frozen=True, slots=True)
class AddressAnswer:
    """The answer of a master to an ``AddressQuery``.

    Attributes:
        told: the answer.
        local: this end of the connection.
        asked_ns: time of the question.
        answered_ns: time of the answer.
    """

    told: AddressIs
    local: Address
    asked_ns: int
    answered_ns: int


_Answer = TypeVar("_Answer", StatusReport, RunIs, EvidenceReport, AddressIs)


async def ask_status(
    clock: Clock, transport: Transport, master: Address, credentials: Credentials, timeout_s: float
) -> StatusReport:
    """Ask a master for the status of its run.

    Args:
        clock: gives the time.
        transport: the network.
        master: address of the master.
        credentials: makes the handshake of this process.
        timeout_s: time limit of the whole call.

    Raises:
        LinkError: no process listens at ``master``, or the connection was lost or too slow.
        NotAdmitted: the master refused to answer; the reason says why.
        RemoteProtocolError: the other process is no master of this version, or has another token.
    """
    question = _MasterQuestion(clock, StatusRequest(), StatusReport, "status")
    return await question.ask(transport, master, credentials, timeout_s)


async def ask_run(
    clock: Clock,
    transport: Transport,
    master: Address,
    credentials: Credentials,
    timeout_s: float,
    query: RunQuery,
) -> RunIs:
    """Ask a master for its run and the members; ``query`` holds what the caller knows already.

    The other arguments and the errors are those of ``ask_status``.
    """
    question = _MasterQuestion(clock, query, RunIs, "run")
    return await question.ask(transport, master, credentials, timeout_s)


async def ask_peer(
    clock: Clock,
    transport: Transport,
    master: Address,
    credentials: Credentials,
    timeout_s: float,
    request: EvidenceRequest,
) -> EvidenceReport:
    """Ask a peer through its master; the other arguments and errors are those of ``ask_status``."""
    question = _MasterQuestion(clock, request, EvidenceReport, "evidence")
    return await question.ask(transport, master, credentials, timeout_s)


async def ask_address(
    clock: Clock,
    transport: Transport,
    master: Address,
    credentials: Credentials,
    timeout_s: float,
    query: AddressQuery,
) -> AddressAnswer:
    """Ask a master how it sees this process, and whether it can dial the address in ``query``.

    The other arguments and the errors are those of ``ask_status``.
    """
    question = _MasterQuestion(clock, query, AddressIs, "answer")
    segment_bytes = 0 if query.padding else CAREFUL_SEGMENT_BYTES  # long packets, to try them
    answer = await question.ask(transport, master, credentials, timeout_s, segment_bytes)
    return AddressAnswer(answer, question.local, question.asked_ns, question.answered_ns)


class _MasterQuestion(Generic[_Answer]):
    """One question on one connection.

    Args:
        clock: gives the time.
        words: the message that asks.
        kind: type of the answer.
        name: name of the answer, for errors.
    """

    def __init__(self, clock: Clock, words: Message, kind: type[_Answer], name: str) -> None:
        self._clock = clock
        self._words = words
        self._kind: type[_Answer] = kind
        self._name = name
        self._answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._stream: ControlStream | None = None
        self.local = Address("", 0)
        self.asked_ns = 0
        self.answered_ns = 0

    async def ask(
        self,
        transport: Transport,
        master: Address,
        credentials: Credentials,
        timeout_s: float,
        segment_bytes: int = CAREFUL_SEGMENT_BYTES,
    ) -> _Answer:
        """Connect, ask, return the answer, and disconnect."""
        clock = self._clock
        deadline_ns = clock.now_ns() + round(timeout_s * NS_PER_S)
        connection = await transport.dial(master, timeout_s, segment_bytes=segment_bytes)
        self.local = connection.local
        handshake = credentials.dial(connection, Opening(Channel.CONTROL))
        await introduce(connection, handshake, clock, deadline_ns, self._begin)
        overdue = LinkError(reason=f"the master is connected, but sent no {self._name} in time")
        timer = clock.call_at_ns(deadline_ns, self._fail, overdue)
        try:
            return await self._answer
        finally:
            timer.cancel()
            if self._stream is not None:
                self._stream.close()

    def _begin(self, connection: Connection, remote: Opening) -> None:
        """Send the question, because the handshake is complete."""
        self._stream = ControlStream(
            connection, self._on_message, self._on_closed, self._clock, masters_bytes_max
        )
        self.asked_ns = self._clock.now_ns()
        self._stream.send(self._words)

    def _fail(self, error: PCCLError) -> None:
        """End the call with ``error``, unless there is an answer."""
        if not self._answer.done():
            self._answer.set_exception(error)

    def _on_message(self, message: Message) -> None:
        match message:
            case Refused(reason=reason):
                self._fail(NotAdmitted(reason=reason))
            case _ if isinstance(message, self._kind):
                if not self._answer.done():
                    self.answered_ns = self._clock.now_ns()
                    self._answer.set_result(message)
            case _:
                reason = f"the master sent {type(message).__name__} instead of the {self._name}"
                raise RemoteProtocolError(func="control", reason=reason)

    def _on_closed(self, reason: str) -> None:
        words = f"the master closed the connection and sent no {self._name}: {reason}"
        self._fail(LinkError(reason=words))
