"""Single faults in an otherwise quiet run: who is removed, who comes back, who never is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S
from pccl.stress.commands import main
from pccl.stress.sim.faults.base import MS, Fault, LifePhase
from pccl.stress.sim.faults.between import Partition
from pccl.stress.sim.faults.connections import BehindNat, HalfOpen, OneIpVersion
from pccl.stress.sim.faults.draws import KINDS
from pccl.stress.sim.faults.garbage import Garbage, Rubbish
from pccl.stress.sim.faults.kills import Restart
from pccl.stress.sim.faults.master import BlankMasterRestart, MasterRestart, Takeover
from pccl.stress.sim.faults.processes import ClockPause, Freeze, Joiners, Leave, Nap, Slow
from pccl.stress.sim.planted import planted
from pccl.stress.sim.runner import Verdict, run_scenario
from pccl.stress.sim.scenarios.file import load, to_text
from pccl.stress.sim.scenarios.mixes import MIXES
from pccl.stress.sim.scenarios.scenario import draw
from pccl.stress.sim.scenarios.shrink import shrink
from pccl.transports.sim.nat import Dependence
from tests.support.virtual_runs import QUIET, run_faults

DEADLINE_NS = round(QUIET.timing.deadline_s * NS_PER_S)


def run(*faults: Fault, **changes: object) -> Verdict:
    return run_faults(QUIET, *faults, **changes)


def removed(verdict: Verdict) -> int:
    return verdict.done.get("removed alive", 0)


def test_a_frozen_peer_is_removed_and_comes_back() -> None:
    verdict = run(Freeze(NS_PER_S // 2, 2, 3 * DEADLINE_NS), seed=10)  # it has one call open then
    assert removed(verdict) == 1
    assert verdict.done["Evicted"] == 1
    assert verdict.done["converged"] == 1
    assert verdict.endings == {"finished": 4}


@pytest.mark.parametrize("stands", [True, False])
def test_a_machine_that_sleeps_long_is_removed_and_comes_back(stands: bool) -> None:
    verdict = run(ClockPause(NS_PER_S // 2, 2, 3 * DEADLINE_NS, stands))
    assert removed(verdict) == 1
    assert verdict.done["converged"] == 1


@pytest.mark.parametrize("index", [-1, 0, 3])
def test_a_pause_shorter_than_the_deadline_costs_nobody_anything(index: int) -> None:
    pause_ns = DEADLINE_NS // 2
    verdict = run(
        Freeze(NS_PER_S // 3, index, pause_ns),
        ClockPause(NS_PER_S * 3, index, pause_ns, False),
        ClockPause(NS_PER_S * 6, index, pause_ns, True),
    )
    assert verdict.faults == {"freeze": 1, "clock_pause": 2}
    assert verdict.aborts == 0
    assert removed(verdict) == 0


@pytest.mark.parametrize("restart", [MasterRestart, BlankMasterRestart])
def test_a_restart_of_the_master_at_any_moment_is_no_error_of_anybody(
    restart: type[MasterRestart],
) -> None:
    for at_ns in range(200 * MS, 320 * MS, 8 * MS):
        verdict = run(restart(at_ns, MS), settles_ns=0, stop_ns=400 * MS)
        assert verdict.faults == {restart.kind: 1}
        assert verdict.aborts == 0, at_ns
        assert removed(verdict) == 0
        assert verdict.endings == {"finished": 4}


def test_a_standby_takes_over_at_any_moment() -> None:
    for at_ns in range(200 * MS, 320 * MS, 20 * MS):
        verdict = run(Takeover(at_ns), settles_ns=0, stop_ns=400 * MS, standby=True)
        assert verdict.faults == {"standby": 1}
        assert verdict.aborts == 0, at_ns
        assert verdict.endings == {"finished": 4}


def test_a_restarted_process_joins_again() -> None:
    verdict = run(Restart(1, LifePhase.GATHER, 2, 0, 100 * MS), seed=0)
    assert verdict.kills["gather"] == 1
    assert verdict.faults["restart"] == 1
    assert verdict.endings == {"finished": 4}
    assert verdict.done["converged"] == 1


def test_newcomers_in_a_crowd_are_all_admitted() -> None:
    verdict = run(Joiners(NS_PER_S // 2, 8))
    assert verdict.endings == {"finished": 12}
    assert verdict.done["converged"] == 1


def test_who_leaves_in_the_middle_holds_nobody_up() -> None:
    verdict = run(Leave(NS_PER_S // 2, 1), settles_ns=0)
    assert verdict.endings == {"finished": 3, "left": 1}
    assert verdict.virtual_s < 2.0


@pytest.mark.parametrize("what", list(Rubbish))
@pytest.mark.parametrize("index", [-1, 1])
def test_hostile_bytes_disturb_nobody(what: Rubbish, index: int) -> None:
    attacks = [Garbage(NS_PER_S // 4 + n * 20 * MS, index, what, n) for n in range(20)]
    verdict = run(*attacks, settles_ns=0)
    assert verdict.faults == {"garbage": 20}
    assert verdict.aborts == 0
    assert removed(verdict) == 0


def test_a_member_that_is_cut_off_from_all_comes_back() -> None:
    verdict = run(Partition(NS_PER_S // 2, 3, None, 4 * DEADLINE_NS))
    assert removed(verdict) == 1
    assert verdict.done["converged"] == 1


def test_half_open_connections_are_found_out() -> None:
    for choice in range(0, 24, 4):
        verdict = run(HalfOpen(NS_PER_S // 2, choice))
        assert verdict.faults == {"half_open": 1}
        assert verdict.done["converged"] == 1


def test_nobody_who_is_only_slow_is_removed_in_half_an_hour() -> None:
    """Default deadlines: long computations, calls that hold the interpreter lock, machines that
    sleep, processes without CPU."""
    rng = Random(7)
    half_hour_ns = 1800 * NS_PER_S
    longest_ns = round((Timing().deadline_s - 1.5) * NS_PER_S)
    faults: list[Fault] = []
    for begin_ns in range(10 * NS_PER_S, half_hour_ns, 25 * NS_PER_S):
        peer, pause_ns = rng.randrange(3), rng.randint(NS_PER_S // 2, longest_ns)
        faults.append(
            rng.choice(
                (
                    Freeze(begin_ns, peer, pause_ns),
                    ClockPause(begin_ns, peer, pause_ns, rng.random() < 0.5),
                    Slow(begin_ns, peer, pause_ns // 3, 12 * NS_PER_S),
                )
            )
        )
    verdict = run(
        *faults,
        peers=3,
        min_peers=3,
        timing=Timing(),
        pause_ns=7 * NS_PER_S,
        stop_ns=half_hour_ns,
        settles_ns=0,
    )
    assert verdict.virtual_s >= 1800
    assert sum(verdict.faults.values()) == len(faults) > 70
    assert removed(verdict) == 0
    assert verdict.aborts == 0
    assert verdict.endings == {"finished": 3}
    assert verdict.reduces > 1000


# -- files and shrinking -------------------------------------------------------------------------


def test_a_scenario_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    kinds: set[str] = set()
    drawn = (draw(seed) for seed in range(150))
    divided = (MIXES["two-masters"].draw(seed) for seed in range(10))
    damaged = (MIXES["corruption"].draw(seed) for seed in range(10))
    napping = (MIXES["quorum"].draw(seed) for seed in range(20))
    nat = BehindNat(
        (1, 2),
        refuses=True,
        is_symmetric=False,
        together=True,
        filtering=Dependence.ADDRESS,
        hairpins=True,
        ports=(443,),
    )
    written = replace(draw(0), faults=(OneIpVersion((0,), 6), nat, Nap(1, 0, 5)))
    for scenario in (*drawn, *divided, *damaged, *napping, written):
        kinds |= {fault.kind for fault in scenario.faults}
        path.write_text(to_text(scenario))
        assert load(path) == scenario
    assert kinds == set(KINDS)


def test_a_timeline_of_the_harness_runs_here_too(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    faults = [
        {"at_s": 1.0, "kind": "kill", "peer": 3},
        {"at_s": 2.0, "kind": "restart", "peer": 1, "duration_s": 1.0},
        {"at_s": 4.0, "kind": "freeze", "peer": 0, "duration_s": 4.0},
        {"at_s": 9.0, "kind": "slow", "peer": 0, "duration_s": 2.0, "amount": 0.2},
        {"at_s": 12.0, "kind": "clock_pause", "peer": 2, "duration_s": 1.0},
        {"at_s": 14.0, "kind": "reset", "peer": 2},
        {"at_s": 15.0, "kind": "half_open", "peer": 2, "other": 0},
        {"at_s": 16.0, "kind": "partition", "peer": 2, "other": 0, "duration_s": 1.0},
        {"at_s": 18.0, "kind": "partition_one_way", "peer": 2, "other": -1, "duration_s": 1.0},
        {"at_s": 20.0, "kind": "stall", "peer": 2, "duration_s": 1.0},
        {"at_s": 22.0, "kind": "bandwidth", "peer": 2, "duration_s": 1.0, "amount": 50000},
        {"at_s": 24.0, "kind": "delay", "peer": 2, "duration_s": 1.0, "amount": 0.2},
        {"at_s": 25.2, "kind": "corrupt", "peer": 2, "duration_s": 0.5, "amount": 0.1},
        {"at_s": 26.0, "kind": "master_restart", "duration_s": 0.5},
        {"at_s": 28.0, "kind": "master_restart_blank", "duration_s": 0.5},
        {"at_s": 30.0, "kind": "joiners", "amount": 2},
        {"at_s": 32.0, "kind": "garbage", "amount": 3},
        {"at_s": 34.0, "kind": "leave", "peer": 4},
    ]
    timeline = {
        "seed": 3, "peers": 4, "duration_s": 36.0, "deadline_s": 2.0,
        "link": "rate=100mbit,rtt=20ms", "faults": faults,
    }  # fmt: skip
    path.write_text(json.dumps(timeline))
    verdict = run_scenario(load(path))
    assert verdict.violation is None, verdict.story
    assert sum(verdict.faults.values()) == len(faults) - 1 + 2  # a kill is told apart, garbage is 3
    assert sum(verdict.kills.values()) == 2
    assert verdict.virtual_s > 36


def test_a_file_that_is_no_scenario_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text('{"slots": [], "peers": "many"}')
    result = CliRunner().invoke(main, ["sim", "--scenario", str(path)])
    assert result.exit_code == 1
    assert "not a scenario of this version" in result.output


def test_a_failing_scenario_is_reduced_and_still_fails_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bug = "no_restore_after_completion"
    arguments = ["sim", "--planted", bug, "--first", "--shrink", "--jobs", "1", "--seeds", "44:50"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    (path,) = tmp_path.glob("seed-*.json")
    assert f"--scenario {path.name} --planted {bug}" in result.output
    reduced = load(path)
    original = draw(reduced.seed)
    assert len(reduced.faults) < len(original.faults)
    with planted(bug):
        assert "input damaged" in str(run_scenario(reduced).violation)
    assert run_scenario(reduced).ok


def test_there_is_nothing_to_shrink_in_a_clean_scenario() -> None:
    with pytest.raises(ValueError, match="nothing to shrink"):
        shrink(QUIET, run_scenario)
