"""The events that a ``MasterMachine`` handles, and the effects that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.machines.master.tokens import Tokens
from pccl.machines.reachability import AddressTried, CallerTried, TryAddress, TryCaller
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId, RemovalCause

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectionOpened:
    """A connection from ``host`` was opened; the shell gives it a new number.

    The process behind it has proven ``key``, its public key, and that it knows the run's token with
    the number ``token``.
    """

    connection: int
    host: str
    key: bytes
    token: int = 0


@dataclass(frozen=True, slots=True)
class TokensChanged:
    """A person has changed the tokens of the run, or has expelled members."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class ConnectionMessage:
    """A decoded message has arrived on a connection."""

    connection: int
    message: msg.Message


@dataclass(frozen=True, slots=True)
class ConnectionPaused:
    """The shell does not read from a connection until ``until_ns``, or resumes if that is now."""

    connection: int
    until_ns: int


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection is closed, by either side."""

    connection: int
    reason: str
    damaged: bool = False
    """Whether damaged bytes were the reason. Then the peer itself may be healthy."""


@dataclass(frozen=True, slots=True)
class MasterTick:
    """Time has passed; the shell sends this event every ``Timing.tick_s``."""

    busy_ns: int = 0
    """Processor time of the I/O thread since the previous tick."""


@dataclass(frozen=True, slots=True)
class MasterAnswered:
    """Another master has answered this standby; ``master`` is its index in the standby's list."""

    master: int
    answer: msg.RunIs


@dataclass(frozen=True, slots=True)
class MasterUnanswered:
    """Another master could not be reached, or did not answer; ``master`` is its index."""

    master: int
    reason: str


@dataclass(frozen=True, slots=True)
class ProcessInspected:
    """The shell has done ``InspectProcess``; the fields are those of an ``EvidenceReply``."""

    query: int
    data: bytes
    refusal: str


MasterEvent = (
    ConnectionOpened
    | ConnectionMessage
    | ConnectionPaused
    | ConnectionClosed
    | MasterTick
    | MasterAnswered
    | MasterUnanswered
    | AddressTried
    | CallerTried
    | ProcessInspected
    | TokensChanged
)

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send ``message`` on a connection."""

    connection: int
    message: msg.MasterMessage


@dataclass(frozen=True, slots=True)
class SendStatus:
    """Send the present status (``MasterMachine.status``) on a connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class SendAddress:
    """Send an ``AddressIs`` on a connection: these fields, and what the shell knows."""

    connection: int
    seen: str
    dialled: bool
    reason: str
    padding: bytes = b""


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close a connection after its queued messages. A ``ConnectionClosed`` for it is ignored."""

    connection: int
    reason: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Announce to operators what happened to a peer: one line for logs and event streams."""

    what: str
    peer: PeerId
    name: str
    group: int
    text: str
    cause: RemovalCause | None = None
    """Of a removed peer: the kind of its removal."""


@dataclass(frozen=True, slots=True)
class InspectProcess:
    """Find out what the operating system knows of a peer's process and of its connection.

    ``ProcessInspected`` follows, with the same number ``query``.
    """

    query: int
    connection: int | None
    """The peer's connection; None: it has none."""
    name: str
    """The peer's name."""


@dataclass(frozen=True, slots=True)
class Remember:
    """Store the run for the next start, before any later effect, if there is a state folder."""

    run: bytes
    term: int
    incumbent: bytes
    coordinated: bool = True
    """Whether this master coordinates the run. A standby has only learnt the run from its master,
    and may learn another one."""
    vouched: Vouched = NOT_TOLD
    """The members of the run, as far as a standby has learnt them."""


@dataclass(frozen=True, slots=True)
class AskMaster:
    """Ask another master which run it coordinates, and for its members.

    ``MasterAnswered`` or ``MasterUnanswered`` follows, with the same index ``master``.
    """

    master: int
    query: msg.RunQuery
    """The run and roster that this standby knows already."""


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn operators of a problem that they should fix: one line."""

    text: str


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """Forget the run, because it has no member left; the next start begins another run."""


MasterEffect = (
    SendTo
    | SendStatus
    | SendAddress
    | CloseConnection
    | Announce
    | InspectProcess
    | Remember
    | ForgetRun
    | AskMaster
    | Warn
    | TryAddress
    | TryCaller
)
