"""How every connection begins, whatever it will carry: who is there, and proof of the run's token.

Both sides send an opening, the dialler first. With a token both then prove that they know it, the
dialler first, over both openings as they were sent. Only then is anything else sent or looked at.

    dialler                                 acceptor
       ├── opening ───────────────────────────>│
       │<─────────────────────────── opening ──┤
       ├── proof ─────────────────────────────>│   (the proofs only with a token)
       │<───────────────────────────── proof ──┤   or 32 zero bytes: your token is not mine

An opening, little-endian, 88 bytes:

    magic "PCCL" | version u16 | check u16 | security u8 | channel u8 | lane u16 | lanes u16
    reserved u16 | term u32 | run 16 bytes | source u64 | target u64 | nonce 32 bytes | seal u32

What a side does not know yet is zero. Magic and version are the same in every version; ``check``
verifies them (CRC-16), and ``seal`` the whole opening (CRC-32). A proof has its seal, too. So what
was damaged on the way is a lost connection, never another version or a wrong token, for which
nobody would try again. A side that will not go on has sent its opening before, so that the other
one can see for itself why.

Pure: bytes in, bytes out. Nonces are passed in. Invariants:

* After a failure nothing more is taken, and nothing is sent but the error's ``last_words``.
* The acceptor proves last: who does not know the token gets nothing that was made with it.
* Whom the openings name is judged after the proofs. Before, it is the claim of a stranger.
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
"""Sent instead of a proof to whom has proven nothing. No proof looks like this."""

_KEY_INFO = b"pccl handshake key"
_GIVE_TOKEN = "set PCCL_TOKEN, or token=, to the run's token; commands of pccl take --token FILE"
_DIALLER, _ACCEPTOR = b"pccl dialler", b"pccl acceptor"
_UNCHECKED_VERSION_MAX = 7
"""Up to this version security and channel were where the check is now."""

assert (PREFIX_BYTES, OPENING_BYTES) == (8, 88)


class Security(enum.IntEnum):
    """What protects a connection. Further values are room for encryption."""

    NONE = 0
    TOKEN = 1
    """Both sides prove at the beginning that they know the run's token."""


class Channel(enum.IntEnum):
    """What a connection will carry."""

    CONTROL = 1
    """Messages between a peer (the dialler) and the master."""
    LANE = 2
    """Frames between two peers."""
    PROBE = 3
    """Nothing: a master, or a peer for it, finds out whether a peer can be dialled."""


class HandshakeRefused(RemoteProtocolError):
    """The two sides cannot work together as they are; the reason says what to change.

    Attributes:
        last_words: to be sent before the connection is closed.
    """

    last_words = b""


class AnotherRun(HandshakeRefused):
    """Whoever answered belongs to another run, and has proven its token if there is one."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What one side says first."""

    channel: Channel
    nonce: bytes
    """32 random bytes, new for each connection."""
    run: bytes = NO_RUN
    term: int = 0
    source: PeerId = NOBODY
    """The sender; 0: a master, or a newcomer."""
    target: PeerId = NOBODY
    """Whom it means to talk to; 0: a master, or whoever has dialled."""
    lane: int = 0
    """Number of the lane within its link."""
    lanes: int = 0
    """How many lanes the sender wants the link to have; 0: it leaves that to the other one."""
    security: int = Security.NONE
    version: int = PROTOCOL_VERSION

    def encode(self) -> bytes:
        """The 88 bytes."""
        assert len(self.nonce) == NONCE_BYTES
        assert len(self.run) == RUN_BYTES
        packed = _OPENING.pack(
            _MAGIC, self.version, _version_check(self.version), self.security, self.channel,
            self.lane, self.lanes, 0, self.term, self.run, self.source, self.target, self.nonce,
        )  # fmt: skip
        return seal(packed)

    @staticmethod
    def decode(data: bytes) -> Opening:
        """Decode 88 bytes.

        Raises:
            DamagedData: they were changed on the way. Close the connection.
            RemoteProtocolError: they are no opening. Close the connection.
        """
        if not data.startswith(_MAGIC):
            raise _not_ours()
        (
            _, version, _, security, channel, lane, lanes, reserved, term, run, source, target,
            nonce,
        ) = unpack_sealed(_OPENING, data, "handshake", "the opening")  # fmt: skip
        if channel not in _CHANNELS or reserved:
            raise RemoteProtocolError(func="handshake", reason="malformed opening")
        return Opening(
            _CHANNELS[channel], nonce, run, term, PeerId(source), PeerId(target), lane,
            lanes, security, version,
        )  # fmt: skip


_CHANNELS = {int(channel): channel for channel in Channel}
_SECURITIES = tuple(map(int, Security))


def _version_check(version: int) -> int:
    return short_check(_PREFIX.pack(_MAGIC, version, 0)[:6])


def derive_key(token: bytes) -> bytes:
    """The key of the proofs, from the secret that all processes of a run share."""
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
"""Yields bytes to send and how many to read then; returns last bytes to send and the opening."""


def _dial(own: Opening, key: bytes | None) -> _Exchange:
    own = replace(own, security=Security.NONE if key is None else Security.TOKEN)
    sent = own.encode()
    prefix = yield sent, PREFIX_BYTES
    _check_version(prefix)
    received = prefix + (yield b"", OPENING_BYTES - PREFIX_BYTES)
    remote = Opening.decode(received)
    if remote.channel is not own.channel:
        there = "a master" if remote.channel is Channel.CONTROL else "a peer, not the master,"
        raise _refused(f"{there} listens there: is the address right?")
    if remote.security != own.security:
        raise _refused(
            f"a token is needed there: {_GIVE_TOKEN}"
            if key is None
            else "a token is set here, and none is used there: start the master with the same "
            "token, or unset PCCL_TOKEN here"
        )
    if key is not None:
        proof = seal(_mac(key, _DIALLER, sent, received).finalize())
        answer = yield proof, PROOF_BYTES
        if answer == REFUSAL:
            raise _refused(f"the token here differs from the one there: {_GIVE_TOKEN}")
        if not _is_proof(_unseal_proof(answer), _mac(key, _ACCEPTOR, sent, received)):
            raise _refused("whoever answers there does not know the token: is the address right?")
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
        raise _refused(f"it came for a {remote.channel.name.lower()} connection", sent)
    if remote.security != security:
        reason = "it has a token, and none is used here" if key is None else "it has no token"
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
        words = f"protocol version {version} there, {PROTOCOL_VERSION} here: install the same"
        raise _refused(words, answer)


def _check_master(own: Opening, remote: Opening) -> None:
    """A peer has reached a master; ``own`` names no run if it knows none yet.

    The master names none if it has not known one for long: it can take up the one of the peer.
    While it waits for the members of a run to return, its term is open: 0.
    """
    if remote.run == NO_RUN:
        return
    if own.run not in (NO_RUN, remote.run):
        raise AnotherRun(func="handshake", reason="it coordinates another run")
    if 0 < remote.term < own.term:
        raise _refused(f"the master there is of term {remote.term}, the run is in term {own.term}")


def _check_dialled(own: Opening, remote: Opening) -> None:
    """A peer has reached another peer."""
    _check_run(own, remote)
    if (remote.source, remote.target) != (own.target, own.source):
        raise _refused(f"peer {remote.source} answered instead of peer {own.target}")
    if remote.lane != own.lane:
        raise _refused(f"lane {remote.lane} answered instead of lane {own.lane}")


def _check_dialler(own: Opening, remote: Opening, last_words: bytes) -> None:
    """Another peer has reached this one."""
    _check_run(own, remote, last_words)
    if remote.target != own.source or not own.source:
        reason = f"it came for peer {remote.target}, and this is peer {own.source}"
        raise _refused(reason, last_words)
    if remote.source in (NOBODY, own.source):
        name = "nobody" if remote.source == NOBODY else "this very peer"
        raise _refused(f"it says that it is {name}", last_words)
    if remote.lane >= LANES_MAX:
        raise _refused(f"there is no lane {remote.lane}", last_words)


def _check_probed(own: Opening, remote: Opening) -> None:
    """A peer has answered, which perhaps has not heard yet who it is."""
    if remote.run not in (NO_RUN, own.run) or remote.source not in (NOBODY, own.target):
        raise _refused(f"another one answered instead of peer {own.target}")


def _check_run(own: Opening, remote: Opening, last_words: bytes = b"") -> None:
    """The terms may differ: not everybody learns at once that there is another master."""
    if remote.run != own.run:
        raise _refused("a peer of another run", last_words)


def _refused(reason: str, last_words: bytes = b"") -> HandshakeRefused:
    error = HandshakeRefused(func="handshake", reason=reason)
    error.last_words = last_words
    return error


def _not_ours() -> RemoteProtocolError:
    return RemoteProtocolError(func="handshake", reason="does not speak this protocol")


# -- the machine -----------------------------------------------------------------------------------


class Handshake:
    """One side of one handshake, fed with bytes in any split.

    Attributes:
        awaited_bytes: how many bytes to read next, and never more; 0 once it is over.
        remote: what the other side has said, once all is well.
    """

    def __init__(self, exchange: _Exchange) -> None:
        self.awaited_bytes = 0
        self.remote: Opening | None = None
        self._exchange = exchange
        self._data = bytearray()
        self._output, self.awaited_bytes = next(exchange)

    @staticmethod
    def dial(own: Opening, key: bytes | None) -> Handshake:
        """The side that has dialled.

        Args:
            own: what to say; its ``security`` follows from ``key``.
            key: see ``derive_key``; None without a token.
        """
        return Handshake(_dial(own, key))

    @staticmethod
    def accept(identify: Callable[[], Opening], key: bytes | None) -> Handshake:
        """The side that has been dialled.

        Args:
            identify: gives what to say, once somebody has begun; its ``security``, ``target`` and
                ``lane`` are filled in.
            key: see ``derive_key``; None without a token.
        """
        return Handshake(_accept(identify, key))

    def take_output(self) -> bytes:
        """What is to be sent now."""
        output, self._output = self._output, b""
        return output

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, at most ``awaited_bytes``.

        Raises:
            HandshakeRefused: the other side cannot be worked with. Send the ``last_words`` and
                close.
            RemoteProtocolError: the other side is none of ours. Close.
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
