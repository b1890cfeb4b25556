"""What seeds of the mix ``slow-lines`` draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccl.stress.sim.scenarios.file import load, to_text
from pccl.stress.sim.scenarios.scenario import TIMINGS, draw
from pccl.stress.sim.scenarios.slow_lines import draw_on_slow_lines


@pytest.mark.parametrize("seed", range(40))
def test_lines_are_slow_and_tensors_fill_them(seed: int) -> None:
    plain, scenario = draw(seed), draw_on_slow_lines(seed)
    if scenario.port is None:
        assert scenario == plain
        assert plain.peers > 4
        return
    assert 125_000 <= scenario.port.up <= 1_250_000
    assert scenario.timing != TIMINGS["quick"]
    assert scenario.faults == plain.faults
    for slot in scenario.slots:
        assert slot.count * slot.data_type.itemsize >= 90_000


def test_a_scenario_with_ports_is_stored_and_replayed(tmp_path: Path) -> None:
    scenario = draw_on_slow_lines(0)
    assert scenario.port is not None
    path = tmp_path / "seed-0.json"
    path.write_text(to_text(scenario))
    assert load(path) == scenario
