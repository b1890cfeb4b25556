"""Makes a failing scenario smaller while it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from itertools import islice

from pccl.stress.sim.runner import Verdict
from pccl.stress.sim.scenarios.scenario import Scenario

RUNS_MAX = 500
"""Maximum number of runs in all."""


def shrink(
    scenario: Scenario, run: Callable[[Scenario], Verdict], runs_max: int = RUNS_MAX
) -> Verdict:
    """Drop faults, peers, collectives and options, one by one, as long as the violation remains.

    Args:
        scenario: a scenario that fails.
        run: runs a scenario.
        runs_max: maximum number of runs.

    Returns:
        The verdict of the smallest failing scenario that was found.

    Raises:
        ValueError: the scenario does not fail.
    """
    best = run(scenario)
    if best.violation is None:
        raise ValueError("nothing to shrink: the scenario breaks no promise")
    wanted = _signature(best.violation)
    runs = 1
    while True:
        before, position = best, 0
        while True:  # what a smaller scenario has kept is not tried again in the same round
            for smaller in islice(_smaller(best.scenario), position, None):
                if runs >= runs_max:
                    return best
                runs += 1
                verdict = run(smaller)
                if verdict.violation is not None and _signature(verdict.violation) == wanted:
                    best = verdict
                    break
                position += 1
            else:
                break
        if best is before:
            return best


def _signature(violation: str) -> str:
    """Return the beginning of a violation, without numbers: the same for any process."""
    return re.sub(r"\W*\d[\w.]*", "#", violation)[:40]


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios that are a little smaller, the greatest steps first."""
    faults = scenario.faults
    if len(faults) > 2:
        half = len(faults) // 2
        for part in (faults[:half], faults[half:]):
            yield replace(scenario, faults=part)
    for index in range(len(faults)):
        yield replace(scenario, faults=faults[:index] + faults[index + 1 :])
    for peers in sorted({2, scenario.peers // 2, scenario.peers - 1}):
        if 2 <= peers < scenario.peers:
            yield _with_peers(scenario, peers)
    for index in range(len(scenario.slots)):
        if len(scenario.slots) > 1:
            slots = scenario.slots[:index] + scenario.slots[index + 1 :]
            yield replace(scenario, slots=slots)
    yield from _plainer(scenario)
    for index, slot in enumerate(scenario.slots):
        if slot.count > 1:
            fewer = replace(slot, count=slot.count // 2)
            slots = (*scenario.slots[:index], fewer, *scenario.slots[index + 1 :])
            yield replace(scenario, slots=slots)


def _with_peers(scenario: Scenario, peers: int) -> Scenario:
    faults = tuple(f for f in scenario.faults if all(index < peers for index in f.indices))
    mistake = scenario.mistake
    return replace(
        scenario,
        peers=peers,
        faults=faults,
        late_peers=min(scenario.late_peers, max(0, peers - 2)),
        groups=min(scenario.groups, peers),
        min_peers=min(scenario.min_peers, peers),
        mistake=mistake if mistake is not None and mistake.culprit < peers else None,
    )


def _plainer(scenario: Scenario) -> Iterator[Scenario]:
    plain = {each.name: each.default for each in fields(scenario) if each.default is not MISSING}
    for name, value in {**plain, "stop_ns": max(1, scenario.stop_ns // 2)}.items():
        plainer = replace(scenario, **{name: value})
        if plainer != scenario:
            yield plainer
