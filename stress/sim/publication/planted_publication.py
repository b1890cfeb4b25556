"""Planted bugs of publishing; see :mod:`pccl.stress.sim.planted`."""

from __future__ import annotations

from typing import Any

from pccl.runtime.publishing import copies, reader
from pccl.runtime.publishing.fetch import VersionFetch
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.layout import StateLayout
from pccl.stress.sim.planting import does, says


@does(reader, "fresh_memory")
def version_changed_in_place(
    fresh: Any, layout: StateLayout, base: StateMemory | None = None
) -> StateMemory:
    """A reader applies deltas to the version that its program sees."""
    made: StateMemory = copies.fresh_memory(layout) if base is None else base
    return made


# A reader goes on with a version that no source has any more.
says("old_version_never_left", VersionFetch, "moves", True)
says("old_version_never_left", VersionFetch, "starves", False)
