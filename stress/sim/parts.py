"""What everything in one simulated run has in common."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.stress.sim.checkers.outcomes import Checkers
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.scenarios.scenario import Scenario
from pccl.stress.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class RunParts:
    """One run: its scenario, its time, and the observers of what happens."""

    scenario: Scenario
    loop: VirtualLoop
    trace: Trace
    checkers: Checkers
