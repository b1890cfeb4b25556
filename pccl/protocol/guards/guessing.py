"""Estimates how hard a secret is to guess for an attacker with unlimited time.

A process that has taken part in a handshake can try secrets against it offline, and finds a word
with four digits within an hour. So the length of a secret does not count, only the number of
secrets that an attacker tries first. The estimate expects words, dates and repetitions before
random characters.
"""

from __future__ import annotations

import math
import re
from collections import Counter

GUESS_BITS_MIN = 64
"""With a million guesses a second each, a thousand processors need 300 years for half of 2**64."""

_WORD_BITS = math.log2(20_000)
"""Consecutive letters may be one of 20,000 words, in small letters or with one capital."""
_REPEATS_MAX = 3
"""How often a repeated single letter or digit counts; a longer repeated run counts once."""
_LETTER_BITS, _DIGIT_BITS, _OTHER_BITS = math.log2(26), math.log2(10), 6.0
_RUN = re.compile(rb"[a-z]+|[A-Z][a-z]*|[0-9]+|[^a-zA-Z0-9]")


def guess_bits(secret: bytes) -> float:
    """Estimate the base-2 logarithm of the number of secrets that attackers try before this one.

    The estimate is low: it gives a secret made of 128 random bits about 70 to 110 bits.
    """
    bits = 0.0
    for run, times in Counter(_RUN.findall(secret)).items():
        times = min(times, _REPEATS_MAX) if len(run) == 1 and run.isalnum() else 1
        if run.isdigit():
            more = max(0, len(run) - 4) * _DIGIT_BITS / 2  # attackers also try counting up
            bits += times * (min(len(run), 4) * _DIGIT_BITS + more)
        elif run.isalpha():
            bits += times * min(len(run) * _LETTER_BITS, _WORD_BITS)
        else:
            bits += _OTHER_BITS
    return bits
