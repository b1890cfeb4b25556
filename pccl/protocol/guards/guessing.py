"""How hard a secret is to guess for somebody who has all the time he wants.

Whoever hears a greeting can try secrets against it without asking anybody: a word and four digits
fall within an hour. So what counts is not the length but what a guesser has to go through. He tries
words before letters, dates before digits, and what has come before; so this estimate does, too.
"""

from __future__ import annotations

import math
import re
from collections import Counter

GUESS_BITS_MIN = 64
"""A thousand processors that try a million secrets a second each need 300 years for half."""

_WORD_BITS = math.log2(20_000)
"""Letters in a row, all small or all capitals, may be a word: one of so many."""
_REPEATS_MAX = 3
"""How often a single letter or digit between others counts; anything longer counts once."""
_LETTER_BITS, _DIGIT_BITS, _OTHER_BITS = math.log2(26), math.log2(10), 6.0
_RUN = re.compile(rb"[a-z]+|[A-Z][a-z]*|[0-9]+|[^a-zA-Z0-9]")


def guess_bits(secret: bytes) -> float:
    """The base-2 logarithm of how many secrets are tried before this one; an estimate.

    The estimate is low: a secret made of 128 random bits is given some 70 to 110.
    """
    bits = 0.0
    for run, times in Counter(_RUN.findall(secret)).items():
        times = min(times, _REPEATS_MAX) if len(run) == 1 and run.isalnum() else 1
        if run.isdigit():
            more = max(0, len(run) - 4) * _DIGIT_BITS / 2  # counting up is tried, too
            bits += times * (min(len(run), 4) * _DIGIT_BITS + more)
        elif run.isalpha():
            bits += times * min(len(run) * _LETTER_BITS, _WORD_BITS)
        else:
            bits += _OTHER_BITS
    return bits
