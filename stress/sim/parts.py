"""``RunParts``: the objects that all parts of one simulated run share."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.stress.sim.checkers.outcomes import Checkers
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.scenarios.scenario import Scenario
from pccl.stress.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class RunParts:
    """The scenario, event loop, trace and checkers of one run."""

    scenario: Scenario
    loop: VirtualLoop
    trace: Trace
    checkers: Checkers
