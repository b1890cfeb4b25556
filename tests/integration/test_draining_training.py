"""SIGTERM to a peer that trains: its steps are in the model, it exits with 0, and nobody waits.

Real processes. This file is also the program that they run. The model is one number: an inner step
subtracts 1 and weighs 1, so the weight of a contribution is its number of steps.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import pccl  # noqa: E402
from pccl.bindings.diloco import DiLoCo  # noqa: E402
from pccl.bindings.events import Event, OuterStep  # noqa: E402
from pccl.bindings.gradient_averager import GradientAverager  # noqa: E402

STEP_S = 0.02
MANY = 10_000
"""No round would begin by itself."""

# -- the program -----------------------------------------------------------------------------------


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)  # noqa: T201


def one_number() -> tuple[Any, Any, Any]:
    model = torch.nn.Module()
    model.w = weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32))
    return model, weight, torch.optim.SGD([weight], lr=1.0)


def diloco(comm: pccl.Communicator, on_event: Any, **options: Any) -> tuple[DiLoCo, Any]:
    """Two parameters, so that there can be two fragments."""
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float32)) for _ in range(2)]
    optimizer = DiLoCo(
        [(f"w{index}", one) for index, one in enumerate(parameters)],
        inner=torch.optim.SGD(parameters, lr=1.0),
        comm=comm,
        outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        on_event=on_event,
        **options,
    )

    def step() -> None:
        time.sleep(STEP_S)  # it computes
        for one in parameters:
            one.grad = torch.ones(4)
        optimizer.step()

    return optimizer, step


def train(comm: pccl.Communicator, options: dict[str, Any]) -> None:
    """Train until SIGTERM."""

    def hear(event: Event) -> None:
        if isinstance(event, OuterStep):
            say("round", fragment=event.fragment, weight=event.own_weight)

    optimizer, step = diloco(comm, hear, **options)
    with optimizer:
        optimizer.join()
        try:
            for made in itertools.count(1):
                step()
                say("step", made=made)
        finally:
            say("left", steps=optimizer.inner_steps)


def average(comm: pccl.Communicator, options: dict[str, Any]) -> None:
    """Train until SIGTERM."""
    model, weight, optimizer = one_number()
    with GradientAverager(model, optimizer, comm=comm, **options) as averager:
        try:
            while True:
                averager.update()
                optimizer.zero_grad()
                weight.sum().backward()
                time.sleep(STEP_S)
                averager.step()
                say("step", made=averager.steps)
        finally:
            say("left", steps=averager.steps)


def main(part: str, options: str) -> None:
    with pccl.Communicator() as comm:
        globals()[part](comm, json.loads(options))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    sys.exit()

# -- the tests -------------------------------------------------------------------------------------

from pccl.inquiry import RemovalCause  # noqa: E402
from tests.integration.conftest import Run  # noqa: E402
from tests.support.commands import environment_with  # noqa: E402
from tests.support.patience import LIMIT_S, patient  # noqa: E402

SOON_S = patient(5.0)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(ready_python: tuple[str, ...]) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def make(
        run: Run, part: str, *, notice_s: float = SOON_S, **options: Any
    ) -> subprocess.Popen[str]:
        notice = {"PCCL_DRAIN": "1", "PCCL_DRAIN_S": f"{notice_s:g}", "PCCL_LOG": "warning"}
        command = [*ready_python, __file__, part, json.dumps(options)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = environment_with(PCCL_MASTER=run.master.address, **notice)
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.communicate()


def until_step(process: subprocess.Popen[str], number: int) -> list[dict[str, Any]]:
    """Read what it says, until it has made a step."""
    assert process.stdout is not None
    said: list[dict[str, Any]] = []
    for line in process.stdout:
        said.append(json.loads(line))
        if said[-1].get("made", 0) >= number:
            return said
    raise AssertionError(process.communicate())


def terminated(process: subprocess.Popen[str]) -> tuple[int, str, list[dict[str, Any]], float]:
    """Send SIGTERM; return status, errors, what it still says, and how long it took."""
    sent_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LIMIT_S)
    took_s = time.monotonic() - sent_s
    return process.returncode, err, [json.loads(line) for line in out.splitlines()], took_s


class Staying:
    """A replica that trains in a thread until ``end``."""

    def __init__(self, run: Run, **options: Any) -> None:
        self.events: list[Event] = []
        self.stops = False
        self.optimizer, self._step = diloco(run.newcomer(), self.events.append, **options)
        self._ends = run.start(self._train)

    def _train(self) -> None:
        with self.optimizer:
            self.optimizer.join()
            while not self.stops:
                self._step()

    @property
    def rounds(self) -> list[OuterStep]:
        return [event for event in self.events if isinstance(event, OuterStep)]

    def end(self) -> None:
        self.stops = True
        self._ends.result(LIMIT_S)


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": MANY},
        {"sync_every": MANY, "delay": 3},
        {"sync_every": MANY, "fragments": 2},
        {"sync_every": "1h"},
        {"sync_every": MANY, "quorum": 2, "grace_s": 30.0},
    ],
    ids=["steps", "delayed", "two fragments", "time", "quorum"],
)
def test_all_steps_of_a_replica_are_in_the_model(
    new_run: Callable[..., Run], start: Start, options: dict[str, Any]
) -> None:
    run = new_run()
    staying = [Staying(run, min_peers=3, **options) for _ in range(2)]
    process = start(run, "train", min_peers=3, **options)
    before = until_step(process, 7)
    assert [one for one in before if one["what"] == "round"] == []
    status, err, said, took_s = terminated(process)
    assert (status, err) == (0, "")
    assert took_s < SOON_S
    fragments = options.get("fragments", 1)
    (steps,) = (one["steps"] for one in said if one["what"] == "left")
    rounds = [one for one in said if one["what"] == "round"]
    assert [one["fragment"] for one in rounds] == list(range(fragments))
    assert {one["weight"] for one in rounds} == {steps}
    run.until(lambda: all(len(one.rounds) == fragments for one in staying))
    for number in range(fragments):
        made = [one.rounds[number] for one in staying]
        assert {one.total_weight for one in made} == {steps + sum(one.own_weight for one in made)}
        # At most the rest of an inner step, and the round.
        assert all(one.exposed_s < SOON_S / 2 for one in made)
    assert [one.cause for one in pccl.master_status(run.master.address).removals] == [
        RemovalCause.GOODBYE
    ]
    for one in staying:
        done = one.optimizer.inner_steps
        run.until(lambda one=one, done=done: one.optimizer.inner_steps > done + 5)  # type: ignore[misc]
        if "quorum" not in options and isinstance(options["sync_every"], int):
            ahead = one.optimizer.steps - one.optimizer.inner_steps
            assert ahead in (0, 1), "steps of the run, which no early round changes"
    for one in staying:
        one.end()


def test_a_member_that_is_behind_begins_the_round_that_a_leaving_one_waits_for(
    new_run: Callable[..., Run], start: Start
) -> None:
    """The round was due for one of them only."""
    run = new_run()
    options: dict[str, Any] = {"sync_every": 5, "min_peers": 2}
    comm, events = run.newcomer(), list[Event]()
    optimizer, step = diloco(comm, events.append, **options)
    joins = run.start(optimizer.join)
    process = start(run, "train", **options)
    joins.result(LIMIT_S)
    step()
    until_step(process, 4)
    run.until(lambda: run.round_requests == 1)
    process.send_signal(signal.SIGTERM)
    run.until(lambda: comm.is_awaited)
    step()
    (made,) = (event for event in events if isinstance(event, OuterStep))
    assert (made.own_weight, made.total_weight) == (2.0, 7.0)
    assert terminated(process)[:2] == (0, "")
    assert (optimizer.round, optimizer.steps) == (1, 2)
    optimizer.close()


def test_a_replica_whose_work_no_member_takes_leaves_when_the_notice_is_over(
    new_run: Callable[..., Run], start: Start
) -> None:
    """Another member is stuck in its step."""
    run = new_run()
    options: dict[str, Any] = {"sync_every": MANY, "min_peers": 2}
    optimizer, _ = diloco(run.newcomer(), (), **options)
    joins = run.start(optimizer.join)
    process = start(run, "train", notice_s=0.5, **options)
    joins.result(LIMIT_S)
    until_step(process, 3)
    status, err, said, took_s = terminated(process)
    assert status == 128 + signal.SIGTERM
    assert "this peer leaves 0.5 s after SIGTERM (PCCL_DRAIN_S)" in err
    assert [one["what"] for one in said][-1] == "left"
    assert took_s >= 0.5
    optimizer.close()


def test_a_replica_without_work_leaves_at_once(new_run: Callable[..., Run], start: Start) -> None:
    run = new_run()
    process = start(run, "train", sync_every=MANY, min_peers=2)
    run.until(lambda: run.registered == 1)
    assert terminated(process)[:3] == (0, "", [])


def test_a_step_of_averaged_gradients_is_finished(
    new_run: Callable[..., Run], start: Start
) -> None:
    run = new_run()
    model, weight, optimizer = one_number()
    comm = run.newcomer()
    waits: list[float] = []

    def stay() -> None:
        with GradientAverager(model, optimizer, comm=comm, min_peers=2) as averager:
            while len(averager_members(averager, comm)) > 1 or averager.steps < 5:
                weight.grad = None
                weight.sum().backward()
                time.sleep(STEP_S)
                called_s = time.monotonic()
                assert averager.step()
                waits.append(time.monotonic() - called_s)

    def averager_members(averager: GradientAverager, comm: pccl.Communicator) -> Any:
        averager.update()
        return comm.members()

    stays = run.start(stay)
    process = start(run, "average", min_peers=2)
    until_step(process, 7)
    status, err, said, took_s = terminated(process)
    assert (status, err) == (0, "")
    assert took_s < SOON_S
    stays.result(LIMIT_S)
    (steps,) = (one["steps"] for one in said if one["what"] == "left")
    assert steps >= 7
    assert max(waits) < SOON_S / 2
    assert [one.cause for one in pccl.master_status(run.master.address).removals] == [
        RemovalCause.GOODBYE
    ]
