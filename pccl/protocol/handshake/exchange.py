"""The handshake: both sides prove their keys, and on control connections a token of the run.

    dialler                                 acceptor
       ├── opening ───────────────────────────>│
       │<─────────────────────────── opening ──┤
       ├── proof ─────────────────────────────>│
       │<───────────────────────────── proof ──┤   or zero bytes: the dialler's proof is wrong

A proof is a signature of both openings by the key that the side claims, then an HMAC of both and
the signature, with a key derived from both shares, the token and both openings, then a seal
(CRC-32). So each side has the secrets of its key and of its share, both know the token (if there is
one), and nobody has changed a byte. No side sends or reads more before the end. This is the SIGMA
design (Krawczyk, CRYPTO 2003), with the token in the derivation.

If one side wants it, the connection is encrypted from then on
(:mod:`pccl.protocol.handshake.records`). The wishes are in the openings, so nobody between the two
can change them.

Only control connections prove a token. Two peers recognize each other by their keys, which they
have from their master. So the peers of a run need no common token. A relay recognizes both in the
same way, and then forwards the bytes of their own handshake with each other.

Damaged bytes count as a lost connection, which the peer dials again, and never as another version
or a wrong token. A side that refuses the connection has sent its opening before, so that the other
side can see the reason. Invariants:

* After a failure a side takes no more bytes, and sends only the error's ``last_words``.
* The acceptor proves last, so a dialler without the token gets no bytes derived from it.
* What an opening says is a claim until the proofs. A side that need not know the claimed key
  refuses it before it computes a key.
* A signature is verified after the HMAC, so strangers cost little. (Of a stranger that dials a
  lane, a signature is verified first: its certificate.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from pccl.protocol.checksum import SEAL_BYTES, DamagedData, seal, unseal
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.keys import (
    MAC_BYTES,
    SIGNATURE_BYTES,
    ConnectionKeys,
    Secrets,
    derive_keys,
    fingerprint_of,
    is_mac,
    mac_of,
    transcript_of,
)
from pccl.protocol.handshake.opening import (
    ENCRYPTS,
    HAS_AES,
    MAGIC,
    NO_RUN,
    OPENING_BYTES,
    PREFIX,
    PREFIX_BYTES,
    Channel,
    Opening,
    Security,
    not_ours,
    version_check,
)
from pccl.protocol.handshake.records import RecordKeys
from pccl.protocol.limits import LANES_MAX, PROTOCOL_VERSION
from pccl.protocol.types import NOBODY

PROOF_BYTES = SIGNATURE_BYTES + MAC_BYTES + SEAL_BYTES
REFUSAL = seal(bytes(SIGNATURE_BYTES + MAC_BYTES))
"""Sent instead of a proof if the dialler's proof is wrong. No proof has these bytes."""

_GIVE_TOKEN = "set PCCL_TOKEN, or token=, to the run's token; commands of pccl take --token FILE"
_DIALLER, _ACCEPTOR = b"pccl dialler", b"pccl acceptor"
_UNCHECKED_VERSION_MAX = 7
"""Up to this version the header had security and channel in place of the check."""
_SECURITIES = tuple(map(int, Security))


class HandshakeRefused(RemoteProtocolError):
    """The two sides cannot work together; the reason says what to change.

    Attributes:
        last_words: bytes to send before closing the connection.
    """

    last_words = b""


class AnotherRun(HandshakeRefused):
    """The master that answered has another run, and has proven the token if there is one."""


# -- the two roles -------------------------------------------------------------------------------

_Exchange = Generator[tuple[bytes, int], bytes, tuple[bytes, Opening, RecordKeys | None]]
"""Yields bytes to send and how many bytes to read next; returns the last bytes, the opening of the
other side, and the keys of the records."""


def _dial(own: Opening, secrets: Secrets, expects: bytes) -> _Exchange:
    own = _completed(own, secrets)
    sent = own.encode()
    prefix = yield sent, PREFIX_BYTES
    _check_version(prefix)
    received = prefix + (yield b"", OPENING_BYTES - PREFIX_BYTES)
    remote = Opening.decode(received)
    if remote.channel is not own.channel:
        there = "a master" if remote.channel is Channel.CONTROL else "a peer, not the master,"
        raise _refused(f"{there} listens at this address: is the address right?")
    if expects and fingerprint_of(remote.key) != expects:
        raise _refused(
            "the master has another key than the token says: is the address right, the token "
            "of this run, and was the master restarted with its keys (--state or --keys)?"
            if own.channel is Channel.CONTROL
            else f"another process answered instead of {_who_answers(own)}"
        )
    if remote.security != own.security:
        raise _refused(
            "this process has a token, but the other side has none: start the master with "
            "the same token, or unset PCCL_TOKEN here"
            if secrets.tokens
            else f"the other side requires a token: {_GIVE_TOKEN}"
        )
    transcript = transcript_of(sent, received)
    keys = _keys(secrets, own, remote, transcript)
    answer = yield _proof(secrets, keys.dialler_proves, _DIALLER + transcript), PROOF_BYTES
    if answer == REFUSAL:
        given = own.token_id and "it was revoked, or copied wrongly; ask for another one"
        raise _refused(f"the other side does not accept this token: {given or _GIVE_TOKEN}")
    stranger = "the other side does not know the token: is the address right?"
    message = _ACCEPTOR + transcript
    if flaw := _proof_flaw(secrets, remote, keys.acceptor_proves, message, answer, stranger):
        raise _refused(flaw)
    if own.channel is Channel.CONTROL:
        _check_master(own, remote)
    elif own.channel is Channel.LANE:
        _check_dialled(own, remote)
    elif own.channel is Channel.PROBE:
        _check_probed(own, remote)
    else:
        _check_relay(own, remote)
    return b"", remote, _record_keys(own, remote, keys.dialler_sends, keys.acceptor_sends)


def _accept(
    identify: Callable[[], Opening], secrets: Secrets, judge: Callable[[Opening], str]
) -> _Exchange:
    prefix = yield b"", PREFIX_BYTES
    if not prefix.startswith(MAGIC):
        raise not_ours(prefix)  # before any key is computed
    own = _completed(identify(), secrets)
    _check_version(prefix, own.encode())
    received = prefix + (yield b"", OPENING_BYTES - PREFIX_BYTES)
    remote = Opening.decode(received)
    if remote.channel is Channel.RELAY:
        own = replace(own, channel=Channel.RELAY, security=Security.NONE)
    elif remote.channel is Channel.PROBE and own.channel is Channel.LANE:
        own = replace(own, channel=Channel.PROBE)
    own = replace(own, target=remote.source, lane=remote.lane, token_id=0)
    sent = own.encode()
    if remote.channel is not own.channel:
        raise _refused(f"it asked for a {remote.channel.name.lower()} connection", sent)
    if remote.security != own.security:
        has_none = not secrets.tokens
        reason = "it has a token, but this side has none" if has_none else "it has no token"
        raise _refused(reason, sent)
    if flaw := judge(remote):
        raise _refused(flaw, sent)
    stranger = "its token is not one of this run"
    if own.security and remote.token_id not in secrets.tokens:
        yield sent, PROOF_BYTES
        raise _refused(stranger, REFUSAL)
    transcript = transcript_of(received, sent)
    keys = _keys(secrets, remote, remote, transcript, sent)
    proof = yield sent, PROOF_BYTES
    message = _DIALLER + transcript
    if flaw := _proof_flaw(secrets, remote, keys.dialler_proves, message, proof, stranger):
        raise _refused(flaw, REFUSAL)
    last = _proof(secrets, keys.acceptor_proves, _ACCEPTOR + transcript)
    if own.channel is Channel.LANE:
        _check_dialler(own, remote, last)
    elif own.channel is Channel.RELAY:
        _check_relay(own, remote, last)
    return last, remote, _record_keys(own, remote, keys.acceptor_sends, keys.dialler_sends)


def _who_answers(own: Opening) -> str:
    return "the relay" if own.channel is Channel.RELAY else f"peer {own.target}"


def _completed(own: Opening, secrets: Secrets) -> Opening:
    proves = own.channel is Channel.CONTROL and secrets.tokens
    return replace(
        own,
        security=Security.TOKEN if proves else Security.NONE,
        flags=own.flags | secrets.flags,
        token_id=next(iter(secrets.tokens)) if proves else 0,
        share=secrets.curves.share(secrets.share),
        key=secrets.signer.key,
    )


def _keys(
    secrets: Secrets, dialler: Opening, remote: Opening, transcript: bytes, last_words: bytes = b""
) -> ConnectionKeys:
    agreed = secrets.curves.agree(secrets.share, remote.share)
    if agreed is None:
        raise _refused("its share is invalid", last_words)
    token_key = secrets.tokens[dialler.token_id] if dialler.security else None
    return derive_keys(agreed, token_key, transcript)


def _record_keys(own: Opening, remote: Opening, sends: bytes, receives: bytes) -> RecordKeys | None:
    if not (own.flags | remote.flags) & ENCRYPTS:
        return None
    return RecordKeys(sends, receives, has_aes=bool(own.flags & remote.flags & HAS_AES))


def _proof(secrets: Secrets, key: bytes, message: bytes) -> bytes:
    signature = secrets.signer.sign(message)
    return seal(signature + mac_of(key, message + signature))


def _proof_flaw(
    secrets: Secrets, remote: Opening, key: bytes, message: bytes, proof: bytes, stranger: str
) -> str:
    """Return what is wrong with a proof: ``stranger`` if it does not prove the token."""
    proof = unseal(proof, "handshake", "the proof")
    signature, mac = proof[:SIGNATURE_BYTES], proof[SIGNATURE_BYTES:]
    if not is_mac(mac, key, message + signature):
        return stranger
    is_signed = secrets.curves.is_signed(remote.key, signature, message)
    return "" if is_signed else "the other side has not proven its key"


def _check_version(prefix: bytes, answer: bytes = b"") -> None:
    magic, version, check = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise not_ours()
    is_old = version <= _UNCHECKED_VERSION_MAX and prefix[6] in _SECURITIES and prefix[7] < 3
    if check != version_check(version) and not is_old:
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


def _check_relay(own: Opening, remote: Opening, last_words: bytes = b"") -> None:
    """Check that a peer and its relay have the same run. A master may not show its run yet."""
    if NO_RUN not in (own.run, remote.run):
        _check_run(own, remote, last_words)


def _check_run(own: Opening, remote: Opening, last_words: bytes = b"") -> None:
    """Check that both have the same run. The terms may differ briefly after a change of master."""
    if remote.run != own.run:
        raise _refused("it is a peer of another run", last_words)


def _refused(reason: str, last_words: bytes = b"") -> HandshakeRefused:
    error = HandshakeRefused(func="handshake", reason=reason)
    error.last_words = last_words
    return error


# -- the machine -----------------------------------------------------------------------------------


class Handshake:
    """One side of one handshake. Callers pass in the received bytes, in any split.

    Attributes:
        awaited_bytes: number of bytes to read next, and never more; 0 once the handshake ends.
        remote: the opening of the other side, once the handshake has succeeded; its ``key`` is
            proven.
        keys: the keys of the records, once the handshake has succeeded; None: both sides send in
            the clear.
    """

    def __init__(self, exchange: _Exchange) -> None:
        self.awaited_bytes = 0
        self.remote: Opening | None = None
        self.keys: RecordKeys | None = None
        self._exchange = exchange
        self._data = bytearray()
        self._output, self.awaited_bytes = next(exchange)

    @staticmethod
    def dial(own: Opening, secrets: Secrets, expects: bytes = b"") -> Handshake:
        """Begin the handshake of a dialler.

        Args:
            own: the opening to send. The handshake fills in what depends on ``secrets``.
            secrets: what this side needs for one handshake.
            expects: fingerprint of the key that the other side must have; empty: any key.
        """
        return Handshake(_dial(own, secrets, expects))

    @staticmethod
    def accept(
        identify: Callable[[], Opening], secrets: Secrets, judge: Callable[[Opening], str]
    ) -> Handshake:
        """Begin the handshake of an acceptor.

        Args:
            identify: returns the opening to send, called once the first bytes have arrived. The
                handshake fills in ``target``, ``lane``, and what depends on ``secrets``.
            secrets: what this side needs for one handshake.
            judge: returns why the sender of an opening, if it proves its claims, may not connect;
                empty: it may.
        """
        return Handshake(_accept(identify, secrets, judge))

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
            output, self.remote, self.keys = stop.value
        self._output += output
