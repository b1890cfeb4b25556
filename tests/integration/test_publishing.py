"""Publishing with real members and readers: deltas, late readers, deaths, liars, and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import SharedState, TensorInfo
from pccl.errors import DeadlineExceeded, NotAdmitted, NotConnected
from pccl.publishing import Subscriber, Version
from pccl.runtime.publishing import exchange
from tests.integration.conftest import QUICK, Array, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

RunOf = Callable[..., Run]
TOKEN = "correct-horse-battery-staple-9f2c41"
COUNT = 3 << 19
"""Elements of 6 MiB of float32: six pieces."""


class Model:
    """A state of one large and one small tensor, equal on all members."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights = self.rng.standard_normal(COUNT, np.float32).reshape(-1, 1024)
        self.steps = np.zeros((), np.int64)
        self.noise = np.zeros(3, np.float32)
        self.state = SharedState(
            [
                TensorInfo.from_numpy(self.weights, "weights"),
                TensorInfo.from_numpy(self.noise, "noise", allow_content_inequality=True),
                TensorInfo.from_numpy(self.steps, "steps"),
            ]
        )

    def train(self, share: float = 0.01) -> None:
        flat = self.weights.reshape(-1)
        flat[self.rng.random(COUNT) < share] += 1
        self.steps += 1
        self.state.push_revision()


@pytest.fixture
def run_of(stack: ExitStack) -> RunOf:
    """Make a run of its own, because the master remembers what was published."""

    def make(size: int, token: str | None = None) -> Run:
        run = Run(QUICK, token)
        stack.callback(run.close)
        for _ in range(size):
            run.join()
        return run

    return make


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def reader_of(stack: ExitStack, run: Run, **options: Any) -> Subscriber:
    return stack.enter_context(Subscriber(run.master.address, timing=QUICK, **options))


def published(run: Run, models: list[Model]) -> dict[str, Array]:
    """Let all members publish, and return what readers should see."""
    for member, model in zip(run.members, models, strict=True):
        assert member.publish(model.state) == model.state.revision
    return {"weights": models[0].weights.copy(), "steps": models[0].steps.copy()}


def check(version: Version, wanted: dict[str, Array]) -> None:
    assert version.tensors.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(version.tensors[name], values)
        assert version.tensors[name].shape == values.shape


def number_of(reader: Subscriber) -> int | None:
    return None if reader.version is None else reader.version.number


def received(reader: Subscriber) -> int:
    return reader.received_bytes


def test_a_version_and_what_changes_after_it(run_of: RunOf, stack: ExitStack) -> None:
    run, models = run_of(2), [Model(), Model()]
    readers = [reader_of(stack, run) for _ in range(2)]
    wanted = published(run, models)
    for reader in readers:
        check(reader.next(LIMIT_S), wanted)
    for _ in range(3):
        for model in models:
            model.train()
        before = [received(reader) for reader in readers]
        wanted = published(run, models)
        for reader, known in zip(readers, before, strict=True):
            version = reader.next(LIMIT_S)
            check(version, wanted)
            assert version.number == models[0].state.revision
            assert received(reader) - known < 0.03 * version.nbytes
    assert not run.machine.membership.pending()
    assert len(run.machine.membership.peers) == 2


def test_a_program_takes_a_version_into_its_tensors(
    run_of: RunOf, stack: ExitStack, tmp_path: Path
) -> None:
    run, models = run_of(1), [Model()]
    reader = reader_of(stack, run)
    models[0].train()
    wanted = published(run, models)
    version = reader.next(LIMIT_S)
    own = Model(seed=2)
    own.noise[:] = 7
    version.load(own.state)
    assert np.array_equal(own.weights, wanted["weights"])
    assert (int(own.steps), own.state.revision, own.noise[0]) == (1, 1, 7)
    version.save(tmp_path / "model.safetensors")
    saved = SharedState.load(tmp_path / "model.safetensors")
    assert [info.shape for info in saved.tensor_infos] == [(COUNT // 1024, 1024), ()]
    assert saved.revision == 1
    other = SharedState([TensorInfo.from_numpy(own.steps, "steps")])
    with pytest.raises(ValueError, match="version 1 has the tensor 'weights'"):
        version.load(other)
    with pytest.raises(ValueError, match="read-only"):
        version.tensors["weights"][0, 0] = 1


def test_a_late_reader_and_one_that_was_asleep(run_of: RunOf, stack: ExitStack) -> None:
    run, models = run_of(1), [Model()]
    first = reader_of(stack, run)
    published(run, models)
    first.next(LIMIT_S)
    for _ in range(3):
        models[0].train(0.002)
        published(run, models)
    models[0].train(0.002)
    wanted = published(run, models)
    late = reader_of(stack, run)
    for reader in (first, late):
        until(lambda: number_of(first) == number_of(late) == 4)
        check(reader.next(LIMIT_S), wanted)
    assert received(first) < 1.2 * 4 * COUNT


def test_the_same_contents_with_another_number(run_of: RunOf, stack: ExitStack) -> None:
    run, models = run_of(1), [Model()]
    reader = reader_of(stack, run)
    wanted = published(run, models)
    known = reader.next(LIMIT_S)
    models[0].state.revision = 9
    published(run, models)
    version = reader.next(LIMIT_S)
    check(version, wanted)
    assert (version.number, version.digest) == (9, known.digest)
    assert received(reader) < 1.01 * version.nbytes


def test_a_small_state_that_changes_as_a_whole(run_of: RunOf, stack: ExitStack) -> None:
    """Its delta has the same bytes as the version, and so the same digest of its contents."""
    run, array = run_of(1), np.ones((4, 5), np.float32)
    state, reader = SharedState([TensorInfo.from_numpy(array, "w")]), reader_of(stack, run)
    for _ in range(3):
        run.members[0].publish(state)
        check(reader.next(LIMIT_S), {"w": array})
        array += 1
        state.push_revision()


def test_one_member_alone_convinces_nobody(run_of: RunOf, stack: ExitStack) -> None:
    run, honest = run_of(3), [Model(), Model()]
    liar = Model(seed=3)
    liar.state.revision = 5
    reader = reader_of(stack, run)
    run.members[2].publish(liar.state)
    with pytest.raises(DeadlineExceeded, match="published by more than half"):
        reader.next(0.5)
    for member, model in zip(run.members[:2], honest, strict=True):
        member.publish(model.state)
    version = reader.next(LIMIT_S)
    assert version.number == 0
    assert np.array_equal(version.tensors["weights"], honest[0].weights)


def test_readers_outlive_a_member_and_a_member_outlives_readers(
    run_of: RunOf, stack: ExitStack
) -> None:
    run, models = run_of(2), [Model(), Model()]
    readers = [reader_of(stack, run) for _ in range(3)]
    wanted = published(run, models)
    for reader in readers:
        check(reader.next(LIMIT_S), wanted)
    readers[0].close()
    run.members[0].close()
    models[1].train()
    run.members[1].publish(models[1].state)
    for reader in readers[1:]:
        assert reader.next(LIMIT_S).number == 1
    late = reader_of(stack, run)
    assert np.array_equal(late.next(LIMIT_S).tensors["weights"], models[1].weights)


def test_a_process_serves_a_few_readers_and_these_serve_the_rest(
    run_of: RunOf, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "READER_LINKS_MAX", 1)
    run, model = run_of(1), Model()
    readers = [reader_of(stack, run) for _ in range(4)]
    run.members[0].publish(model.state)
    for reader in readers:
        assert np.array_equal(reader.next(LIMIT_S).tensors["weights"], model.weights)
    served = engine_of(run.members[0]).publisher.exchange
    assert sum(link.up for link in served.links.all()) == 1


def test_another_layout_is_another_state(run_of: RunOf, stack: ExitStack) -> None:
    run = run_of(1)
    reader = reader_of(stack, run)
    published(run, [Model()])
    reader.next(LIMIT_S)
    small = np.arange(5, dtype=np.float16)
    state = SharedState([TensorInfo.from_numpy(small, "small")])
    state.revision = 3
    run.members[0].publish(state)
    check(reader.next(LIMIT_S), {"small": small})


def test_a_limit_for_all_readers_together(run_of: RunOf, stack: ExitStack) -> None:
    run, model = run_of(1), Model()
    run.members[0].publish(model.state, readers_bytes_per_s_max=64 << 20)
    reader = reader_of(stack, run)
    assert np.array_equal(reader.next(LIMIT_S).tensors["weights"], model.weights)
    with pytest.raises(ValueError, match="readers_bytes_per_s_max must be at least"):
        run.members[0].publish(model.state, readers_bytes_per_s_max=10)


def test_what_a_program_is_told(run_of: RunOf, stack: ExitStack) -> None:
    run = run_of(1, token=TOKEN)
    with pytest.raises(NotAdmitted, match="token"):
        reader_of(stack, run, token=TOKEN[::-1]).next(LIMIT_S)
    reader = reader_of(stack, run, token=TOKEN)
    with pytest.raises(DeadlineExceeded, match="published by more than half"):
        reader.next(0.2)
    reader.close()
    with pytest.raises(NotConnected, match="is closed"):
        reader.next()
    assert list(reader) == []
    newcomer = stack.enter_context(pccl.Communicator(run.master.address, token=TOKEN))
    with pytest.raises(NotConnected, match="connect"):
        newcomer.publish(Model().state)


def test_with_asyncio(run_of: RunOf, stack: ExitStack) -> None:
    run, model = run_of(1), Model()
    reader = reader_of(stack, run)

    async def read() -> Version:
        waiting = asyncio.create_task(reader.next_async())
        await asyncio.sleep(0)
        run.members[0].publish(model.state)
        return await asyncio.wait_for(waiting, LIMIT_S)

    assert asyncio.run(read()).number == 0
