"""The examples, and the first scripts of the documents, as they say: under ``pccl launch``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import PCCL, STRICT_PYTHON, environment_with, run_to_end, without_hint
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def launch(
    peers: int, *command: str, status: int = 0, cwd: Path = ROOT
) -> tuple[dict[int, list[str]], list[str]]:
    """Run so many peers to their end; what each printed, in order, and what went to stderr."""
    clean = environment_with(PYTHONPATH=str(ROOT))
    ended = run_to_end(*PCCL, "launch", "-n", str(peers), "--", *command, cwd=cwd, env=clean)
    assert ended.returncode == status, ended.stdout + ended.stderr
    printed: dict[int, list[str]] = {peer: [] for peer in range(peers)}
    for line in ended.stdout.splitlines():
        found = re.fullmatch(r"\[p(\d)\] (.*)", line)
        assert found is not None, line
        printed[int(found[1])].append(found[2])
    return printed, without_hint(ended.stderr).splitlines()


def run_example(name: str, peers: int, python: tuple[str, ...]) -> dict[int, list[str]]:
    printed, complaints = launch(peers, *python, str(EXAMPLES / name))
    assert complaints == []
    return printed


def check_training(printed: list[str], steps: list[str]) -> None:
    """A loss after each of these steps, the last one below the first, and then the weights."""
    *lines, weights = printed
    losses: list[float] = []
    for step, line in zip(steps, lines, strict=True):
        found = re.fullmatch(rf"{step}: mean loss (\d+\.\d+)", line)
        assert found is not None, line
        losses.append(float(found[1]))
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"weights: [0-9a-f]{16}", weights)


def test_all_examples_are_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) == 10
    assert [name for name in names if f'"{name}"' not in tested] == []


def test_blocking(forked_python: tuple[str, ...]) -> None:
    printed = run_example("blocking.py", 3, forked_python)
    ranks: list[str] = []
    for lines in printed.values():
        first, second = lines
        found = re.fullmatch(r"rank (\d) of 3: \[1\. 1\. 1\. 1\.\] from 3 peers", first)
        assert found is not None, first
        ranks.append(found[1])
        assert second == "smallest number: 0"
    assert sorted(ranks) == ["0", "1", "2"]


def test_with_asyncio(forked_python: tuple[str, ...]) -> None:
    printed = run_example("with_asyncio.py", 3, forked_python)
    for lines in printed.values():
        sums, big, turns = lines
        assert sums == "sums by tag: [30.0, 33.0, 36.0, 39.0]"
        assert big == "each of 4000000 elements is 3, from peers (1, 2, 3)"
        assert re.fullmatch(r"the loop had \d+ turns meanwhile", turns)


def test_with_torch(ready_python: tuple[str, ...]) -> None:
    printed = run_example("with_torch.py", 2, ready_python)
    assert printed[0] == printed[1]
    check_training(printed[0], [f"outer step {number}" for number in range(8)])


@pytest.mark.parametrize("name", ["diloco_by_hand.py", "diloco_one_step_late.py"])
def test_diloco_without_the_wrapper(name: str, ready_python: tuple[str, ...]) -> None:
    """Ten outer steps, after which both have the same weights."""
    printed = run_example(name, 2, ready_python)
    assert printed[0] == printed[1]
    assert re.fullmatch(r"10 steps: \[ *-?\d.*\]", printed[0][0])


def test_train_gpt_and_plot_losses(tmp_path: Path, ready_python: tuple[str, ...]) -> None:
    """Peers that train alone: each on data of its own, each with a log."""
    pytest.importorskip("matplotlib")
    sizes = "--width 16 --layers 1 --heads 2 --context 32 --batch 2 --held-out 4 --steps 20"
    log = str(tmp_path / "alone-{peer}.jsonl")
    train = (str(EXAMPLES / "train_gpt.py"), "--mode", "alone", *sizes.split(), "--log", log)
    printed, complaints = launch(2, *ready_python, *train)
    assert complaints == []
    assert printed[0][-1] != printed[1][-1]
    for lines in printed.values():
        assert re.fullmatch(r"step 20: held-out loss \d\.\d{4}", lines[0])
        assert re.fullmatch(r"weights: [0-9a-f]{16}", lines[-1])
    logs = sorted(str(path) for path in tmp_path.glob("*.jsonl"))
    plot = (str(EXAMPLES / "plot_losses.py"), *logs, "--out", str(tmp_path / "losses.png"))
    drawn, complaints = launch(1, *ready_python, *plot)
    assert complaints == []
    assert drawn[0][:-1] == [
        f"alone-{peer}: {printed[peer][0].removeprefix('step 20: held-out loss ')}"
        for peer in (0, 1)
    ]


def test_data_parallel(ready_python: tuple[str, ...]) -> None:
    printed = run_example("data_parallel.py", 2, ready_python)
    assert printed[0] == printed[1]
    check_training(printed[0], [f"step {10 * number + 10}" for number in range(6)])


def test_peer_groups(forked_python: tuple[str, ...]) -> None:
    printed = run_example("peer_groups.py", 4, forked_python)
    everybody = "4 peers in 2 groups"
    assert printed == {
        0: ["group 0: [1. 1.] from 2 peers", everybody],
        1: ["group 1: [2. 2. 2.] from 2 peers", everybody],
        2: ["group 0: [1. 1.] from 2 peers", everybody],
        3: ["group 1: [2. 2. 2.] from 2 peers", everybody],
    }


def sums(lines: list[str]) -> list[float]:
    """What each step of ``churn.py`` added, first to last."""
    found = [re.fullmatch(r"step (\d+): (\d+) from peers \(.*\)", line) for line in lines]
    return [float(match[2]) for match in found if match is not None]


def test_churn_goes_on_without_the_dead() -> None:
    """The status is that of the peer that was killed; the others end well all the same."""
    command = (*STRICT_PYTHON, str(EXAMPLES / "churn.py"), "--kill", "1")
    printed, complaints = launch(3, *command, status=128 + 9)
    assert complaints == ["pccl launch: p1 failed: signal SIGKILL"]
    assert sums(printed[1]) == [7.0] * 10
    for peer in (0, 2):
        assert sums(printed[peer]) == [7.0] * 10 + [5.0] * 10
        assert printed[peer][-1] == "total after 20 steps: 120"


def test_churn_takes_back_who_died() -> None:
    """Of two peers: the one that is left can't go on until the other is back."""
    churn = shlex.join((*STRICT_PYTHON, str(EXAMPLES / "churn.py")))
    printed, complaints = launch(2, "sh", "-c", f"{churn} --kill 1 || {churn}")
    assert [line for line in complaints if "Killed" not in line] == []  # the shell's, not ours
    for peer in (0, 1):
        assert sums(printed[peer]) == [3.0] * 20
        assert printed[peer][-1] == "total after 20 steps: 60"
    assert "step 10: 3 from peers (1, 2)" in printed[1]
    assert re.fullmatch(r"step 11: 3 from peers \([12], 3\)", printed[1][10])


def test_churn_gives_up_when_the_others_have_finished(forked_python: tuple[str, ...]) -> None:
    """Process 0 is over before it joins; 1 waits for two members, and for so long only."""
    churn = shlex.join((*forked_python, str(EXAMPLES / "churn.py"), "--patience", "1"))
    printed, complaints = launch(2, "sh", "-c", f'[ "$PCCL_PEER_INDEX" = 0 ] || {churn}')
    assert complaints == []
    assert printed == {0: [], 1: ["too few peers joined: the run seems to be over"]}


@pytest.mark.parametrize(
    ("page", "peers", "said"),
    [
        ("README.md", 3, r"rank {rank}: \[10\. 10\. 10\. 10\. 10\.\] from peers \(1, 2, 3\)"),
        (
            "docs/getting-started.md",
            2,
            r"peer \d, rank {rank}: \[5\. 5\. 5\. 5\.\] from peers \(1, 2\)",
        ),
    ],
)
def test_first_script_of(page: str, peers: int, said: str, tmp_path: Path) -> None:
    """Anybody's first minute, copied from the page."""
    script = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    (tmp_path / "first.py").write_text(script[1], encoding="utf-8")
    printed, complaints = launch(peers, *STRICT_PYTHON, "first.py", cwd=tmp_path)
    assert complaints == []
    lines = sorted((line for lines in printed.values() for line in lines), key=rank_in)
    assert len(lines) == peers
    for rank, line in enumerate(lines):
        assert re.fullmatch(said.replace("{rank}", str(rank)), line), line


def rank_in(line: str) -> str:
    found = re.search(r"rank (\d)", line)
    return found[1] if found else line
