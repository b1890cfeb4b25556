"""Handshakes on connections, bounded in number, bytes and time.

A ``Greeting`` receives the bytes of a connection during its handshake. It asks the network for
exactly the bytes of the next step, so it reads nothing that follows the handshake. Then it passes
the connection on to the next receiver. ``introduce`` does the handshakes of the side that dials. A
``Reception`` holds accepted connections until their handshakes are complete. It bounds their
number, shares the places fairly among source addresses, and gives each connection a deadline. If a
named proxy forwards a connection, it first receives the header that names the source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Protocol

from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.handshake.certificates import Certificate, is_certified
from pccl.protocol.handshake.exchange import Handshake, HandshakeRefused
from pccl.protocol.handshake.keys import (
    CURVE25519,
    SECRET_BYTES,
    SIGNATURE_BYTES,
    Curves,
    Secrets,
    Signer,
    derive_token_key,
)
from pccl.protocol.handshake.opening import (
    ENCRYPTS,
    HAS_AES,
    NO_RUN,
    OPENING_BYTES,
    Channel,
    Opening,
)
from pccl.protocol.handshake.proxy_header import IPNetwork, is_named
from pccl.protocol.handshake.records import RECORD_BYTES_MAX
from pccl.protocol.handshake.token import RunToken, parse_token
from pccl.protocol.limits import TURN_BYTES_MAX
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.proxy_header import HeaderReceiver
from pccl.runtime.control.stranger_log import StrangerLog
from pccl.transports.base import Connection
from pccl.transports.sealed import SealedConnection, processor_has_aes

_log = logging.getLogger("pccl.link")


class Identity(Protocol):
    """The identity of a peer. The peer's machine provides it."""

    @property
    def peer(self) -> PeerId:
        """Id of the peer; 0 before registration."""
        ...

    @property
    def run(self) -> bytes:
        """Id of the run; empty before registration."""
        ...

    @property
    def term(self) -> int:
        """Term of the master that the peer follows."""
        ...

    @property
    def certificate(self) -> Certificate:
        """What the master has signed for the peer."""
        ...


def opening_of(
    channel: Channel, own: Identity, target: PeerId = NOBODY, *, lane: int = 0, lanes: int = 0
) -> Opening:
    """Return the opening of a peer."""
    shows = channel in (Channel.LANE, Channel.RELAY)
    signature = own.certificate.signature if shows else b""
    return Opening(
        channel, own.run or NO_RUN, own.term, own.peer, target, lane, lanes,
        certificate=signature or bytes(SIGNATURE_BYTES),
    )  # fmt: skip


def leaves_machine(connection: Connection) -> bool:
    """Whether other machines may see what a connection carries; a relay always may."""
    return not all(_is_loopback(end.host) for end in (connection.local, connection.remote))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a link-local address with its scope, a simulated host, or a relay
        return False


def encryption(*, always: bool) -> Callable[[Connection], bool]:
    """Return which connections this side wants to be encrypted: all, or those to elsewhere."""
    return (lambda connection: True) if always else leaves_machine


class Credentials:
    """The key of a process and the token that it knows; makes its handshakes.

    Args:
        token: text of the token that this process knows (``parse_token``); None: none.
        random_bytes: source of secrets; must be unpredictable outside simulation.
        curves: computes with keys.
        secret: the secret of the key of this process; None: a new one.
        encrypts: whether this side wants a connection to be encrypted.
    """

    def __init__(
        self,
        token: bytes | None,
        random_bytes: Callable[[int], bytes],
        curves: Curves = CURVE25519,
        secret: bytes | None = None,
        encrypts: Callable[[Connection], bool] = leaves_machine,
    ) -> None:
        self._encrypts = encrypts
        self._tokens: Mapping[int, bytes] = {}
        self._own: RunToken | None = None
        if token is not None:
            self._own = parse_token(token)
            self._tokens = {self._own.number: derive_token_key(self._own.secret)}
        self._random_bytes = random_bytes
        self._curves = curves
        self.signer: Signer = curves.signer(secret or random_bytes(SECRET_BYTES))
        """The key of this process."""

    def accept_tokens(self, secrets: Mapping[int, bytes], own: RunToken | None) -> None:
        """Set the tokens that a master accepts, instead of the one that this process knows.

        Args:
            secrets: secrets of the tokens by number; empty: any process may connect.
            own: what this process proves to another master of the run; None: nothing.
        """
        self._tokens = {number: derive_token_key(secret) for number, secret in secrets.items()}
        self._own = own

    def _secrets(self, connection: Connection, tokens: Mapping[int, bytes]) -> Secrets:
        share = self._random_bytes(SECRET_BYTES)
        flags = ENCRYPTS if self._encrypts(connection) else 0
        flags |= HAS_AES if processor_has_aes() else 0
        return Secrets(self._curves, self.signer, share, tokens, flags)

    def dial(self, connection: Connection, opening: Opening, expects: bytes = b"") -> Handshake:
        """Return a handshake for the side that has dialled.

        ``expects``: fingerprint of the key that the other side must have; empty: that of the run's
        key for a master, if the token names it, otherwise any key.
        """
        tokens: dict[int, bytes] = {}
        if opening.channel is Channel.CONTROL and self._own is not None:
            expects = expects or self._own.fingerprint
            tokens[self._own.number] = self._tokens[self._own.number]
        return Handshake.dial(opening, self._secrets(connection, tokens), expects)

    def accept(
        self,
        connection: Connection,
        identify: Callable[[], Opening],
        judge: Callable[[Opening], str],
    ) -> Handshake:
        """Return the handshake of the side that was dialled; see ``Handshake.accept``."""
        return Handshake.accept(identify, self._secrets(connection, self._tokens), judge)

    def is_registered(self, authority: bytes, remote: Opening) -> bool:
        """Whether the master with the key ``authority`` has registered the sender of an opening."""
        certificate = Certificate(authority, remote.certificate)
        return is_certified(self._curves, certificate, remote.run, remote.source, remote.key)


def anyone(remote: Opening) -> str:
    """Let the sender of any opening connect, if it proves its claims."""
    return ""


class Greeting:
    """One handshake on one connection.

    Args:
        connection: a connection that is not started; the greeting starts it.
        handshake: a handshake that has not begun.
        clock: gives the time.
        deadline_ns: time by which the handshake must be complete.
        on_proven: called when the handshake is complete and sent, with the connection, which is
            encrypted from now on if either side wants that, and the other side's opening; must
            start or end the connection.
        on_failed: called with the error if the handshake fails; ``dismiss`` does not call it.
        on_opening: called when a valid opening of the other side has arrived.
    """

    def __init__(
        self,
        connection: Connection,
        handshake: Handshake,
        clock: Clock,
        deadline_ns: int,
        on_proven: Callable[[Connection, Opening], None],
        on_failed: Callable[[PCCLError], None],
        on_opening: Callable[[], None] | None = None,
    ) -> None:
        self.connection = connection
        self._handshake = handshake
        self._clock = clock
        self._on_proven = on_proven
        self._on_failed: Callable[[PCCLError], None] | None = on_failed
        self._on_opening = on_opening
        self._opening_bytes_missing = OPENING_BYTES
        self._buffer = memoryview(bytearray(OPENING_BYTES))
        self._unsent = handshake.take_output()
        self._refused: HandshakeRefused | None = None
        self._heard = False
        self.was_probe = False
        """Whether the other side disconnected without sending a byte."""
        self._timer = clock.call_at_ns(deadline_ns, self._overdue)
        connection.start(self)
        self._flush()

    def dismiss(self) -> None:
        """End the handshake and the connection at once, without calling a callback."""
        self._on_failed = None
        self._timer.cancel()
        self.connection.abort()

    def _overdue(self) -> None:
        reason = "the other side did not complete the pccl handshake in time"
        self._fail(LinkError(func="handshake", reason=reason))
        self.connection.abort()

    def _flush(self) -> None:
        while self._unsent:
            taken = self.connection.send([self._unsent])
            self._unsent = self._unsent[taken:]
            if self._unsent:
                self.connection.notify_writable()
                return
        if self._refused is not None:
            self._fail(self._refused)
            self.connection.close()
        elif self._handshake.remote is not None:
            self._timer.cancel()
            self._on_proven(self._protected(self._handshake.remote), self._handshake.remote)
            self._on_failed = None

    def _protected(self, remote: Opening) -> Connection:
        keys = self._handshake.keys
        if keys is None or remote.channel is Channel.RELAY:
            return self.connection  # what a relay forwards is encrypted already
        is_lane = remote.channel is Channel.LANE
        longest = RECORD_BYTES_MAX if is_lane else TURN_BYTES_MAX
        return SealedConnection(self.connection, keys, self._clock, longest)

    def _fail(self, error: PCCLError) -> None:
        self._timer.cancel()
        report, self._on_failed = self._on_failed, None
        if report is not None:
            report(error)

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for exactly the bytes of the next step of the handshake."""
        return self._buffer[: max(self._handshake.awaited_bytes, 1)]

    def buffer_updated(self, nbytes: int) -> None:
        """Continue the handshake, and send the answer or the refusal."""
        self._heard = True
        if self._refused is not None:
            return  # only the refusal is still to be sent
        if not self._handshake.awaited_bytes:
            reason = "the other side sent data before it received the answer"
            raise RemoteProtocolError(func="handshake", reason=reason)
        try:
            self._handshake.receive(self._buffer[:nbytes])
            self._opening_bytes_missing -= nbytes
            if self._on_opening is not None and self._opening_bytes_missing <= 0:
                self._on_opening()
                self._on_opening = None
        except HandshakeRefused as error:
            self._refused = error
            self._unsent += error.last_words
        self._unsent += self._handshake.take_output()
        self._flush()

    def writable(self) -> None:
        """Continue to send the handshake."""
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the handshake failed, and note whether the other side sent nothing."""
        self.was_probe = not self._heard
        if isinstance(error, PCCLError):
            self._fail(error)
        else:
            reason = str(error or "this side closed the connection")
            self._fail(LinkError(func="handshake", reason=reason))


async def introduce(
    connection: Connection,
    handshake: Handshake,
    clock: Clock,
    deadline_ns: int,
    take: Callable[[Connection, Opening], None],
) -> None:
    """Do the handshake on a connection that this process has dialled.

    Args:
        connection: a connection that is not started.
        handshake: a handshake that has not begun.
        clock: gives the time.
        deadline_ns: time by which the handshake must be complete.
        take: called with the connection and the other side's opening after the handshake; must
            start the connection. After this call nothing fails; a cancellation prevents this call.

    Raises:
        HandshakeRefused: the two sides are incompatible; the reason says what to change.
        RemoteProtocolError: the other side did not answer with a pccl handshake.
        LinkError: the connection was lost, or there was no answer in time.
    """
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def proven(connection: Connection, remote: Opening) -> None:
        if over.done():  # the waiter was cancelled, and has not run since
            connection.abort()
        else:
            take(connection, remote)
            over.set_result(None)

    def failed(error: PCCLError) -> None:
        if not over.done():
            over.set_exception(error)

    greeting = Greeting(connection, handshake, clock, deadline_ns, proven, failed)
    try:
        await over
    except asyncio.CancelledError:
        greeting.dismiss()
        raise


class Beginning(Protocol):
    """One stage of a connection before its proof: a ``Greeting``, or the header before it."""

    @property
    def was_probe(self) -> bool:
        """Whether the other side disconnected without sending a byte."""
        ...

    def dismiss(self) -> None:
        """End the connection at once, without calling a callback."""
        ...


class UnprovenConnections:
    """Connections of a port that are in one stage before their proof, bounded in number.

    Args:
        connections_max: how many there may be; ``SourceShares`` chooses which one to close.
        stage: what they are in, for the log.
        log: gets a line for each connection that ends here.
    """

    def __init__(self, connections_max: int, stage: str, log: StrangerLog) -> None:
        self._stage = stage
        self._log = log
        self._begun: dict[Connection, Beginning] = {}
        self._shares: SourceShares[Connection] = SourceShares(connections_max)
        self.spoke = self._shares.spoke

    def add(
        self, connection: Connection, begin: Callable[[Callable[[PCCLError], None]], Beginning]
    ) -> None:
        """Begin the stage of a connection; ``begin`` gets what to call if it fails."""
        goes = self._shares.add(connection, connection.remote.host)
        if goes is not None:
            self._begun.pop(goes).dismiss()
            text = "closed a connection from %s: too many newer ones came during its %s"
            self._log.write(logging.INFO, text, goes.remote, self._stage)
        self._begun[connection] = begin(partial(self._failed, connection))

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has completed the stage."""
        del self._begun[connection]
        self._shares.remove(connection)

    def close(self) -> None:
        """Close all connections."""
        for connection, stage in self._begun.items():
            self._shares.remove(connection)
            stage.dismiss()
        self._begun.clear()

    def _failed(self, connection: Connection, error: PCCLError) -> None:
        stage = self._begun.pop(connection, None)
        self._shares.remove(connection)
        is_ours = isinstance(error, RemoteProtocolError)
        level = logging.WARNING if is_ours else logging.INFO
        if stage is not None and stage.was_probe:
            level = logging.DEBUG  # `pccl join` connects so, to test whether the port is open
        text = "closed a connection from %s: %s"
        self._log.write(level, text, connection.remote, error.reason)


class Reception:
    """Accepted connections whose handshake is not complete.

    Args:
        clock: gives the time.
        patience_ns: time limit of each handshake, with the header before it.
        unproven_max: how many connections may wait in each of the two stages.
        credentials: makes the handshakes of this process.
        identify: returns the opening of this side.
        on_proven: called with a connection, the opening of its other side, and the deadline of
            its handshake; must start the connection.
        judge: returns why the sender of an opening may not connect; empty: it may.
        proxies: the proxies whose connections begin with a header that names their source. From
            then on such a connection comes from that source.
    """

    def __init__(
        self,
        clock: Clock,
        patience_ns: int,
        unproven_max: int,
        credentials: Credentials,
        identify: Callable[[], Opening],
        on_proven: Callable[[Connection, Opening, int], None],
        judge: Callable[[Opening], str] = anyone,
        proxies: Sequence[IPNetwork] = (),
    ) -> None:
        self._clock = clock
        self._judge = judge
        self._patience_ns = patience_ns
        self._credentials = credentials
        self._identify = identify
        self._on_proven = on_proven
        self._proxies = proxies
        self.log = StrangerLog(clock, _log)
        """Log of errors that other processes cause at this port, also after the handshake."""
        self._headed = UnprovenConnections(unproven_max, "PROXY header", self.log)
        self._greeted = UnprovenConnections(unproven_max, "handshake", self.log)

    def accept(self, connection: Connection) -> None:
        """Begin the handshake of a connection to this port, or receive the header before it."""
        deadline_ns = self._clock.now_ns() + self._patience_ns
        if not is_named(connection.remote.host, self._proxies):
            self._greet(connection, deadline_ns)
            return

        def headed(proxied: Connection) -> None:
            self._headed.remove(connection)
            self._greet(proxied, deadline_ns)

        self._headed.add(
            connection, partial(HeaderReceiver, connection, self._clock, deadline_ns, headed)
        )

    def _greet(self, connection: Connection, deadline_ns: int) -> None:
        def proven(protected: Connection, remote: Opening) -> None:
            self._greeted.remove(connection)
            self._on_proven(protected, remote, deadline_ns)

        def begin(failed: Callable[[PCCLError], None]) -> Greeting:
            handshake = self._credentials.accept(connection, self._identify, self._judge)
            begun = partial(self._greeted.spoke, connection)
            return Greeting(connection, handshake, self._clock, deadline_ns, proven, failed, begun)

        self._greeted.add(connection, begin)

    def close(self) -> None:
        """Close all waiting connections."""
        self._headed.close()
        self._greeted.close()
        self.log.close()
