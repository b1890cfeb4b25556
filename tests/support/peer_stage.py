"""``PeerStage``: plays the scenarios of one peer, with the master's messages written out.

A step is an event of the peer, a message of the master, or one of the words that ``PeerStage``
defines. ``to master:`` begins what the peer sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self, TypeVar, cast

from pccl.machines import blocks
from pccl.machines.peer import events as ev
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import data_type, errors, operation, types
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import ContributionGuard, GuardAction
from pccl.protocol.limits import Timing
from pccl.protocol.types import (
    AbortCause,
    Algorithm,
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    Quorum,
    ReduceOp,
    Roster,
)
from tests.support.scenarios import WORDS, Short, op, public, roster

Raised = TypeVar("Raised", bound=Exception)
SECOND = 1_000_000_000
RUN, ME = b"the run's own id", 2
BACK = ev.Send(msg.BlockedReply(0, False))
"""What a late member says with its calls."""
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8, algorithm=Algorithm.RING)
WEIGHTED = Descriptor(DataType.FLOAT, ReduceOp.AVG, 8, algorithm=Algorithm.RING, weighted=True)
GUARD = ContributionGuard(GuardAction.EXCLUDE, GuardAction.WARN, 8.0, 8)
GUARDED = replace(WEIGHTED, guard=GUARD)
QUORUM = Quorum(2, grace_ms=1000)
QUORATE, QUORATE_MEAN = replace(SUM, quorum=QUORUM), replace(WEIGHTED, quorum=QUORUM)
BROADCAST, BARRIER = Descriptor.broadcast(DataType.FLOAT, 8, 0), Descriptor.barrier()
FROM_LAST = replace(BROADCAST, root=2)
ALL_GATHER = Descriptor.direct(Collective.ALL_GATHER, DataType.FLOAT)
SEND = Descriptor.direct(Collective.SEND_RECV, DataType.FLOAT)
OF_PART = operation.Subset((PeerId(3), PeerId(2)), 5)
PART = OF_PART.operation_tag
NAMED = {
    "RUN": RUN,
    "SUM": SUM,
    "WEIGHTED": WEIGHTED,
    "GUARDED": GUARDED,
    "QUORUM": QUORUM,
    "QUORATE": QUORATE,
    "QUORATE_MEAN": QUORATE_MEAN,
    "BROADCAST": BROADCAST,
    "BARRIER": BARRIER,
    "FROM_LAST": FROM_LAST,
    "ALL_GATHER": ALL_GATHER,
    "SEND": SEND,
    "PART": PART,
    "OF_PART": OF_PART,
}
SHORT = Short({value: name for name, value in NAMED.items()})


VOCABULARY = {
    name: one
    for module in (data_type, errors, types, blocks, operation, msg, ev)
    for name, one in public(module).items()
}


class PeerStage:
    """Peer 2, with a clock that the scenario sets."""

    def __init__(self, timing: Timing | None = None, eager: EagerBudget | None = None) -> None:
        self.machine = PeerMachine(timing or Timing(), 0, eager)
        self.now_ns = 0
        self.words: dict[str, Any] = {**VOCABULARY, **WORDS, **NAMED}
        self.words |= {
            "sleep": self.sleep,
            "wait": self.wait,
            "registered": self.registered,
            "member": self.member,
            "running": self.running,
        }

    def tell(self, said: Any, listener: str) -> Iterable[str]:
        """An event, a message of the master, or effects."""
        effects: list[ev.PeerEffect] = []
        if isinstance(said, list):
            effects = cast("list[ev.PeerEffect]", said)
        elif said is not None and said is not self:
            effects = self.do(said)
        for effect in effects:
            if isinstance(effect, ev.Send):
                yield f"to master: {SHORT.of(effect.message)}"
            else:
                yield SHORT.of(effect)

    def do(self, said: Any) -> list[ev.PeerEffect]:
        """Tell the machine."""
        event = said if isinstance(said, ev.PeerEvent) else ev.ControlMessage(said)
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def status(self) -> dict[str, str]:
        """What it is, and what its caller sees of the membership."""
        machine, seen, newest = self.machine, self.machine.seen, self.machine.newest
        parts = {"standing": machine.standing.name.lower()}
        if machine.knows_its_loss:
            parts["the caller knows of"] = type(machine.loss).__name__
        if seen is not None:
            parts["the caller sees"] = short_of(seen)
        if newest is not None and newest != seen:
            parts["the peer knows"] = short_of(newest)
        return parts

    # -- words -----------------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Let time pass without a tick."""
        self.now_ns += round(seconds * SECOND)

    def wait(
        self, seconds: float, step_s: float = 0.25, *, hears: msg.Message | None = None
    ) -> list[ev.PeerEffect]:
        """Let time pass, with what it hears and a tick at each step; all effects but heartbeats."""
        effects: list[ev.PeerEffect] = []
        end_ns = self.now_ns + round(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += round(step_s * SECOND)
            if hears is not None:
                effects += self.do(hears)
            effects += self.do(ev.Tick())
        return [
            effect
            for effect in effects
            if not (isinstance(effect, ev.Send) and isinstance(effect.message, msg.Heartbeat))
        ]

    def registered(self, master: bytes = b"", *standbys: msg.MasterAddress) -> Self:
        """A newcomer that the master has given an id; its call 1 is to join."""
        self.do(ev.JoinCall(1, 0, "", 4002, 5))
        self.do(ev.ControlOpened(RUN, 1))
        self.do(msg.Registered(PeerId(ME), 1, RUN, master, standbys))
        return self

    def member(self, *peers: int, **others: Any) -> Self:
        """A member of view 1, with peer 1 or these; its first update_topology is used up."""
        if self.machine.standing is Standing.OUTSIDE:
            self.registered()
        counts = (msg.RoundCount(WORDS["UPDATE"], 1), msg.RoundCount(WORDS["PENDING"], 0))
        self.do(msg.Admitted(roster(1, 1, *(peers or (1, ME)), **others), counts))
        self.do(ev.RoundCall(2, WORDS["UPDATE"]))
        return self

    def running(self, *peers: int, done: bool = False) -> Self:
        """The same, in an operation that has begun; its call 9. ``done``: with its result."""
        self.member(*peers)
        self.do(ev.ReduceCall(9, 5, SUM))
        self.do(msg.OperationStarted(op()))
        if done:
            self.do(ev.ReduceDone(op(), b"digest"))
        return self


def short_of(seen: Roster) -> str:
    """Version and members."""
    return f"version {seen.version}: " + " ".join(str(member.peer) for member in seen.members)


def sent(effects: Iterable[ev.PeerEffect]) -> list[msg.PeerMessage]:
    """What the master is sent."""
    return [effect.message for effect in effects if isinstance(effect, ev.Send)]


def raised(effects: Iterable[ev.PeerEffect], kind: type[Raised]) -> Raised:
    """What the only call that raises does raise: an error of this kind."""
    (error,) = [effect.error for effect in effects if isinstance(effect, ev.RaiseCall)]
    assert isinstance(error, kind)
    return error


def ended(
    what: OperationId,
    abort: AbortCause | None = None,
    reason: str = "",
    version: int = 1,
    **others: Any,
) -> msg.OperationEnded:
    """An outcome; peers 1 and 2 have contributed to it, unless others are named."""
    usual: dict[str, Any] = {
        "contributors": () if abort else (PeerId(1), PeerId(ME)),
        "roster_version": version,
    }
    return msg.OperationEnded(what, abort, reason, **{**usual, **others})
