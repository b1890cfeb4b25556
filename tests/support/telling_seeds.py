"""Few seeds of the simulator that draw all that can be drawn, from one end to the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import MISSING, fields

from pccl.stress.sim.faults.kills import Kill
from pccl.stress.sim.scenarios.mixes import MIXES
from pccl.stress.sim.scenarios.scenario import Scenario, Slot


def drawn(scenario: Scenario) -> set[str]:
    """Kinds of fault, with the phase of a kill; the style, and what is not the simplest value."""
    faults = (f"kill in {one.phase}" if type(one) is Kill else one.kind for one in scenario.faults)
    return {scenario.style.value, *faults, *_unusual(scenario)}.union(
        *map(_unusual, scenario.slots)
    )


def _unusual(options: Scenario | Slot) -> set[str]:
    return {
        each.name
        for each in fields(options)
        if each.default is not MISSING and getattr(options, each.name) != each.default
    }


def telling_seeds(mix: str, times: int, stop: int) -> tuple[int, ...]:
    """The seeds below ``stop`` of which each draws what fewer than ``times`` before it draw."""
    seen: Counter[str] = Counter()
    chosen: list[int] = []
    for seed in range(stop):
        what = drawn(MIXES[mix].draw(seed))
        if any(seen[each] < times for each in what):
            chosen.append(seed)
            seen.update(what)
    return tuple(chosen)
