"""The handshake of a peer with a relay: no token, two proven keys, and one run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.checksum import DamagedData
from pccl.protocol.handshake.exchange import PROOF_BYTES, REFUSAL, Handshake
from pccl.protocol.handshake.keys import CURVE25519, Secrets, fingerprint_of
from pccl.protocol.handshake.opening import (
    ENCRYPTS,
    NO_RUN,
    OPENING_BYTES,
    Channel,
    Opening,
    Security,
)
from pccl.protocol.types import PeerId
from tests.property.protocol.test_handshake import Thief, Wire, accepting, reasons
from tests.support.secrets import secrets_of, signer_of

RUN, OTHER_RUN = bytes(range(16)), b"x" * 16
TOKEN = b"correct horse battery staple"
SEVEN, FOUR, TWO = PeerId(7), PeerId(4), PeerId(2)

TO_FOUR = Opening(Channel.RELAY, RUN, 3, SEVEN, FOUR)
"""What peer 7 sends to a relay, to reach peer 4."""
A_PEER = Opening(Channel.LANE, RUN, 3, TWO)
A_MASTER = Opening(Channel.CONTROL, RUN, 3)
RELAYS = {"a peer": A_PEER, "a master": A_MASTER}
RELAY = pytest.mark.parametrize("relay", RELAYS.values(), ids=RELAYS)
TOKENS = pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])

ANOTHER_RUN = "it is a peer of another run"


def asking(
    opening: Opening = TO_FOUR, token: bytes | None = None, expects: bytes = b"", flags: int = 0
) -> Handshake:
    """The side of the peer that dials the relay."""
    return Handshake.dial(opening, secrets_of(token, b"d", flags=flags), expects)


def forwarding(relay: Opening, token: bytes | None = None) -> Handshake:
    """The side of the relay, to which every peer may come."""
    return accepting(relay, secrets_of(token, b"a"))


def shown(opening: Opening, secrets: Secrets) -> Opening:
    """An opening with what a handshake fills in for this side."""
    share, key = CURVE25519.share(secrets.share), secrets.signer.key
    return replace(opening, share=share, key=key)


# -- who passes ----------------------------------------------------------------------------------


@RELAY
@TOKENS
def test_the_relay_learns_who_dials_and_whom_it_wants_to_reach(
    relay: Opening, token: bytes | None
) -> None:
    wire = Wire(asking(token=token), forwarding(relay, token)).run()
    assert wire.sides[1].remote == shown(TO_FOUR, secrets_of(token, b"d"))
    answer = replace(relay, channel=Channel.RELAY, target=SEVEN)
    assert wire.sides[0].remote == shown(answer, secrets_of(token, b"a"))
    assert [len(sent) for sent in wire.sent] == [OPENING_BYTES + PROOF_BYTES] * 2
    assert [side.awaited_bytes for side in wire.sides] == [0, 0]
    assert [side.keys for side in wire.sides] == [None, None]


@RELAY
@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, None), (None, TOKEN), (TOKEN, TOKEN + b"!")])
def test_no_token_is_asked_for(relay: Opening, ours: bytes | None, theirs: bytes | None) -> None:
    """A master with tokens recognizes a peer that it has registered by its key."""
    wire = Wire(asking(token=ours), forwarding(relay, theirs)).run()
    assert wire.passed == (True, True)
    remotes = [side.remote for side in wire.sides]
    assert [one and (one.security, one.token_id) for one in remotes] == [(Security.NONE, 0)] * 2


@settings(max_examples=40)
@given(st.sampled_from(sorted(RELAYS)), st.booleans(), st.data())
def test_any_split_of_the_bytes_passes(name: str, secured: bool, data: st.DataObject) -> None:
    token = TOKEN if secured else None
    wire = Wire(asking(token=token), forwarding(RELAYS[name], token))
    wire.collect()
    moves = st.tuples(st.integers(0, 1), st.integers(1, OPENING_BYTES))
    for reader, most in data.draw(st.lists(moves, max_size=30)):
        wire.carry(reader, most)
    assert wire.run(1).passed == (True, True)


def test_a_relay_answers_other_channels_as_before() -> None:
    """A peer that forwards for some is still the other end of a lane."""
    lane = Opening(Channel.LANE, RUN, 3, SEVEN, TWO)
    wire = Wire(asking(lane), forwarding(A_PEER)).run()
    assert wire.passed == (True, True)
    answer = wire.sides[0].remote
    assert answer is not None
    assert answer.channel is Channel.LANE


# -- who does not ----------------------------------------------------------------------------------


@RELAY
def test_the_relay_refuses_in_words_before_anything_is_proven(relay: Opening) -> None:
    judged: list[Opening] = []

    def judge(remote: Opening) -> str:
        judged.append(remote)
        return "this relay forwards for too many others"

    wire = Wire(asking(), accepting(relay, secrets_of(TOKEN, b"a"), judge)).run()
    assert reasons(wire) == ("", "this relay forwards for too many others")
    assert judged == [shown(TO_FOUR, secrets_of(None, b"d"))]
    assert wire.passed == (False, False)
    assert len(wire.sent[1]) == OPENING_BYTES, "the opening, and no proof"


@RELAY
def test_another_process_than_the_relay_is_noticed_before_anything_is_proven(
    relay: Opening,
) -> None:
    right = fingerprint_of(secrets_of(None, b"a").signer.key)
    assert Wire(asking(expects=right), forwarding(relay)).run().passed == (True, True)
    wire = Wire(asking(expects=fingerprint_of(signer_of(b"x").key)), forwarding(relay)).run()
    assert reasons(wire)[0] == "another process answered instead of the relay"
    assert wire.passed == (False, False)
    assert len(wire.sent[0]) == OPENING_BYTES


@RELAY
def test_a_relay_of_another_run_is_refused_by_both(relay: Opening) -> None:
    wire = Wire(asking(), forwarding(replace(relay, run=OTHER_RUN))).run()
    assert reasons(wire) == (ANOTHER_RUN, ANOTHER_RUN)
    assert wire.passed == (False, False)


@pytest.mark.parametrize("term", [0, 2, 4])
def test_a_master_that_shows_no_run_yet_forwards(term: int) -> None:
    waiting = replace(A_MASTER, run=NO_RUN, term=term)
    assert Wire(asking(), forwarding(waiting, TOKEN)).run().passed == (True, True)


@RELAY
def test_the_terms_of_both_may_differ(relay: Opening) -> None:
    """After a change of master they do for a moment."""
    for term in (2, 4):
        wire = Wire(asking(), forwarding(replace(relay, term=term))).run()
        assert wire.passed == (True, True)


@RELAY
def test_whoever_shows_the_key_of_a_peer_has_to_prove_it(relay: Opening) -> None:
    key, own = signer_of(b"x").key, signer_of(b"d")
    secrets = replace(secrets_of(None, b"d"), signer=Thief(key, own))
    wire = Wire(Handshake.dial(TO_FOUR, secrets), forwarding(relay)).run()
    assert reasons(wire)[1] == "the other side has not proven its key"
    assert wire.sent[1].endswith(REFUSAL)
    assert wire.passed == (False, False)


@settings(max_examples=60)
@given(st.integers(0, 1), st.integers(0, 8 * (OPENING_BYTES + PROOF_BYTES) - 1), st.booleans())
def test_a_flipped_bit_anywhere_keeps_both_from_passing(
    side: int, bit: int, with_master: bool
) -> None:
    """At least the side that reads it notices; the acceptor sends its own proof last."""

    class Damaged(Wire):
        """Flips one bit of what ``side`` sends."""

        is_flipped = False

        def collect(self) -> None:
            super().collect()
            sent = self.sent[side]
            if not self.is_flipped and bit // 8 < len(sent):
                sent[bit // 8] ^= 1 << bit % 8
                self.is_flipped = True

    relay = A_MASTER if with_master else A_PEER
    wire = Damaged(asking(), forwarding(relay))
    wire.run()
    assert wire.is_flipped
    reader = 1 - side
    assert wire.sides[reader].remote is None
    assert wire.failures[reader] is not None


def test_damage_counts_as_damage_and_not_as_a_refusal() -> None:
    wire = Wire(asking(), forwarding(A_MASTER))
    wire.collect()
    wire.sent[0][20] ^= 1
    assert isinstance(wire.run().failures[1], DamagedData)


# -- what follows --------------------------------------------------------------------------------


def test_the_wish_to_encrypt_makes_keys_as_on_other_connections() -> None:
    wire = Wire(asking(flags=ENCRYPTS), forwarding(A_MASTER, TOKEN)).run()
    keys, others = (side.keys for side in wire.sides)
    assert keys is not None
    assert others is not None
    assert (keys.sends, keys.receives) == (others.receives, others.sends)


@RELAY
def test_the_certificate_of_a_peer_reaches_the_judge(relay: Opening) -> None:
    """A relay may know a newcomer only by the signature of their master."""
    signature = b"C" * 64
    seen: list[tuple[bytes, PeerId, PeerId]] = []

    def judge(remote: Opening) -> str:
        seen.append((remote.certificate, remote.source, remote.target))
        return ""

    opening = replace(TO_FOUR, certificate=signature)
    wire = Wire(asking(opening), accepting(relay, secrets_of(None, b"a"), judge)).run()
    assert wire.passed == (True, True)
    assert seen == [(signature, 7, 4)]
