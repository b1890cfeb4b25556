"""``pccl stress run`` as users run it: real processes, a few fixed faults, seconds, not hours."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import FROM_ANYWHERE, PCCL, run_to_end, running
from tests.support.patience import LONG_LIMIT_S, patient
from tests.support.processes import assert_gone, descendants

COMMAND = (*PCCL, "stress", "run")

REPORT_KEYS = {
    "verdict",
    "operations",
    "wrong_values",
    "damaged_inputs",
    "hangs",
    "leaks",
    "false_removals",
    "faults",
    "recovery_s",
}

SHORT: dict[str, Any] = {
    "seed": 3,
    "peers": 3,
    "duration_s": 6.0,
    "deadline_s": 4.0,
    "link": "rate=200mbit,rtt=2ms",
    "faults": [
        {"at_s": 0.4, "kind": "kill", "peer": 2},
        {"at_s": 0.8, "kind": "joiners", "amount": 1},
        {"at_s": 1.2, "kind": "reset", "peer": 0, "other": 1},
        {"at_s": 1.6, "kind": "freeze", "peer": 1, "duration_s": 0.3},
        {"at_s": 2.2, "kind": "garbage", "peer": 0, "amount": 2},
        {"at_s": 2.6, "kind": "partition", "peer": 0, "other": 1, "duration_s": 0.3},
        {"at_s": 3.2, "kind": "slow", "peer": 0, "duration_s": 0.5, "amount": 0.3},
        {"at_s": 3.8, "kind": "delay", "peer": 0, "duration_s": 0.3, "amount": 0.05},
    ],
}


def write(folder: Path, scenario: dict[str, Any]) -> str:
    path = folder / "scenario.json"
    path.write_text(json.dumps(scenario))
    return str(path)


def stress(
    folder: Path, *options: str, pccl: tuple[str, ...] = PCCL
) -> subprocess.CompletedProcess[str]:
    return run_to_end(*pccl, "stress", "run", *options, cwd=folder, env=FROM_ANYWHERE)


def test_it_says_its_own_name() -> None:
    said = run_to_end(*PCCL, "stress", "--help")
    assert said.stdout.startswith("Usage: pccl stress [OPTIONS] COMMAND")
    assert "Usage: pccl stress run" in run_to_end(*COMMAND, "--nonsense").stderr


def test_a_short_run_with_faults_of_many_kinds(ready_pccl: tuple[str, ...], tmp_path: Path) -> None:
    scenario = write(tmp_path, SHORT)
    options = ("--scenario", scenario, "--json", "r.json", "--html", "r.html")
    done = stress(tmp_path, *options, pccl=ready_pccl)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert report["verdict"] == "ok"
    faults = {fault["kind"]: 1 for fault in SHORT["faults"]}
    assert report["faults"] == faults
    assert report["recovery_s"].keys() == faults.keys()
    assert all(0 < each["median"] <= each["p95"] for each in report["recovery_s"].values())
    assert report["operations"] >= 10
    assert report["results"] >= 2 * report["operations"]
    assert report["processes"] == 5  # the master, three peers, a newcomer
    assert "kill peer 2" in done.stdout
    assert re.search(r"the master removed peer 2 \(id \d+\): CONNECTIONS_LOST: ", done.stdout)
    assert (tmp_path / "r.html").read_text().count("<svg") == 3


def test_processes_that_share_memory_go_on(ready_pccl: tuple[str, ...], tmp_path: Path) -> None:
    faults = [
        {"at_s": 0.5, "kind": "freeze", "peer": 1, "duration_s": 0.5},
        {"at_s": 1.5, "kind": "restart", "peer": 2, "duration_s": 0.2},
        {"at_s": 2.5, "kind": "reset", "peer": 0, "other": -1},
    ]
    changes = {"duration_s": 4.0, "link": "", "local": True, "faults": faults}
    scenario = write(tmp_path, {**SHORT, **changes})
    done = stress(tmp_path, "--scenario", scenario, "--json", "r.json", pccl=ready_pccl)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["faults"] == {"freeze": 1, "restart": 1, "reset": 1}
    assert report["operations"] >= 10


def test_a_wrong_value_is_seen(ready_pccl: tuple[str, ...], tmp_path: Path) -> None:
    scenario = write(tmp_path, {**SHORT, "duration_s": 1.0, "faults": []})
    options = ("--scenario", scenario, "--plant", "3", "--json", "r.json")
    done = stress(tmp_path, *options, pccl=ready_pccl)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["verdict"], report["wrong_values"]) == ("failed", 1)
    assert re.search(r"peer 0, iteration \d+, tag \d: .*1 elements differ", done.stdout)


def test_a_restarted_master_goes_on(ready_pccl: tuple[str, ...], tmp_path: Path) -> None:
    faults = [{"at_s": 0.5, "kind": "master_restart", "duration_s": 0.2}]
    scenario = write(tmp_path, {**SHORT, "duration_s": 4.0, "faults": faults})
    done = stress(tmp_path, "--scenario", scenario, "--json", "r.json", pccl=ready_pccl)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["faults"] == {"master_restart": 1}
    assert report["recovery_s"]["master_restart"]["count"] == 1
    assert report["failures"] == {}  # no call of any peer has raised


@pytest.mark.parametrize("wanted", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left(wanted: signal.Signals, tmp_path: Path) -> None:
    frozen = [{"at_s": 0.0, "kind": "freeze", "peer": 2, "duration_s": 60.0}]
    scenario = write(tmp_path, {**SHORT, "duration_s": 100.0, "faults": frozen})
    command = (*COMMAND, "--scenario", scenario, "--json", "r.json")
    with running(*command, cwd=tmp_path, env=FROM_ANYWHERE, stderr=subprocess.STDOUT) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if "freeze peer 2" in line:
                break
        pids = descendants(run.pid)
        assert len(pids) >= 4
        run.send_signal(wanted)
        said, _ = run.communicate(timeout=LONG_LIMIT_S)
    assert_gone(pids)  # a guard ends them if the harness could not
    assert "Traceback" not in said
    if wanted != signal.SIGKILL:
        assert run.returncode == 130
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["verdict"] == "interrupted"
        assert report["faults"] == {"freeze": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "1"], "--peers"),
        (["--minutes", "0"], "--minutes"),
        (["--link", "rate=5"], "rate=5 is not understood"),
        (["--scenario", "missing.json"], "missing.json"),
        (["--scenario", "bad.json"], "faults[0].kind: 'explode' is none of kill, restart"),
        (["--scenario", "bad.json", "--peers", "3"], "--peers is set by the scenario file"),
        (["--json", "no/such/folder.json"], "the folder"),
    ],
)
def test_mistakes_are_said_first(
    options: list[str], words: str, ready_pccl: tuple[str, ...], tmp_path: Path
) -> None:
    bad = {**SHORT, "faults": [{"at_s": 1, "kind": "explode"}]}
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    command = (*ready_pccl, "stress", "run")
    done = run_to_end(*command, *options, cwd=tmp_path, env=FROM_ANYWHERE)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_drawn_can_be_saved_and_run_again(
    ready_pccl: tuple[str, ...], tmp_path: Path
) -> None:
    drawn = ["--peers", "2", "--minutes", "0.06", "--every", "100", "--save-scenario", "s.json"]
    assert stress(tmp_path, *drawn, pccl=ready_pccl).returncode == 0
    saved = json.loads((tmp_path / "s.json").read_text())
    assert (saved["seed"], saved["peers"], saved["faults"]) == (7, 2, [])
    assert saved["duration_s"] == pytest.approx(3.6)
    assert saved["link"] == "rate=200mbit,rtt=10ms"


def test_recovery_and_joins_are_measured(forked_python: tuple[str, ...], tmp_path: Path) -> None:
    command = [*forked_python, "-m", "pccl.stress", "recovery"]
    options = ["--tries", "2", "--peers", "3", "--size", "1M", "--json"]
    done = run_to_end(*command, *options, cwd=tmp_path, env=FROM_ANYWHERE)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["sizes"]
    assert (found["bytes"], found["tries"]) == (1 << 20, 2)
    recovery, join = found["recovery_s"], found["join_s"]
    assert 0 < recovery["min"] <= recovery["median"] <= recovery["max"] < patient(10.0)
    assert 0 < join["median"] < patient(10.0)


def test_namespaces_work_or_are_refused_in_words(tmp_path: Path) -> None:
    faults = [{"at_s": 0.3, "kind": "restart", "peer": 1, "duration_s": 0.1}]
    scenario = write(tmp_path, {**SHORT, "duration_s": 2.0, "faults": faults})
    done = stress(tmp_path, "--scenario", scenario, "--netns", "--json", "r.json")
    if done.returncode != 0:  # what may be refused, and how, is for the unit tests
        assert re.search("--netns (needs root|needs the program|is not possible)", done.stderr)
        return
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["verdict"], report["faults"]) == ("ok", {"restart": 1})
