"""The demo as users run it: real processes, a real SIGKILL, a few steps."""

import json
import os
import re
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import FROM_ANYWHERE, PCCL, run_to_end, running
from tests.support.patience import LONG_LIMIT_S, patient

for module in ("torch", "sklearn", "matplotlib"):  # found, but not imported into this process
    if find_spec(module) is None:
        pytest.skip(f"the demo needs {module}", allow_module_level=True)

COMMAND = (*PCCL, "demo")
WEIGHT_COUNT = (32 * 9 + 32) + (64 * 32 * 9 + 64) + (64 * 4 * 4 * 10 + 10)
STATE_BYTES = 1797 * (64 * 4 + 8) + 2 * 4 * WEIGHT_COUNT + 8
"""Images and digits; weights and their momentum; the step counter."""


def test_demo_survives_a_kill_and_takes_a_newcomer_in(
    ready_pccl: tuple[str, ...], tmp_path: Path
) -> None:
    picture = tmp_path / "picture.png"
    run = run_to_end(*ready_pccl, "demo", "--json", "--steps", "150", "--out", str(picture))
    assert run.returncode == 0, run.stdout + run.stderr
    verdict = json.loads(run.stdout)
    assert set(verdict) == {
        "accuracy",
        "single_shard_accuracy",
        "digests_equal",
        "lost_peers",
        "joined_peers",
        "fetched_bytes",
        "seconds",
    }
    assert verdict["accuracy"] >= 0.95
    assert 0.5 < verdict["single_shard_accuracy"] <= 1.0
    assert verdict["digests_equal"] is True
    assert verdict["lost_peers"] == 1
    assert verdict["joined_peers"] == 5
    assert verdict["fetched_bytes"] == STATE_BYTES
    assert 0 < verdict["seconds"] < LONG_LIMIT_S
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids_when_training(demo: subprocess.Popen[str]) -> list[int]:
    """Read until the peers train and one more process starts; collect all process ids."""
    assert demo.stdout is not None
    pids: list[int] = []
    for line in demo.stdout:
        if found := re.search(r"(?:joined|starts) \(shard \d+, pid (\d+)\)", line):
            pids.append(int(found[1]))
        if "one more process starts" in line:
            return pids
    raise AssertionError("the peers never trained")


@pytest.mark.parametrize("wanted", ["SIGINT", "SIGTERM", "death of a peer"])
def test_no_process_is_left(wanted: str, ready_pccl: tuple[str, ...], tmp_path: Path) -> None:
    """Once no fork stands for the command: a Ctrl-C must find its own processes."""
    command = (*(PCCL if wanted == "SIGINT" else ready_pccl), "demo")
    options = ("--peers", "2", "--no-kill", "--steps", "100000", "--out", "picture.png")
    merged = subprocess.STDOUT
    with running(*command, *options, cwd=tmp_path, env=FROM_ANYWHERE, stderr=merged) as demo:
        pids = pids_when_training(demo)
        assert len(pids) == 3
        began = time.monotonic()
        if wanted.startswith("SIG"):
            demo.send_signal(signal.Signals[wanted])
        else:
            os.kill(pids[0], signal.SIGKILL)
        said, _ = demo.communicate(timeout=LONG_LIMIT_S)
        if wanted.startswith("SIG"):
            assert time.monotonic() - began < patient(10.0)
    assert [pid for pid in pids if is_there(pid)] == []
    assert demo.returncode != 0
    assert "Traceback" not in said
    if not wanted.startswith("SIG"):
        assert re.search(r"FAILED: shard \d ended unexpectedly: signal SIGKILL", said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "2"], "--peers must be 3 or more"),
        (["--out", "no/such/folder.png"], "the folder"),
        (["--out", "demo.jpeg"], "does not end in .png"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_options_are_checked_first(options: list[str], words: str, tmp_path: Path) -> None:
    run = run_to_end(*COMMAND, *options, cwd=tmp_path, env=FROM_ANYWHERE)
    assert run.returncode == 2
    assert words in run.stderr
    assert "Traceback" not in run.stderr
