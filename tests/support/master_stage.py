"""``MasterStage``: plays the scenarios of one master, with the peers' messages written out.

A step is an event of the master, ``CONNECTION: message``, or one of the words that ``MasterStage``
defines; peer n speaks on connection n unless a step says otherwise. ``to 1, 2:`` begins what the
master sends on these connections, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, groupby
from typing import Any, Self, TypeVar, cast

from pccl.machines.master import events as ev
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.origin import Origin
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import data_type, operation, shared_state, types
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import (
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    Quorum,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
)
from tests.support.scenarios import WORDS, Short, key, op, public, roster
from tests.support.secrets import MASTER_SIGNER

SECOND = 1_000_000_000
NEW_RUN, RUN, OTHER_RUN = b"run", b"the run of these", b"quite other runs"
MASTER, NEXT = b"master A", b"master B"
SUM, AVG = (Descriptor(DataType.FLOAT, op, 8) for op in (ReduceOp.SUM, ReduceOp.AVG))
BARRIER = Descriptor.barrier()
ALL_GATHER = Descriptor.direct(Collective.ALL_GATHER, DataType.FLOAT)
SEND = Descriptor.direct(Collective.SEND_RECV, DataType.FLOAT)
OF_PAIR = operation.Subset((PeerId(1), PeerId(3)), 5, 1)
PAIR = OF_PAIR.operation_tag
OF_PART = operation.Subset((PeerId(3), PeerId(2)), 5)
PART = OF_PART.operation_tag
QUORUM = Quorum(2, grace_ms=1000)
QUORATE = replace(SUM, quorum=QUORUM)
AFAR = ("10.0.0.9:1",)
"""The masters that another one stands by for."""
BEFORE = roster(7, 4, 1, 2, 3)
"""What the members of the run know before its master dies."""
FIRST = op(view=2)
"""The first operation of a run that ``new`` has begun."""
NAMED = {
    "RUN": RUN,
    "OTHER_RUN": OTHER_RUN,
    "NO_RUN": NO_RUN,
    "MASTER": MASTER,
    "NEXT": NEXT,
    "SUM": SUM,
    "AVG": AVG,
    "BARRIER": BARRIER,
    "ALL_GATHER": ALL_GATHER,
    "SEND": SEND,
    "PAIR": PAIR,
    "OF_PAIR": OF_PAIR,
    "PART": PART,
    "OF_PART": OF_PART,
    "QUORUM": QUORUM,
    "QUORATE": QUORATE,
    "BEFORE": BEFORE,
}
Kind = TypeVar("Kind", bound=msg.Message)
BACKGROUND = (msg.MasterHeartbeat, msg.AdmissionWaits)
"""What comes of time alone."""


def counts(update: int = 0, pending: int = 0, optimize: int = 0) -> tuple[msg.RoundCount, ...]:
    """How many rounds there were, by kind."""
    return tuple(map(msg.RoundCount, RoundKind, (update, pending, optimize)))


SHORT = Short(
    {
        **{value: name for name, value in NAMED.items()},
        **{key(peer): f"key({peer})" for peer in range(1, 100)},
    }
)
VOCABULARY = {
    name: one
    for module in (data_type, types, operation, shared_state, msg, ev)
    for name, one in public(module).items()
}


class MasterStage:
    """A master, with a clock that the scenario sets."""

    machine: MasterMachine

    def __init__(self) -> None:
        self.now_ns = 0
        self.words: dict[str, Any] = {**VOCABULARY, **WORDS, **NAMED}
        mine = (self.new, self.blank, self.restarted, self.standby, self.register, self.resume)
        more = (self.link, self.start, self.come, self.say, self.wait, self.sleep, counts)
        self.words |= {word.__name__: word for word in (*mine, *more)}

    def tell(self, said: Any, listener: str) -> Iterator[str]:
        """An event, a message on the connection ``listener``, or effects."""
        effects: list[ev.MasterEffect] = []
        if isinstance(said, list):
            effects = cast("list[ev.MasterEffect]", said)
        elif listener:
            effects = self.hear(int(listener), said)
        elif said is not None and said is not self:
            effects = self.do(said)
        yield from short_effects(effects)

    def do(self, event: ev.MasterEvent) -> list[ev.MasterEffect]:
        """Tell the machine; as its shell does, fill in the status where it is to be sent."""
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return [
            ev.SendTo(effect.connection, self.machine.status())
            if isinstance(effect, ev.SendStatus)
            else effect
            for effect in effects
        ]

    def hear(self, connection: int, *messages: msg.Message) -> list[ev.MasterEffect]:
        """Messages of one connection."""
        return [
            effect
            for message in messages
            for effect in self.do(ev.ConnectionMessage(connection, message))
        ]

    def status(self) -> dict[str, str]:
        """Who belongs to the run."""
        if not hasattr(self, "machine"):
            return {}
        membership = self.machine.membership
        run = f"{SHORT.of(self.machine.shown_run)} in term {self.machine.shown_term}"
        parts = {
            "run": run,
            "members": " ".join(str(peer.id) for peer in membership.members()) or "none",
        }
        if pending := membership.pending():
            parts["pending"] = " ".join(str(peer.id) for peer in pending)
        if self.machine.recovering:
            parts["recovering"] = "yes"
        return parts

    # -- words: how the master begins ------------------------------------------------------------

    def new(self, members: int = 0, deadline_s: float = Timing().deadline_s) -> Self:
        """A master of a new run, which has admitted so many peers."""
        self.begin(timing=Timing(deadline_s=deadline_s, waiting_report_s=5.0))
        for peer in range(1, members + 1):
            self.register(peer)
        if members > 1:
            for peer in range(1, members + 1):
                self.link(peer)
            first = RoundId(RoundKind.UPDATE_TOPOLOGY, 0)
            self.hear(1, msg.RoundRequest(first), msg.Heartbeat((), (), (first,)))
        return self

    def together(self, *groups: int, masters: int = 1) -> Self:
        """Peers of these groups, admitted at once: each waits for so many."""
        for peer, group in enumerate(groups, 1):
            self.register(peer, len(groups), group, masters)
            self.link(peer)
        assert len(self.machine.membership.members()) == len(groups)
        return self

    def blank(self, *standbys: msg.MasterAddress) -> Self:
        """A master that remembers nothing, and whose members may come back."""
        return self.begin(OTHER_RUN, 1, Origin.BLANK, NEXT, standbys, stands_by_for=AFAR)

    def restarted(
        self, term: int = 2, *standbys: msg.MasterAddress, vouched: Vouched = NOT_TOLD
    ) -> Self:
        """A master that knows its run, and of the members what is ``vouched`` for."""
        return self.begin(
            RUN, term, Origin.RESTARTED, NEXT, standbys, stands_by_for=AFAR, vouched=vouched
        )

    def standby(self, term: int = 1) -> Self:
        """A standby, which does not know of any run yet."""
        return self.begin(NO_RUN, term, Origin.STANDBY, NEXT, stands_by_for=AFAR)

    def begin(
        self,
        run: bytes = NEW_RUN,
        term: int = 1,
        origin: Origin = Origin.BLANK,
        incumbent: bytes = b"",
        standbys: tuple[msg.MasterAddress, ...] = (),
        *,
        timing: Timing | None = None,
        **others: Any,
    ) -> Self:
        """A master of any kind."""
        numbers = count(1)
        self.machine = MasterMachine(
            timing or Timing(waiting_report_s=5.0),
            run,
            term,
            lambda size: bytes([next(numbers)] * size),
            self.now_ns,
            origin,
            incumbent,
            standbys,
            signer=MASTER_SIGNER,
            **others,
        )
        return self

    # -- words: what peers do --------------------------------------------------------------------

    def register(
        self,
        peer: int,
        min_peers: int = 1,
        group: int = 0,
        masters: int = 1,
        host: str = "",
        name: str = "",
    ) -> list[ev.MasterEffect]:
        """A newcomer registers."""
        self.do(ev.ConnectionOpened(peer, f"10.0.0.{peer}", key(peer)))
        asked = msg.Register(group, host, 4000 + peer, min_peers, masters, name=name)
        return self.hear(peer, asked)

    def link(self, peer: int, *others: int) -> list[ev.MasterEffect]:
        """It has links to these, or to all with lower numbers."""
        up = [msg.LinkReport(PeerId(other), True, "") for other in others or range(1, peer)]
        return self.hear(peer, *up)

    def round(self, kind: RoundKind, n: int, *peers: int) -> list[ev.MasterEffect]:
        """Members ask for a round."""
        asked = msg.RoundRequest(RoundId(kind, n))
        return [effect for peer in peers for effect in self.hear(peer, asked)]

    def resume(
        self,
        peer: int,
        connection: int,
        version: int,
        incumbent: bytes = b"",
        proven: bytes | None = None,
    ) -> list[ev.MasterEffect]:
        """A peer comes back on another connection, with the newest roster that it has.

        ``proven``: the key that the process behind the connection has; None: the peer's.
        """
        self.do(ev.ConnectionOpened(connection, f"10.0.0.{peer}", proven or key(peer)))
        return self.hear(connection, msg.Resume(PeerId(peer), version, incumbent))

    def start(self, *peers: int, what: OperationId = FIRST) -> list[ev.MasterEffect]:
        """Members ask for the same sum."""
        asked = msg.OperationRequest(what, SUM)
        return [effect for peer in peers for effect in self.hear(peer, asked)]

    def say(
        self,
        peer: int,
        *more: msg.Message,
        connection: int | None = None,
        known: tuple[Roster, ...] = (BEFORE,),
        term: int = 1,
        rounds: tuple[msg.RoundCount, ...] = (),
        run: bytes = RUN,
        incumbent: bytes = MASTER,
        masters: int = 1,
        proven: bytes | None = None,
        ratified: int = 0,
        expected: Expected = NOTHING_EXPECTED,
    ) -> list[ev.MasterEffect]:
        """A member of the run returns with a report, and has not said its end.

        ``proven``: the key that the process behind the connection has; None: the peer's.
        """
        connection = connection or peer
        newest = max((one.version for one in known), default=0)
        header = msg.Return(
            PeerId(peer),
            run,
            term,
            msg.Register(0, "", 4000 + peer, 1, masters),
            newest,
            rounds,
            incumbent,
            ratified,
            expected,
        )
        self.do(ev.ConnectionOpened(connection, f"10.0.0.{peer}", proven or key(peer)))
        return self.hear(
            connection, header, *(msg.KnownRoster(one, incumbent) for one in known), *more
        )

    def come(self, peer: int, *more: msg.Message, **options: Any) -> list[ev.MasterEffect]:
        """A member of the run returns, and has said everything."""
        effects = self.say(peer, *more, **options)
        return effects + self.hear(options.get("connection") or peer, msg.Reported())

    def sleep(self, seconds: float) -> None:
        """Let time pass without a tick."""
        self.now_ns += round(seconds * SECOND)

    def wait(self, seconds: float, *speaking: int) -> list[ev.MasterEffect]:
        """Let time pass, with ticks; these connections send heartbeats.

        All effects but the master's heartbeats, and what newcomers are told about their waiting.
        """
        effects: list[ev.MasterEffect] = []
        end_ns = self.now_ns + round(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += SECOND // 4
            for connection in speaking:
                effects += self.hear(connection, msg.Heartbeat())
            effects += self.do(ev.MasterTick())
        return [
            effect
            for effect in effects
            if not (isinstance(effect, ev.SendTo) and isinstance(effect.message, BACKGROUND))
        ]


def short_effects(effects: Iterable[ev.MasterEffect]) -> Iterator[str]:
    """One line each; one for all connections that are sent the same, one after the other."""
    for message, alike in groupby(
        effects, lambda effect: effect.message if isinstance(effect, ev.SendTo) else effect
    ):
        sent = [effect for effect in alike if isinstance(effect, ev.SendTo)]
        if sent:
            yield f"to {', '.join(str(one.connection) for one in sent)}: {SHORT.of(message)}"
        else:
            yield SHORT.of(message)


def removals(effects: Iterable[ev.MasterEffect]) -> list[tuple[int, str]]:
    """The peers that were removed, and why."""
    announced = [effect for effect in effects if isinstance(effect, ev.Announce)]
    return [
        (one.peer, f"{one.cause.name}: {one.text}") for one in announced if one.cause is not None
    ]


def sent(effects: Iterable[ev.MasterEffect]) -> list[tuple[int, msg.MasterMessage]]:
    """What was sent, with the connection."""
    return [(one.connection, one.message) for one in effects if isinstance(one, ev.SendTo)]


def told(effects: Iterable[ev.MasterEffect], kind: type[Kind]) -> list[tuple[int, Kind]]:
    """The messages of a kind that were sent, with the connection."""
    return [(where, message) for where, message in sent(effects) if isinstance(message, kind)]


def closed(effects: Iterable[ev.MasterEffect]) -> list[int]:
    """The connections that were closed."""
    return [effect.connection for effect in effects if isinstance(effect, ev.CloseConnection)]
