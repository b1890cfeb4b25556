"""``examples/train_gpt.py``: it learns, resumes as if nothing had been, logs, draws."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import plot_losses  # noqa: E402
import train_gpt  # noqa: E402

from tests.support.commands import environment_with, run_to_end  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

SMALL = (
    "--mode alone --threads 1 --width 16 --layers 1 --heads 2 --context 16 --batch 8"
    " --lr 0.02 --warm-up 5 --held-out 16 --evaluate-every 10"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of text that is easy to learn."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_bytes(b"to be or not to be, " * (number + 5))
    return folder


@pytest.fixture(autouse=True)
def outside_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    for name in ("PCCL_PEERS", "PCCL_PEER_INDEX", "PCCL_MASTER"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, text: Path, *words: str | Path) -> None:
    command = ["train_gpt.py", *SMALL.split(), "--text", str(text), *map(str, words)]
    monkeypatch.setattr(sys, "argv", command)
    train_gpt.main()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_learns_and_says_so(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "alone.jsonl"
    run(monkeypatch, text, "--steps", "40", "--log", log, "--status", "--sample", "12")
    printed, status = capsys.readouterr()
    *judged, cost, weights, _ = printed.splitlines()[:7]
    losses = [float(line.rpartition(" ")[2]) for line in judged]
    assert [line.rpartition(" ")[0] for line in judged] == [
        f"step {step}: held-out loss" for step in (10, 20, 30, 40)
    ]
    assert losses[0] > losses[-1]
    assert losses[-1] < 2.5  # a guess among 256 bytes is 5.5
    count = 256 * 16 + 16 * 16 + (4 * 16 + 4 * 16 * 16 + 8 * 16 * 16) + 2 * 16
    assert re.fullmatch(rf"{count} parameters, 40 steps, \d+ s", cost)
    assert re.fullmatch(r"weights: [0-9a-f]{16}", weights)
    assert re.fullmatch(r"pccl: step 40, \S+ steps/s", status.splitlines()[-1])

    events = lines_of(log)
    steps = [(line["event"], line["step"]) for line in events]
    assert steps == [
        (event, step)
        for step in (10, 20, 30, 40)
        for event in ("InnerStep", "Trained", "Evaluated")
    ]
    evaluated = [line for line in events if line["event"] == "Evaluated"]
    assert [line["tokens"] for line in evaluated] == [1280, 2560, 3840, 5120]
    assert [f"{line['loss']:.4f}" for line in evaluated] == [f"{loss:.4f}" for loss in losses]
    # The rate that step 10 was made with, the tenth: half a cosine from 0.02 at 5 to 0.002 at 40.
    assert events[1]["learning_rate"] == pytest.approx(0.02 * (0.1 + 0.9 * 0.96812), rel=1e-4)


def test_a_resumed_run_ends_with_the_same_weights(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights_after(*words: str | Path) -> tuple[str, str]:
        run(monkeypatch, text, "--steps", "20", *words)
        printed = capsys.readouterr().out.splitlines()
        return printed[0], printed[-1]

    _, whole = weights_after()
    path = tmp_path / "gpt.pt"
    checkpoint = ("--checkpoint", path, "--checkpoint-every", "15")  # not where it is judged
    _, first = weights_after(*checkpoint)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["gpt.pt"]
    said, resumed = weights_after(*checkpoint)
    assert said == f"resumed from {path} after step 15"
    assert whole == first == resumed
    assert re.fullmatch(r"weights: [0-9a-f]{16}", whole)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_peers_with_muon_inside_end_alike(
    text: Path, ready_pccl: tuple[str, ...], ready_python: tuple[str, ...]
) -> None:
    words = "--mode sync --sync-every 5 --inner muon --steps 20"
    command = [*SMALL.replace("--mode alone", words).split(), "--text", str(text)]
    script = str(ROOT / "examples/train_gpt.py")
    launched = (*ready_pccl, "launch", "-n", "2", "--", *ready_python, script, *command)
    ended = run_to_end(*launched, cwd=ROOT, env=environment_with(PYTHONPATH=str(ROOT)))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    weights = re.findall(r"weights: ([0-9a-f]{16})", ended.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    losses = [float(loss) for loss in re.findall(r"held-out loss (\S+)", ended.stdout)]
    assert max(losses[-2:]) < 4.0  # a guess among 256 bytes is 5.5


def test_a_folder_without_text_ends_it_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"^train_gpt\.py: .*/none is not a folder$"):
        run(monkeypatch, tmp_path / "none", "--steps", "1")


def test_curves_go_to_tensorboard(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    run(monkeypatch, text, "--steps", "20", "--tensorboard", tmp_path / "board")
    read: Any = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == [
        "evaluated/loss",
        "evaluated/tokens",
        "inner_step/seconds",
        "trained/learning_rate",
        "trained/loss",
    ]
    assert [point.step for point in read.Scalars("evaluated/loss")] == [10, 20]


def evaluated(step: int, loss: float | None, second: int) -> str:
    time = f"2026-03-01T12:00:{second:02}.500+00:00"
    line = {"event": "Evaluated", "time": time, "step": step, "loss": loss, "tokens": 128 * step}
    return json.dumps(line) + "\n"


def test_curves_are_read_from_logs(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    start = '{"event": "InnerStep", "time": "2026-03-01T12:00:00.000+00:00", "step": 1}\n'
    diverged = evaluated(30, None, 9)
    log.write_text(
        start + evaluated(10, 2.5, 3) + '{"event": "Trai\n' + diverged + evaluated(20, 2.25, 7),
        encoding="utf-8",
    )
    assert plot_losses.read_curve(log, "step") == ([10.0, 20.0], [2.5, 2.25])
    assert plot_losses.read_curve(log, "tokens") == ([1280.0, 2560.0], [2.5, 2.25])
    assert plot_losses.read_curve(log, "seconds") == ([3.5, 7.5], [2.5, 2.25])


def test_several_logs_make_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    logs = [tmp_path / "sync-0.jsonl", tmp_path / "delayed-0.jsonl"]
    for log, loss in zip(logs, (2.0, 2.5), strict=True):
        log.write_text(evaluated(10, 3.0, 1) + evaluated(20, loss, 2), encoding="utf-8")
    out = tmp_path / "losses.png"
    plot_losses.main([*map(str, logs), "--out", str(out)])
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert capsys.readouterr().out.splitlines() == [
        "sync-0: 2.0000",
        "delayed-0: 2.5000",
        f"picture: {out}",
    ]


def test_a_log_without_losses_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "empty.jsonl"
    log.write_text("", encoding="utf-8")
    with pytest.raises(SystemExit):
        plot_losses.main([str(log)])
    assert f"{log} holds no held-out loss" in capsys.readouterr().err
