"""``pccl publish`` and ``pccl subscribe`` as users run them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pccl
from pccl import SharedState, TensorInfo
from tests.support.commands import PCCL, environment_with, run_to_end
from tests.support.patience import LIMIT_S


def state_of(values: float, revision: int) -> SharedState:
    array = np.full((4, 5), values, np.float32)
    state = SharedState([TensorInfo.from_numpy(array, "w")])
    state.revision = revision
    return state


@pytest.fixture
def master() -> Iterator[str]:
    node = pccl.MasterNode("127.0.0.1:0")
    node.run()
    yield node.address
    node.interrupt()


def test_a_file_goes_from_a_publisher_to_readers(master: str, tmp_path: Path) -> None:
    file, there, log = tmp_path / "model.safetensors", tmp_path / "there.st", tmp_path / "log"
    state_of(1, 3).save(file)
    environment = environment_with()
    publisher = subprocess.Popen(
        [*PCCL, "publish", str(file), master, "--interval", "0.1"],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    reader = None
    try:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == f"version 3: 80 bytes of {file}\n"
        once = run_to_end(
            *PCCL, "subscribe", str(there), master, "--once", "--json", env=environment,
            limit_s=LIMIT_S,
        )  # fmt: skip
        assert json.loads(once.stdout)["version"] == 3
        assert SharedState.load(there).revision == 3
        command = f"echo $PCCL_VERSION $PCCL_FILE >> {log}"
        reader = subprocess.Popen(
            [*PCCL, "subscribe", str(there), master, "--run", command],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdout.readline() == f"version 3: 80 bytes in {there}\n"
        state_of(2, 4).save(file)
        assert publisher.stdout.readline() == f"version 4: 80 bytes of {file}\n"
        assert reader.stdout.readline() == f"version 4: 80 bytes in {there}\n"
        array = SharedState.load(there).tensor_infos[0].tensor
        assert np.array_equal(array, np.full((4, 5), 2, np.float32))  # type: ignore[arg-type]
        assert log.read_text().splitlines()[0] == f"3 {there}"
    finally:
        for process in (publisher, reader):
            if process is not None:
                process.kill()
                process.communicate()


def test_members_of_another_group_do_not_wait_for_a_publisher(master: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    state_of(1, 3).save(file)
    publisher = subprocess.Popen(
        [*PCCL, "publish", str(file), master, "--group", "7"],
        stdout=subprocess.PIPE, text=True, env=environment_with(),
    )  # fmt: skip
    try:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == f"version 3: 80 bytes of {file}\n"
        with pccl.Communicator(master) as comm:
            comm.connect(min_peers=2, timeout_s=LIMIT_S)
            for _ in range(5):
                comm.update_topology(timeout_s=LIMIT_S)
            assert comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) == 2
    finally:
        publisher.kill()
        publisher.communicate()


def test_a_publisher_outlives_files_that_cannot_be_published(master: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    own = SharedState([TensorInfo.from_numpy(np.zeros(3), "own", allow_content_inequality=True)])
    own.save(file)
    refused = run_to_end(*PCCL, "publish", str(file), master, env=environment_with())
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    state_of(1, 3).save(file)
    publisher = subprocess.Popen(
        [*PCCL, "publish", str(file), master, "--interval", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment_with(),
    )  # fmt: skip
    try:
        assert publisher.stdout is not None
        assert publisher.stderr is not None
        assert publisher.stdout.readline().startswith("version 3")
        own.save(file)
        assert publisher.stderr.readline().startswith("cannot publish")
        file.unlink()
        file.symlink_to(file)  # no process can look at it
        with pytest.raises(subprocess.TimeoutExpired):
            publisher.wait(0.5)  # it would end at its next look
        file.unlink()
        file.write_text("no checkpoint")
        assert publisher.stderr.readline().startswith("cannot publish")
        state_of(2, 4).save(file)
        assert publisher.stdout.readline().startswith("version 4")
    finally:
        publisher.kill()
        publisher.communicate()


def test_mistakes_end_with_a_line(master: str, tmp_path: Path) -> None:
    file = tmp_path / "none.safetensors"
    missing = run_to_end(*PCCL, "publish", str(file), master, env=environment_with())
    assert (missing.returncode, "cannot publish" in missing.stderr) == (1, True)
    late = run_to_end(
        *PCCL, "subscribe", str(file), master, "--timeout", "0.3", env=environment_with()
    )
    assert late.returncode == 1
    assert "no version has been published by more than half of the group yet" in late.stderr
