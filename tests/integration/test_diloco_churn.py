"""``DiLoCo`` in processes that are killed, stopped and started while they train; and sharded."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pccl
from tests.support.forks import ForkedProgram
from tests.support.patience import LONG_LIMIT_S

TIMING = {"heartbeat_s": 0.2, "tick_s": 0.05, "deadline_s": 3.0, "lane_stall_s": 3.0}

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"sync_every": 5},
    "streaming": {"sync_every": 8, "delay": 3, "fragments": 2, "compression": "int4"},
    "one round delayed": {"sync_every": 5, "delay": 5},
}


class Process:
    """One process, and what it says."""

    def __init__(self, program: str, given: dict[str, Any]) -> None:
        self._process = ForkedProgram(f"tests.integration.{program}", json.dumps(given))
        self.said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._changed:
                self.said.append(json.loads(line))
                self._changed.notify_all()

    def hear(self, kind: str, found: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        """Wait until it has said this."""

        def has_said() -> bool:
            return any(one["event"] == kind and found(one) for one in self.said)

        with self._changed:
            assert self._changed.wait_for(has_said, LONG_LIMIT_S), self.said[-3:]

    def end(self) -> dict[str, Any]:
        """Wait for its end; what it said last."""
        assert self._process.wait(LONG_LIMIT_S) == 0
        self._reader.join()
        return self.said[-1]

    def heard(self, kind: str) -> dict[str, Any]:
        """What it said first of this kind."""
        return next(one for one in self.said if one["event"] == kind)

    def outer_steps(self) -> list[dict[str, Any]]:
        return [one for one in self.said if one["event"] == "OuterStep"]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._process.stdin.close()


class Run:
    """A master and processes."""

    def __init__(self) -> None:
        self.master = pccl.MasterNode("127.0.0.1:0", timing=pccl.Timing(**TIMING))
        self.master.run()
        self.processes: list[Process] = []

    def start(self, rounds: int, after: int, options: dict[str, Any]) -> Process:
        """One more peer, until so many rounds after the first with a peer of id ``after``."""
        given = {
            "master": self.master.address,
            "index": len(self.processes),
            "rounds": rounds,
            "after": after,
            "step_s": 0.004,
            "timing": TIMING,
            "options": options,
        }
        return self.launch("diloco_peer", given)

    def launch(self, program: str, given: dict[str, Any]) -> Process:
        self.processes.append(Process(program, given))
        return self.processes[-1]

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.master.interrupt()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    made.close()


def is_of(count: int) -> Callable[[dict[str, Any]], bool]:
    """Whether an outer step is one of so many peers."""
    return lambda event: len(event["contributors"]) == count


def check_conserved(process: Process) -> None:
    """Each inner step of a survivor went into exactly one pseudo-gradient."""
    stopped = next(said["round"] for said in process.said if said["event"] == "stopped")
    steps = [step for step in process.outer_steps() if step["number"] <= stopped]
    fragments = max(step["fragment"] for step in steps) + 1
    for fragment in range(fragments):
        weights = [step["own_weight"] for step in steps if step["fragment"] == fragment]
        assert sum(weights) <= 16 * process.said[-1]["steps"]
        launched = [weight for weight in weights if weight]
        assert set(launched[1:]) <= {launched[1]}


@pytest.mark.parametrize("mode", MODES)
def test_one_is_killed_and_another_joins(run: Run, mode: str) -> None:
    options = MODES[mode] | {"min_peers": 2}
    three = [run.start(30, 4, options) for _ in range(3)]
    victim = three.pop()
    victim.hear("OuterStep", is_of(3))
    victim.send(signal.SIGKILL)
    for survivor in three:
        survivor.hear("MembersChanged", lambda event: bool(event["lost"]))
    newcomer = run.start(30, 4, options)
    ended = [process.end() for process in (*three, newcomer)]
    assert len({end["model"] for end in ended}) == 1
    assert len({end["round"] for end in ended}) == 1
    for survivor in three:
        numbers = [step["number"] for step in survivor.outer_steps()]
        assert numbers == list(range(numbers[0], ended[0]["round"] + 1))
        check_conserved(survivor)
    assert any(map(is_of(3), newcomer.outer_steps()))
    assert all(steps > 0 for steps in newcomer.heard("joined")["moments"])
    assert all(process.heard("stopped")["behind"] == 0 for process in (*three, newcomer))


@pytest.mark.parametrize("mode", MODES)
def test_one_is_stopped_for_longer_than_the_deadline(run: Run, mode: str) -> None:
    """It is cut off, comes back by itself, and ends with the same model."""
    options = MODES[mode] | {"min_peers": 3}
    three = [run.start(30, 4, options) for _ in range(3)]
    frozen, *others = three
    for process in three:
        process.hear("OuterStep", lambda event: event["number"] >= 3)
    frozen.send(signal.SIGSTOP)
    for process in others:
        process.hear("MembersChanged", lambda event: bool(event["lost"]))
    frozen.send(signal.SIGCONT)
    ended = [process.end() for process in three]
    assert len({end["model"] for end in ended}) == 1
    seen = [event for event in frozen.said if event["event"] == "MembersChanged"]
    assert len({event["peer_id"] for event in seen}) == 2
    assert [event["rejoined"] for event in frozen.said if event["event"] == "Joined"][-1]
    assert is_of(3)(frozen.outer_steps()[-1])
    assert all(process.heard("stopped")["behind"] == 0 for process in three)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_shards_of_replicas(run: Run, tmp_path: Path, seeds: tuple[int, int]) -> None:
    """Two replicas of two shards each: gloo inside a replica, one peer group for each shard.

    Each shard's group elects for itself. If some shards of a replica are changed by that, all of
    them leave out the first step, or they would wait for each other.
    """
    options = {"sync_every": 4, "delay": 1, "fragments": 2}
    processes = [
        run.launch(
            "fsdp_peer",
            {
                "master": run.master.address,
                "replica": replica,
                "shard": shard,
                "seed": seeds[replica],
                "store": str(tmp_path / f"store{replica}"),
                "rounds": 6,
                "options": options,
            },
        )
        for replica in range(2)
        for shard in range(2)
    ]
    ended = [process.end() for process in processes]
    assert len({end["model"] for end in ended}) == 1
    assert [end["worlds"] for end in ended] == [[2]] * 4
