"""A hostile connection: somebody who does not belong to the run sends bytes to one of its ports."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Self

from pccl.protocol.codec import encode
from pccl.protocol.errors import LinkError
from pccl.protocol.handshake import NONCE_BYTES, RUN_BYTES, Channel, Opening
from pccl.protocol.messages import Goodbye, Resume
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.stress.sim.faults.base import MASTER, Ground, Process, Seed, TimedFault
from pccl.transports.base import Address, Connection

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

_DIAL_S = 1.0
_STAYS_NS = 2 * NS_PER_S
"""How long it stays connected, if nobody throws it out."""


class Rubbish(enum.Enum):
    """What it sends."""

    NOISE = "noise"
    TRUNCATED = "truncated"
    """Half an opening, and silence."""
    STRANGER = "stranger"
    """A good opening with ids that nobody has; then noise."""
    BAD_MESSAGE = "bad message"
    """A good opening of a newcomer; then a message that is none."""
    IMPOSTOR = "impostor"
    """It says that it is a member that comes back, and then goodbye. It does not know the token."""


@dataclass(frozen=True)
class Garbage(TimedFault, kind="garbage", calm=True, keeps_majority=True):
    """Connect to the port of a process and send rubbish."""

    peer: Process
    what: Rubbish
    seed: Seed
    """Of the bytes."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw one; only the master takes anybody for a member that comes back."""
        what = rng.choice((*Rubbish, Rubbish.IMPOSTOR))
        peer = MASTER if what is Rubbish.IMPOSTOR else ground.process(rng)
        return super().draw(rng, ground, peer=peer, what=what)

    def strike(self, stage: Stage) -> None:
        """Begin."""
        address = stage.address(self.peer)
        stage.struck(self)
        stage.spawn(self._attack(stage, address))

    async def _attack(self, stage: Stage, address: Address) -> None:
        try:
            connection = await stage.stranger().dial(address, _DIAL_S)
        except LinkError:
            return  # nobody listens there (any more)
        attacker = _Attacker(connection, *self._bytes(Random(self.seed)))
        stage.at(stage.now_ns() + _STAYS_NS, attacker.leave)

    def _bytes(self, rng: Random) -> tuple[bytes, bytes]:
        """What it sends at once, and what after the answer."""
        noise = rng.randbytes(rng.choice((1, 8, 80, 500, 5000)))
        if self.what is Rubbish.NOISE:
            return noise, b""
        channel = Channel.CONTROL if self.peer == MASTER else Channel.LANE
        if self.what is Rubbish.STRANGER:
            channel = rng.choice(tuple(Channel))
        stranger = self.what is Rubbish.STRANGER
        opening = Opening(
            channel=channel,
            nonce=rng.randbytes(NONCE_BYTES),
            run=rng.randbytes(RUN_BYTES) if stranger else bytes(RUN_BYTES),
            term=rng.choice((0, 1, 7)),
            source=PeerId(rng.randrange(1 << 40) if stranger else 0),
            target=PeerId(rng.randrange(1 << 40) if stranger else 0),
        ).encode()
        if self.what is Rubbish.TRUNCATED:
            return opening[: rng.randrange(1, len(opening))], b""
        if self.what is Rubbish.BAD_MESSAGE:
            length = rng.choice((len(noise), 0, 1, 1 << 31)).to_bytes(4, "little")
            return opening, length + noise
        if self.what is Rubbish.IMPOSTOR:
            peer = PeerId(rng.randint(1, 6))
            return opening, encode(Resume(peer, rng.randbytes(16), 0)) + encode(Goodbye())
        return opening, noise


class _Attacker:
    """Sends what it has, reads whatever comes, and does not care."""

    def __init__(self, connection: Connection, data: bytes, rest: bytes) -> None:
        self._connection = connection
        self._data = data
        self._rest = rest
        self._sink = memoryview(bytearray(4096))
        connection.start(self)
        self.writable()

    def leave(self) -> None:
        """Go without a word."""
        self._connection.abort()

    def get_buffer(self) -> memoryview:
        """Memory that nobody reads."""
        return self._sink

    def buffer_updated(self, nbytes: int) -> None:
        """Send the second part: the other side has answered."""
        self._data += self._rest
        self._rest = b""
        self.writable()

    def writable(self) -> None:
        """Send as much as the network takes."""
        while self._data:
            taken = self._connection.send([self._data])
            self._data = self._data[taken:]
            if not taken:
                self._connection.notify_writable()
                return

    def connection_lost(self, error: Exception | None) -> None:
        """Send nothing more."""
        self._data = self._rest = b""
