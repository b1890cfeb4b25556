"""A hostile connection: a stranger sends bytes to a port of the run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Self

from pccl.protocol.codec import encode
from pccl.protocol.errors import LinkError, RemoteProtocolError
from pccl.protocol.handshake.opening import RUN_BYTES, Channel, Opening
from pccl.protocol.messages import Goodbye, Resume
from pccl.protocol.types import KEY_BYTES, NS_PER_S, PeerId
from pccl.runtime.control.greeting import Credentials, introduce
from pccl.stress.sim.curves import QuickCurves
from pccl.stress.sim.faults.base import MASTER, Ground, Process, Seed, TimedFault
from pccl.transports.base import Address, Connection

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage

_DIAL_S = 1.0
_STAYS_NS = 2 * NS_PER_S
"""How long the stranger stays connected, unless the process closes the connection."""


class Rubbish(enum.Enum):
    """What the stranger sends."""

    NOISE = "noise"
    TRUNCATED = "truncated"
    """Part of an opening, then silence."""
    STRANGER = "stranger"
    """A valid opening with ids that no process has; then noise."""
    BAD_MESSAGE = "bad message"
    """A whole handshake with the token of the run, if it has one; then bytes that are no message,
    or no frame."""
    IMPOSTOR = "impostor"
    """The same, and then the claim to be a member that returns, and its goodbye."""


@dataclass(frozen=True)
class Garbage(TimedFault, kind="garbage", calm=True, keeps_majority=True):
    """Connect to the port of a process and send rubbish."""

    peer: Process
    what: Rubbish
    seed: Seed
    """Seed of the bytes."""

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; an impostor dials the master, because only the master accepts returns."""
        what = rng.choice((*Rubbish, Rubbish.IMPOSTOR))
        peer = MASTER if what is Rubbish.IMPOSTOR else ground.process(rng)
        return super().draw(rng, ground, peer=peer, what=what)

    def strike(self, stage: Stage) -> None:
        """Start the attack."""
        address = stage.address(self.peer)
        stage.struck(self)
        stage.spawn(self._attack(stage, address))

    async def _attack(self, stage: Stage, address: Address) -> None:
        rng, greets = Random(self.seed), self.what in (Rubbish.BAD_MESSAGE, Rubbish.IMPOSTOR)
        data, rest = self._bytes(rng)

        def attack(connection: Connection, opening: Opening | None = None) -> None:
            attacker = _Attacker(connection, data, rest)
            stage.at(stage.now_ns() + _STAYS_NS, attacker.leave)

        try:
            connection = await stage.stranger().dial(address, _DIAL_S)
            if not greets:
                attack(connection)
                return
            credentials = Credentials(
                stage.scenario.token, rng.randbytes, QuickCurves(), encrypts=stage.scenario.encrypts
            )
            handshake = credentials.dial(connection, Opening(self._channel))
            until_ns = stage.now_ns() + _STAYS_NS
            await introduce(connection, handshake, stage.loop, until_ns, attack)
        except (LinkError, RemoteProtocolError):
            return  # no process listens there (any more), or a peer does not know the stranger

    @property
    def _channel(self) -> Channel:
        return Channel.CONTROL if self.peer == MASTER else Channel.LANE

    def _bytes(self, rng: Random) -> tuple[bytes, bytes]:
        """Return the bytes to send at once, and the bytes to send after an answer."""
        noise = rng.randbytes(rng.choice((1, 8, 80, 500, 5000)))
        if self.what is Rubbish.NOISE:
            return noise, b""
        if self.what is Rubbish.BAD_MESSAGE:
            length = rng.choice((len(noise), 0, 1, 1 << 31)).to_bytes(4, "little")
            return length + noise, b""
        if self.what is Rubbish.IMPOSTOR:
            return encode(Resume(PeerId(rng.randint(1, 6)), 0)) + encode(Goodbye()), b""
        stranger = self.what is Rubbish.STRANGER
        opening = Opening(
            channel=rng.choice(tuple(Channel)) if stranger else self._channel,
            share=rng.randbytes(KEY_BYTES),
            key=rng.randbytes(KEY_BYTES),
            run=rng.randbytes(RUN_BYTES) if stranger else bytes(RUN_BYTES),
            term=rng.choice((0, 1, 7)),
            source=PeerId(rng.randrange(1 << 40) if stranger else 0),
            target=PeerId(rng.randrange(1 << 40) if stranger else 0),
        ).encode()
        if self.what is Rubbish.TRUNCATED:
            return opening[: rng.randrange(1, len(opening))], b""
        return opening, noise


class _Attacker:
    """Sends its bytes, and ignores all data that arrives."""

    def __init__(self, connection: Connection, data: bytes, rest: bytes) -> None:
        self._connection = connection
        self._data = data
        self._rest = rest
        self._sink = memoryview(bytearray(4096))
        connection.start(self)
        self.writable()

    def leave(self) -> None:
        """Abort the connection."""
        self._connection.abort()

    def get_buffer(self) -> memoryview:
        """Return memory whose content is ignored."""
        return self._sink

    def buffer_updated(self, nbytes: int) -> None:
        """Send the second part, because the other side has answered."""
        self._data += self._rest
        self._rest = b""
        self.writable()

    def writable(self) -> None:
        """Send as much as the network accepts."""
        while self._data:
            taken = self._connection.send([self._data])
            self._data = self._data[taken:]
            if not taken:
                self._connection.notify_writable()
                return

    def connection_lost(self, error: Exception | None) -> None:
        """Send nothing more."""
        self._data = self._rest = b""
