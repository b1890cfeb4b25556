"""The handshake as bytes: the right token passes however bytes are split, nothing else does."""

from __future__ import annotations

import binascii
import dataclasses
import hashlib
import hmac
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.checksum import seal
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.certificates import NO_CERTIFICATE, Certificate, certify, is_certified
from pccl.protocol.handshake.exchange import (
    PROOF_BYTES,
    REFUSAL,
    AnotherRun,
    Handshake,
    HandshakeRefused,
)
from pccl.protocol.handshake.keys import (
    CURVE25519,
    SIGNATURE_BYTES,
    Curve25519,
    Secrets,
    Signer,
    derive_token_key,
    fingerprint_of,
)
from pccl.protocol.handshake.opening import (
    ASKS_ADDRESS,
    ENCRYPTS,
    HAS_AES,
    NO_RUN,
    OPENING_BYTES,
    PREFIX_BYTES,
    READS,
    Channel,
    Opening,
    Security,
)
from pccl.protocol.handshake.records import RecordKeys
from pccl.protocol.limits import LANES_MAX, PROTOCOL_VERSION
from pccl.protocol.types import KEY_BYTES, NOBODY, PeerId
from pccl.runtime.control.greeting import anyone
from tests.support.secrets import MASTER_SIGNER, secrets_of, signer_of

RUN = bytes(range(16))
TOKEN = b"correct horse battery staple"
TOKENS = pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])

NEWCOMER = Opening(Channel.CONTROL)
MEMBER = Opening(Channel.CONTROL, RUN, 3, PeerId(7))
MASTER = Opening(Channel.CONTROL, RUN, 3)
YOUNGER = Opening(Channel.LANE, RUN, 3, PeerId(7), PeerId(4))
ELDER = Opening(Channel.LANE, RUN, 3, PeerId(4))
PAIRS = {"newcomer": (NEWCOMER, MASTER), "member": (MEMBER, MASTER), "lane": (YOUNGER, ELDER)}
PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
CONTROL = pytest.mark.parametrize("pair", [PAIRS["newcomer"], PAIRS["member"]])


def changed(opening: Opening, **fields: Any) -> Opening:
    return replace(opening, **fields)


DIALLER, ACCEPTOR = (secrets_of(TOKEN, who) for who in (b"d", b"a"))
"""Their keys are the same with every token."""


def told(opening: Opening, secrets: Secrets, **fields: Any) -> Opening:
    """An opening as it is sent."""
    share, key = CURVE25519.share(secrets.share), secrets.signer.key
    return changed(opening, **{"share": share, "key": key, **fields})


def security_of(opening: Opening, token: bytes | None) -> Security:
    """Control connections prove the token."""
    proves = opening.channel is Channel.CONTROL and token is not None
    return Security.TOKEN if proves else Security.NONE


def dialler(
    opening: Opening, token: bytes | None, expects: bytes = b"", flags: int = 0
) -> Handshake:
    return Handshake.dial(opening, secrets_of(token, b"d", flags=flags), expects)


def acceptor(
    opening: Opening, token: bytes | None, judge: Callable[[Opening], str] = anyone
) -> Handshake:
    return accepting(opening, secrets_of(token, b"a"), judge)


def accepting(
    opening: Opening, secrets: Secrets, judge: Callable[[Opening], str] = anyone
) -> Handshake:
    return Handshake.accept(lambda: opening, secrets, judge)


class Wire:
    """Two handshakes with a wire between, in which bytes may be split, counted and changed."""

    def __init__(self, one: Handshake, other: Handshake) -> None:
        self.sides = (one, other)
        self.sent = (bytearray(), bytearray())
        """What each side has sent so far."""
        self.failures: list[RemoteProtocolError | None] = [None, None]
        self._read = [0, 0]

    def collect(self) -> None:
        for side, sent in zip(self.sides, self.sent, strict=True):
            sent += side.take_output()

    def carry(self, reader: int, most: int) -> bool:
        """Give one side at most so many bytes; whether there were any that it wanted."""
        side, sent = self.sides[reader], self.sent[1 - reader]
        count = min(most, side.awaited_bytes, len(sent) - self._read[reader])
        if count <= 0 or self.failures[reader] is not None:
            return False
        start = self._read[reader]
        self._read[reader] += count
        try:
            side.receive(sent[start : start + count])
        except HandshakeRefused as error:
            self.failures[reader] = error
            self.sent[reader].extend(error.last_words)
        except RemoteProtocolError as error:
            self.failures[reader] = error
        self.collect()
        return True

    def run(self, most: int = OPENING_BYTES) -> Wire:
        self.collect()
        while any([self.carry(0, most), self.carry(1, most)]):
            pass
        return self

    @property
    def passed(self) -> tuple[bool, bool]:
        return self.sides[0].remote is not None, self.sides[1].remote is not None


def reasons(wire: Wire) -> tuple[str, str]:
    one, other = wire.failures
    return (one.reason if one else ""), (other.reason if other else "")


# -- who passes ------------------------------------------------------------------------------------


@TOKENS
@PAIR
def test_both_sides_learn_what_the_other_has_said(
    pair: tuple[Opening, Opening], token: bytes | None
) -> None:
    wire = Wire(dialler(pair[0], token), acceptor(pair[1], token)).run()
    security = security_of(pair[0], token)
    assert wire.sides[1].remote == told(pair[0], DIALLER, security=security)
    answer = told(pair[1], ACCEPTOR, security=security, target=pair[0].source)
    assert wire.sides[0].remote == answer
    assert [len(sent) for sent in wire.sent] == [OPENING_BYTES + PROOF_BYTES] * 2
    assert [side.awaited_bytes for side in wire.sides] == [0, 0]
    assert [side.keys for side in wire.sides] == [None, None], "nobody wants records"


FLAGS = st.integers(0, ENCRYPTS | HAS_AES | ASKS_ADDRESS | READS)


@settings(max_examples=60)
@given(st.sampled_from(sorted(PAIRS)), FLAGS, FLAGS)
def test_the_wish_of_one_side_to_encrypt_is_enough(name: str, ours: int, theirs: int) -> None:
    one = dialler(PAIRS[name][0], TOKEN, flags=ours)
    other = accepting(PAIRS[name][1], replace(ACCEPTOR, flags=theirs))
    wire = Wire(one, other).run()
    assert wire.passed == (True, True)
    assert [side.remote and side.remote.flags for side in wire.sides] == [theirs, ours]
    keys, others = (side.keys for side in wire.sides)
    if not (ours | theirs) & ENCRYPTS:
        assert keys is others is None
        return
    assert keys is not None
    assert others is not None
    assert (keys.sends, keys.receives) == (others.receives, others.sends)
    assert keys.sends != keys.receives
    assert keys.has_aes is others.has_aes is bool(ours & theirs & HAS_AES)


@settings(max_examples=60)
@given(st.sampled_from(sorted(PAIRS)), st.booleans(), st.data())
def test_any_split_of_the_bytes_passes(name: str, secured: bool, data: st.DataObject) -> None:
    token = TOKEN if secured else None
    wire = Wire(dialler(PAIRS[name][0], token), acceptor(PAIRS[name][1], token))
    wire.collect()
    moves = st.tuples(st.integers(0, 1), st.integers(1, OPENING_BYTES))
    for reader, most in data.draw(st.lists(moves, max_size=30)):
        wire.carry(reader, most)
    assert wire.run(1).passed == (True, True)


@TOKENS
def test_the_dialler_speaks_first_and_nobody_reads_beyond_his_part(token: bytes | None) -> None:
    one, other = dialler(NEWCOMER, token), acceptor(MASTER, token)
    assert (len(one.take_output()), one.awaited_bytes) == (OPENING_BYTES, PREFIX_BYTES)
    assert (other.take_output(), other.awaited_bytes) == (b"", PREFIX_BYTES)
    other.receive(dialler(NEWCOMER, token).take_output()[:PREFIX_BYTES])
    assert (other.take_output(), other.awaited_bytes) == (b"", OPENING_BYTES - PREFIX_BYTES)


def test_an_opening_byte_by_byte() -> None:
    opening = Opening(
        Channel.LANE, b"R" * 16, 0x01020304, PeerId(0x0506), PeerId(0x0708), 9, 0x0A0B,
        flags=HAS_AES, token_id=0x090A, share=b"S" * 32, key=b"K" * 32, certificate=b"C" * 64,
    )  # fmt: skip
    expected = bytes.fromhex("50 43 43 4c") + struct.pack("<H", PROTOCOL_VERSION)
    expected += struct.pack("<H", binascii.crc_hqx(expected, 0))
    expected += bytes.fromhex("00 02 0900 0b0a 0200 04030201") + b"R" * 16
    expected += bytes.fromhex("0605000000000000 0807000000000000 0a09000000000000")
    expected += b"S" * 32 + b"K" * 32 + b"C" * 64
    expected += struct.pack("<I", zlib.crc32(expected))
    assert opening.encode() == expected
    assert len(expected) == OPENING_BYTES == 192
    assert Opening.decode(expected) == opening


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
OPENINGS = st.builds(
    Opening,
    channel=st.sampled_from(Channel),
    share=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=32, max_size=32),
    certificate=st.binary(min_size=64, max_size=64),
    flags=st.integers(0, ENCRYPTS | HAS_AES | ASKS_ADDRESS | READS),
    token_id=U64,
    run=st.binary(min_size=16, max_size=16),
    term=U32,
    source=U64.map(PeerId),
    target=U64.map(PeerId),
    lane=U16,
    lanes=U16,
    security=st.integers(0, 255),
    version=U16,
)


@given(OPENINGS)
def test_openings_round_trip(opening: Opening) -> None:
    assert Opening.decode(opening.encode()) == opening


@given(st.integers((ENCRYPTS | HAS_AES | ASKS_ADDRESS | READS) + 1, (1 << 16) - 1))
def test_flags_that_this_version_does_not_know(flags: int) -> None:
    sent = NEWCOMER.encode()
    wrong = seal(sent[:14] + flags.to_bytes(2, "little") + sent[16:-4])
    with pytest.raises(RemoteProtocolError, match="the opening is malformed"):
        Opening.decode(wrong)


# -- proofs ----------------------------------------------------------------------------------------


def hkdf_sha256(secret: bytes, info: bytes, salt: bytes = bytes(32), blocks: int = 1) -> bytes:
    """RFC 5869."""
    extracted, found, block = hmac.new(salt, secret, hashlib.sha256).digest(), b"", b""
    for number in range(1, blocks + 1):
        text = block + info + bytes([number])
        block = hmac.new(extracted, text, hashlib.sha256).digest()
        found += block
    return found


def keys_of(token: bytes | None, openings: bytes) -> list[bytes]:
    """The four keys that the documentation tells, of two sides with such openings."""
    theirs = X25519PublicKey.from_public_bytes(CURVE25519.share(ACCEPTOR.share))
    agreed = X25519PrivateKey.from_private_bytes(DIALLER.share).exchange(theirs)
    salt = bytes(32) if token is None else hkdf_sha256(token, b"pccl handshake key")
    info = b"pccl connection keys" + hashlib.sha256(openings).digest()
    found = hkdf_sha256(agreed, info, salt, blocks=4)
    return [found[i : i + 32] for i in range(0, 128, 32)]


def proof_of(secrets: Secrets, key: bytes, role: bytes, openings: bytes) -> bytes:
    message = role + hashlib.sha256(openings).digest()
    signature = secrets.signer.sign(message)
    proof = signature + hmac.new(key, message + signature, hashlib.sha256).digest()
    return proof + struct.pack("<I", zlib.crc32(proof))


@TOKENS
def test_keys_and_proofs_are_what_the_documentation_says(token: bytes | None) -> None:
    wire = Wire(dialler(MEMBER, token, flags=ENCRYPTS), acceptor(MASTER, token)).run()
    there, back = (bytes(sent) for sent in wire.sent)
    openings = there[:OPENING_BYTES] + back[:OPENING_BYTES]
    keys = keys_of(token, openings)
    assert len({*keys}) == 4
    assert wire.sides[0].keys == RecordKeys(keys[2], keys[3], has_aes=False)
    assert wire.sides[1].keys == RecordKeys(keys[3], keys[2], has_aes=False)
    assert there[OPENING_BYTES:] == proof_of(DIALLER, keys[0], b"pccl dialler", openings)
    assert back[OPENING_BYTES:] == proof_of(ACCEPTOR, keys[1], b"pccl acceptor", openings)


def test_the_hkdf_of_this_file_is_the_real_one() -> None:
    """RFC 5869, appendix A.3: 42 bytes."""
    expected = (
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )
    assert hkdf_sha256(b"\x0b" * 22, b"", blocks=2)[:42].hex() == expected


def test_curves_are_the_real_ones() -> None:
    """RFC 7748, section 5.2, and RFC 8032, section 7.1, test 2."""
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    agreed = CURVE25519.agree(scalar, point)
    assert agreed is not None
    assert agreed.hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    secret = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    signer = CURVE25519.signer(secret)
    key = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert signer.key.hex() == key
    expected = (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert signer.sign(b"\x72").hex() == expected
    assert CURVE25519.is_signed(signer.key, bytes.fromhex(expected), b"\x72")


@pytest.mark.parametrize("share", [bytes(32), b"\1" + bytes(31)], ids=["zero", "one"])
def test_a_share_that_decides_the_result(share: bytes) -> None:
    """Points of low order: a side that sends them would know the keys of all its connections."""
    assert CURVE25519.agree(DIALLER.share, share) is None
    other = acceptor(MASTER, TOKEN)
    opening = told(MEMBER, DIALLER, security=Security.TOKEN, share=share).encode()
    other.receive(opening[:PREFIX_BYTES])
    with pytest.raises(HandshakeRefused, match="its share is invalid"):
        other.receive(opening[PREFIX_BYTES:])


@PAIR
def test_a_key_that_is_not_the_senders(pair: tuple[Opening, Opening]) -> None:
    """A process that knows the token, and claims the key of another one."""
    thief = replace(DIALLER, signer=Thief(ACCEPTOR.signer.key, DIALLER.signer))
    wire = Wire(Handshake.dial(pair[0], thief), acceptor(pair[1], TOKEN)).run()
    assert reasons(wire)[1] == "the other side has not proven its key"
    thief = replace(ACCEPTOR, signer=Thief(DIALLER.signer.key, ACCEPTOR.signer))
    wire = Wire(dialler(pair[0], TOKEN), accepting(pair[1], thief)).run()
    assert reasons(wire)[0] == "the other side has not proven its key"


@dataclass
class Thief:
    """Signs with a key of its own, and claims another one."""

    key: bytes
    own: Signer

    def sign(self, message: bytes) -> bytes:
        return self.own.sign(message)


def test_somebody_between_two_sides_without_a_token() -> None:
    """Both agree with it on keys, but its signatures are not theirs."""
    between = secrets_of(None, b"m")
    wire = Wire(dialler(MEMBER, None), accepting(MASTER, between)).run()
    assert wire.sides[0].remote == told(MASTER, between, target=MEMBER.source)


@CONTROL
def test_another_token(pair: tuple[Opening, Opening]) -> None:
    wire = Wire(dialler(pair[0], TOKEN + b"!"), acceptor(pair[1], TOKEN)).run()
    assert reasons(wire) == (
        "the other side does not accept this token: set PCCL_TOKEN, or token=, to the run's token; "
        "commands of pccl take --token FILE",
        "its token is not one of this run",
    )
    assert wire.passed == (False, False)
    assert wire.sent[1][OPENING_BYTES:] == REFUSAL == seal(bytes(96))


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(PAIRS)),
    st.integers(0, 1),
    st.integers(0, 8 * (OPENING_BYTES + PROOF_BYTES) - 1),
    st.booleans(),
)
def test_a_flipped_bit_fails_on_both_sides(name: str, liar: int, bit: int, secured: bool) -> None:
    """Of what one side sends, opening or proof: the other one never takes it."""
    openings, token = PAIRS[name], TOKEN if secured else None
    wire = Wire(dialler(openings[0], token), acceptor(openings[1], token))
    wire.collect()
    flipped = False
    for reader in [0, 1] * 4:
        if not flipped and len(wire.sent[liar]) > bit // 8:
            wire.sent[liar][bit // 8] ^= 1 << bit % 8
            flipped = True
        while wire.carry(reader, 200):
            pass
    assert flipped
    assert not wire.sides[1 - liar].remote
    # Nobody takes it for another version or a wrong token, for which nobody would try again.
    refusals = [error for error in wire.failures if isinstance(error, HandshakeRefused)]
    assert refusals == []
    # The acceptor proves last: he cannot know that his proof was changed on the way.
    assert not wire.sides[liar].remote or (liar == 1 and bit >= 8 * OPENING_BYTES)


def test_whoever_answers_without_the_token() -> None:
    """He has an opening, but cannot make a proof."""
    opening = told(MASTER, ACCEPTOR, security=Security.TOKEN).encode()
    for proof in (seal(b"\1" * 96), seal(bytes(95) + b"\1")):
        one = dialler(NEWCOMER, TOKEN)
        one.receive(opening[:PREFIX_BYTES])
        one.receive(opening[PREFIX_BYTES:])
        with pytest.raises(HandshakeRefused, match="does not know the token: is the address right"):
            one.receive(proof)
        assert one.remote is None


def test_a_proof_that_is_reflected() -> None:
    """Somebody answers with our own words and our own proof."""
    one = dialler(NEWCOMER, TOKEN)
    opening = one.take_output()
    one.receive(opening[:PREFIX_BYTES])
    one.receive(opening[PREFIX_BYTES:])
    proof = one.take_output()
    assert len(proof) == PROOF_BYTES
    with pytest.raises(HandshakeRefused, match="does not know the token"):
        one.receive(proof)


@PAIR
@TOKENS
def test_a_handshake_that_is_replayed(pair: tuple[Opening, Opening], token: bytes | None) -> None:
    """Either side's words of an earlier connection, to somebody with a new share."""
    earlier = Wire(dialler(pair[0], token), acceptor(pair[1], token)).run()
    fresh = replace(secrets_of(token, b"a"), share=b"2" * 32)
    wire = Wire(accepting(pair[1], fresh), dialler(pair[0], token))
    wire.sent[1].extend(earlier.sent[0])
    while wire.carry(0, OPENING_BYTES):
        pass
    assert wire.passed[0] is False
    assert reasons(wire)[0] == "its token is not one of this run"
    fresh = replace(secrets_of(token, b"d"), share=b"2" * 32)
    wire = Wire(Handshake.dial(pair[0], fresh), acceptor(pair[1], token))
    wire.sent[1].extend(earlier.sent[1])
    while wire.carry(0, OPENING_BYTES):
        pass
    assert wire.passed[0] is False
    assert "does not know the token" in reasons(wire)[0]


@PAIR
def test_keys_of_a_later_connection_are_new(pair: tuple[Opening, Opening]) -> None:
    first = Wire(dialler(pair[0], TOKEN, flags=ENCRYPTS), acceptor(pair[1], TOKEN)).run()
    fresh = replace(DIALLER, share=b"2" * 32, flags=ENCRYPTS)
    second = Wire(Handshake.dial(pair[0], fresh), acceptor(pair[1], TOKEN)).run()
    before, now = first.sides[0].keys, second.sides[0].keys
    assert before is not None
    assert now is not None
    assert len({before.sends, before.receives, now.sends, now.receives}) == 4
    assert repr(fresh) == "<Secrets>"


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_keys_of_different_tokens_differ(one: bytes, other: bytes) -> None:
    assert (derive_token_key(one) == derive_token_key(other)) == (one == other)
    assert len(derive_token_key(one)) == 32


# -- disagreements -----------------------------------------------------------------------------


def test_a_token_on_one_side_only() -> None:
    wire = Wire(dialler(NEWCOMER, None), acceptor(MASTER, TOKEN)).run()
    assert reasons(wire) == (
        "the other side requires a token: set PCCL_TOKEN, or token=, to the run's token; commands "
        "of pccl take --token FILE",
        "it has no token",
    )
    wire = Wire(dialler(NEWCOMER, TOKEN), acceptor(MASTER, None)).run()
    assert reasons(wire) == (
        "this process has a token, but the other side has none: start the master with the same "
        "token, or unset PCCL_TOKEN here",
        "it has a token, but this side has none",
    )
    assert [len(sent) for sent in wire.sent] == [OPENING_BYTES] * 2, "no proof for anybody"


@TOKENS
def test_another_version(token: bytes | None) -> None:
    """Whatever follows the first eight bytes there, both say the same."""
    newer = PROTOCOL_VERSION + 1
    words = f"protocol version {newer}, this one {PROTOCOL_VERSION}: install the same"
    prefix = changed(NEWCOMER, version=newer).encode()[:PREFIX_BYTES]
    other = acceptor(MASTER, token)
    with pytest.raises(HandshakeRefused, match=words) as caught:
        other.receive(prefix)
    answer = Opening.decode(caught.value.last_words)
    assert (answer.version, answer.run) == (PROTOCOL_VERSION, RUN)
    one = dialler(NEWCOMER, token)
    with pytest.raises(HandshakeRefused, match=words) as caught:
        one.receive(prefix)
    assert caught.value.last_words == b""


def test_the_preamble_of_version_1_is_understood() -> None:
    with pytest.raises(HandshakeRefused, match="protocol version 1, this one"):
        acceptor(MASTER, TOKEN).receive(b"PCCL\1\0\0\0")


@TOKENS
@pytest.mark.parametrize("data", [b"GET / HT", b"\x16\3\1\2\0\1\0\1", b"PCCM\2\0\0\0", bytes(8)])
def test_another_protocol_is_told_nothing(data: bytes, token: bytes | None) -> None:
    for side in (dialler(NEWCOMER, token), acceptor(MASTER, token)):
        side.take_output()
        with pytest.raises(RemoteProtocolError, match="does not speak this protocol") as caught:
            side.receive(data)
        assert not isinstance(caught.value, HandshakeRefused)
        assert side.take_output() == b""
        assert side.awaited_bytes == 0


@TOKENS
def test_the_wrong_door(token: bytes | None) -> None:
    wire = Wire(dialler(NEWCOMER, token), acceptor(ELDER, token)).run()
    assert reasons(wire) == (
        "a peer, not the master, listens at this address: is the address right?",
        "it asked for a control connection",
    )
    wire = Wire(dialler(YOUNGER, token), acceptor(MASTER, token)).run()
    assert reasons(wire) == (
        "a master listens at this address: is the address right?",
        "it asked for a lane connection",
    )


@TOKENS
def test_a_master_of_another_run_or_an_older_term(token: bytes | None) -> None:
    other_run, older = changed(MASTER, run=b"x" * 16), changed(MASTER, term=2)
    wire = Wire(dialler(MEMBER, token), acceptor(other_run, token)).run()
    assert isinstance(wire.failures[0], AnotherRun)
    assert reasons(wire)[0] == "the master coordinates another run"
    wire = Wire(dialler(MEMBER, token), acceptor(older, token)).run()
    assert reasons(wire)[0] == "the master has term 2, but the run is in term 3"
    for master in (other_run, older, changed(MASTER, term=4)):
        assert Wire(dialler(NEWCOMER, token), acceptor(master, token)).run().passed == (True, True)
    newer = changed(MASTER, term=4)
    assert Wire(dialler(MEMBER, token), acceptor(newer, token)).run().passed == (True, True)


@TOKENS
@pytest.mark.parametrize(
    ("younger", "elder", "words"),
    [
        ({"run": b"x" * 16}, {}, ("it is a peer of another run", "it is a peer of another run")),
        (
            {"target": PeerId(5)},
            {},
            ("the answer is from peer 4 to peer 7", "it asked for peer 5, but this is peer 4"),
        ),
        ({"source": PeerId(4)}, {}, ("", "it gave the id of this peer")),
        ({"lane": LANES_MAX}, {}, ("", "lane 256 is above 255")),
        ({"lane": 65535}, {}, ("", "lane 65535 is above 255")),
        (
            {"run": NO_RUN, "term": 0, "target": NOBODY},
            {"run": NO_RUN, "term": 0, "source": NOBODY},
            ("", "it asked for peer 0, but this peer has no id yet"),
        ),
    ],
)
def test_lanes_between_peers_that_do_not_belong_together(
    younger: dict[str, Any], elder: dict[str, Any], words: tuple[str, str], token: bytes | None
) -> None:
    one, other = (
        dialler(changed(YOUNGER, **younger), token),
        acceptor(changed(ELDER, **elder), token),
    )
    wire = Wire(one, other).run()
    assert reasons(wire) == words
    assert wire.sides[1].remote is None


@TOKENS
@pytest.mark.parametrize("lane", [0, 1, LANES_MAX - 1])
def test_either_side_hears_of_the_lane_and_how_many_the_other_wants(
    lane: int, token: bytes | None
) -> None:
    one, other = changed(YOUNGER, lane=lane, lanes=7), changed(ELDER, lanes=LANES_MAX)
    wire = Wire(dialler(one, token), acceptor(other, token)).run()
    assert wire.passed == (True, True)
    elder, younger = wire.sides[0].remote, wire.sides[1].remote
    assert elder is not None
    assert younger is not None
    assert (elder.source, elder.target, elder.lane, elder.lanes) == (4, 7, lane, 256)
    assert (younger.source, younger.target, younger.lane, younger.lanes) == (7, 4, lane, 7)


def test_another_lane_than_the_one_that_was_dialled() -> None:
    one = dialler(changed(YOUNGER, lane=3), None)
    answer = told(ELDER, ACCEPTOR, target=YOUNGER.source, lane=2).encode()
    openings = one.take_output() + answer
    one.receive(answer[:PREFIX_BYTES])
    one.receive(answer[PREFIX_BYTES:])
    proof = proof_of(ACCEPTOR, keys_of(None, openings)[1], b"pccl acceptor", openings)
    with pytest.raises(HandshakeRefused, match="lane 2 answered instead of lane 3"):
        one.receive(proof)


def test_nothing_is_said_about_a_run_before_the_proof() -> None:
    """A stranger cannot find out by his lane's opening which peers there are."""
    for source, target, run in ((7, 4, RUN), (7, 5, RUN), (2, 4, RUN), (7, 4, b"x" * 16)):
        opening = changed(YOUNGER, run=run, source=PeerId(source), target=PeerId(target))
        wire = Wire(dialler(opening, None), acceptor(ELDER, None, lambda _: "unknown")).run()
        assert reasons(wire)[1] == "unknown"
        assert wire.sent[1] == told(ELDER, ACCEPTOR, target=PeerId(source)).encode()


# -- who may connect -------------------------------------------------------------------------------


class CountedCurves(Curve25519):
    """Counts what costs much."""

    def __init__(self) -> None:
        self.computed = 0

    def agree(self, secret: bytes, share: bytes) -> bytes | None:
        self.computed += 1
        return super().agree(secret, share)

    def is_signed(self, key: bytes, signature: bytes, message: bytes) -> bool:
        self.computed += 1
        return super().is_signed(key, signature, message)


@PAIR
def test_who_may_not_connect_is_refused_before_anything_is_computed(
    pair: tuple[Opening, Opening],
) -> None:
    curves, judged = CountedCurves(), list[Opening]()

    def judge(remote: Opening) -> str:
        judged.append(remote)
        return "it does not have the key of peer 7"

    other = accepting(pair[1], replace(ACCEPTOR, curves=curves), judge)
    wire = Wire(dialler(pair[0], TOKEN), other).run()
    assert reasons(wire)[1] == "it does not have the key of peer 7"
    assert [one.key for one in judged] == [DIALLER.signer.key]
    assert curves.computed == 0
    assert wire.passed == (False, False)
    assert len(wire.sent[1]) == OPENING_BYTES


@PAIR
def test_whom_the_judge_lets_in_has_still_to_prove_the_key(pair: tuple[Opening, Opening]) -> None:
    thief = replace(DIALLER, signer=Thief(signer_of(b"x").key, DIALLER.signer))

    def judge(remote: Opening) -> str:
        return "" if remote.key == signer_of(b"x").key else "unknown"

    wire = Wire(Handshake.dial(pair[0], thief), acceptor(pair[1], TOKEN, judge)).run()
    assert reasons(wire)[1] == "the other side has not proven its key"
    owner = replace(DIALLER, signer=signer_of(b"x"))
    wire = Wire(Handshake.dial(pair[0], owner), acceptor(pair[1], TOKEN, judge)).run()
    assert wire.passed == (True, True)


@PAIR
@TOKENS
def test_the_dialler_expects_a_key(pair: tuple[Opening, Opening], token: bytes | None) -> None:
    fingerprint = fingerprint_of(ACCEPTOR.signer.key)
    wire = Wire(dialler(pair[0], token, fingerprint), acceptor(pair[1], token)).run()
    assert wire.passed == (True, True)
    for wrong in (fingerprint_of(DIALLER.signer.key), fingerprint_of(b""), fingerprint[:-1]):
        curves = CountedCurves()
        secrets = replace(secrets_of(token, b"d"), curves=curves)
        one = Handshake.dial(pair[0], secrets, wrong)
        wire = Wire(one, acceptor(pair[1], token)).run()
        words = (
            "another process answered instead of peer 4"
            if pair[0].channel is Channel.LANE
            else "the master has another key than the token says"
        )
        assert reasons(wire)[0].startswith(words)
        assert curves.computed == 0
        assert (wire.passed, len(wire.sent[0])) == ((False, False), OPENING_BYTES)


PROBING = Opening(Channel.PROBE, RUN, 3, target=PeerId(4))


@TOKENS
@pytest.mark.parametrize("probed", [ELDER, Opening(Channel.LANE)], ids=["a peer", "a newcomer"])
def test_a_probe_needs_no_token_and_expects_a_key(probed: Opening, token: bytes | None) -> None:
    """The probed peer may not know its own id yet, so its key says that it is the right one."""
    fingerprint = fingerprint_of(ACCEPTOR.signer.key)
    assert Wire(dialler(PROBING, TOKEN, fingerprint), acceptor(probed, token)).run().passed == (
        True,
        True,
    )
    wire = Wire(dialler(PROBING, TOKEN, fingerprint_of(b"x")), acceptor(probed, token)).run()
    assert reasons(wire)[0] == "another process answered instead of peer 4"
    assert wire.passed == (False, False)


@pytest.mark.parametrize("fields", [{"run": b"x" * 16}, {"source": PeerId(5)}])
def test_a_probe_of_another_process(fields: dict[str, Any]) -> None:
    wire = Wire(dialler(PROBING, None), acceptor(changed(ELDER, **fields), None)).run()
    assert reasons(wire)[0] == "another process answered instead of peer 4"


@given(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), st.integers(0, 8 * KEY_BYTES - 1))
def test_fingerprints_of_different_keys_differ(key: bytes, bit: int) -> None:
    assert fingerprint_of(key) == hashlib.sha256(key).digest()[:16]
    assert fingerprint_of(flipped(key, bit)) != fingerprint_of(key)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# -- tokens with numbers -----------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.dictionaries(st.integers(0, (1 << 64) - 1), st.binary(max_size=40), min_size=1, max_size=4),
    st.data(),
)
def test_a_dialler_with_one_token_of_several(tokens: dict[int, bytes], data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(sorted(tokens)))
    keys = {one: derive_token_key(token) for one, token in tokens.items()}
    other = accepting(MASTER, replace(ACCEPTOR, tokens=keys))
    wire = Wire(Handshake.dial(MEMBER, secrets_of(tokens[number], b"d", number)), other).run()
    assert wire.passed == (True, True)
    assert wire.sides[1].remote == told(MEMBER, DIALLER, security=Security.TOKEN, token_id=number)
    answer = wire.sides[0].remote
    assert answer is not None
    assert answer.token_id == 0, "the answer does not say which tokens there are"


@CONTROL
@settings(max_examples=30)
@given(number=st.integers(0, (1 << 64) - 1), proof=st.binary(max_size=PROOF_BYTES - 4))
def test_an_unknown_number_is_refused_after_the_proof(
    pair: tuple[Opening, Opening], number: int, proof: bytes
) -> None:
    """Nobody can try which numbers there are: the answer is that to a wrong token."""
    known = {number ^ 1: derive_token_key(TOKEN)}
    curves = CountedCurves()
    other = accepting(pair[1], replace(ACCEPTOR, tokens=known, curves=curves))
    wire = Wire(Handshake.dial(pair[0], secrets_of(TOKEN, b"d", number)), other).run()
    assert reasons(wire)[1] == "its token is not one of this run"
    assert reasons(wire)[0].startswith("the other side does not accept this token")
    assert (wire.passed, curves.computed) == ((False, False), 0)
    openings = told(pair[1], ACCEPTOR, security=Security.TOKEN, target=pair[0].source).encode()
    assert wire.sent[1] == openings + REFUSAL

    other = accepting(pair[1], replace(ACCEPTOR, tokens=known))
    opening = told(pair[0], DIALLER, security=Security.TOKEN, token_id=number).encode()
    other.receive(opening[:PREFIX_BYTES])
    other.receive(opening[PREFIX_BYTES:])
    assert (other.take_output(), other.awaited_bytes) == (openings, PROOF_BYTES)
    with pytest.raises(HandshakeRefused) as caught:
        other.receive(seal(proof.ljust(PROOF_BYTES - 4, b"\0")))
    assert caught.value.last_words == REFUSAL


def test_another_token_under_the_same_number() -> None:
    known = {5: derive_token_key(TOKEN), 6: derive_token_key(TOKEN + b"!")}
    other = accepting(MASTER, replace(ACCEPTOR, tokens=known))
    wire = Wire(Handshake.dial(MEMBER, secrets_of(TOKEN, b"d", 6)), other).run()
    assert reasons(wire)[1] == "its token is not one of this run"


def test_lanes_prove_no_token() -> None:
    """Two peers of a run may know different tokens of it, or none."""
    for token in (TOKEN, TOKEN + b"!", None):
        wire = Wire(dialler(YOUNGER, token), acceptor(ELDER, TOKEN)).run()
        assert wire.passed == (True, True)
        remote = wire.sides[1].remote
        assert remote is not None
        assert (remote.security, remote.token_id) == (Security.NONE, 0)


# -- certificates --------------------------------------------------------------------------------

SEVEN = PeerId(7)
CERTIFICATE = certify(MASTER_SIGNER, RUN, SEVEN, DIALLER.signer.key)


def test_a_certificate_byte_by_byte() -> None:
    """Its master signs a fixed text, the run, the id (8 bytes, big-endian) and the key."""
    key = DIALLER.signer.key
    signed = b"pccl registered peer" + RUN + (7).to_bytes(8, "big") + key
    assert Certificate(MASTER_SIGNER.key, MASTER_SIGNER.sign(signed)) == CERTIFICATE
    assert is_certified(CURVE25519, CERTIFICATE, RUN, SEVEN, key)


@settings(max_examples=300)
@given(st.integers(0, 8 * (KEY_BYTES + SIGNATURE_BYTES + 16 + 8 + KEY_BYTES) - 1))
def test_a_flipped_bit_anywhere_makes_a_certificate_false(bit: int) -> None:
    """Of the master's key, its signature, the run, the id, or the peer's key."""
    parts = [*dataclasses.astuple(CERTIFICATE), RUN, SEVEN.to_bytes(8), DIALLER.signer.key]
    for number, part in enumerate(parts):
        if 0 <= bit < 8 * len(part):
            parts[number] = flipped(part, bit)
        bit -= 8 * len(part)
    authority, signature, run, peer, key = parts
    certificate = Certificate(authority, signature)
    assert not is_certified(CURVE25519, certificate, run, PeerId(int.from_bytes(peer)), key)


@pytest.mark.parametrize("key", [DIALLER.signer.key, MASTER_SIGNER.key, b"", bytes(KEY_BYTES)])
def test_no_certificate_certifies_nobody(key: bytes) -> None:
    for one in (NO_CERTIFICATE, Certificate(MASTER_SIGNER.key), Certificate(b"", bytes(64))):
        assert not is_certified(CURVE25519, one, RUN, SEVEN, key)


def test_peers_cannot_certify_each_other() -> None:
    own = certify(DIALLER.signer, RUN, SEVEN, DIALLER.signer.key)
    assert not is_certified(
        CURVE25519, replace(own, authority=MASTER_SIGNER.key), RUN, SEVEN, DIALLER.signer.key
    )
