"""Records: what was sealed can be opened, once, in order, and by nobody who changes a bit."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.handshake import records
from pccl.protocol.handshake.records import (
    LENGTH_BYTES,
    TAG_BYTES,
    RecordCipher,
    plain_length,
    plain_of,
)

KEY = bytes(range(32))
PLAIN = st.binary(max_size=300)
CIPHERS = pytest.mark.parametrize("has_aes", [True, False], ids=["AES", "ChaCha20"])


def sealed(cipher: RecordCipher, plain: bytes) -> bytearray:
    record = bytearray(LENGTH_BYTES + len(plain) + TAG_BYTES)
    view = memoryview(record)
    plain_of(view)[:] = plain
    cipher.seal(view, plain_of(view))
    return record


def opened(cipher: RecordCipher, record: bytes | bytearray) -> bytes | None:
    view = memoryview(bytearray(record))
    return bytes(plain_of(view)) if cipher.open(view) else None


@CIPHERS
@given(plains=st.lists(PLAIN, max_size=5))
def test_records_come_out_as_they_went_in(has_aes: bool, plains: list[bytes]) -> None:
    sealer, opener = (RecordCipher(KEY, has_aes=has_aes) for _ in range(2))
    for plain in plains:
        record = sealed(sealer, plain)
        assert plain_length(record) == len(plain)
        assert opened(opener, record) == plain


@pytest.mark.parametrize("number", [0, 1, 2, 300])
@CIPHERS
def test_a_record_is_as_its_description_says(has_aes: bool, number: int) -> None:
    cipher = RecordCipher(KEY, has_aes=has_aes)
    for _ in range(number):
        sealed(cipher, b"")
    nonce, head = bytes(4) + number.to_bytes(8, "big"), (5).to_bytes(4, "little")
    aead = AESGCM(KEY) if has_aes else ChaCha20Poly1305(KEY)
    assert sealed(cipher, b"hello") == head + aead.encrypt(nonce, b"hello", head)


@CIPHERS
@given(plain=PLAIN, data=st.data())
def test_a_record_with_a_changed_bit_stays_shut(
    has_aes: bool, plain: bytes, data: st.DataObject
) -> None:
    record = sealed(RecordCipher(KEY, has_aes=has_aes), plain)
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    assert opened(RecordCipher(KEY, has_aes=has_aes), record) is None


@given(st.permutations(range(4)), st.integers(0, 3))
def test_records_that_are_repeated_or_in_another_order_stay_shut(
    order: list[int], twice: int
) -> None:
    sealer = RecordCipher(KEY, has_aes=True)
    sent = [sealed(sealer, bytes([n])) for n in range(4)]
    arrived = [*order[: twice + 1], order[twice], *order[twice + 1 :]]
    opener = RecordCipher(KEY, has_aes=True)
    for place, number in enumerate(arrived):
        expected = bytes([number]) if number == place else None
        assert opened(opener, sent[number]) == expected


@CIPHERS
def test_keys_change_on_both_sides_at_once(has_aes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_PER_KEY", 3)
    sealer, opener = (RecordCipher(KEY, has_aes=has_aes) for _ in range(2))
    seen: set[bytes] = set()
    for number in range(10):
        record = sealed(sealer, b"the same")
        seen.add(bytes(record))
        if number == 3:  # the first record of the second key has the first key's first nonce
            assert opened(RecordCipher(KEY, has_aes=has_aes), record) is None
        assert opened(opener, record) == b"the same"
    assert len(seen) == 10
