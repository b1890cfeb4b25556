"""``DiLoCo`` in the trainers of transformers and lightning; both wrappers in loops of accelerate.

The peers compute in bfloat16, clip gradients, and accumulate those of two batches.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import pccl
from tests.support import forks
from tests.support.insides import machine_of
from tests.support.patience import LONG_LIMIT_S
from tests.support.peers import PeerProcess
from tests.support.waiting import until
from tests.trainers import tiny

if any(find_spec(name) is None for name in ("accelerate", "lightning", "transformers")):
    pytest.skip("pip install -e '.[trainers]'", allow_module_level=True)

KINDS = ["hugging_face", "lightning", "accelerate", "averager"]

STEPS = 40


class Crew:
    """A master, and peers of a kind, each a process."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        timing = pccl.Timing(heartbeat_s=0.2, tick_s=0.05)
        self.master = pccl.MasterNode("127.0.0.1:0", timing=timing)
        self.master.run()
        self.peers: list[PeerProcess] = []

    def start(self, peer: int, steps: int, **options: Any) -> PeerProcess:
        folder = str(self._folder / str(peer))
        given = tiny.Given(self.master.address, peer, folder, steps, **options)
        module = f"tests.trainers.{self._kind}_peer"
        self.peers.append(PeerProcess(module, json.dumps(asdict(given)), limit_s=LONG_LIMIT_S))
        return self.peers[-1]

    def wait_for(self, count: int) -> None:
        """Wait until so many peers have come, admitted or not, and have not gone."""
        peers = machine_of(self.master).membership.peers
        until(lambda: len(peers) == count, LONG_LIMIT_S)

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        self.master.interrupt()


@pytest.fixture(scope="module", autouse=True)
def peers_import_nothing() -> Iterator[None]:
    """They are forks of a process that has imported the trainers, which takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        forks.preload("tests.support.torch_ready", "tests.trainers.ready")
        yield


@pytest.fixture(params=KINDS)
def crews(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Crew]]:
    """Two crews of a kind, whose peers keep their checkpoints in the same folders."""
    made = [Crew(request.param, tmp_path) for _ in range(2)]
    yield made
    for crew in made:
        crew.close()


def test_a_peer_is_killed_and_another_joins_late(crews: list[Crew]) -> None:
    """The late one has the run's step, rate and moments at once, and all end with one model."""
    crew = crews[0]
    gate = 18 * tiny.ACCUMULATED
    three = [crew.start(n, STEPS, peers=3, gate=gate, compiles=n == 1) for n in range(3)]
    for peer in three:
        assert peer.answer() == {"gate": True}
    victim = three.pop()
    victim.process.send_signal(signal.SIGKILL)
    crew.wait_for(2)
    late = crew.start(3, STEPS, peers=3)
    crew.wait_for(3)
    for peer in three:
        peer.tell("go on")
    ends = [peer.answer() for peer in (*three, late)]
    assert len({end["model"] for end in ends}) == 1
    assert {(end["steps"], end["counted"], end["scheduled"]) for end in ends} == {(STEPS,) * 3}
    first, end = ends[0], ends[-1]
    assert set(first["rates"]) == {str(step + 1) for step in range(STEPS)}
    made = {int(step) for step in end["rates"]}
    assert made == set(range(min(made), STEPS + 1))
    assert 15 < min(made) < 25
    assert end["rates"] == {step: first["rates"][step] for step in end["rates"]}
    assert end["moments"] > STEPS - min(made) + 1  # the first ones came from a member
    ratios = [end["losses"][step] / first["losses"][step] for step in end["losses"]]
    assert all(0.8 < ratio < 1.25 for ratio in ratios)
    if "drawn" in first:
        rounds = range(tiny.SYNC_EVERY, STEPS + 1, tiny.SYNC_EVERY)
        assert first["drawn"] == list(rounds)
        assert end["drawn"] == [step for step in rounds if step >= min(made) - 1]


def test_a_run_continues_from_its_checkpoints_bit_for_bit(crews: list[Crew]) -> None:
    ends: list[dict[str, Any]] = []
    for crew, resume in zip(crews, (False, True), strict=True):
        two: list[PeerProcess] = []
        for peer in range(2):
            two.append(crew.start(peer, 20, save=8, resume=resume))
            crew.wait_for(peer + 1)
        ends += [peer.answer() for peer in two]
    assert len({end["model"] for end in ends}) == 1
    assert {(end["steps"], end["counted"], end["scheduled"]) for end in ends} == {(20,) * 3}
    assert ends[2]["rates"] == {step: ends[0]["rates"][step] for step in ends[2]["rates"]}
