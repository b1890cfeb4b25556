"""The handshake as bytes: the right token passes however bytes are split, nothing else does."""

from __future__ import annotations

import binascii
import dataclasses
import hashlib
import hmac
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.checksum import seal
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake import (
    NO_RUN,
    NONCE_BYTES,
    OPENING_BYTES,
    PREFIX_BYTES,
    PROOF_BYTES,
    REFUSAL,
    AnotherRun,
    Channel,
    Handshake,
    HandshakeRefused,
    Opening,
    Security,
    derive_key,
)
from pccl.protocol.limits import LANES_MAX, PROTOCOL_VERSION
from pccl.protocol.types import NOBODY, PeerId

RUN = bytes(range(16))
TOKEN = b"correct horse battery staple"
KEY = derive_key(TOKEN)
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["no token", "token"])

NEWCOMER = Opening(Channel.CONTROL, b"n" * 32)
MEMBER = Opening(Channel.CONTROL, b"n" * 32, RUN, 3, PeerId(7))
MASTER = Opening(Channel.CONTROL, b"m" * 32, RUN, 3)
YOUNGER = Opening(Channel.LANE, b"y" * 32, RUN, 3, PeerId(7), PeerId(4))
ELDER = Opening(Channel.LANE, b"e" * 32, RUN, 3, PeerId(4))
PAIRS = {"newcomer": (NEWCOMER, MASTER), "member": (MEMBER, MASTER), "lane": (YOUNGER, ELDER)}
PAIR = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)


def changed(opening: Opening, **fields: Any) -> Opening:
    return dataclasses.replace(opening, **fields)


def dialler(opening: Opening, key: bytes | None) -> Handshake:
    return Handshake.dial(opening, key)


def acceptor(opening: Opening, key: bytes | None) -> Handshake:
    return Handshake.accept(lambda: opening, key)


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


@KEYS
@PAIR
def test_both_sides_learn_what_the_other_has_said(
    pair: tuple[Opening, Opening], key: bytes | None
) -> None:
    wire = Wire(dialler(pair[0], key), acceptor(pair[1], key)).run()
    security = Security.NONE if key is None else Security.TOKEN
    assert wire.sides[1].remote == changed(pair[0], security=security)
    answer = changed(pair[1], security=security, target=pair[0].source)
    assert wire.sides[0].remote == answer
    proof_bytes = 0 if key is None else PROOF_BYTES
    assert [len(sent) for sent in wire.sent] == [OPENING_BYTES + proof_bytes] * 2
    assert [side.awaited_bytes for side in wire.sides] == [0, 0]


@settings(max_examples=60)
@given(st.sampled_from(sorted(PAIRS)), st.booleans(), st.data())
def test_any_split_of_the_bytes_passes(name: str, secured: bool, data: st.DataObject) -> None:
    key = KEY if secured else None
    wire = Wire(dialler(PAIRS[name][0], key), acceptor(PAIRS[name][1], key))
    wire.collect()
    moves = st.tuples(st.integers(0, 1), st.integers(1, OPENING_BYTES))
    for reader, most in data.draw(st.lists(moves, max_size=30)):
        wire.carry(reader, most)
    assert wire.run(1).passed == (True, True)


@KEYS
def test_the_dialler_speaks_first_and_nobody_reads_beyond_his_part(key: bytes | None) -> None:
    one, other = dialler(NEWCOMER, key), acceptor(MASTER, key)
    assert (len(one.take_output()), one.awaited_bytes) == (OPENING_BYTES, PREFIX_BYTES)
    assert (other.take_output(), other.awaited_bytes) == (b"", PREFIX_BYTES)
    other.receive(dialler(NEWCOMER, key).take_output()[:PREFIX_BYTES])
    assert (other.take_output(), other.awaited_bytes) == (b"", OPENING_BYTES - PREFIX_BYTES)


def test_an_opening_byte_by_byte() -> None:
    opening = Opening(
        Channel.LANE, b"N" * 32, b"R" * 16, 0x01020304, PeerId(0x0506), PeerId(0x0708), 9, 0x0A0B
    )
    expected = bytes.fromhex("50 43 43 4c") + struct.pack("<H", PROTOCOL_VERSION)
    expected += struct.pack("<H", binascii.crc_hqx(expected, 0))
    expected += bytes.fromhex("00 02 0900 0b0a 0000 04030201") + b"R" * 16
    expected += bytes.fromhex("0605000000000000 0807000000000000") + b"N" * 32
    expected += struct.pack("<I", zlib.crc32(expected))
    assert opening.encode() == expected
    assert len(expected) == OPENING_BYTES == 88
    assert Opening.decode(expected) == opening


U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32, 64))
OPENINGS = st.builds(
    Opening,
    channel=st.sampled_from(Channel),
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
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


# -- proofs ----------------------------------------------------------------------------------------


def hkdf_sha256(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of output and no salt."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\1", hashlib.sha256).digest()


def test_proofs_are_what_the_documentation_says() -> None:
    wire = Wire(dialler(MEMBER, KEY), acceptor(MASTER, KEY)).run()
    there, back = (bytes(sent) for sent in wire.sent)
    openings = there[:OPENING_BYTES] + back[:OPENING_BYTES]
    key = hkdf_sha256(TOKEN, b"pccl handshake key")
    for proof, role in ((there, b"pccl dialler"), (back, b"pccl acceptor")):
        expected = hmac.new(key, role + openings, hashlib.sha256).digest()
        assert proof[OPENING_BYTES:] == expected + struct.pack("<I", zlib.crc32(expected))


def test_the_hkdf_of_this_file_is_the_real_one() -> None:
    """RFC 5869, appendix A.3, the first 32 of its 42 bytes."""
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert hkdf_sha256(b"\x0b" * 22, b"").hex() == expected


@PAIR
def test_another_token(pair: tuple[Opening, Opening]) -> None:
    wire = Wire(dialler(pair[0], derive_key(TOKEN + b"!")), acceptor(pair[1], KEY)).run()
    assert reasons(wire) == (
        "the two sides have different tokens: set PCCL_TOKEN, or token=, to the run's token; "
        "commands of pccl take --token FILE",
        "its token is not the one of this run",
    )
    assert wire.passed == (False, False)
    assert wire.sent[1][OPENING_BYTES:] == REFUSAL == seal(bytes(32))


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(PAIRS)),
    st.integers(0, 1),
    st.integers(0, 8 * (OPENING_BYTES + PROOF_BYTES) - 1),
)
def test_a_flipped_bit_fails_on_both_sides(name: str, liar: int, bit: int) -> None:
    """Of what one side sends, opening or proof: the other one never takes it."""
    openings = PAIRS[name]
    wire = Wire(dialler(openings[0], KEY), acceptor(openings[1], KEY))
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
    for proof in (seal(b"\1" * 32), seal(bytes(31) + b"\1")):
        one = dialler(NEWCOMER, KEY)
        one.receive(acceptor_opening()[:PREFIX_BYTES])
        one.receive(acceptor_opening()[PREFIX_BYTES:])
        with pytest.raises(HandshakeRefused, match="does not know the token: is the address right"):
            one.receive(proof)
        assert one.remote is None


def acceptor_opening() -> bytes:
    return changed(MASTER, security=Security.TOKEN).encode()


def test_a_proof_that_is_reflected() -> None:
    """Somebody answers with our own words and our own proof."""
    one = dialler(NEWCOMER, KEY)
    opening = one.take_output()
    one.receive(opening[:PREFIX_BYTES])
    one.receive(opening[PREFIX_BYTES:])
    proof = one.take_output()
    assert len(proof) == PROOF_BYTES
    with pytest.raises(HandshakeRefused, match="does not know the token"):
        one.receive(proof)


@PAIR
def test_a_handshake_that_is_replayed(pair: tuple[Opening, Opening]) -> None:
    """Either side's words of an earlier connection, to somebody with a new nonce."""
    earlier = Wire(dialler(pair[0], KEY), acceptor(pair[1], KEY)).run()
    again = acceptor(changed(pair[1], nonce=b"2" * 32), KEY)
    wire = Wire(again, dialler(pair[0], KEY))
    wire.sent[1].extend(earlier.sent[0])
    while wire.carry(0, OPENING_BYTES):
        pass
    assert wire.passed[0] is False
    assert reasons(wire)[0] == "its token is not the one of this run"
    again = dialler(changed(pair[0], nonce=b"2" * 32), KEY)
    wire = Wire(again, acceptor(pair[1], KEY))
    wire.sent[1].extend(earlier.sent[1])
    while wire.carry(0, OPENING_BYTES):
        pass
    assert wire.passed[0] is False
    assert "does not know the token" in reasons(wire)[0]


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_keys_of_different_tokens_differ(one: bytes, other: bytes) -> None:
    assert (derive_key(one) == derive_key(other)) == (one == other)
    assert len(derive_key(one)) == 32


# -- disagreements -----------------------------------------------------------------------------


def test_a_token_on_one_side_only() -> None:
    wire = Wire(dialler(NEWCOMER, None), acceptor(MASTER, KEY)).run()
    assert reasons(wire) == (
        "the other side requires a token: set PCCL_TOKEN, or token=, to the run's token; commands "
        "of pccl take --token FILE",
        "it has no token",
    )
    wire = Wire(dialler(NEWCOMER, KEY), acceptor(MASTER, None)).run()
    assert reasons(wire) == (
        "this process has a token, but the other side has none: start the master with the same "
        "token, or unset PCCL_TOKEN here",
        "it has a token, but this side has none",
    )
    assert [len(sent) for sent in wire.sent] == [OPENING_BYTES] * 2, "no proof for anybody"


@KEYS
def test_another_version(key: bytes | None) -> None:
    """Whatever follows the first eight bytes there, both say the same."""
    newer = PROTOCOL_VERSION + 1
    words = f"protocol version {newer}, this one {PROTOCOL_VERSION}: install the same"
    prefix = changed(NEWCOMER, version=newer).encode()[:PREFIX_BYTES]
    other = acceptor(MASTER, key)
    with pytest.raises(HandshakeRefused, match=words) as caught:
        other.receive(prefix)
    answer = Opening.decode(caught.value.last_words)
    assert (answer.version, answer.run) == (PROTOCOL_VERSION, RUN)
    one = dialler(NEWCOMER, key)
    with pytest.raises(HandshakeRefused, match=words) as caught:
        one.receive(prefix)
    assert caught.value.last_words == b""


def test_the_preamble_of_version_1_is_understood() -> None:
    with pytest.raises(HandshakeRefused, match="protocol version 1, this one"):
        acceptor(MASTER, KEY).receive(b"PCCL\1\0\0\0")


@KEYS
@pytest.mark.parametrize("data", [b"GET / HT", b"\x16\3\1\2\0\1\0\1", b"PCCM\2\0\0\0", bytes(8)])
def test_another_protocol_is_told_nothing(data: bytes, key: bytes | None) -> None:
    for side in (dialler(NEWCOMER, key), acceptor(MASTER, key)):
        side.take_output()
        with pytest.raises(RemoteProtocolError, match="does not speak this protocol") as caught:
            side.receive(data)
        assert not isinstance(caught.value, HandshakeRefused)
        assert side.take_output() == b""
        assert side.awaited_bytes == 0


@KEYS
def test_the_wrong_door(key: bytes | None) -> None:
    wire = Wire(dialler(NEWCOMER, key), acceptor(ELDER, key)).run()
    assert reasons(wire) == (
        "a peer, not the master, listens at this address: is the address right?",
        "it asked for a control connection",
    )
    wire = Wire(dialler(YOUNGER, key), acceptor(MASTER, key)).run()
    assert reasons(wire) == (
        "a master listens at this address: is the address right?",
        "it asked for a lane connection",
    )


@KEYS
def test_a_master_of_another_run_or_an_older_term(key: bytes | None) -> None:
    other_run, older = changed(MASTER, run=b"x" * 16), changed(MASTER, term=2)
    wire = Wire(dialler(MEMBER, key), acceptor(other_run, key)).run()
    assert isinstance(wire.failures[0], AnotherRun)
    assert reasons(wire)[0] == "the master coordinates another run"
    wire = Wire(dialler(MEMBER, key), acceptor(older, key)).run()
    assert reasons(wire)[0] == "the master has term 2, but the run is in term 3"
    for master in (other_run, older, changed(MASTER, term=4)):
        assert Wire(dialler(NEWCOMER, key), acceptor(master, key)).run().passed == (True, True)
    newer = changed(MASTER, term=4)
    assert Wire(dialler(MEMBER, key), acceptor(newer, key)).run().passed == (True, True)


@KEYS
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
    younger: dict[str, Any], elder: dict[str, Any], words: tuple[str, str], key: bytes | None
) -> None:
    one, other = dialler(changed(YOUNGER, **younger), key), acceptor(changed(ELDER, **elder), key)
    wire = Wire(one, other).run()
    assert reasons(wire) == words
    assert wire.sides[1].remote is None


@KEYS
@pytest.mark.parametrize("lane", [0, 1, LANES_MAX - 1])
def test_either_side_hears_of_the_lane_and_how_many_the_other_wants(
    lane: int, key: bytes | None
) -> None:
    one, other = changed(YOUNGER, lane=lane, lanes=7), changed(ELDER, lanes=LANES_MAX)
    wire = Wire(dialler(one, key), acceptor(other, key)).run()
    assert wire.passed == (True, True)
    elder, younger = wire.sides[0].remote, wire.sides[1].remote
    assert elder is not None
    assert younger is not None
    assert (elder.source, elder.target, elder.lane, elder.lanes) == (4, 7, lane, 256)
    assert (younger.source, younger.target, younger.lane, younger.lanes) == (7, 4, lane, 7)


def test_another_lane_than_the_one_that_was_dialled() -> None:
    one = dialler(changed(YOUNGER, lane=3), None)
    answer = changed(ELDER, target=YOUNGER.source, lane=2).encode()
    one.receive(answer[:PREFIX_BYTES])
    with pytest.raises(HandshakeRefused, match="lane 2 answered instead of lane 3"):
        one.receive(answer[PREFIX_BYTES:])


def test_nothing_is_said_about_a_run_before_the_proof() -> None:
    """A stranger cannot find out by his lane's opening which peers there are."""
    for source, target, run in ((7, 4, RUN), (7, 5, RUN), (2, 4, RUN), (7, 4, b"x" * 16)):
        opening = changed(YOUNGER, run=run, source=PeerId(source), target=PeerId(target))
        wire = Wire(dialler(opening, derive_key(b"guess")), acceptor(ELDER, KEY)).run()
        assert reasons(wire)[1] == "its token is not the one of this run"
        answer = changed(ELDER, security=Security.TOKEN, target=PeerId(source))
        assert wire.sent[1] == answer.encode() + REFUSAL
