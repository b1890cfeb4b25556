"""Losses while a newcomer is between ``init_process_group`` and its first ``reconfigure``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pccl
from tests.integration.conftest import QUICK
from tests.support.commands import environment_with, running
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

TRAIN = """
import hashlib, json, os, time
import torch, torch.distributed as dist
import pccl.torch
from pccl.errors import StateUnavailable

def say(**what):
    print(json.dumps(what), flush=True)

dist.init_process_group("pccl")
say(rank=dist.get_rank(), size=dist.get_world_size())

def wait_for(file):
    while not os.path.exists(os.environ[file]):
        time.sleep(0.01)

wait_for("MODELS")
torch.manual_seed(os.getpid())
module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-4)
if os.environ.get("REFUSED"):
    for collective in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.broadcast_object_list([1], src=0),
        lambda: dist.all_gather_object([None] * dist.get_world_size(), 1),
        lambda: dist.send(torch.ones(1), dst=0),
        dist.barrier,
    ):
        try:
            collective()
        except RuntimeError as error:
            say(refused=str(error))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
resume = "never"
while True:
    try:
        model, step = pccl.torch.reconfigure(model, optimizer, step, resume=resume)
    except StateUnavailable as error:
        say(unavailable=str(error))
        resume = "highest"
        continue
    wait_for("STEPS")
    is_done = step >= 4 and dist.get_world_size() == int(os.environ["LAST_SIZE"])
    done = torch.tensor([float(is_done)])
    dist.all_reduce(done)
    if done.item() == dist.get_world_size():
        break
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    say(step=step)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters()))
say(end=step, rank=dist.get_rank(), digest=digest.hexdigest())
dist.destroy_process_group()
"""


class Scene:
    """A master, and the processes of a run.

    Members wait before their first step until ``admitted``, newcomers before they make their models
    until ``go``.

    Args:
        address: of the master.
        python: command of the interpreter.
        folder: for files.
        stack: ends the processes.
        last_size: size of the process group at which the run ends.
    """

    def __init__(
        self,
        address: str,
        python: tuple[str, ...],
        folder: Path,
        stack: contextlib.ExitStack,
        last_size: int,
    ) -> None:
        self.address, self._python, self._stack = address, python, stack
        self._steps, self._models = folder / "steps", folder / "models"
        self._last_size = str(last_size)

    def members(self, count: int) -> list[subprocess.Popen[str]]:
        """The first processes of the run."""
        return [self._begin(count, os.devnull) for _ in range(count)]

    def _begin(self, peers: int, models: str, **more: str) -> subprocess.Popen[str]:
        environment = environment_with(
            PCCL_MASTER=self.address,
            PCCL_PEERS=str(peers),
            MODELS=models,
            STEPS=str(self._steps),
            LAST_SIZE=self._last_size,
            **more,
        )
        return self._stack.enter_context(running(*self._python, "-c", TRAIN, env=environment))

    def admitted(self, members: int, count: int, **more: str) -> list[subprocess.Popen[str]]:
        """Newcomers that wait before they make their models, once all are members."""
        until(lambda: len(self.status().members) == members)
        newcomers = [self._begin(1, str(self._models), **more) for _ in range(count)]
        ready = ["the members' update_topology()"] * count  # and no link
        until(lambda: [one.waits_for for one in self.status().newcomers] == ready)
        self._steps.touch()
        for one in newcomers:
            assert one.stdout is not None
            assert "size" in json.loads(one.stdout.readline())
        return newcomers

    def lose(self, *processes: subprocess.Popen[str]) -> None:
        """Kill members, and wait until the master has removed them."""
        left = len(self.status().members) - len(processes)
        for one in processes:
            one.kill()
        until(lambda: len(self.status().members) == left)

    def go(self) -> None:
        """Let the newcomers go on."""
        self._models.touch()

    def status(self) -> pccl.MasterStatus:
        return pccl.master_status(self.address)


@pytest.fixture
def scene_of(ready_python: tuple[str, ...], tmp_path: Path) -> Iterator[Callable[[int], Scene]]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as node, contextlib.ExitStack() as stack:
        yield lambda last_size: Scene(node.address, ready_python, tmp_path, stack, last_size)


def told_by(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a process that ends well has said."""
    printed, complaints = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, complaints
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.parametrize("lost", ["a member", "all but one member", "one newcomer"])
def test_a_loss_while_newcomers_make_their_models(
    scene_of: Callable[[int], Scene], lost: str
) -> None:
    """The constructor of DDP makes no collective with the members, so it cannot fail."""
    scene = scene_of(4 if lost != "all but one member" else 3)
    members = scene.members(3)
    newcomers = scene.admitted(3, 2)
    gone = {
        "a member": members[:1],
        "all but one member": members[1:],
        "one newcomer": newcomers[:1],
    }
    scene.lose(*gone[lost])
    scene.go()
    ends = [told_by(one)[-1] for one in (*members, *newcomers) if one not in gone[lost]]
    assert len({(end["end"], end["digest"]) for end in ends}) == 1
    assert sorted(end["rank"] for end in ends) == list(range(len(ends)))


def test_a_newcomer_makes_no_other_collective(scene_of: Callable[[int], Scene]) -> None:
    scene = scene_of(2)
    (member,) = scene.members(1)
    (newcomer,) = scene.admitted(1, 1, REFUSED="1")
    scene.go()
    said = told_by(newcomer)
    refused = [one["refused"] for one in said if "refused" in one]
    assert len(refused) == 5
    assert all("call pccl.torch.reconfigure() first" in one for one in refused)
    assert said[-1]["digest"] == told_by(member)[-1]["digest"]


def test_newcomers_whose_members_are_all_lost(scene_of: Callable[[int], Scene]) -> None:
    """As with the other ways to train, nothing begins anew unless the program says so."""
    scene = scene_of(2)
    members = scene.members(2)
    newcomers = scene.admitted(2, 2)
    scene.lose(*members)
    scene.go()
    told = [told_by(one) for one in newcomers]
    for said in told:
        (unavailable,) = [one["unavailable"] for one in said if "unavailable" in one]
        assert "no member offers contents with revision" in unavailable
        assert 'resume="highest"' in unavailable
        assert next(one["step"] for one in said if "step" in one) == 1
    assert len({said[-1]["digest"] for said in told}) == 1
