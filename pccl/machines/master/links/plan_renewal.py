"""When the master compares a group's plan with what its members have measured since."""

from __future__ import annotations

from collections.abc import Collection

from pccl.protocol.types import NS_PER_S

PLAN_INTERVAL_NS = 60 * NS_PER_S
"""Least time between two plans of a group. A new view costs each of its members a roster, and
measures of a changed link need some seconds of traffic to settle."""

PLAN_PAUSE_NS = 5 * NS_PER_S
"""Least time between the plans of two groups. One of 64 members keeps the master busy for 0.3 s, so
planning takes at most about 6 % of its time, however many groups it has."""


class PlanRenewal:
    """Chooses at most one group in each round, whose plan the master checks."""

    def __init__(self) -> None:
        self._free_ns: dict[int, int] = {}
        """Group with members -> when it may be chosen again."""
        self._all_free_ns = 0

    def due(self, measured: Collection[int], groups: Collection[int], now_ns: int) -> int | None:
        """Return the group that is due for the longest time, a new one first; None: none is due.

        Args:
            measured: the groups with new measures, at least one.
            groups: all groups that have members.
            now_ns: the time.
        """
        self._free_ns = {one: free_ns for one, free_ns in self._free_ns.items() if one in groups}
        free_ns, group = min((self._free_ns.get(group, 0), group) for group in measured)
        if now_ns < max(free_ns, self._all_free_ns):
            return None
        self._free_ns[group] = now_ns + PLAN_INTERVAL_NS
        self._all_free_ns = now_ns + PLAN_PAUSE_NS
        return group
