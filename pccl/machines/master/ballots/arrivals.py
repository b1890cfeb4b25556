"""When members make their joint calls, and how long a quorum waits for late members.

A member's lag is how long after a quorum its own request came; 0 if it came before. The adaptive
grace lasts for the median of the last lags plus ``DEVIATIONS`` scaled median absolute deviations,
within its bounds. A member that calls early makes nobody wait longer. A member that a call
continued without counts with ``GRACE_MAX_S``. So members that are always late do not lengthen the
grace, unless about half of the lags are theirs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from statistics import median

from pccl.protocol.types import NS_PER_MS, NS_PER_S, Quorum

GRACE_MIN_S, GRACE_MAX_S = 0.1, 10.0
"""Bounds of the adaptive grace. A grace begins when enough members have made the call."""

GRACE_FIRST_S = 1.0
"""The adaptive grace while no lag is known."""

DEVIATIONS = 4.0
SCALE = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""

LAGS_KEPT_MAX = 256
"""Number of last lags that count for a call, of all members together."""

CALLS_KEPT_MAX = 1024
"""Most calls whose lags a master remembers. It forgets the least recently used one."""

_MIN_NS, _MAX_NS = round(GRACE_MIN_S * NS_PER_S), round(GRACE_MAX_S * NS_PER_S)


class Arrivals:
    """The last lags of the members in one call that they repeat."""

    def __init__(self) -> None:
        self._lags_ns: deque[int] = deque(maxlen=LAGS_KEPT_MAX)
        self._expected_ns: int | None = None

    def note(self, lag_ns: int | None) -> None:
        """Record the lag of a member; None: the call continued without it."""
        self._lags_ns.append(_MAX_NS if lag_ns is None else min(max(lag_ns, 0), _MAX_NS))
        self._expected_ns = None

    def goes_on_ns(self, quorum: Quorum, enough_ns: int) -> int:
        """Return when the grace of a call ends.

        Args:
            quorum: the quorum of the call.
            enough_ns: when enough members had made it.
        """
        if quorum.grace_ms is not None:
            return enough_ns + quorum.grace_ms * NS_PER_MS
        if not self._lags_ns:
            return enough_ns + round(GRACE_FIRST_S * NS_PER_S)
        if self._expected_ns is None:
            middle = median(self._lags_ns)
            deviation = SCALE * median(abs(lag - middle) for lag in self._lags_ns)
            self._expected_ns = round(middle + DEVIATIONS * deviation)
        return enough_ns + min(max(self._expected_ns, _MIN_NS), _MAX_NS)


class ArrivalHistory:
    """The lags of all repeated calls. A restart of the master loses them."""

    def __init__(self) -> None:
        self._calls: OrderedDict[Hashable, Arrivals] = OrderedDict()

    def at(self, call: Hashable) -> Arrivals:
        """Return the lags of a call: (group, tag) of an operation, or the kind of a round."""
        known = self._calls.get(call)
        if known is None:
            known = self._calls[call] = Arrivals()
            if len(self._calls) > CALLS_KEPT_MAX:
                self._calls.popitem(last=False)
        self._calls.move_to_end(call)
        return known
