"""Scenario files: what may be in one, what is said of a wrong one, and timelines from a seed."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pccl.stress.drawing import WEIGHTS, draw
from pccl.stress.sim.scenarios.from_timeline import from_timeline
from pccl.stress.timeline import (
    LASTING,
    MASTER,
    OF_PAIR,
    WITH_AMOUNT,
    FaultKind,
    Timeline,
    TimelineError,
    TimelineFault,
)
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S

PLAIN: dict[str, Any] = {"seed": 7, "peers": 3, "duration_s": 30.0}


def scenario(**changes: Any) -> dict[str, Any]:
    return {**PLAIN, **changes}


def fault(**changes: Any) -> dict[str, Any]:
    return scenario(faults=[{"at_s": 1.0, "kind": "kill", "peer": 0}, {"at_s": 2.0, **changes}])


def test_a_scenario_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(
        '{"seed": 7, "peers": 6, "duration_s": 300, "link": "rate=200mbit,rtt=20ms", "faults": ['
        '{"at_s": 5, "kind": "partition", "peer": 1, "other": -1, "duration_s": 4.0},'
        '{"at_s": 1.5, "kind": "freeze", "peer": 2, "duration_s": 4.0}]}'
    )
    read = Timeline.load(path)
    assert (read.seed, read.peers, read.duration_s) == (7, 6, 300)
    assert (read.lanes, read.groups, read.deadline_s) == (2, 1, 10.0)
    assert (read.link_spec.rate_bps, read.link_spec.rtt_s) == (200_000_000, 0.02)
    assert read.faults == (
        TimelineFault(1.5, FaultKind.FREEZE, 2, None, 4.0),
        TimelineFault(5, FaultKind.PARTITION, 1, MASTER, 4.0),
    )
    assert [each.end_s for each in read.faults] == [5.5, 9.0]


def test_local_peers_have_faults_only_of_processes_and_of_the_way_to_the_master() -> None:
    drawn = draw(3, 5, 400.0, 0.5, local=True)
    assert drawn.local
    pairs = [each for each in drawn.faults if each.kind in OF_PAIR]
    assert len(pairs) > 50
    assert {each.other for each in pairs} == {MASTER}
    reset = {"at_s": 1.0, "kind": "reset", "peer": 1}
    for other, refused in (({"other": 2}, True), ({}, True), ({"other": MASTER}, False)):
        told = scenario(local=True, faults=[{**reset, **other}])
        if refused:
            with pytest.raises(TimelineError, match=r"faults\[0\].other: local peers have no"):
                Timeline.from_json(told)
        else:
            assert Timeline.from_json(told).local
    joiners: list[dict[str, Any]] = [{"at_s": 1.0, "kind": "joiners", "amount": 2}]
    for local, size in ((False, 1), (True, 5)):
        read = Timeline.from_json(scenario(local=local, faults=joiners))
        assert from_timeline(read).machine_size == size
    with pytest.raises(TimelineError, match="local: must be true or false"):
        Timeline.from_json(scenario(local=1))


def test_what_is_dumped_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "scenario.json"
    drawn = draw(3, 5, 200.0, 1.0, lanes=3, groups=2, deadline_s=4.0, link="rtt=2ms")
    drawn.dump(path)
    assert Timeline.load(path) == drawn
    assert json.loads(path.read_text()) == drawn.to_json()


def test_newcomers_take_the_numbers_that_follow() -> None:
    given = scenario(
        faults=[{"at_s": 1, "kind": "joiners", "amount": 2}, {"at_s": 2, "kind": "kill", "peer": 4}]
    )
    assert Timeline.from_json(given).processes == 5
    given["faults"][1]["at_s"] = 0.5
    with pytest.raises(TimelineError, match=r"faults\[0\].peer: no process 4 exists at 0.5 s"):
        Timeline.from_json(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "scenario: must be an object, not list"),
        ({"seed": 1, "peers": 3}, "scenario.duration_s: is missing"),
        (scenario(pers=3), "scenario.pers: no such field; known are seed, peers, duration_s"),
        (scenario(peers=1), "peers: must be a whole number from 2 to 128, not 1"),
        (scenario(peers=True), "peers: must be a whole number"),
        (scenario(seed=1.5), "seed: must be a whole number"),
        (scenario(duration_s="30"), "duration_s: must be a number from 0.1"),
        (scenario(deadline_s=float("nan")), "deadline_s: must be a number"),
        (scenario(lanes=0), "lanes: must be a whole number from 1"),
        (scenario(groups=0), "groups: must be a whole number from 1"),
        (scenario(link="rate=200"), "link: rate=200 is not understood; write a number and"),
        (scenario(link=5), "scenario.link: must be text such as"),
        (scenario(faults={}), "faults: must be a list"),
        (fault(), r"faults\[1\].kind: is missing"),
        (fault(kind="explode"), r"faults\[1\].kind: 'explode' is none of kill, restart, freeze"),
        (fault(kind="kill", when=3), r"faults\[1\].when: no such field; known are at_s, kind"),
        (fault(kind="kill"), r"faults\[1\].peer: kill needs the index of a peer"),
        (fault(kind="kill", peer=3), r"faults\[1\].peer: no process 3 exists at 2 s; .* 0 to 2"),
        (fault(kind="kill", peer=1, other=2), r"faults\[1\].other: kill affects one process"),
        (fault(kind="kill", peer=1, duration_s=2), r"faults\[1\].duration_s: kill has no duration"),
        (fault(kind="kill", peer=1, amount=2), r"faults\[1\].amount: kill has no amount"),
        (fault(kind="freeze", peer=1), r"faults\[1\].duration_s: must be a number from 0.001"),
        (fault(kind="reset", peer=1, other=1), r"faults\[1\].other: must differ from peer"),
        (fault(kind="reset", peer=1, other=9), r"faults\[1\].other: no process 9 exists"),
        (fault(kind="reset", peer=1.5), r"faults\[1\].peer: must be a whole number"),
        (
            fault(kind="bandwidth", peer=1, duration_s=1, amount=3),
            r"faults\[1\].amount \(bytes per second\): must be a number from 1000",
        ),
        (
            fault(kind="slow", peer=1, duration_s=1, amount=1),
            r"faults\[1\].amount \(a share of a CPU\): must be a number from 0.01 to 0.99",
        ),
        (fault(kind="joiners", amount=1.5), r"faults\[1\].amount: must be a whole number"),
        (fault(kind="standby", peer=1), r"faults\[1\].peer: standby has no peer"),
        (scenario(faults=[{"at_s": 31, "kind": "standby"}]), r"at_s: 31 is after the end"),
        (scenario(faults=[{"at_s": -1, "kind": "standby"}]), r"at_s: must be a number from 0"),
    ],
)
def test_what_is_wrong_is_said(given: object, words: str) -> None:
    with pytest.raises(TimelineError, match=words):
        Timeline.from_json(given)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"missing.json: No such file"):
        Timeline.load(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(TimelineError, match=r"broken.json: is not JSON: .*line 1"):
        Timeline.load(broken)


def test_a_drawn_timeline_has_all_kinds_as_often_as_asked() -> None:
    drawn = draw(7, 6, 4000.0, 2.0)
    kinds = Counter(each.kind for each in drawn.faults)
    assert set(kinds) == {kind for kind, weight in WEIGHTS.items() if weight}
    # 2000 of them, give or take five standard deviations of a Poisson process (45 each)
    assert 1775 < len(drawn.faults) < 2225
    assert kinds[FaultKind.RESTART] > kinds[FaultKind.MASTER_RESTART_BLANK]
    assert all(each.end_s <= drawn.duration_s for each in drawn.faults)


@pytest.mark.parametrize("seed", range(50))
def test_drawn_faults_keep_the_rules(seed: int) -> None:
    drawn = draw(seed, 4, 120.0, 0.5, deadline_s=3.0)
    gone: set[int] = set()
    known = drawn.peers
    for each in drawn.faults:
        assert each.peer not in gone
        assert each.other not in gone
        assert (each.duration_s > 0) == (each.kind in LASTING)
        assert (each.amount > 0) == (each.kind in WITH_AMOUNT)
        assert each.other is None or each.kind in OF_PAIR
        if each.kind in (FaultKind.KILL, FaultKind.LEAVE):
            gone.add(each.peer)
        if each.kind is FaultKind.JOINERS:
            known += round(each.amount)
        assert 2 <= known - len(gone) <= 6


def test_only_what_has_weight_is_drawn() -> None:
    drawn = draw(1, 4, 100.0, 1.0, weights={FaultKind.FREEZE: 1})
    assert {each.kind for each in drawn.faults} == {FaultKind.FREEZE}


def test_a_seed_means_the_same_in_each_process() -> None:
    script = "from pccl.stress.drawing import draw; print(draw(11, 6, 60.0, 1.0).to_text(), end='')"
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=LIMIT_S,
        ).stdout
        for seed in ("0", "1")
    }
    assert texts == {draw(11, 6, 60.0, 1.0).to_text()}
    assert draw(12, 6, 60.0, 1.0).to_text() not in texts
