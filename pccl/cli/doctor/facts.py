"""What the doctor knows of a machine, of its path to a master, and of a run.

An empty text, or None, is unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from pccl.inquiry import Examination


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """This machine and its interpreter.

    Attributes:
        implementation: name of the interpreter, such as CPython.
        python: its version.
        system: name and release of the system.
        versions: versions of packages; empty: not installed.
        descriptors_max: largest number of descriptors that a process can get (the hard limit).
        congestion: default congestion control of the system.
        congestion_choices: congestion controls that the kernel has loaded.
        loopback_bytes_per_s: speed of one connection of this interpreter to itself.
        outward: the address that this machine uses for the internet.
        interface: the network interface with that address.
        interface_mtu: its largest packet in bytes.
    """

    implementation: str
    python: str
    system: str
    versions: Mapping[str, str]
    descriptors_max: int
    congestion: str
    congestion_choices: tuple[str, ...]
    loopback_bytes_per_s: float | None
    outward: str
    interface: str
    interface_mtu: int | None


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """The token for the run.

    Attributes:
        nbytes: its length in bytes; None: there is none.
        flaw: why it is not usable, with the remedy; empty: it is.
    """

    nbytes: int | None = None
    flaw: str = ""


@dataclass(frozen=True, slots=True)
class AddressFacts:
    """A variable with an address of this machine.

    Attributes:
        variable: its name.
        value: the address.
        flaw: why no peer can use it; empty: one can.
    """

    variable: str
    value: str
    flaw: str = ""


class Obstacle(enum.Enum):
    """Why a dial has failed."""

    NO_NAME = enum.auto()
    """The name has no address."""
    REFUSED = enum.auto()
    """A system has answered that nothing listens at the port, or that it lets nobody in."""
    SILENT = enum.auto()
    """There was no answer."""
    NO_ROUTE = enum.auto()
    """This machine, or one on the way, knows no way there."""
    OTHER = enum.auto()


@dataclass(frozen=True, slots=True)
class FailedDial:
    """An address of a master that did not answer.

    Attributes:
        host: the numeric host, or the name if it has no address.
        obstacle: what kept the dial from succeeding.
        reason: the same in words.
    """

    host: str
    obstacle: Obstacle
    reason: str


@dataclass(frozen=True, slots=True)
class PathFacts:
    """The path to one master.

    Attributes:
        master: its address as given, ``host:port``.
        failed: its addresses that do not answer; if none answers, there is no ``address``.
        port: the port that was dialled.
        address: its numeric address, ``host:port``.
        host: the numeric host.
        local: the host of this end of the connection.
        interface: the network interface with that host.
        interface_mtu: its largest packet in bytes.
        path_mtu: largest packet of the path in bytes, as far as the kernel knows.
        segment_bytes: largest TCP segment of the connection.
        congestion: congestion control of the connection.
        round_trips_s: durations of some connects, in seconds.
    """

    master: str
    failed: tuple[FailedDial, ...] = ()
    port: int = 0
    address: str = ""
    host: str = ""
    local: str = ""
    interface: str = ""
    interface_mtu: int | None = None
    path_mtu: int | None = None
    segment_bytes: int | None = None
    congestion: str = ""
    round_trips_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run behind a path.

    Attributes:
        path: the path to its master.
        refusal: why the master did not answer; empty: it answered.
        remedy: what to do about that.
        loses_long: whether the reason is that long packets get lost.
        examination: what the library has learnt; None if the master did not answer.
    """

    path: PathFacts
    refusal: str = ""
    remedy: str = ""
    loses_long: bool = False
    examination: Examination | None = None
