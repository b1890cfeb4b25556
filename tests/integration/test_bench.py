"""``pccl bench allreduce`` as users run it: real processes, tiny tensors, few rounds."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pccl.cli.bench.command
from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.statistics import Figures
from pccl.cli.bench.view import BenchView
from pccl.cli.main import group
from pccl.cli.processes.crew import Crew
from tests.support.commands import PCCL, printed_objects, run_to_end, running
from tests.support.paths import ROOT
from tests.support.patience import LONG_LIMIT_S, patient
from tests.support.processes import descendants, is_there

ALLREDUCE = ("bench", "allreduce")
COMMAND = (*PCCL, *ALLREDUCE)

FIELDS = {
    *("peers", "bytes", "dtype", "algorithm", "lanes", "in_place", "seconds_median"),
    *("quantize", "error", "wire_bytes_per_value"),
    *("cpu_s_per_gib", "extra_mib", "values_ok", "congestion", "seconds"),
    *("side", "seconds_p95", "seconds_p99", "span_median", "span_p95", "span_p99", "span"),
}
OURS_ALONE = {"extra_mib", "lanes", "wire_bytes_per_value"}

ENVIRONMENT = {
    **os.environ,
    # Of another run: none of it may matter.
    "PCCL_MASTER": "host.example:1",
    "PCCL_GROUP": "7",
    "PCCL_MIN_PEERS": "9",
    "PCCL_LANES": "3",
    "PCCL_TOKEN": "the secret of another run",
    "PCCL_ADVERTISE": "host.example:2",
}


def measure(pccl: tuple[str, ...], *options: str) -> list[dict[str, Any]]:
    """The objects that a benchmark prints."""
    return printed_objects(*pccl, *ALLREDUCE, "--json", *options, env=ENVIRONMENT)


def test_sizes_peers_and_lanes(ready_pccl: tuple[str, ...]) -> None:
    results = measure(
        ready_pccl,
        *("--size", "4,64KiB", "-n", "2,3", "--lanes", "1,2", "--rounds", "2"),
        *("--warmup", "1"),
    )
    assert [(each["peers"], each["lanes"], each["bytes"]) for each in results] == [
        *((2, 1, 4), (2, 1, 65536), (2, 2, 4), (2, 2, 65536)),
        *((3, 1, 4), (3, 1, 65536), (3, 2, 4), (3, 2, 65536)),
    ]
    for result in results:
        assert set(result) >= FIELDS
        assert "ratio" not in result
        assert result["side"] == "pccl"
        assert result["dtype"] == "float32"
        assert result["algorithm_asked"] == "auto"
        assert set(result["algorithm"].split(",")) <= {"ring", "star", "mesh"}
        assert (result["quantize"], result["error"]) == ("none", 0.0)
        assert result["in_place"] is False
        assert result["values_ok"] is True
        assert result["faults"] == []
        assert len(result["seconds"]) == 2
        for mean_s, span_s in zip(result["seconds"], result["span"], strict=True):
            assert 0 < mean_s <= span_s + 2e-9  # both are rounded
        assert result["seconds_median"] == pytest.approx(sum(result["seconds"]) / 2, abs=2e-9)
        assert result["cpu_s_per_gib"] > 0
        assert 0 <= result["extra_mib"] < 64


def test_in_place_with_another_dtype_and_no_lanes_named(ready_pccl: tuple[str, ...]) -> None:
    how = ("--dtype", "bfloat16", "--in-place", "--rounds", "1")
    [result] = measure(ready_pccl, "--size", "1MiB", *how)
    assert result["values_ok"] is True
    assert result["in_place"] is True
    assert result["dtype"] == "bfloat16"
    assert result["lanes"] >= 1
    assert 1.0 <= result["extra_mib"] < 64  # the copy that an abort would need


def check_sides(results: list[dict[str, Any]], sides: list[str]) -> None:
    """Check the rounds of a case that three peers played, of each side."""
    assert [each["side"] for each in results] == sides
    ours, *others = results
    assert "ratio" not in ours
    for each in others:
        assert set(each) == set(ours) - OURS_ALONE | {"ratio"}
        assert each["ratio"] == pytest.approx(each["seconds_median"] / ours["seconds_median"])
    for each in results:
        assert (each["peers"], each["values_ok"], each["faults"]) == (3, True, [])
        assert len(each["seconds"]) == len(each["span"]) == 3
        assert each["cpu_s_per_gib"] > 0


def test_against_a_bare_ring(ready_pccl: tuple[str, ...]) -> None:
    sizes = ("--size", "4,1MiB", "--peers", "3", "--in-place", "--dtype", "bfloat16")
    results = measure(ready_pccl, *sizes, "--against", "ring", "--rounds", "3", "--warmup", "0")
    for case in (results[:2], results[2:]):
        check_sides(case, ["pccl", "ring"])
        assert case[0]["congestion"] == case[1]["congestion"]
        assert case[1]["algorithm"] == "ring"
        assert case[0]["conditions"]["no_namespace"] == ""


def test_against_gloo_also_under_our_congestion_control(ready_pccl: tuple[str, ...]) -> None:
    pytest.importorskip("torch")
    ask = ("--size", "64KiB", "--peers", "3", "--against", "gloo,ring")
    results = measure(ready_pccl, *ask, "--rounds", "3", "--warmup", "0")
    conditions, control = results[0]["conditions"], results[0]["congestion"]
    default = conditions["congestion_default"]
    again = [f"gloo-{control}"] if control != default and not conditions["no_namespace"] else []
    check_sides(results, ["pccl", "gloo", *again, "ring"])
    controls = {each["side"]: each["congestion"] for each in results}
    assert controls.pop("gloo") == default
    assert set(controls.values()) == {control}


def test_emulated_link(ready_pccl: tuple[str, ...]) -> None:
    [result] = measure(
        ready_pccl,
        *("--size", "4KiB", "--emulate", "rate=200mbit,rtt=20ms", "--rounds", "1", "--warmup", "0"),
    )
    assert result["values_ok"] is True
    assert result["conditions"]["emulate"] == "rate=200mbit,rtt=20ms"
    assert result["seconds_median"] > 0.02  # what goes both ways over a link takes a round trip


# -- how it ends -----------------------------------------------------------------------------------


def peers_when_measuring(pid: int) -> list[int]:
    """Process ids of the peers, once both are connected to somebody."""
    deadline = time.monotonic() + LONG_LIMIT_S
    while time.monotonic() < deadline:
        peers: list[int] = []
        for child in descendants(pid):
            with contextlib.suppress(OSError):
                threads = len(list(Path(f"/proc/{child}/task").iterdir()))
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"pccl.cli.bench.peer" in command and threads > 1:
                    peers.append(child)
        if len(peers) == 2:
            return peers
        time.sleep(0.01)
    raise AssertionError("the peers never began")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("wanted", ["SIGINT", "SIGTERM", "SIGKILL", "death of a peer"])
def test_no_process_and_no_folder_is_left(wanted: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = (*COMMAND, "--size", "1MiB", "--rounds", "1000", "--against", "gloo,ring")
    with running(*command, env={**os.environ, "TMPDIR": str(tmp_path)}) as run:
        peers = peers_when_measuring(run.pid)
        everybody = descendants(run.pid)
        began = time.monotonic()
        if wanted.startswith("SIG"):
            run.send_signal(signal.Signals[wanted])
        else:
            os.kill(peers[1], signal.SIGKILL)
        _, complaints = run.communicate(timeout=LONG_LIMIT_S)
        assert time.monotonic() - began < patient(10.0)
    # Its guard takes a moment.
    give_up = time.monotonic() + (LONG_LIMIT_S if wanted == "SIGKILL" else 0.0)
    while (left := [pid for pid in everybody if is_there(pid)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert left == []
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in complaints
    assert run.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}.get(wanted, 1)
    if not wanted.startswith("SIG"):
        assert re.fullmatch(
            r"Error: peer \d ended unexpectedly: signal SIGKILL", complaints.strip()
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "12Foo"], "'12Foo' is not a size; write a number and a unit, such"),
        (["--peers", "1"], "1 is not in the range 2<=x<=64"),
        (["--peers", "2,65"], "65 is not in the range 2<=x<=64"),
        (["--dtype", "float31"], "'float31' is not one of 'uint8'"),
        (["--against", "nccl"], "'nccl' is not one of 'gloo', 'ring'"),
        (["--size", "4KiB..1KiB"], "'4KiB..1KiB' begins above its end"),
        (["--size", "64GiB", "--peers", "64"], "GiB of memory"),
    ],
)
def test_options_are_checked_first(options: list[str], words: str) -> None:
    found = CliRunner().invoke(group, ["bench", "allreduce", *options])
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_stdout_is_one_line_and_one() -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*COMMAND, "--size", "4KiB"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LONG_LIMIT_S,
            check=False,
        )
    expected = "Error: cannot write to stdout: No space left on device\n"
    assert (run.returncode, run.stderr) == (1, expected)


def test_standard_streams_that_are_closed() -> None:
    options = ["--size", "4KiB", "--rounds", "1", "--warmup", "0", "--json"]
    run = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&- 2>&-', "sh", *COMMAND, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=LONG_LIMIT_S,
        check=False,
    )
    assert run.returncode == 0
    assert json.loads(run.stdout)["values_ok"] is True


def test_a_link_that_relays_do_not_understand() -> None:
    run = run_to_end(*COMMAND, "--emulate", "rate=200foo")
    assert run.returncode == 2
    assert run.stdout == ""
    expected = (
        r"Error: Invalid value for '--emulate': .*rate=200foo.* \(see pccl bench allreduce .*"
    )
    assert re.fullmatch(expected, run.stderr.strip())


@pytest.mark.parametrize("faults", [(), ("peer 1: 4 bytes, round 3: element 0 is 2, expected 1",)])
def test_wrong_values_are_a_failure(
    faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {
        "side": "pccl",
        "peers": 2,
        "algorithm_asked": "auto",
        "quantize": "none",
        "faults": faults,
    }

    def measured(crew: Crew, plan: BenchPlan, view: BenchView) -> list[Figures]:
        return [result]

    monkeypatch.setattr(pccl.cli.bench.command, "measure", measured)
    found = CliRunner().invoke(group, ["bench", "allreduce"])
    assert found.exit_code == len(faults)
    complaints = [f"WRONG VALUES: pccl, 2 peers, {fault}" for fault in faults]
    assert found.stderr.splitlines() == complaints


@pytest.mark.parametrize("arguments", [[], ["--rounds", "7"], ["allreduce"]])
def test_without_a_command_it_is_allreduce(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[BenchPlan] = []

    def measured(crew: Crew, plan: BenchPlan, view: BenchView) -> list[Figures]:
        plans.append(plan)
        return []

    monkeypatch.setattr(pccl.cli.bench.command, "measure", measured)
    assert CliRunner().invoke(group, ["bench", *arguments]).exit_code == 0
    assert [plan.rounds for plan in plans] == [7 if "7" in arguments else 20]
