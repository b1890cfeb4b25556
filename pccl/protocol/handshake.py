"""The beginning of every connection: both sides identify themselves and prove the run's token.

Both sides send an opening, the dialler first. With a token both then prove that they know it, the
dialler first. The proofs cover both openings as sent. No side sends or reads more before the end.

    dialler                                 acceptor
       ├── opening ───────────────────────────>│
       │<─────────────────────────── opening ──┤
       ├── proof ─────────────────────────────>│   (the proofs only with a token)
       │<───────────────────────────── proof ──┤   or 32 zero bytes: the token is wrong

An opening, little-endian, 88 bytes:

    magic "PCCL" | version u16 | check u16 | security u8 | channel u8 | lane u16 | lanes u16
    reserved u16 | term u32 | run 16 bytes | source u64 | target u64 | nonce 32 bytes | seal u32

A field that a side does not know yet is zero. Magic and version are the same in every version;
``check`` verifies them (CRC-16), and ``seal`` the whole opening (CRC-32). A proof has its seal,
too. So damaged bytes count as a lost connection, which the peer dials again, and never as another
version or a wrong token. A side that refuses the connection has sent its opening before, so that
the other side can see the reason.

The module is pure: it takes and returns bytes, and callers pass in the nonces. Invariants:

* After a failure a side takes no more bytes, and sends only the error's ``last_words``.
* The acceptor proves last, so a dialler without the token gets no bytes derived from it.
* A side judges the ids in an opening after the proofs. Before that they are unproven claims.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pccl.protocol.checksum import SEAL_BYTES, DamagedData, seal, short_check, unpack_sealed, unseal
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import LANES_MAX, PROTOCOL_VERSION
from pccl.protocol.types import NOBODY, PeerId

_MAGIC = b"PCCL"
_PREFIX = struct.Struct("<4sHH")
_OPENING = struct.Struct("<4sHHBBHHHI16sQQ32s")
PREFIX_BYTES = _PREFIX.size
OPENING_BYTES = _OPENING.size + SEAL_BYTES
RUN_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32 + SEAL_BYTES
NO_RUN = bytes(RUN_BYTES)
REFUSAL = seal(bytes(32))
"""Sent instead of a proof if the dialler's proof is wrong. No proof has these bytes."""

_KEY_INFO = b"pccl handshake key"
_GIVE_TOKEN = "set PCCL_TOKEN, or token=, to the run's token; commands of pccl take --token FILE"
_DIALLER, _ACCEPTOR = b"pccl dialler", b"pccl acceptor"
_UNCHECKED_VERSION_MAX = 7
"""Up to this version the header had security and channel in place of the check."""

assert (PREFIX_BYTES, OPENING_BYTES) == (8, 88)


class Security(enum.IntEnum):
    """The protection of a connection. Further values are reserved for encryption."""

    NONE = 0
    TOKEN = 1
    """Both sides prove at the beginning that they know the run's token."""


class Channel(enum.IntEnum):
    """The purpose of a connection."""

    CONTROL = 1
    """Messages between a peer (the dialler) and the master."""
    LANE = 2
    """Frames between two peers."""
    PROBE = 3
    """No data: a master, or a peer on its behalf, tests whether a peer can be dialled."""


class HandshakeRefused(RemoteProtocolError):
    """The two sides cannot work together; the reason says what to change.

    Attributes:
        last_words: bytes to send before closing the connection.
    """

    last_words = b""


class AnotherRun(HandshakeRefused):
    """The master that answered has another run, and has proven the token if there is one."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The first bytes that a side sends."""

    channel: Channel
    nonce: bytes
    """32 random bytes, new for each connection."""
    run: bytes = NO_RUN
    term: int = 0
    source: PeerId = NOBODY
    """The sender; 0: a master, or a newcomer."""
    target: PeerId = NOBODY
    """The peer that the sender wants to reach; 0: a master, or any dialler."""
    lane: int = 0
    """Number of the lane within its link."""
    lanes: int = 0
    """Number of lanes that the sender wants for the link; 0: the other side decides."""
    security: int = Security.NONE
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """Return the 88 bytes of the opening."""
        assert len(self.nonce) == NONCE_BYTES
        assert len(self.run) == RUN_BYTES
        packed = _OPENING.pack(
            _MAGIC, self.version, _version_check(self.version), self.security, self.channel,
            self.lane, self.lanes, 0, self.term, self.run, self.source, self.target, self.nonce,
        )  # fmt: skip
        return seal(packed)

    @staticmethod
    def decode(data: bytes) -> Opening:
        """Decode the 88 bytes of an opening.

        Raises:
            DamagedData: the bytes were changed in transit. Close the connection.
            RemoteProtocolError: the bytes are no opening. Close the connection.
        """
        if not data.startswith(_MAGIC):
            raise _not_ours()
        (
            _, version, _, security, channel, lane, lanes, reserved, term, run, source, target,
            nonce,
        ) = unpack_sealed(_OPENING, data, "handshake", "the opening")  # fmt: skip
        if channel not in _CHANNELS or reserved:
            raise RemoteProtocolError(func="handshake", reason="the opening is malformed")
        return Opening(
            _CHANNELS[channel], nonce, run, term, PeerId(source), PeerId(target), lane,
            lanes, security, version,
        )  # fmt: skip


_CHANNELS = {int(channel): channel for channel in Channel}
_SECURITIES = tuple(map(int, Security))


def _version_check(version: int) -> int:
    return short_check(_PREFIX.pack(_MAGIC, version, 0)[:6])


def derive_key(token: bytes) -> bytes:
    """Derive the key of the proofs from the token, the secret of the run."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=_KEY_INFO).derive(token)


def _mac(key: bytes, role: bytes, dialler: bytes, acceptor: bytes) -> HMAC:
    mac = HMAC(key, SHA256())
    mac.update(role + dialler + acceptor)
    return mac


def _unseal_proof(sealed: bytes) -> bytes:
    return unseal(sealed, "handshake", "the proof of the token")


def _is_proof(proof: bytes, mac: HMAC) -> bool:
    try:
        mac.verify(proof)  # in constant time
    except InvalidSignature:
        return False
    return True


# -- the two roles -------------------------------------------------------------------------------

_Exchange = Generator[tuple[bytes, int], bytes, tuple[bytes, Opening]]
"""Yields bytes to send and how many bytes to read next; returns the last bytes and the opening."""


def _dial(own: Opening, key: bytes | None) -> _Exchange:
    own = replace(own, security=Security.NONE if key is None else Security.TOKEN)
    sent = own.encode()
    prefix = yield sent, PREFIX_BYTES
    _check_version(prefix)
    received = prefix + (yield b"", OPENING_BYTES - PREFIX_BYTES)
    remote = Opening.decode(received)
    if remote.channel is not own.channel:
        there = "a master" if remote.channel is Channel.CONTROL else "a peer, not the master,"
        raise _refused(f"{there} listens at this address: is the address right?")
    if remote.security != own.security:
        raise _refused(
            f"the other side requires a token: {_GIVE_TOKEN}"
            if key is None
            else "this process has a token, but the other side has none: start the master with "
            "the same token, or unset PCCL_TOKEN here"
        )
    if key is not None:
        proof = seal(_mac(key, _DIALLER, sent, received).finalize())
        answer = yield proof, PROOF_BYTES
        if answer == REFUSAL:
            raise _refused(f"the two sides have different tokens: {_GIVE_TOKEN}")
        if not _is_proof(_unseal_proof(answer), _mac(key, _ACCEPTOR, sent, received)):
            raise _refused("the other side does not know the token: is the address right?")
    if own.channel is Channel.CONTROL:
        _check_master(own, remote)
    elif own.channel is Channel.LANE:
        _check_dialled(own, remote)
    else:
        _check_probed(own, remote)
    return b"", remote


def _accept(identify: Callable[[], Opening], key: bytes | None) -> _Exchange:
    security = Security.NONE if key is None else Security.TOKEN
    prefix = yield b"", PREFIX_BYTES
    own = replace(identify(), security=security)
    _check_version(prefix, own.encode())
    received = prefix + (yield b"", OPENING_BYTES - PREFIX_BYTES)
    remote = Opening.decode(received)
    if remote.channel is Channel.PROBE and own.channel is Channel.LANE:
        own = replace(own, channel=Channel.PROBE)
    sent = replace(own, target=remote.source, lane=remote.lane).encode()
    if remote.channel is not own.channel:
        raise _refused(f"it asked for a {remote.channel.name.lower()} connection", sent)
    if remote.security != security:
        reason = "it has a token, but this side has none" if key is None else "it has no token"
        raise _refused(reason, sent)
    last = sent
    if key is not None:
        proof = _unseal_proof((yield sent, PROOF_BYTES))
        if not _is_proof(proof, _mac(key, _DIALLER, received, sent)):
            raise _refused("its token is not the one of this run", REFUSAL)
        last = seal(_mac(key, _ACCEPTOR, received, sent).finalize())
    if own.channel is Channel.LANE:
        _check_dialler(own, remote, last)
    return last, remote


def _check_version(prefix: bytes, answer: bytes = b"") -> None:
    magic, version, check = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise _not_ours()
    is_old = version <= _UNCHECKED_VERSION_MAX and prefix[6] in _SECURITIES and prefix[7] < 3
    if check != _version_check(version) and not is_old:
        raise DamagedData(func="handshake", reason="the version was damaged on the way")
    if version != PROTOCOL_VERSION:
        words = f"the other side has protocol version {version}, this one {PROTOCOL_VERSION}"
        raise _refused(f"{words}: install the same version of pccl", answer)


def _check_master(own: Opening, remote: Opening) -> None:
    """Check the opening of a master; ``own`` names no run if this peer knows none yet.

    A master that waits for members to return, or whose new run may give way to an older one, names
    no run and term 0. It can continue the run of this peer.
    """
    if remote.run == NO_RUN:
        return
    if own.run not in (NO_RUN, remote.run):
        raise AnotherRun(func="handshake", reason="the master coordinates another run")
    if 0 < remote.term < own.term:
        raise _refused(f"the master has term {remote.term}, but the run is in term {own.term}")


def _check_dialled(own: Opening, remote: Opening) -> None:
    """Check the opening of a peer that this peer dialled."""
    _check_run(own, remote)
    if (remote.source, remote.target) != (own.target, own.source):
        raise _refused(f"the answer is from peer {remote.source} to peer {remote.target}")
    if remote.lane != own.lane:
        raise _refused(f"lane {remote.lane} answered instead of lane {own.lane}")


def _check_dialler(own: Opening, remote: Opening, last_words: bytes) -> None:
    """Check the opening of a peer that dialled this peer."""
    _check_run(own, remote, last_words)
    if remote.target != own.source or not own.source:
        this = f"this is peer {own.source}" if own.source else "this peer has no id yet"
        raise _refused(f"it asked for peer {remote.target}, but {this}", last_words)
    if remote.source in (NOBODY, own.source):
        name = "no peer id" if remote.source == NOBODY else "the id of this peer"
        raise _refused(f"it gave {name}", last_words)
    if remote.lane >= LANES_MAX:
        raise _refused(f"lane {remote.lane} is above {LANES_MAX - 1}", last_words)


def _check_probed(own: Opening, remote: Opening) -> None:
    """Check the opening of a probed peer, which may not know its own id yet."""
    if remote.run not in (NO_RUN, own.run) or remote.source not in (NOBODY, own.target):
        raise _refused(f"another process answered instead of peer {own.target}")


def _check_run(own: Opening, remote: Opening, last_words: bytes = b"") -> None:
    """Check that both have the same run. The terms may differ briefly after a change of master."""
    if remote.run != own.run:
        raise _refused("it is a peer of another run", last_words)


def _refused(reason: str, last_words: bytes = b"") -> HandshakeRefused:
    error = HandshakeRefused(func="handshake", reason=reason)
    error.last_words = last_words
    return error


def _not_ours() -> RemoteProtocolError:
    return RemoteProtocolError(func="handshake", reason="the process does not speak this protocol")


# -- the machine -----------------------------------------------------------------------------------


class Handshake:
    """One side of one handshake. Callers pass in the received bytes, in any split.

    Attributes:
        awaited_bytes: number of bytes to read next, and never more; 0 once the handshake ends.
        remote: the opening of the other side, once the handshake has succeeded.
    """

    def __init__(self, exchange: _Exchange) -> None:
        self.awaited_bytes = 0
        self.remote: Opening | None = None
        self._exchange = exchange
        self._data = bytearray()
        self._output, self.awaited_bytes = next(exchange)

    @staticmethod
    def dial(own: Opening, key: bytes | None) -> Handshake:
        """Begin the handshake of a dialler.

        Args:
            own: opening to send; ``key`` replaces its ``security``.
            key: see ``derive_key``; None without a token.
        """
        return Handshake(_dial(own, key))

    @staticmethod
    def accept(identify: Callable[[], Opening], key: bytes | None) -> Handshake:
        """Begin the handshake of an acceptor.

        Args:
            identify: returns the opening to send, called once the first bytes have arrived. The
                handshake fills in its ``security``, ``target`` and ``lane``.
            key: see ``derive_key``; None without a token.
        """
        return Handshake(_accept(identify, key))

    def take_output(self) -> bytes:
        """Return the bytes to send now, and clear them."""
        output, self._output = self._output, b""
        return output

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Process the next bytes, at most ``awaited_bytes``.

        Raises:
            HandshakeRefused: the two sides cannot work together. Send the ``last_words``, then
                close the connection.
            RemoteProtocolError: the other side does not speak this protocol. Close the connection.
        """
        assert len(data) <= self.awaited_bytes
        self._data += data
        self.awaited_bytes -= len(data)
        if self.awaited_bytes:
            return
        whole, self._data = bytes(self._data), bytearray()
        try:
            output, self.awaited_bytes = self._exchange.send(whole)
        except StopIteration as stop:
            output, self.remote = stop.value
        self._output += output
