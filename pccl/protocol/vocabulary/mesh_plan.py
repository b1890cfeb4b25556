"""How the members of a view divide a mesh: who owns how much, and who is near whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.guards.bounds import AtMost, Below

MESH_MEMBERS_MAX = 64
"""Larger groups get no mesh: its many streams lose packets, and the master's work grows with the
square of the group's size."""

SHARE_UNITS = 1 << 16
"""The sum of the shares of a mesh."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Shares and sites of the members, by rank. Both may be empty."""

    shares: Annotated[
        tuple[Annotated[int, Below(SHARE_UNITS + 1)], ...], AtMost(MESH_MEMBERS_MAX)
    ] = ()
    """How much of a tensor the member owns; empty: all own the same."""
    sites: Annotated[
        tuple[Annotated[int, Below(MESH_MEMBERS_MAX)], ...], AtMost(MESH_MEMBERS_MAX)
    ] = ()
    """The site of the member: members of one site are near each other, and first add up among
    themselves. Empty: each member is its own site."""

    def is_sound_for(self, members: int) -> bool:
        """Whether a master may send this plan for so many members."""
        return (
            len(self.shares) in (0, members)
            and (not self.shares or sum(self.shares) == SHARE_UNITS)
            and len(self.sites) in (0, members)
        )

    def among(self, ranks: Sequence[int]) -> MeshPlan:
        """Return the plan for some of the members, by their ranks.

        Their shares keep their ratios. If all shares of these members are 0, they own the same.
        """
        shares = tuple(self.shares[rank] for rank in ranks) if self.shares else ()
        sites = tuple(self.sites[rank] for rank in ranks) if self.sites else ()
        return MeshPlan(shares if any(shares) else (), sites)


EQUAL_MESH = MeshPlan()
