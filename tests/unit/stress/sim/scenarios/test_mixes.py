"""What each mix of the simulator draws, and what a run of it must not miss."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.stress.sim.faults.divide import Divide
from pccl.stress.sim.faults.draws import KINDS, UNDRAWN, kinds
from pccl.stress.sim.scenarios.mixes import MIXES, Mix
from pccl.stress.sim.scenarios.naps import draw_with_naps
from pccl.stress.sim.scenarios.scenario import draw, draw_two_masters

HIT = Mix(
    draw, ("reset", "cut"), struck_in=("cut in gather",), done=("late result",), seeds_min=200
)


def counted(seeds: int, **faults: int) -> dict[str, Any]:
    struck_in, done = {"cut in gather": 1}, {"late result": 1, "handle": 9}
    return {"seeds": seeds, "faults": faults, "struck_in": struck_in, "kills": {}, "done": done}


def test_a_fault_that_is_drawn_and_never_struck_is_missed() -> None:
    assert HIT.missed(counted(200, reset=3)) == ["cut"]
    assert HIT.missed(counted(200, reset=3, cut=1)) == []
    assert HIT.missed({**counted(200, reset=3, cut=1), "struck_in": {}}) == ["cut in gather"]
    never = {"late result": 0, "handle": 9}
    assert HIT.missed({**counted(200, reset=3, cut=1), "done": never}) == ["late result"]


def test_few_seeds_need_not_hit_everything() -> None:
    assert HIT.missed(counted(199)) == []


def test_every_kind_of_fault_is_in_a_mix() -> None:
    counted_somewhere = {kind for mix in MIXES.values() for kind in mix.faults}
    # Kills are counted by phase.
    assert set(KINDS) - counted_somewhere == {"kill", *kinds(UNDRAWN)}


@pytest.mark.parametrize("seed", range(40))
def test_members_nap_before_calls_that_go_on_without_them(seed: int) -> None:
    scenario = draw_with_naps(seed)
    assert scenario.naps > 0
    assert scenario.quorum is not None
    assert {slot.quorum for slot in scenario.slots} == {scenario.quorum}
    assert scenario.peers >= 3
    assert scenario.late_peers < scenario.peers - 1
    assert scenario.mistake is None


@pytest.mark.parametrize("seed", range(40))
def test_two_masters_live_while_the_first_is_cut_off_from_members_with_little_time(
    seed: int,
) -> None:
    scenario = draw_two_masters(seed)
    assert scenario.standby
    assert scenario.impatience > 0
    assert scenario.peers >= 3
    divides = [fault for fault in scenario.faults if isinstance(fault, Divide)]
    assert divides
    assert not {"standby", "master_death"} & {fault.kind for fault in scenario.faults}
    for divide in divides:
        assert 0 < len(divide.cut) < scenario.peers
        assert divide.trigger in divide.cut
        assert divide.lagging not in divide.cut
