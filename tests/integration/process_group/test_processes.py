"""``init_process_group("pccl")`` in processes of their own, one of which is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import pccl
from tests.integration.conftest import QUICK
from tests.integration.process_group.trainings import TRAININGS
from tests.support.commands import environment_with, run_to_end, running
from tests.support.patience import LIMIT_S, LONG_LIMIT_S

TRAIN = """
import hashlib, json, os, signal
import torch, torch.distributed as dist
import pccl.torch

dist.init_process_group("pccl")
print(json.dumps({"rank": dist.get_rank(), "size": dist.get_world_size()}), flush=True)
torch.manual_seed(os.getpid())
module = torch.nn.Sequential(
    torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
)
dies_at, ends_at = int(os.environ["DIES_AT"]), int(os.environ["ENDS_AT"])
steps = []

def hook(gradient):
    if steps and steps[-1] == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

module[2].weight.register_hook(hook)
model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1e-4)
optimizer = torch.optim.AdamW(model.parameters())
step = size = 0
while True:
    model, step = pccl.torch.reconfigure(model, optimizer, step)
    if dist.get_world_size() != size:
        size, since = dist.get_world_size(), step
        print(json.dumps({"since": step}), flush=True)
    done = torch.tensor([float(size == 3 and step >= max(ends_at, since + 3))])
    dist.all_reduce(done)
    if done.item() == 3.0:
        break
    steps.append(step)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    step += 1
    lost = len(pccl.torch.lost_ranks())
    print(json.dumps({"step": step, "size": size, "lost": lost}), flush=True)
digest = hashlib.sha256()
for value in module.parameters():
    digest.update(value.detach().numpy().tobytes())
print(json.dumps({"end": step, "rank": dist.get_rank(), "digest": digest.hexdigest()}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as entered:
        yield entered


@pytest.fixture
def master() -> Iterator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK) as node:
        yield node


def test_a_killed_rank_is_replaced(
    master: pccl.MasterNode, ready_python: tuple[str, ...], stack: contextlib.ExitStack
) -> None:
    def begin(dies_at: int, peers: int) -> Any:
        environment = environment_with(
            PCCL_MASTER=master.address,
            PCCL_PEERS=str(peers),
            DIES_AT=str(dies_at),
            ENDS_AT="12",
        )
        return stack.enter_context(running(*ready_python, "-c", TRAIN, env=environment))

    first = [begin(4 if number == 1 else -1, 3) for number in range(3)]
    assert first[1].wait(LIMIT_S) == 128 + signal.SIGKILL
    last = begin(-1, 1)
    told = [
        [json.loads(line) for line in one.communicate(timeout=LIMIT_S)[0].splitlines()]
        for one in (first[0], first[2], last)
    ]
    assert [one.returncode for one in (first[0], first[2], last)] == [0, 0, 0]
    assert sorted(lines[0]["rank"] for lines in told[:2]) != [0, 0]
    assert all(lines[0]["size"] == 3 for lines in told)
    assert len({lines[-1]["digest"] for lines in told}) == 1
    assert sorted(lines[-1]["rank"] for lines in told) == [0, 1, 2]
    for lines in told[:2]:
        steps = [line for line in lines if "step" in line]
        assert [line["step"] for line in steps] == list(range(1, lines[-1]["end"] + 1))
        assert [(line["size"], line["lost"]) for line in steps[3:6]] == [(3, 0), (3, 1), (2, 0)]
        assert steps[-1]["size"] == 3
    entered = told[2][1]["since"]
    assert entered >= 5
    assert [line["step"] for line in told[2][2:5]] == [entered + 1, entered + 2, entered + 3]
    assert {"since": entered} in told[0]
    assert {"since": entered} in told[1]


TALK = """
import torch, torch.distributed as dist
dist.init_process_group("pccl")
tensor = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(tensor)
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, (dist.get_rank(), dist.get_backend()))
print(tensor.item(), everybody, flush=True)
dist.destroy_process_group()
"""


AGAIN = """
import os, time
import torch, torch.distributed as dist
import pccl.torch
for turn in range(4):
    dist.init_process_group("pccl")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    if turn < 2:
        module = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        pccl.torch.reconfigure(module, optimizer, resume="highest")
    print(tensor.item(), flush=True)
    if turn % 2 == int(os.environ["SLOW"]):
        time.sleep(0.3)
    dist.destroy_process_group()
"""


def test_a_process_group_that_all_ranks_make_again(
    master: pccl.MasterNode, ready_python: tuple[str, ...], stack: contextlib.ExitStack
) -> None:
    """Whoever comes first waits for the others, some of which have not left yet.

    After a ``reconfigure`` in an earlier group they are no newcomers either.
    """
    ranks = [
        stack.enter_context(
            running(
                *(*ready_python, "-c", AGAIN),
                env=environment_with(PCCL_MASTER=master.address, PCCL_PEERS="2", SLOW=str(slow)),
            )
        )
        for slow in range(2)
    ]
    for one in ranks:
        printed, complaints = one.communicate(timeout=LIMIT_S)
        assert (printed, one.returncode) == ("2.0\n" * 4, 0), complaints


def test_ranks_from_elsewhere(ready_python: tuple[str, ...], stack: contextlib.ExitStack) -> None:
    """As under torchrun. Rank 0 runs the master, and does not end before the other has left."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        stack.enter_context(
            running(*ready_python, "-c", TALK, env=environment_with(RANK=str(rank), **places))
        )
        for rank in range(2)
    ]
    for one in ranks:
        printed, complaints = one.communicate(timeout=LIMIT_S)
        assert (printed, one.returncode) == ("3.0 [(0, 'pccl'), (1, 'pccl')]\n", 0), complaints


def test_a_new_interpreter_knows_the_backend() -> None:
    """torch calls the entry point; without it, the public module does the same."""
    check = "import torch.distributed as dist; print('PCCL' in dist.Backend._plugins)"
    for text, environment, expected in (
        (f"import torch; {check}", {}, "True"),
        (f"import torch; {check}", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "False"),
        (f"import pccl.torch; {check}", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "True"),
    ):
        done = run_to_end(sys.executable, "-c", text, env=environment_with(**environment))
        assert done.stdout.strip() == expected, done.stderr


def test_trainings_end_as_with_gloo(
    master: pccl.MasterNode, ready_python: tuple[str, ...], stack: contextlib.ExitStack
) -> None:
    """Bit for bit: a sum of two values has no order."""
    command = *ready_python, "-m", "tests.integration.process_group.trainings"
    environment = environment_with(PCCL_MASTER=master.address, PCCL_PEERS="2")
    ranks = [stack.enter_context(running(*command, env=environment)) for _ in range(2)]
    printed = [one.communicate(timeout=LONG_LIMIT_S) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], printed
    lines = printed[0][0].splitlines()
    assert lines == printed[1][0].splitlines()
    trained = [line.split(": ") for line in lines]
    assert [name for name, theirs, ours in trained if theirs == ours] == list(TRAININGS)
    assert len({ours for _, _, ours in trained}) > len(TRAININGS) / 2
