"""``ElasticSampler`` in processes that are killed while they train: 20 kills, and 20 joins.

Each sample that the ledger has as done must be in exactly one outcome, and no other sample in any.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import pccl
from pccl.bindings.data.sample_ledger import SampleLedger
from tests.integration.elastic_peer import TIMING
from tests.support.forks import ForkedProgram
from tests.support.patience import LONG_LIMIT_S

pytest.importorskip("torch")

KILLS = 20
PEERS = 3
MARGIN = 200
"""Rounds or steps between the word to stop and the end, so that all hear it in time."""

STEPS_S = 0.02
"""A few steps."""


class ElasticProcess:
    """One process, and what it says."""

    def __init__(self, master: str, options: dict[str, Any] | None) -> None:
        given = json.dumps({"master": master, "options": options})
        self.program = ForkedProgram("tests.integration.elastic_peer", given)
        self.said: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.program.stdout:
            with self._changed:
                if line.endswith("\n"):  # else it was killed meanwhile
                    self.said.append(json.loads(line))
                self._changed.notify_all()

    @property
    def number(self) -> int:
        """The last round or step that it has begun."""
        return max((one["number"] for one in self.said if "number" in one), default=0)

    def until_outcomes(self, count: int) -> None:
        """Wait until it has had so many outcomes with its own samples."""

        def has() -> bool:
            peers = {one["peer"] for one in self.said if "peer" in one}
            own = [one for one in self.said if peers.intersection(one.get("contributors", ()))]
            return len(own) >= count

        with self._changed:
            assert self._changed.wait_for(has, LONG_LIMIT_S), self.said[-3:]

    def end(self) -> None:
        """Wait for its end."""
        assert self.program.wait(LONG_LIMIT_S) == 0
        self._reader.join()

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        self._reader.join()
        self.program.stdout.close()
        self.program.stdin.close()


class Churn:
    """A master, and processes that come and go."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._options = options
        self._master = pccl.MasterNode("127.0.0.1:0", timing=TIMING)
        self._master.run()
        self.processes: list[ElasticProcess] = []
        self.alive = [self._start() for _ in range(PEERS)]

    def _start(self) -> ElasticProcess:
        self.processes.append(ElasticProcess(self._master.address, self._options))
        return self.processes[-1]

    def live(self) -> None:
        """Kill a process, and start another one, again and again; then end."""
        drawn = random.Random(1)
        for process in self.alive:
            process.until_outcomes(1)
        for _ in range(KILLS):
            victim = self.alive.pop(drawn.randrange(PEERS))
            time.sleep(drawn.uniform(0.0, STEPS_S))  # it may be anywhere in its step
            victim.program.kill()
            self.alive.append(self._start())
            self.alive[-1].until_outcomes(drawn.randint(1, 4))
        end = max(process.number for process in self.alive) + MARGIN
        for process in self.alive:
            process.program.stdin.write(f"{end}\n")
            process.program.stdin.flush()
        for process in self.alive:
            process.end()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self._master.interrupt()

    # -- what became of the samples ----------------------------------------------------------------

    def averaged(self) -> Counter[int]:
        """Return how often each sample is in an outcome."""
        said = [one for process in self.processes for one in process.said]
        given = {(one["number"], one["peer"]): one["samples"] for one in said if "samples" in one}
        if self._options is None:
            outcomes = {one["number"]: one["contributors"] for one in said if "contributors" in one}
            return Counter(
                sample
                for number, contributors in outcomes.items()
                for peer in contributors
                for sample in given[number, peer]
            )
        trained: defaultdict[int, list[int]] = defaultdict(list)
        for one in said:
            if "samples" in one:
                trained[one["peer"]] += one["samples"]
        rounds = {
            one["operation"]: list(zip(one["contributors"], one["weights"], strict=True))
            for one in said
            if "operation" in one
        }
        totals: Counter[int] = Counter()
        for weights in rounds.values():
            totals.update({peer: int(weight) for peer, weight in weights})
        return Counter(s for peer, total in totals.items() for s in trained[peer][:total])

    def done(self) -> set[int]:
        """Return the samples that the ledger of all survivors has as done."""
        (record,) = {tuple(process.said[-1]["ledger"]) for process in self.alive}
        ledger = SampleLedger(np.array(record, np.int64), 50)
        rest = {one for start, end in ledger.rest for one in range(start, end)}
        return set(range(ledger.next)) - rest


@pytest.fixture
def churn(request: pytest.FixtureRequest) -> Iterator[Churn]:
    made = Churn(request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "churn",
    [None, {"sync_every": 3}],
    ids=["averaged gradients", "rounds"],
    indirect=True,
)
def test_twenty_kills_and_twenty_joins(churn: Churn) -> None:
    churn.live()
    averaged, done = churn.averaged(), churn.done()
    assert max(averaged.values()) == 1
    assert averaged.keys() == done
    assert len(done) > 1000
