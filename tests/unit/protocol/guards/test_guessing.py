"""How hard secrets are to guess: what people type is not taken, what a generator makes is."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from random import Random
from uuid import UUID

import pytest

from pccl.config import read_token_file, resolve_token
from pccl.protocol.guards.guessing import GUESS_BITS_MIN, guess_bits
from tests.support.secret_files import keep

WORD = math.log2(20_000)
LETTER, DIGIT = math.log2(26), math.log2(10)


@pytest.mark.parametrize(
    ("secret", "bits"),
    [
        (b"dictionary2024", WORD + 4 * DIGIT),
        (b"123456", 5 * DIGIT),
        (b"abc", 3 * LETTER),
        (b"Word word", 2 * WORD + 6),
        (b"word word word", WORD + 6),
        (b"a1a1a1a1a1a1a1a1a1a1", 3 * LETTER + 3 * DIGIT),
        (b"", 0.0),
    ],
)
def test_the_estimate(secret: bytes, bits: float) -> None:
    assert guess_bits(secret) == pytest.approx(bits)


@pytest.mark.parametrize(
    "secret",
    [
        "internationally1234",
        "correct horse battery staple",
        "0123456789abcdef",
        "x" * 4000,
        "ab" * 9,
    ],
)
def test_what_people_type_is_refused_with_a_way_out(secret: str) -> None:
    with pytest.raises(ValueError, match=r"too easy to guess .*--token auto"):
        resolve_token(secret)


def test_what_a_generator_makes_is_taken() -> None:
    random = Random(1)
    for _ in range(2000):
        made = random.randbytes(32)
        for secret in (made, base64.urlsafe_b64encode(made), base64.b32encode(made)):
            assert guess_bits(secret) >= GUESS_BITS_MIN
        for text in (made.hex(), made[:16].hex(), str(UUID(bytes=made[:16]))):
            assert resolve_token(text) == text.encode()
    resolve_token("orbit velvet cactus thimble ledger mosaic")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o620, 0o644, 0o777])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    file = keep(tmp_path / "token", "orbit velvet cactus thimble ledger mosaic")
    assert len(read_token_file(file)) == 41
    file.chmod(mode)
    with pytest.raises(ValueError, match=f"{mode:o}.*chmod 600 {file}"):
        read_token_file(file)
