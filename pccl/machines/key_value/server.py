"""Carries out the requests of members to the run's store, each once, and answers them.

A request has a number of its member, and the member repeats it until it has the answer, also to
another master. A repeated read is carried out again. A write leaves a *receipt*, which the master
keeps until a later request of the member shows that it has the answer. The answers to other members
carry the receipts of the key, and members report these with the key. So another master that knows
the effect of a write knows that it must not repeat it.

State only: the caller sends the answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pccl.machines.history import History, InvariantViolation
from pccl.machines.key_value.entries import StoreEntries, number_of
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import STORE_OPEN_MAX, STORE_VALUE_BYTES_MAX
from pccl.protocol.messages import (
    KnownEntry,
    StoreAnswer,
    StoreOp,
    StoreReceipt,
    StoreRefusal,
    StoreRequest,
)
from pccl.protocol.types import PeerId

TERM_SHIFT = 30
"""A billion changes for each term; the place of a change is below ``REPORTED_MAX``."""

Answers = list[tuple[PeerId, StoreAnswer]]
"""The answers, in order, each with its member."""

_WITH_VALUE = (StoreOp.SET, StoreOp.ADD, StoreOp.COMPARE_SET, StoreOp.APPEND)
_ON_ONE_KEY = (*_WITH_VALUE, StoreOp.GET, StoreOp.DELETE)


@dataclass(slots=True)
class _Session:
    """The requests of one member that it may not have the answer to."""

    written: dict[int, tuple[bytes, StoreReceipt]] = field(
        default_factory=dict[int, tuple[bytes, StoreReceipt]]
    )
    """Number -> the key, and the receipt."""
    waiting: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Number -> the key that the request waits for."""


class StoreServer:
    """The run's store, as the master has it."""

    def __init__(self) -> None:
        self._entries = StoreEntries()
        self._sessions: dict[PeerId, _Session] = {}
        self._waiting: dict[bytes, dict[tuple[PeerId, int], StoreRequest]] = {}
        """A missing key -> the requests that wait for it."""
        self._sequence = 0
        """Place of the last change."""

    def take(self, peer: PeerId, request: StoreRequest, term: int) -> Answers:
        """Handle a request of a member; return the answers that can be given now.

        Raises:
            RemoteProtocolError: no member sends this request.
        """
        session = self._sessions.setdefault(peer, _Session())
        self._forget_all_but(peer, session, {*request.open, request.number})
        flaw = _flaw(request)
        if len(session.written) > STORE_OPEN_MAX or len(session.waiting) > STORE_OPEN_MAX:
            flaw = "the member has too many open requests to the store"
        if flaw:
            raise RemoteProtocolError(reason=flaw)
        known = session.written.get(request.number)
        if known is not None:
            return [(peer, self._confirm(*known, request.op))]
        if request.op is StoreOp.FORGET or request.number in session.waiting:
            return []
        return self._carry_out(peer, request, term)

    def _carry_out(self, peer: PeerId, request: StoreRequest, term: int) -> Answers:
        """Carry out a new request, or one that has waited."""
        match request.op:
            case StoreOp.GET | StoreOp.WAIT:
                missing = self._entries.missing(request.keys)
                if missing is not None:
                    self._waiting.setdefault(missing, {})[peer, request.number] = request
                    self._sessions[peer].waiting[request.number] = missing
                    return []
                return [(peer, self._read(request))]
            case StoreOp.CHECK | StoreOp.COUNT:
                return [(peer, self._read(request))]
            case _:
                return self._write(peer, request, term)

    def _read(self, request: StoreRequest) -> StoreAnswer:
        number = request.number
        match request.op:
            case StoreOp.COUNT:
                return StoreAnswer(number, value=b"%d" % self._entries.count)
            case StoreOp.CHECK | StoreOp.WAIT:
                return StoreAnswer(number, done=self._entries.missing(request.keys) is None)
            case _:
                entry = self._entries.get(request.keys[0])
                change = entry.change() if entry is not None else None
                value = entry.value if entry is not None else None
                return StoreAnswer(
                    number, done=request.op is StoreOp.GET, value=value, change=change
                )

    def _write(self, peer: PeerId, request: StoreRequest, term: int) -> Answers:
        (key,), value, number = request.keys, request.value, request.number
        present, result = self._entries.value_of(key), b""
        match request.op:
            case StoreOp.ADD:
                before, amount = number_of(b"0" if present is None else present), number_of(value)
                total = None if before is None or amount is None else b"%d" % (before + amount)
                if total is None or number_of(total) is None:
                    return [(peer, StoreAnswer(number, StoreRefusal.NO_NUMBER, done=False))]
                value = result = total
            case StoreOp.APPEND:
                value = (present or b"") + value
                if len(value) > STORE_VALUE_BYTES_MAX:
                    return [(peer, StoreAnswer(number, StoreRefusal.TOO_LONG, done=False))]
            case StoreOp.COMPARE_SET if (present or b"") != request.expected:
                return [(peer, self._read(request))]
            case StoreOp.DELETE if present is None:
                return [(peer, self._read(request))]
            case _:
                pass
        deletes = request.op is StoreOp.DELETE
        refusal = None if deletes else self._entries.refusal(key, value, peer)
        if refusal is not None:
            return [(peer, StoreAnswer(number, refusal, done=False))]
        self._sequence = sequence = max(self._sequence, term << TERM_SHIFT) + 1
        entry = self._entries.write(key, None if deletes else value, sequence, peer)
        receipt = StoreReceipt(peer, number, sequence, result)
        entry.receipts[peer, number] = receipt
        self._sessions[peer].written[number] = key, receipt
        answers: Answers = [(peer, self._confirm(key, receipt, request.op))]
        if not deletes:
            for (other, its_number), waiting in self._waiting.pop(key, {}).items():
                del self._sessions[other].waiting[its_number]
                answers += self._carry_out(other, waiting, term)
        return answers

    def _confirm(self, key: bytes, write: StoreReceipt, op: StoreOp) -> StoreAnswer:
        """Return the answer to a write that was carried out, perhaps by an earlier master."""
        entry = self._entries.get(key)
        assert entry is not None
        if op is not StoreOp.APPEND:
            return StoreAnswer(write.number, value=write.result, change=entry.change(write))
        if entry.sequence != write.sequence:  # the writer of the last change keeps the value
            return StoreAnswer(write.number)
        return StoreAnswer(write.number, value=entry.value, change=entry.change(write))

    def _forget_all_but(self, peer: PeerId, session: _Session, numbers: set[int]) -> None:
        """Forget the requests of a member that have an answer, or have no caller any more."""
        for number in [n for n in session.written if n not in numbers]:
            key, _ = session.written.pop(number)
            self._entries.acknowledge(key, peer, number)
        for number in [n for n in session.waiting if n not in numbers]:
            key = session.waiting.pop(number)
            waiting = self._waiting[key]
            del waiting[peer, number]
            if not waiting:
                del self._waiting[key]

    def forget(self, gone: Iterable[PeerId]) -> None:
        """Forget the requests of members that were removed; their keys stay."""
        for peer in gone:
            session = self._sessions.pop(peer, None)
            if session is not None:
                self._forget_all_but(peer, session, set())

    def take_up(self, known: Iterable[KnownEntry], members: Iterable[PeerId]) -> None:
        """Replace the store by what members report of it to another master."""
        self._entries = StoreEntries()
        self._waiting.clear()
        self._sessions = {peer: _Session() for peer in members}
        useless: list[tuple[bytes, StoreReceipt]] = []
        for key, receipt in list(self._entries.take_up(known)):
            session = self._sessions.get(receipt.peer)
            if session is None or receipt.number in session.written:
                useless.append((key, receipt))
            else:
                session.written[receipt.number] = key, receipt
        for key, receipt in useless:
            self._entries.acknowledge(key, receipt.peer, receipt.number)
        self._sequence = self._entries.last

    def check(self, history: History) -> None:
        """Assert that entries and sessions have the same receipts and waiting requests.

        Raises:
            InvariantViolation: they differ, or a request waits for a key that exists.
        """
        self._entries.check(history)
        for peer, session in self._sessions.items():
            for number, (key, receipt) in session.written.items():
                entry = self._entries.get(key)
                if entry is None or entry.receipts.get((peer, number)) != receipt:
                    raise InvariantViolation("a receipt of the store is lost", history)
            for number, key in session.waiting.items():
                if (peer, number) not in self._waiting[key]:
                    raise InvariantViolation("a waiting request is lost", history)
        if any(self._entries.value_of(key) is not None for key in self._waiting):
            raise InvariantViolation("a request waits for a key that exists", history)


def _flaw(request: StoreRequest) -> str:
    """Return why no member sends this request; empty if one may."""
    count, op = len(request.keys), request.op
    if (count > 0) is not op.names_keys or (count > 1 and op in _ON_ONE_KEY):
        return f"a request to the store names {count} keys for {op.label}"
    if (request.value and op not in _WITH_VALUE) or (
        request.expected and op is not StoreOp.COMPARE_SET
    ):
        return f"a request to the store has a value for {op.label}"
    return ""
