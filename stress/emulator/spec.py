"""The description of an emulated link, as a text such as ``rate=200mbit,rtt=80ms``.

Units are those of ``tc``, without its traps: a rate is always in bits, and a size in bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

KIB = 1 << 10
MIB = 1 << 20

RATE_BPS_MIN, RATE_BPS_MAX = 1_000, 1_000_000_000_000
RTT_S_MAX = 60.0
WINDOW_BYTES_MIN, WINDOW_BYTES_MAX = 1 * KIB, 1024 * MIB

QUEUE_S = 0.02
"""Seconds of a link's work that may queue in the emulator, for times when the proxy's process does
not run. Further bytes wait at the sender, as on a real link with a careful congestion control."""

WINDOW_SLACK_BYTES = 256 * KIB
"""Bytes of the default window beyond the bandwidth-delay product: a few reads of the proxy."""

PACKET_BYTES = 1448
"""Payload of a packet on most networks. A share ``corrupt`` of packets has a flipped bit."""

UNLIMITED_WINDOW_BYTES = 16 * MIB
"""Default window of a link without a rate, as on hosts that are tuned for long links."""

_RATE_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIME_UNITS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1)}
_SIZE_UNITS = {"b": 1, "kib": KIB, "mib": MIB, "gib": 1024 * MIB}
_SHARE_UNITS = {"%": Decimal("0.01")}

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]+|%)", re.ASCII)
_NUMBER_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between two hosts, the same in both directions. Times are whole nanoseconds.

    Attributes:
        rate_bps: bits per second of each direction, for all connections together; None: unlimited.
        rtt_s: round trip on the idle link; each way takes half of it.
        flow_bps: bits per second of one connection in one direction; None: as the link.
        jitter_s: largest extra delay of a piece each way, uniformly drawn; pieces stay in order.
        window_bytes: largest number of unacknowledged bytes of one connection in one direction, as
            with a receive window; None: enough to fill the link.
        corrupt: share of packets that arrive with one flipped bit, from 0 to 1, as damage that
            TCP's checksum misses, or that a middlebox hides with a new checksum.

    Raises:
        ValueError: a value is out of range; the message says what is allowed.
    """

    rate_bps: int | None = None
    rtt_s: float = 0.0
    flow_bps: int | None = None
    jitter_s: float = 0.0
    window_bytes: int | None = None
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        for name, rate_bps in (("rate", self.rate_bps), ("flow", self.flow_bps)):
            if rate_bps is not None and not RATE_BPS_MIN <= rate_bps <= RATE_BPS_MAX:
                raise ValueError(f"{name} must be between 1kbit and 1000gbit per second")
        for name, time_s in (("rtt", self.rtt_s), ("jitter", self.jitter_s)):
            if not (math.isfinite(time_s) and 0 <= time_s <= RTT_S_MAX):
                raise ValueError(f"{name} must be between 0ms and {RTT_S_MAX:.0f}s")
            object.__setattr__(self, f"{name}_s", round(time_s * 1e9) / 1e9)
        window_bytes = self.window_bytes
        if window_bytes is not None and not WINDOW_BYTES_MIN <= window_bytes <= WINDOW_BYTES_MAX:
            raise ValueError("window must be between 1kib and 1gib")
        if not 0 <= self.corrupt <= 1:
            raise ValueError("corrupt must be between 0% and 100%")
        object.__setattr__(self, "corrupt", round(self.corrupt, 12))

    @staticmethod
    def parse(text: str) -> LinkSpec:
        """Parse a link such as ``rate=200mbit,rtt=80ms,flow=100mbit,jitter=2ms,window=8mib``.

        An empty text means a link without limits.

        Raises:
            ValueError: the text is not a link; the message says what is allowed.
        """
        values: dict[str, Any] = {}
        for part in (part.strip() for part in text.lower().split(",") if text.strip()):
            name, equals, value = part.partition("=")
            if not equals or name not in _FIELDS:
                allowed = ", ".join(f"{name}={one.example}" for name, one in _FIELDS.items())
                raise ValueError(f"{part!r} is not a part of a link; write any of {allowed}")
            known = _FIELDS[name]
            if known.field in values:
                raise ValueError(f"{name} is given twice; give it once")
            number = _number(name, value)
            values[known.field] = round(number) if known.kind is int else float(number)
        return LinkSpec(**values)

    def __str__(self) -> str:
        """Return the text for :meth:`parse`, without parts at their defaults."""
        given = ((name, getattr(self, one.field), one.units) for name, one in _FIELDS.items())
        return ",".join(f"{name}={_write(value, units)}" for name, value, units in given if value)

    @property
    def half_rtt_ns(self) -> int:
        """The delay of one way, in nanoseconds."""
        return round(self.rtt_s * 500_000_000)

    @property
    def slowest_bps(self) -> int | None:
        """The rate of one connection alone in one direction; None: no limit."""
        rates = [rate for rate in (self.rate_bps, self.flow_bps) if rate is not None]
        return min(rates, default=None)

    @property
    def flight_max_bytes(self) -> int:
        """The window: as given, or large enough for the full rate of one connection.

        A byte uses the window from its read by the proxy until its acknowledgement: for the round
        trip, the jitter of both ways, and the queue. The queue counts twice, because the proxy does
        not run all the time.
        """
        if self.window_bytes is not None:
            return self.window_bytes
        bps = self.slowest_bps
        if bps is None:
            return UNLIMITED_WINDOW_BYTES
        occupied_s = self.rtt_s + 2 * self.jitter_s + 2 * QUEUE_S
        return min(WINDOW_BYTES_MAX, math.ceil(bps * occupied_s / 8) + WINDOW_SLACK_BYTES)


def _number(name: str, text: str) -> Decimal:
    match = _NUMBER.fullmatch(text)
    units = _FIELDS[name].units
    if match is None or len(text) > _NUMBER_CHARACTERS_MAX or match[2] not in units:
        *first, last = units
        one_of = f"one of {', '.join(first)} or {last}" if first else last
        raise ValueError(
            f"{name}={text} is not understood; write a number and its unit, {one_of}, "
            f"such as {name}={_FIELDS[name].example}"
        )
    return Decimal(match[1]) * units[match[2]]


def _write(value: float, units: Mapping[str, int | Decimal]) -> str:
    """Return ``value`` with the largest unit that gives a whole number; a float: 1 or more."""
    # From repr, whose decimal digits parse to the same float.
    exact = Decimal(repr(value))
    fits = [
        u for u in units if (exact % units[u] == 0 if type(value) is int else exact >= units[u])
    ]
    unit = max(fits or [min(units, key=units.__getitem__)], key=units.__getitem__)
    number = f"{exact / units[unit]:f}"
    return (number.rstrip("0").rstrip(".") if "." in number else number) + unit


@dataclass(frozen=True, slots=True)
class _Part:
    """The name, type, units and example of a field."""

    field: str
    kind: type[int] | type[float]
    units: Mapping[str, int | Decimal]
    example: str


_FIELDS = {
    "rate": _Part("rate_bps", int, _RATE_UNITS, "200mbit"),
    "rtt": _Part("rtt_s", float, _TIME_UNITS, "80ms"),
    "flow": _Part("flow_bps", int, _RATE_UNITS, "100mbit"),
    "jitter": _Part("jitter_s", float, _TIME_UNITS, "2ms"),
    "window": _Part("window_bytes", int, _SIZE_UNITS, "8mib"),
    "corrupt": _Part("corrupt", float, _SHARE_UNITS, "0.1%"),
}
