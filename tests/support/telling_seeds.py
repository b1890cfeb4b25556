"""Few seeds of the simulator that draw all that can be drawn, from one end to the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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


def telling_seeds(mix: str, times: int, stop: int, recorded: Iterable[int] = ()) -> tuple[int, ...]:
    """The recorded seeds, and those that draw what is drawn fewer than ``times`` otherwise.

    Args:
        mix: what the seeds draw.
        times: how often whatever can be drawn shall be drawn.
        stop: the first seed that is not looked at.
        recorded: seeds that are played anyway.
    """
    seen: Counter[str] = Counter()
    chosen: set[int] = set()
    for seed in (*sorted(set(recorded)), *range(stop)):
        what = drawn(MIXES[mix].draw(seed))
        if seed not in chosen and (seed in recorded or any(seen[each] < times for each in what)):
            chosen.add(seed)
            seen.update(what)
    return tuple(sorted(chosen))
