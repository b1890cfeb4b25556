"""What ``pccl top`` knows, and how keys and answers of the master change it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pccl.inquiry import MasterStatus, MemberStatus
from pccl.observe import summary

_STATES = ("lost", "awaited", "waits", "works")
"""States of members, those that need attention first."""

PAGE = 10
"""Members by which the keys for pages move."""

COLUMNS: dict[str, Callable[[MemberStatus], Any]] = {
    "peer": lambda member: member.peer,
    "name": lambda member: member.name,
    "host": lambda member: (member.host, member.port),
    "rank": lambda member: (member.group, member.rank),
    "step": lambda member: member.step,
    "steps/s": summary.steps_per_s,
    "state": lambda member: (_STATES.index(summary.state(member)), -(member.awaited_ms or 0)),
}
"""The columns by which members can be sorted, and the values that count."""


@dataclass(frozen=True, slots=True)
class Model:
    """The state of the view.

    Attributes:
        master: address of the master.
        status: its last answer; None: none yet.
        answered_s: when that came, in seconds of the caller's clock.
        trouble: why there is no newer answer; empty: the last question was answered.
        sort: column of ``COLUMNS`` by which members are sorted.
        descending: whether the largest value is first.
        chosen: id of the chosen member; None: the first one.
        details: whether the details of the chosen member are shown.
        typed: digits typed so far, of a member's id.
        ended: whether the user has quit.
    """

    master: str
    status: MasterStatus | None = None
    answered_s: float = 0.0
    trouble: str = ""
    sort: str = "peer"
    descending: bool = False
    chosen: int | None = None
    details: bool = False
    typed: str = ""
    ended: bool = False

    def members(self) -> list[MemberStatus]:
        """Return the members in their order on the screen."""
        members = self.status.members if self.status else ()
        return sorted(members, key=COLUMNS[self.sort], reverse=self.descending)

    def place(self) -> int:
        """Return the index of the chosen member; 0 if it is gone."""
        found = (at for at, member in enumerate(self.members()) if member.peer == self.chosen)
        return next(found, 0)

    def answered(self, status: MasterStatus, now_s: float) -> Model:
        """Show a new answer of the master."""
        return replace(self, status=status, answered_s=now_s, trouble="")

    def unanswered(self, trouble: str) -> Model:
        """Say why there is no new answer; the last one stays."""
        return replace(self, trouble=trouble)

    def press(self, key: str) -> Model:
        """React to a key."""
        if key.isdecimal() and key.isascii():
            return self._type(key)
        fresh = replace(self, typed="")
        match key:
            case "q":
                return replace(fresh, ended=True)
            case "s" | ">":
                return fresh._sorted_by(1)
            case "S" | "<":
                return fresh._sorted_by(-1)
            case "r":
                return replace(fresh, descending=not self.descending)
            case "up" | "k":
                return fresh._move(-1)
            case "down" | "j":
                return fresh._move(1)
            case "page up":
                return fresh._move(-PAGE)
            case "page down":
                return fresh._move(PAGE)
            case "enter":
                return replace(fresh._move(0), details=not self.details)
            case "escape":
                return replace(fresh, details=False)
            case _:
                return fresh

    def _type(self, digit: str) -> Model:
        """Show the details of the member whose id has been typed, if there is one."""
        ids = {str(member.peer) for member in self.members()}
        typed = self.typed + digit
        if not any(one.startswith(typed) for one in ids):
            typed = digit if any(one.startswith(digit) for one in ids) else ""
        if typed in ids:
            return replace(self, typed=typed, chosen=int(typed), details=True)
        return replace(self, typed=typed)

    def _sorted_by(self, by: int) -> Model:
        columns = list(COLUMNS)
        at = (columns.index(self.sort) + by) % len(columns)
        return replace(self, sort=columns[at], descending=False)

    def _move(self, by: int) -> Model:
        members = self.members()
        if not members:
            return self
        at = min(max(self.place() + by, 0), len(members) - 1)
        return replace(self, chosen=members[at].peer)
