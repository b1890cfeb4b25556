"""A clock that is ahead of another one, and goes faster or slower."""

from __future__ import annotations


def skewed_ns(true_ns: int, ahead_ns: int, ppm: int) -> int:
    """What the clock shows at a time of the other one."""
    return true_ns + ahead_ns + true_ns * ppm // 10**6


def true_ns(shown_ns: int, ahead_ns: int, ppm: int) -> int:
    """The time of the other clock at which it shows this, within a nanosecond."""
    return (shown_ns - ahead_ns) * 10**6 // (10**6 + ppm)
