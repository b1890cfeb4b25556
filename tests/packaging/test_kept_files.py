"""Files that earlier versions have written can still be read.

``kept/`` holds a checkpoint, pickled errors, the log of a training run, a scenario of the simulator
and the state of a master, as written on 2026-11-24, and what ``DiLoCo.state_dict`` returned on
2026-11-28. They are not made anew when the code moves: who
has such files has no other version to read them with.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import errors
from pccl.bindings import events
from pccl.machines.master.succession.vouched import NOT_TOLD
from pccl.runtime.master_store import DirectoryStore
from pccl.shared_state import SharedState
from pccl.stress.sim.scenarios import file as scenario_file

KEPT = Path(__file__).with_name("kept")
CONTENTS = {
    "weight": np.arange(12, dtype=np.float32).reshape(3, 4) / 8,
    "step": np.array([7], dtype=np.int64),
}


def test_a_checkpoint() -> None:
    state = SharedState.load(KEPT / "state.safetensors")
    assert state.revision == 3
    infos = {info.name: info for info in state.tensor_infos}
    assert infos.keys() == CONTENTS.keys()
    again = {name: np.zeros_like(array) for name, array in CONTENTS.items()}
    restored = SharedState([pccl.TensorInfo.from_numpy(a, n) for n, a in again.items()])
    restored.restore(KEPT / "state.safetensors")
    assert restored.revision == 3
    for name, array in CONTENTS.items():
        np.testing.assert_array_equal(again[name], array)


def test_every_error() -> None:
    kept = json.loads((KEPT / "errors.json").read_text(encoding="utf-8"))
    kinds = {
        name
        for name in errors.__all__
        if isinstance(kind := getattr(errors, name), type) and issubclass(kind, errors.PCCLError)
    }
    assert kinds <= kept.keys(), "add the pickle of a new error, and keep the old ones"
    for name, pickled in kept.items():
        error = pickle.loads(bytes.fromhex(pickled))
        assert type(error) is getattr(errors, name)
        assert (error.func, error.reason) == ("all_reduce", f"why {name} was raised")


def test_the_log_of_a_training_run() -> None:
    for line in (KEPT / "run.jsonl").read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        kind = getattr(events, given.pop("event"))
        assert given.pop("time").endswith("+00:00")
        assert given.keys() <= {field.name for field in fields(kind)}, "later versions add fields"
        kind(**given)


def test_a_scenario_of_the_simulator() -> None:
    scenario = scenario_file.load(KEPT / "scenario.json")
    assert (scenario.seed, scenario.peers, len(scenario.faults)) == (1, 3, 7)


def test_the_state_of_a_master() -> None:
    kept = DirectoryStore(KEPT).load()
    assert kept is not None
    assert (kept.run, kept.term, kept.incumbent) == (b"the run of these", 4, b"master A")
    assert kept.coordinated
    assert kept.vouched == NOT_TOLD, "its members had no keys"


def test_the_checkpoint_of_a_diloco() -> None:
    """It was written after step 5, between a launch after step 4 and its merge after step 6."""
    torch: Any = pytest.importorskip("torch")
    from pccl.bindings.diloco import DiLoCo

    kept = torch.load(KEPT / "diloco.pt", weights_only=True)
    model = torch.nn.Linear(2, 1)
    model.load_state_dict(kept["model"])
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    master = pccl.MasterNode("127.0.0.1:0")
    master.run()
    with (
        pccl.Communicator(master.address) as comm,
        DiLoCo(
            model,
            inner=inner,
            comm=comm,
            sync_every=4,
            delay=2,
            mixing=0.0,
            outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        ) as optimizer,
    ):
        optimizer.load_state_dict(kept["optimizer"])
        while optimizer.inner_steps < 8:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.finish()
        assert (optimizer.outer_steps, optimizer.steps) == (2, 8)
    master.interrupt()
    moved = velocity = 0.0
    for step in range(8):
        velocity = 0.5 * velocity + 1.0
        moved -= velocity if step not in (4, 5) else 0.0  # the merge replaces steps 5 and 6
    for parameter in model.parameters():
        assert torch.equal(parameter.detach(), torch.full_like(parameter, moved))
