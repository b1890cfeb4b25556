"""What goes into a ``MasterMachine`` (events) and what comes out of it (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """Somebody has connected from ``host``; the shell calls this connection by a new number."""

    connection: int
    host: str


@dataclass(frozen=True, slots=True)
class ConnectionMessage:
    """A decoded message has arrived."""

    connection: int
    message: msg.Message


@dataclass(frozen=True, slots=True)
class ConnectionPaused:
    """The shell does not read from the connection until ``until_ns``; the present ends a pause."""

    connection: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The connection is gone, whoever closed it."""

    connection: int
    reason: str
    damaged: bool = False
    """Whether it was closed because bytes had changed on the way: the other side is well then."""


@dataclass(frozen=True, slots=True)
class MasterTick:
    """Time has passed; the shell sends one every ``Timing.tick_s``."""

    busy_ns: int = 0
    """Processor time of the I/O thread since the tick before."""


@dataclass(frozen=True, slots=True)
class MasterAnswered:
    """Another master, by its place in the list of those that this standby asks, has answered."""

    master: int
    answer: msg.RunIs


@dataclass(frozen=True, slots=True)
class MasterUnanswered:
    """Likewise: it was not reached, or has not answered."""

    master: int
    reason: str


MasterEvent = (
    ConnectionOpened
    | ConnectionMessage
    | ConnectionPaused
    | ConnectionClosed
    | MasterTick
    | MasterAnswered
    | MasterUnanswered
    | AddressTried
)

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send ``message`` on a connection."""

    connection: int
    message: msg.MasterMessage


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close a connection after what was sent on it; its ``ConnectionClosed`` is ignored."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Something that operators want to know: one line for logs and event streams."""

    what: str
    peer: PeerId
    group: int
    text: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep this for the next start, where there is a place for it, before anything else is done."""

    run: bytes
    term: int
    incumbent: bytes
    coordinated: bool = True
    """Whether this master coordinates it; a standby has only learnt of it, and may learn of
    another."""
    vouched: Vouched = NOT_TOLD
    """Its members, as far as a standby has learnt them."""


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Ask another master, by its place in the list, which run it has, and who is in it.

    One of ``MasterAnswered`` and ``MasterUnanswered`` follows.
    """

    master: int
    query: msg.RunQuery
    """What is known already."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Something is wrong that operators should mend: one line."""

    text: str


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """The run is over, nobody is a member any more: the next start begins another one."""


MasterEffect = (
    SendTo | CloseConnection | Announce | Remember | ForgetRun | AskMaster | Warn | TryAddress
)
