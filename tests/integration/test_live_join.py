"""Newcomers that fetch what the members hold before they are admitted, and that replay reductions.

Which pieces move when is decided by the test: members work on only after the newcomer is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import ObservedReduction, ReduceOp, SharedState, SyncProgress, TensorInfo, Timing
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.runtime.state.upload import StateUpload
from pccl.shared_state import SharedStateSyncInfo
from tests.integration.conftest import Array, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S

PIECES = 6
PIECE_FLOATS = PIECE_BYTES // 4
SIZE = (PIECES - 1) * PIECE_FLOATS + 5
"""The last piece is a short one."""


def weights(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


def state_of(*tensors: Array) -> SharedState:
    return SharedState([TensorInfo.from_numpy(t, f"t{i}") for i, t in enumerate(tensors)])


def sync_each(run: Run, states: list[SharedState], **options: Any) -> list[SharedStateSyncInfo]:
    started = [
        run.start(member.sync_shared_state, state, **options)
        for member, state in zip(run.members, states, strict=True)
    ]
    return [future.result(LIMIT_S) for future in started]


def until_ready(run: Run) -> None:
    """A newcomer may be admitted: it has fetched what it can."""
    run.until(lambda: all(run.each(lambda member: member.are_peers_pending())))


def admit(run: Run, newcomer: pccl.Communicator, joining: Future[Any]) -> None:
    run.each(lambda member: member.update_topology())
    joining.result(LIMIT_S)
    run.members.append(newcomer)


def joined(run: Run, newcomer: pccl.Communicator, state: SharedState, **options: Any) -> None:
    """Let it fetch, then admit it."""
    joining = run.start(newcomer.connect, shared_state=state, **options)
    until_ready(run)
    admit(run, newcomer, joining)


def synchronized(run: Run) -> tuple[list[Array], list[SharedState]]:
    """All members have the same tensor."""
    tensors = [weights(1) for _ in run.members]
    states = [state_of(tensor) for tensor in tensors]
    sync_each(run, states)
    return tensors, states


def test_only_what_has_changed_since_moves_when_it_is_admitted(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    tensors, states = synchronized(run)
    newcomer, own = run.newcomer(), weights(2)
    before, seen = own.copy(), list[SyncProgress]()
    joining = run.start(newcomer.connect, shared_state=state_of(own), on_progress=seen.append)
    until_ready(run)
    assert (own == before).all()
    assert all(progress.phase == "prefetching" for progress in seen)
    for tensor, state in zip(tensors, states, strict=True):
        tensor[2 * PIECE_FLOATS] = 7  # in one piece
        state.push_revision()
    admit(run, newcomer, joining)
    assert (own == before).all()
    mine = state_of(own)
    infos = sync_each(run, [*states, mine])
    assert infos[3].rx_bytes == SIZE * 4  # another state than the one that was fetched for
    assert own.tobytes() == tensors[0].tobytes()


def test_what_was_fetched_counts_for_the_state_it_was_fetched_for(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(3)
    tensors, states = synchronized(run)
    newcomer, own = run.newcomer(), weights(2)
    mine = state_of(own)
    joining = run.start(newcomer.connect, shared_state=mine)
    until_ready(run)
    for tensor, state in zip(tensors, states, strict=True):
        tensor[2 * PIECE_FLOATS] = 7
        state.push_revision()
    admit(run, newcomer, joining)
    infos = sync_each(run, [*states, mine])
    assert [info.rx_bytes for info in infos] == [0, 0, 0, PIECE_BYTES]
    assert sum(info.tx_bytes for info in infos) == PIECE_BYTES
    assert own.tobytes() == tensors[0].tobytes()
    assert mine.revision == states[0].revision == 1


def test_a_piece_that_is_changing_is_nobodys_fault(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    tensors, states = synchronized(run)
    for tensor in tensors:
        tensor[0] = 3  # since the synchronization, before anybody fetches
    own = weights(2)
    mine = state_of(own)
    joined(run, run.newcomer(), mine)
    for state in states:
        state.push_revision()
    infos = sync_each(run, [*states, mine])
    assert [info.rx_bytes for info in infos] == [0, 0, PIECE_BYTES]
    assert [info.wrong_pieces for info in infos] == [0, 0, 0]
    assert own.tobytes() == tensors[0].tobytes()


def test_members_that_show_nothing_hold_nobody_up(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    joined(run, run.newcomer(), state_of(weights(2)))
    tensors = [weights(1) for _ in range(2)]
    own = weights(2)
    infos = sync_each(run, [*map(state_of, tensors), state_of(own)])
    assert infos[2].rx_bytes == SIZE * 4
    assert own.tobytes() == tensors[0].tobytes()


def test_alone_a_newcomer_that_wants_to_fetch_is_admitted_at_once(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(0)
    first, own = run.newcomer(), weights(1)
    first.connect(shared_state=state_of(own), timeout_s=LIMIT_S)
    assert first.world_size == 1


def test_newcomers_that_fetch_at_the_same_time_do_not_disturb_each_other(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(2)
    tensors, states = synchronized(run)
    newcomers, owns = [run.newcomer() for _ in range(3)], [weights(2 + i) for i in range(3)]
    mine = [state_of(own) for own in owns]
    joining = [
        run.start(newcomer.connect, shared_state=state)
        for newcomer, state in zip(newcomers, mine, strict=True)
    ]

    def all_are_ready() -> bool:
        pending = run.machine.membership.pending()
        return len(pending) == 3 and not any(peer.prefetching for peer in pending)

    run.until(all_are_ready)
    run.each(lambda member: member.update_topology())
    for newcomer, future in zip(newcomers, joining, strict=True):
        future.result(LIMIT_S)
        run.members.append(newcomer)
    broken = [news.text for member in run.members for news in member.status().happened]
    assert not [text for text in broken if "link" in text]
    for state in states:
        state.push_revision()
    infos = sync_each(run, [*states, *mine])
    assert [info.rx_bytes for info in infos] == [0] * 5
    assert {own.tobytes() for own in owns} == {tensors[0].tobytes()}


def test_another_layout_is_not_fetched(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    sync_each(run, [state_of(weights(1)) for _ in run.members])
    other = state_of(weights(2), weights(3))
    seen = list[SyncProgress]()
    joined(run, run.newcomer(), other, on_progress=seen.append)
    assert all(progress.total_bytes == 0 for progress in seen)


def test_the_state_of_a_program_that_has_let_go_of_it_is_not_shown(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(2)
    sync_each(run, [state_of(weights(1)) for _ in run.members])  # and they are gone
    own = weights(2)
    joined(run, run.newcomer(), state_of(own))
    assert (own == weights(2)).all()


def test_a_slow_newcomer_joins_again_and_goes_on_with_what_it_has(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_s = 0.3
    run = new_run(2, Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, hold_s=hold_s))
    tensors = [weights(1) for _ in run.members]
    states = [state_of(tensor) for tensor in tensors]
    give, gave = StateUpload.send_pieces, list[int]()

    def stingy(upload: StateUpload, peer: Any, numbers: list[int]) -> None:
        """Give two pieces in all, until the newcomer is sent away."""
        first_time = engine.machine.peer == first_id
        given = numbers[: max(0, 2 - len(gave))] if first_time else numbers
        gave.extend(given)
        give(upload, peer, given)

    newcomer, own = run.newcomer(), weights(2)
    engine = engine_of(newcomer)
    mine = state_of(own)
    sync_each(run, states)
    for state in states:
        state.push_revision()
    joining = run.start(newcomer.connect)
    until_ready(run)
    run.each(lambda member: member.update_topology())
    joining.result(LIMIT_S)
    first_id = newcomer.peer_id
    monkeypatch.setattr(StateUpload, "send_pieces", stingy)
    late = run.start(newcomer.sync_shared_state, mine)
    infos = sync_each(run, states)  # returns without it
    assert [info.members for info in infos] == [(1, 2), (1, 2)]
    assert not late.done()
    for state in states:
        state.push_revision()
    until_ready(run)
    run.each(lambda member: member.update_topology())
    run.members.append(newcomer)
    started = [run.start(m.sync_shared_state, s) for m, s in zip(run.members, states, strict=False)]
    infos = [future.result(LIMIT_S) for future in started]
    info = late.result(LIMIT_S)
    assert info.members == infos[0].members == (1, 2, newcomer.peer_id)
    assert own.tobytes() == tensors[0].tobytes()
    assert mine.revision == 2


# -- replaying reductions ------------------------------------------------------------------------


def outer_step(weight: Array, momentum: Array, gradient: Array) -> None:
    """Changes everything."""
    momentum *= np.float32(0.9)
    momentum += gradient
    weight -= np.float32(0.7) * momentum


class Trainer:
    """A member, or one who wants to be: weights, momentum, and their state."""

    def __init__(self, seed: int) -> None:
        self.weight, self.momentum = weights(seed), np.zeros(SIZE, np.float32)
        self.state = state_of(self.weight, self.momentum)
        self.seen: list[ObservedReduction] = []

    def replay(self, reduction: ObservedReduction) -> None:
        self.seen.append(reduction)
        outer_step(self.weight, self.momentum, reduction.values)

    def train(self, comm: pccl.Communicator, seed: int) -> None:
        """One step; every other one averages by weight."""
        gradient = weights(seed + comm.peer_id)
        weight = float(comm.peer_id) if seed % 200 else None
        comm.all_reduce(gradient, op=ReduceOp.AVG, weight=weight, tag=9, observable=True)
        outer_step(self.weight, self.momentum, gradient)
        self.state.push_revision()


def trainers_of(run: Run) -> list[Trainer]:
    """All members, in step."""
    trainers = [Trainer(1) for _ in run.members]
    sync_each(run, [trainer.state for trainer in trainers])
    return trainers


def train_all(run: Run, trainers: list[Trainer], seed: int) -> None:
    started = [
        run.start(trainer.train, member, seed)
        for trainer, member in zip(trainers, run.members, strict=True)
    ]
    for future in started:
        future.result(LIMIT_S)


def test_who_replays_reductions_need_not_fetch_what_they_changed(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(3)
    trainers = trainers_of(run)
    newcomer, late = run.newcomer(), Trainer(2)
    joining = run.start(newcomer.connect, shared_state=late.state, on_reduction=late.replay)
    until_ready(run)
    for step in range(3):  # of which the second follows another synchronization
        train_all(run, trainers, 100 * step)
        run.until(lambda: len(late.seen) == step + 1)  # noqa: B023 - called at once
        if step == 0:
            sync_each(run, [trainer.state for trainer in trainers])
            for trainer in trainers:
                trainer.state.push_revision()
    admit(run, newcomer, joining)
    assert [seen.tag for seen in late.seen] == [9, 9, 9]
    assert [seen.n for seen in late.seen] == [0, 1, 2]
    assert {seen.contributors for seen in late.seen} == {(1, 2, 3)}
    assert [seen.weights for seen in late.seen] == [(), (1, 2, 3), ()]
    assert [seen.total_weight for seen in late.seen] == [None, 6, None]
    for trainer in trainers:
        trainer.state.revision = 2
    infos = sync_each(run, [*(trainer.state for trainer in trainers), late.state])
    assert [info.rx_bytes for info in infos] == [0, 0, 0, 0]
    assert late.weight.tobytes() == trainers[0].weight.tobytes()
    assert late.momentum.tobytes() == trainers[0].momentum.tobytes()
    assert late.state.revision == 2


def test_who_has_missed_a_reduction_fetches_what_it_changed(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    trainers = trainers_of(run)
    train_all(run, trainers, 0)  # nobody watches
    late, newcomer = Trainer(2), run.newcomer()
    joining = run.start(newcomer.connect, shared_state=late.state, on_reduction=late.replay)
    until_ready(run)
    train_all(run, trainers, 100)
    admit(run, newcomer, joining)
    for trainer in trainers:
        trainer.state.revision = 1
    infos = sync_each(run, [*(trainer.state for trainer in trainers), late.state])
    assert not late.seen
    assert infos[2].rx_bytes == 2 * SIZE * 4
    assert late.weight.tobytes() == trainers[0].weight.tobytes()


def test_a_replay_that_raises_is_said_and_what_it_did_not_do_is_fetched(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(2)
    trainers = trainers_of(run)
    newcomer, late = run.newcomer(), Trainer(2)

    def fail(reduction: ObservedReduction) -> None:
        late.seen.append(reduction)
        late.weight[:10] = 7.0  # some of it is changed when the bug shows
        raise ZeroDivisionError("a bug")

    joining = run.start(newcomer.connect, shared_state=late.state, on_reduction=fail)
    until_ready(run)
    for step in range(2):
        train_all(run, trainers, 100 * step)
    run.until(lambda: bool(late.seen))
    admit(run, newcomer, joining)
    for trainer in trainers:
        trainer.state.revision = 1
    sync_each(run, [*(trainer.state for trainer in trainers), late.state])
    assert len(late.seen) == 1
    assert late.weight.tobytes() == trainers[0].weight.tobytes()
    assert late.momentum.tobytes() == trainers[0].momentum.tobytes()
    said = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert said == ["on_reduction failed; this peer does not call it again"]


def test_results_are_copied_only_while_somebody_watches(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    trainers = trainers_of(run)
    train_all(run, trainers, 0)
    engines = [engine_of(member) for member in run.members]
    assert [len(engine.exchange.snapshots) for engine in engines] == [1, 1]  # the state


def test_arguments_are_checked(new_run: Callable[..., Run]) -> None:
    run = new_run(0)
    comm, anything = run.newcomer(), Any
    wrong: Any = anything
    with pytest.raises(TypeError, match="on_progress must be a function"):
        comm.connect(on_progress=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_reduction needs the shared_state"):
        comm.connect(on_reduction=print)
    with pytest.raises(ValueError, match="staging_bytes_max must be"):
        comm.connect(staging_bytes_max=-2)
    with pytest.raises(TypeError, match="shared_state"):
        comm.connect(shared_state=wrong)
    with pytest.raises(TypeError, match="observable"):
        comm.all_reduce(np.ones(1), observable=3)  # type: ignore[arg-type]
