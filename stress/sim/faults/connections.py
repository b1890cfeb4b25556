"""Faults of one connection (reset, forgotten, stalled), and processes that no process can dial."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Annotated, ClassVar

from pccl.protocol.types import NS_PER_S
from pccl.stress.sim.faults.base import (
    Choice,
    Drawn,
    Duration,
    Fault,
    Ground,
    Peer,
    TimedFault,
    chance,
    one_of,
)
from pccl.transports.sim.nat import IDLE_NS, PORT_RESTRICTED, SYMMETRIC, Dependence

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection


@dataclass(frozen=True)
class ConnectionFault(TimedFault):
    """A fault of the ``choice``-th connection of the run, at one or both of its ends."""

    lanes_only: ClassVar[bool] = False
    """Whether the fault strikes only connections between peers."""

    choice: Choice

    def strike(self, stage: Stage) -> None:
        """Choose a connection, and apply the fault."""
        ends = stage.lane_ends() if self.lanes_only else list(stage.network.ends)
        if ends:
            stage.struck(self)
            self._befall(stage, ends[self.choice % len(ends)])

    @abstractmethod
    def _befall(self, stage: Stage, end: SimConnection) -> None:
        """Apply the fault to the connection that has the end ``end``."""


@dataclass(frozen=True)
class Reset(ConnectionFault, kind="reset"):
    """Reset any connection of the run, at both ends."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.broken(end)
        end.reset()


@dataclass(frozen=True)
class Cut(Reset, kind="cut", calm=True, keeps_majority=True, lanes_only=True):
    """Reset a lane between two peers; the other lanes of the link still work."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.checkers.done["lane cut"] += 1
        super()._befall(stage, end)


@dataclass(frozen=True)
class DeadLane(ConnectionFault, kind="dead_lane", lanes_only=True):
    """A lane delivers nothing more in one direction; new connections of the pair work.

    Once a peer notices that, a new lane with the same number replaces the dead lane.
    """

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.stall(None)


@dataclass(frozen=True)
class HalfOpen(ConnectionFault, kind="half_open"):
    """One end learns that the connection is lost; the other end learns it only when it sends."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.forget()


@dataclass(frozen=True)
class SilentLoss(ConnectionFault, kind="silent_loss", lanes_only=True):
    """A firewall or NAT forgets a lane, and drops all packets of the lane.

    One end drops the lane. The other end notices the loss only when its kernel gives up.
    """

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.cut()
        end.forget()


@dataclass(frozen=True)
class StreamStall(ConnectionFault, kind="stall"):
    """Stall the data that one end of any connection sends; other connections of the pair work."""

    duration_ns: Duration

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.silenced(end.local.host, end.other.local.host, self.duration_ns)
        end.stall(self.duration_ns)


@dataclass(frozen=True)
class Moved(TimedFault, kind="moved"):
    """A peer, or the NAT before it, gets another address: a line was dialled again, for example.

    All its connections end without a word, except in its local network. Its dials come from the new
    address, and nobody answers at the old one.
    """

    peer: Peer
    is_told: Annotated[bool, chance(0.5)]
    """Whether its system tells the peer that its connections are lost."""

    def strike(self, stage: Stage) -> None:
        """Change the address, and that of all hosts behind the same NAT."""
        stage.struck(self)
        network = stage.network
        names = network.move(stage.name(self.peer))
        for name in names:
            stage.excuses.moved(name)
        if self.is_told:
            for end in [end for end in network.ends if end.local.host in names and end.is_cut]:
                end.forget()


def _some_peers(ground: Ground, rng: Random) -> tuple[int, ...]:
    """Draw the peers: one, which can still dial all other processes, or more, up to all."""
    count = 1 if rng.random() < 0.25 else rng.randint(1, ground.peers)
    return tuple(sorted(rng.sample(range(ground.peers), count)))


@dataclass(frozen=True)
class BehindNat(Fault, kind="undialable", calm=True, keeps_majority=True):
    """Processes behind a firewall or NAT, from the start to the end, also after a restart.

    They can dial other processes, but no process can dial them, unless both are in one network.
    """

    peers: Annotated[tuple[int, ...], Drawn(_some_peers, names=True)]
    refuses: Annotated[bool, chance(0.5)]
    """Whether a dial is refused; otherwise it is never answered."""
    is_symmetric: Annotated[bool, chance(0.5)]
    """Whether the NAT chooses another port for each destination, so that two processes that dial
    each other at the same time do not meet."""
    together: Annotated[bool, chance(0.25)]
    """Whether these processes are in one local network."""
    filtering: Annotated[Dependence, one_of(*Dependence)] = Dependence.ADDRESS_AND_PORT
    """What the NAT compares to tell an answer from a dial."""
    shares_address: Annotated[bool, chance(0.25)] = False
    """Whether the others see all these processes at one address."""
    hairpins: Annotated[bool, chance(0.5)] = False
    """Whether processes behind one NAT reach each other at its address."""
    ports: tuple[int, ...] = ()
    """The only ports that the processes can dial; empty: all."""
    idle_ns: Annotated[int, one_of(NS_PER_S, 30 * NS_PER_S, IDLE_NS)] = IDLE_NS
    """Time after which the NAT forgets a mapping that no connection uses."""

    def plant(self, stage: Stage) -> None:
        """Put the processes behind their NATs."""
        stage.struck(self)
        kind = replace(
            SYMMETRIC if self.is_symmetric else PORT_RESTRICTED,
            filtering=self.filtering,
            refuses=self.refuses,
            hairpins=self.hairpins,
            ports=self.ports,
            idle_ns=self.idle_ns,
        )
        names = [stage.name(index) for index in self.peers]
        first = self.peers[0]
        if self.shares_address:
            stage.network.addresses.translate(kind, *names, outside=f"nat{first}")
        for index, name in zip(self.peers, names, strict=True):
            if not self.shares_address:
                stage.network.addresses.translate(kind, name)
            home = first if self.together else index if self.shares_address else None
            if home is not None:
                stage.network.addresses.local[name] = home
            stage.excuses.shut(name, home, is_barred=bool(self.ports))


@dataclass(frozen=True)
class OneIpVersion(Fault, kind="ip_version", calm=True, keeps_majority=True):
    """Processes that have one version of IP only; the masters have both. No seed draws it."""

    peers: Annotated[tuple[int, ...], Drawn(names=True)]
    version: int

    def plant(self, stage: Stage) -> None:
        """Take the other version from the processes."""
        stage.struck(self)
        for name in map(stage.name, self.peers):
            stage.network.addresses.versions[name] = self.version
            stage.excuses.has_version(name, self.version)
