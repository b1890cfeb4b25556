"""``RunParts``: the objects that all parts of one simulated run share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pccl.stress.sim.checkers.outcomes import Checkers
from pccl.stress.sim.loop import VirtualLoop
from pccl.stress.sim.scenarios.scenario import Scenario
from pccl.stress.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class RunParts:
    """The scenario, event loop, trace and checkers of one run.

    Attributes:
        application: makes the application of a process, from these parts, the process, and whether
            it exists from the start; None: that of the scenario.
    """

    scenario: Scenario
    loop: VirtualLoop
    trace: Trace
    checkers: Checkers
    application: Callable[[RunParts, Any, bool], Any] | None = None
