"""Workers that end well, badly, or silently; ``timeit`` plays their parts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import click
import pytest

from pccl import config
from pccl.cli.processes import crew as module
from pccl.cli.processes.crew import Crew, ProcessDied
from pccl.cli.processes.reports import Doing, Failed, WorkerReport, encode

ENDS = "__import__('os')._exit({})"
FOREVER = "__import__('signal').pause()"
KILLED = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


def start(crew: Crew, name: str, *statements: str) -> None:
    """A process that executes statements and then ends well, unless they say otherwise."""
    setup = ["-s", "import sys; print('ready', flush=True)"]
    quiet = "sys.stdout = open('/dev/null', 'w')"  # timeit's own result
    crew.start(name, "timeit", ["-n", "1", "-r", "1", *setup, *statements, quiet])


def says(report: WorkerReport) -> str:
    return f"print({encode(report)!r}, flush=True)"


def hear_all(crew: Crew, name: str) -> list[str]:
    heard: list[str] = []
    while crew.running([name]):
        heard += [text for who, text in crew.hear() if who == name]
    return heard


def test_lines_are_heard(crew: Crew) -> None:
    start(crew, "one", "print('a\\nb')")
    assert hear_all(crew, "one") == ["ready", "a", "b"]


def test_what_a_good_process_says_on_stderr_is_passed_on(
    crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    start(crew, "one", "print('mind the gap', file=sys.stderr)")
    assert hear_all(crew, "one") == ["ready"]
    assert capsys.readouterr() == ("", "one: mind the gap\n")


def test_a_death_comes_after_the_lines_and_has_the_last_words(crew: Crew) -> None:
    start(crew, "one", "print('last words', file=sys.stderr, flush=True)", ENDS.format(3))
    assert crew.hear() == [("one", "ready")]
    with pytest.raises(ProcessDied) as caught:
        hear_all(crew, "one")
    assert str(caught.value) == "one ended unexpectedly: exit code 3"
    assert caught.value.said == ("last words",)
    assert not crew.running(["one"])


def test_first_lines(crew: Crew) -> None:
    start(crew, "one", FOREVER)
    start(crew, "two", FOREVER)
    assert crew.first_lines(["one", "two"]) == {"one": "ready", "two": "ready"}
    crew.dismiss(["one"])
    assert not crew.running(["one"])
    assert crew.running(["two"])


def test_a_first_line_that_never_comes(crew: Crew) -> None:
    crew.start("mute", "timeit", ["-s", ENDS.format(0)])
    with pytest.raises(ProcessDied, match="mute ended unexpectedly"):
        crew.first_lines(["mute"])


def test_environment(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in config.OF_A_PEER:
        monkeypatch.setenv(name, "of another run")
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    script = "print(__import__('json').dumps(dict(__import__('os').environ)))"
    crew.start("one", "timeit", ["-n1", "-r1", script], {config.TOKEN: "ours"})
    found = json.loads(hear_all(crew, "one")[0])
    assert {name: found.get(name) for name in config.OF_A_PEER if name in found} == {
        config.TOKEN: "ours"
    }
    assert found["SOMETHING"] == "else"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["PATH"] == os.environ["PATH"]


# -- what is made of their reports -----------------------------------------------------------------


def listened(crew: Crew, *workers: list[str]) -> list[tuple[str, Doing]]:
    """Workers do as they are told; what they reported."""
    told: list[tuple[str, Doing]] = []
    names = [f"peer {number}" for number in range(len(workers))]
    for name, statements in zip(names, workers, strict=True):
        start(crew, name, *statements)

    def add(name: str, report: Doing) -> None:
        told.append((name, report))

    crew.listen(names, (Doing,), add)
    return told


def test_reports_are_heard(crew: Crew, capsys: pytest.CaptureFixture[str]) -> None:
    told = listened(crew, [says(Doing("a")), says(Doing("b"))], [says(Doing("c"))])
    assert sorted(told, key=lambda each: each[1].text) == [
        *(("peer 0", Doing("a")), ("peer 0", Doing("b")), ("peer 1", Doing("c")))
    ]
    assert sorted(capsys.readouterr().err.splitlines()) == ["peer 0: ready", "peer 1: ready"]


def test_a_worker_that_gives_up_says_why(crew: Crew) -> None:
    with pytest.raises(click.ClickException, match=r"^peer 0: no more memory$"):
        listened(crew, [says(Failed("no more memory")), ENDS.format(1)], [FOREVER])


def test_a_death_is_the_cause_of_what_others_say(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CAUSE_S", 60.0)  # this machine may be busy
    gives_up = [says(Failed("peer 2 was lost")), ENDS.format(1)]
    with pytest.raises(click.ClickException, match=r"^peer 1 ended .*: signal SIGKILL$"):
        listened(crew, gives_up, [KILLED])


def test_silence_ends_the_wait(crew: Crew) -> None:
    start(crew, "mute", FOREVER)
    assert crew.first_lines(["mute"]) == {"mute": "ready"}
    with pytest.raises(click.ClickException, match=r"^no process wrote a line for 0 s$"):
        crew.listen(["mute"], (Doing,), lambda: None, silence_s=0.01)


def test_a_worker_that_breaks_shows_its_last_lines(crew: Crew) -> None:
    with pytest.raises(click.ClickException, match=r"exit code 1\n(.*\n)*.*ZeroDivisionError"):
        listened(crew, ["1 / 0"], [FOREVER])
