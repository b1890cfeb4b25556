"""``sync_shared_state`` over real sockets: who gets what, how many bytes, and who fails how."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl import DataType, SharedState, SharedStateSyncStrategy, TensorInfo, Timing
from pccl.descriptors import DeviceType
from pccl.errors import (
    DeadlineExceeded,
    DescriptorMismatch,
    Evicted,
    NotConnected,
    OutcomeUnknown,
    PendingOperations,
    Result,
    ResyncRequired,
    StateMismatch,
    StateUnavailable,
)
from pccl.protocol.shared_state import PIECE_BYTES
from pccl.protocol.types import PeerId
from pccl.runtime import hashing
from pccl.runtime.hashing import PooledHasher
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.session import StateSession
from pccl.runtime.state.sync import SyncOptions
from pccl.runtime.state.upload import StateUpload
from pccl.shared_state import SharedStateSyncInfo
from tests.integration.conftest import Array, Run
from tests.support.insides import engine_of
from tests.support.patience import LIMIT_S, patient

POPULAR, RECEIVE_ONLY, SEND_ONLY = SharedStateSyncStrategy
PIECE_FLOATS = PIECE_BYTES // 4


def state_of(**tensors: Array) -> SharedState:
    return SharedState([TensorInfo.from_numpy(array, name) for name, array in tensors.items()])


def weights(seed: int, size: int = 1000) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def sync_all(
    run: Run,
    states: Sequence[SharedState],
    strategies: Sequence[SharedStateSyncStrategy] | None = None,
    **options: Any,
) -> list[SharedStateSyncInfo]:
    """All members synchronize."""
    chosen = strategies or [POPULAR] * len(states)
    return [future.result(LIMIT_S) for future in start_all(run, states, chosen, options)]


def fail_all(
    run: Run,
    states: Sequence[SharedState],
    strategies: Sequence[SharedStateSyncStrategy] | None = None,
    **options: Any,
) -> list[BaseException | None]:
    """All members synchronize; what each of them gets to see."""
    chosen = strategies or [POPULAR] * len(states)
    return [future.exception(LIMIT_S) for future in start_all(run, states, chosen, options)]


def start_all(
    run: Run,
    states: Sequence[SharedState],
    strategies: Sequence[SharedStateSyncStrategy],
    options: dict[str, Any],
) -> list[Any]:
    return [
        run.start(member.sync_shared_state, state, strategy, **options)
        for member, state, strategy in zip(run.members, states, strategies, strict=True)
    ]


def moved(infos: Sequence[SharedStateSyncInfo]) -> list[tuple[int, int]]:
    return [(info.tx_bytes, info.rx_bytes) for info in infos]


# -- contents ------------------------------------------------------------------------------------


DTYPES = [
    *(np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
    *(np.float16, np.float32, np.float64),
]


def test_every_dtype_arrives(new_run: Callable[..., Run]) -> None:
    """Scalars, empty and unaligned tensors as well; and bfloat16, which NumPy does not know."""
    run = new_run(2)

    def tensors(full: bool) -> tuple[list[TensorInfo], list[Array]]:
        infos: list[TensorInfo] = []
        arrays: list[Array] = []
        for count in (1, 0, 5, 1000):
            for dtype in DTYPES:
                array = np.arange(count).astype(dtype) + (dtype(3) if full else dtype(0))
                arrays.append(array.reshape(()) if count == 1 else array)
                infos.append(TensorInfo.from_numpy(arrays[-1], f"{np.dtype(dtype).name}.{count}"))
        raw = np.zeros(2 * 777 + 1, np.uint8)
        if full:
            raw[:] = np.arange(raw.size) % 251 + 1
        arrays.append(raw)
        infos.append(
            TensorInfo(
                "bfloat16 at an odd address",
                raw.ctypes.data + 1,
                numel=777,
                dtype=DataType.BFLOAT16,
                device_type=DeviceType.CPU,
                allow_content_inequality=False,
            )
        )
        return infos, arrays

    infos, held = tensors(full=True)
    theirs, received = tensors(full=False)
    before = received[-1][0]
    given, got = sync_all(run, [SharedState(infos), SharedState(theirs)], [SEND_ONLY, RECEIVE_ONLY])
    for mine, other in zip(held[:-1], received[:-1], strict=True):
        assert mine.tobytes() == other.tobytes()
    assert held[-1][1:].tobytes() == received[-1][1:].tobytes()
    assert received[-1][0] == before  # beside the tensor
    elements = 1 + 0 + 5 + 1000
    nbytes = elements * sum(np.dtype(dtype).itemsize for dtype in DTYPES) + 2 * 777
    assert (given.tx_bytes, given.rx_bytes) == (nbytes, 0)
    assert (got.tx_bytes, got.rx_bytes) == (0, nbytes)


def test_torch_tensors_of_every_dtype(new_run: Callable[..., Run]) -> None:
    torch: Any = pytest.importorskip("torch")
    run = new_run(2)
    dtypes = [torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.int64]

    def state(value: float) -> tuple[SharedState, list[Any]]:
        tensors = [torch.full((3, 7), value, dtype=dtype) for dtype in dtypes]
        return SharedState(
            [TensorInfo.from_torch(tensor, str(tensor.dtype)) for tensor in tensors]
        ), tensors

    (one, _), (other, received) = state(5), state(6)
    sync_all(run, [one, other], [SEND_ONLY, RECEIVE_ONLY])
    assert all((tensor == 5).all() for tensor in received)


def test_only_pieces_that_differ_travel(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [weights(0, 3 * PIECE_FLOATS + 10) for _ in range(3)]
    states = [state_of(other=np.zeros(9), w=array) for array in arrays]
    arrays[1][PIECE_FLOATS + 3] += 1  # in the second piece
    arrays[1][-1] += 1  # in the last one, which has 10 elements
    infos = sync_all(run, states)
    assert [info.rx_bytes for info in infos] == [0, PIECE_BYTES + 40, 0]
    assert sum(info.tx_bytes for info in infos) == PIECE_BYTES + 40
    assert infos[1].tx_bytes == 0
    assert all((array == weights(0, 3 * PIECE_FLOATS + 10)).all() for array in arrays)


# -- revisions -----------------------------------------------------------------------------------


def test_alone_it_moves_nothing_and_advances_what_is_expected(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    state = state_of(w=weights(0))
    for revision in range(3):
        (info,) = sync_all(run, [state])
        assert (info.tx_bytes, info.rx_bytes, info.revision) == (0, 0, revision)
        state.push_revision()
    state.revision = 7
    (error,) = fail_all(run, [state])
    assert isinstance(error, StateUnavailable)
    assert "revision 3" in str(error)
    assert "revision 7" in str(error)
    assert 'resume="highest"' in str(error)
    assert error.result is Result.INVALID_USAGE
    (info,) = sync_all(run, [state], resume="highest")
    assert info.revision == state.revision == 7


def test_who_forgets_to_push_is_told_so(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    states = [state_of(w=weights(0)) for _ in range(2)]
    sync_all(run, states)
    for error in fail_all(run, states):
        assert isinstance(error, StateUnavailable)
        assert "push_revision()" in str(error)
    for state in states:
        state.push_revision()
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_first_sync_resumes_whoever_comes_first(new_run: Callable[..., Run], first: int) -> None:
    """One has loaded a checkpoint of revision 40, the other one begins anew."""
    run = new_run(2)
    arrays = [weights(1), weights(2)]
    states = [state_of(w=array) for array in arrays]
    states[1].revision = 40
    calls = [run.start(run.members[first].sync_shared_state, states[first])]
    run.until(lambda: run.requests == 1)
    calls.append(run.start(run.members[1 - first].sync_shared_state, states[1 - first]))
    infos = [call.result(LIMIT_S) for call in calls]
    assert [info.revision for info in infos] == [40, 40]
    assert [state.revision for state in states] == [40, 40]
    assert all((array == weights(2)).all() for array in arrays)


def test_a_newcomer_gets_contents_revision_and_what_may_differ(new_run: Callable[..., Run]) -> None:
    run = new_run(2)

    def made(seed: int, own: int) -> tuple[SharedState, Array, Array]:
        shared, private = weights(seed), np.full(8, own, np.int32)
        return (
            SharedState(
                [
                    TensorInfo.from_numpy(shared, "w"),
                    TensorInfo.from_numpy(private, "own", allow_content_inequality=True),
                ]
            ),
            shared,
            private,
        )

    held = [made(0, rank) for rank in range(2)]
    states = [state for state, _, _ in held]
    for state in states:
        state.revision = 5
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]
    assert [private[0] for _, _, private in held] == [0, 1]  # they may differ
    run.join()
    state, shared, private = made(9, 2)
    held.append((state, shared, private))
    for old in states:
        old.push_revision()
    infos = sync_all(run, [*states, state])
    assert [info.rx_bytes for info in infos] == [0, 0, 4000 + 32]
    assert sum(info.tx_bytes for info in infos) == 4032
    assert state.revision == 6
    assert (shared == weights(0)).all()
    assert (private == held[0][2][0]).all() or (private == held[1][2][0]).all()
    assert [one[2][0] for one in held[:2]] == [0, 1]
    # A member of old, and no newcomer any more: its own values are its own.
    private[:] = 77
    for old in (*states, state):
        old.push_revision()
    assert moved(sync_all(run, [*states, state])) == [(0, 0)] * 3
    assert private[0] == 77


def test_an_outdated_member_with_equal_contents_gets_the_revision_only(
    new_run: Callable[..., Run],
) -> None:
    run = new_run(2)
    states = [state_of(w=weights(0)) for _ in range(2)]
    states[0].revision = 3
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]
    assert [state.revision for state in states] == [3, 3]


def test_a_revision_counts_only_with_its_lineage(new_run: Callable[..., Run]) -> None:
    """Whoever has the right number by chance has not taken part in what the others did."""
    run = new_run(2)
    states = [state_of(w=weights(0)) for _ in range(2)]
    for revision in (0, 1):
        for state in states:
            state.revision = revision
        sync_all(run, states)
    run.join()
    run.join()
    arrays = [weights(8), weights(8)]
    others = [state_of(w=array) for array in arrays]
    for state in (*states, *others):
        state.revision = 2
    infos = sync_all(run, [*states, *others])
    assert [info.rx_bytes for info in infos] == [0, 0, 4000, 4000]
    assert all((array == weights(0)).all() for array in arrays)


# -- strategies ----------------------------------------------------------------------------------


def test_the_contents_of_most_win(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [weights(1), weights(2), weights(2)]
    infos = sync_all(run, [state_of(w=array) for array in arrays])
    assert [info.rx_bytes for info in infos] == [4000, 0, 0]
    assert all((array == weights(2)).all() for array in arrays)


def test_who_only_sends_receives_nothing(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [weights(1), weights(2), weights(2)]
    infos = sync_all(
        run, [state_of(w=array) for array in arrays], [SEND_ONLY, RECEIVE_ONLY, RECEIVE_ONLY]
    )
    assert [info.rx_bytes for info in infos] == [0, 4000, 4000]
    assert all((array == weights(1)).all() for array in arrays)


@pytest.mark.parametrize("other", [SEND_ONLY, RECEIVE_ONLY])
def test_strategies_that_do_not_go_together(
    new_run: Callable[..., Run], other: SharedStateSyncStrategy
) -> None:
    run = new_run(3)
    states = [state_of(w=weights(rank)) for rank in range(3)]
    for error in fail_all(run, states, [POPULAR, other, POPULAR]):
        assert isinstance(error, DescriptorMismatch)
        assert other.name in str(error)
        assert f"peer {run.members[1].peer_id}" in str(error)
    assert [member.world_size for member in run.members] == [3, 3, 3]
    assert all((s.revision, s.lineage) == (0, None) for s in states)
    assert [info.rx_bytes for info in sync_all(run, states)] == [0, 4000, 4000]


def test_nobody_offers_anything(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    states = [state_of(w=weights(rank)) for rank in range(2)]
    for error in fail_all(run, states, [RECEIVE_ONLY] * 2):
        assert isinstance(error, StateUnavailable)
        assert "RECEIVE_ONLY" in str(error)
    run.check()
    assert [member.world_size for member in run.members] == [2, 2]


def test_senders_that_conflict_without_a_majority_all_fail(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [weights(rank) for rank in range(3)]
    states = [state_of(w=array) for array in arrays]
    errors = fail_all(run, states, [SEND_ONLY, SEND_ONLY, RECEIVE_ONLY])
    ids = sorted(member.peer_id for member in run.members[:2])
    for error in errors:
        assert isinstance(error, StateMismatch)
        assert error.tensor == "w"
        assert error.piece == 0
        assert all(f"{peer}" in str(error) for peer in ids)
    assert all((array == weights(rank)).all() for rank, array in enumerate(arrays))
    run.check()


def test_a_sender_that_conflicts_with_most_senders_fails_alone(new_run: Callable[..., Run]) -> None:
    run = new_run(4)
    arrays = [weights(1), weights(1), weights(2), weights(3)]
    states = [state_of(w=array) for array in arrays]
    *good, bad, receiver = fail_all(run, states, [SEND_ONLY] * 3 + [RECEIVE_ONLY])
    assert good == [None, None]
    assert receiver is None
    assert isinstance(bad, Evicted)
    assert "'w'" in str(bad)
    assert (arrays[2] == weights(2)).all()
    assert (arrays[3] == weights(1)).all()


# -- conflicts -----------------------------------------------------------------------------------


def test_layouts_that_differ_without_a_majority(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    states = [state_of(a=np.zeros(3), b=np.zeros(4)), state_of(a=np.zeros(3), b=np.zeros(5))]
    for error in fail_all(run, states):
        assert isinstance(error, StateMismatch)
        assert error.tensor == "b"
        assert all(str(member.peer_id) in str(error) for member in run.members)
        assert "4 x float64" in str(error)
        assert "5 x float64" in str(error)
    run.check()


OTHERS = {
    "name": lambda: state_of(a=np.zeros(3), c=np.zeros(4)),
    "dtype": lambda: state_of(a=np.zeros(3), b=np.zeros(4, np.int64)),
    "missing": lambda: state_of(a=np.zeros(3)),
    "one more": lambda: state_of(a=np.zeros(3), b=np.zeros(4), c=np.zeros(1)),
    "flag": lambda: SharedState(
        [
            TensorInfo.from_numpy(np.zeros(3), "a"),
            TensorInfo.from_numpy(np.zeros(4), "b", allow_content_inequality=True),
        ]
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_layout_that_differs_from_that_of_most(new_run: Callable[..., Run], kind: str) -> None:
    """The others go on, and it can come back with a better one."""
    run = new_run(3)
    states = [state_of(a=np.zeros(3), b=np.zeros(4)) for _ in range(2)]
    first, second, error = fail_all(run, [*states, OTHERS[kind]()])
    assert (first, second) == (None, None)
    assert isinstance(error, Evicted)
    assert {"name": "'b'", "dtype": "int64", "missing": "'b'", "one more": "'c'", "flag": "'b'"}[
        kind
    ] in str(error)
    assert [member.world_size for member in run.members[:2]] == [2, 2]


def test_verify(new_run: Callable[..., Run]) -> None:
    run = new_run(3)
    arrays = [weights(0, 2 * PIECE_FLOATS) for _ in range(3)]
    states = [state_of(first=np.ones(5), w=array) for array in arrays]
    for revision, state in enumerate(states):
        state.revision = revision  # does not matter
    calls = [
        run.start(member.verify, state) for member, state in zip(run.members, states, strict=True)
    ]
    assert [call.result(LIMIT_S) for call in calls] == [None] * 3
    assert [state.revision for state in states] == [0, 1, 2]
    arrays[2][-1] += 1
    calls = [
        run.start(member.verify, state) for member, state in zip(run.members, states, strict=True)
    ]
    for call in calls:
        error = call.exception(LIMIT_S)
        assert isinstance(error, StateMismatch)
        assert (error.tensor, error.piece) == ("w", 1)
        assert str(run.members[2].peer_id) in str(error)
    assert arrays[2][-1] != arrays[0][-1]
    infos = sync_all(run, states)  # verifying has expected nothing
    assert [info.revision for info in infos] == [2, 2, 2]


def test_expect_unchanged(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays = [weights(0), weights(0)]
    states = [state_of(w=array) for array in arrays]
    sync_all(run, states, expect_unchanged=True)
    for state in states:
        state.push_revision()
    arrays[1][3] = 0
    for error in fail_all(run, states, expect_unchanged=True):
        assert isinstance(error, StateMismatch)
        assert error.tensor == "w"
    assert arrays[1][3] == 0
    assert [info.rx_bytes for info in sync_all(run, states)].count(4000) == 1


# -- options -------------------------------------------------------------------------------------


def test_what_was_not_touched_is_not_looked_at(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays = [weights(0), weights(0)]
    states = [
        SharedState([TensorInfo.from_numpy(array, "w")], track_touched=True) for array in arrays
    ]
    sync_all(run, states)
    arrays[0][:] = arrays[1][:] = 5
    arrays[1][7] = 8
    for state in states:
        state.push_revision()
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]  # nobody has told of it
    assert arrays[1][7] == 8
    for state in states:
        state.touch("w")
        state.push_revision()
    infos = sync_all(run, states)
    assert sum(info.rx_bytes for info in infos) == 4000
    assert arrays[0].tobytes() == arrays[1].tobytes()
    for state in states:
        state.push_revision()
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]


def test_straight_into_the_tensors(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays = [weights(0, 3 * PIECE_FLOATS), weights(1, 3 * PIECE_FLOATS)]
    states = [state_of(w=array) for array in arrays]
    sync_all(run, states, [SEND_ONLY, RECEIVE_ONLY], in_place=True)
    assert arrays[0].tobytes() == arrays[1].tobytes()
    for state in states:
        state.push_revision()
    with pytest.raises(ValueError, match="first synchronization"):
        run.members[0].sync_shared_state(states[0], in_place=True)
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]


def test_staged_on_the_disk(new_run: Callable[..., Run], tmp_path: Any) -> None:
    run = new_run(2)
    arrays = [weights(0, 3 * PIECE_FLOATS), weights(1, 3 * PIECE_FLOATS)]
    states = [state_of(w=array) for array in arrays]
    infos = sync_all(
        run, states, [SEND_ONLY, RECEIVE_ONLY], staging_bytes_max=0, staging_directory=tmp_path
    )
    assert infos[1].rx_bytes == 3 * PIECE_BYTES
    assert arrays[0].tobytes() == arrays[1].tobytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["nothing", "a file"])
def test_no_place_to_stage(new_run: Callable[..., Run], tmp_path: Any, kind: str) -> None:
    """Its caller is told, and has what he had; the others wait until he calls again."""
    run = new_run(2)
    arrays = [weights(0, 3 * PIECE_FLOATS), weights(1, 3 * PIECE_FLOATS)]
    states = [state_of(w=array) for array in arrays]
    place = tmp_path / "nowhere"
    place.mkdir()
    bad = run.start(
        run.members[1].sync_shared_state,
        states[1],
        RECEIVE_ONLY,
        staging_bytes_max=0,
        staging_directory=place,
    )
    run.until(lambda: run.members[1].status().calls != ())
    place.rmdir()  # it was there when the call was made
    if kind == "a file":
        place.write_text("")
    other = run.start(run.members[0].sync_shared_state, states[0], SEND_ONLY)
    error = bad.exception(LIMIT_S)
    assert isinstance(error, OSError)
    assert "nowhere" in str(error)
    assert (arrays[1] == weights(1, 3 * PIECE_FLOATS)).all()
    assert (states[1].revision, states[1].lineage) == (0, None)
    run.members[1].sync_shared_state(states[1], RECEIVE_ONLY)
    assert other.result(LIMIT_S).attempts == 2
    assert arrays[0].tobytes() == arrays[1].tobytes()


@pytest.mark.parametrize("kind", ["nothing", "a file"])
def test_a_place_that_is_none_is_refused_at_once(
    new_run: Callable[..., Run], tmp_path: Any, kind: str
) -> None:
    """Whether or not anything would have to be staged, and before anybody is told of the call."""
    run = new_run(2)
    states = [state_of(w=weights(0)) for _ in range(2)]
    place = tmp_path / "nowhere"
    if kind == "a file":
        place.write_text("")
    words = r"staging_directory: no directory '.*nowhere'; create it, or leave staging_directory"
    with pytest.raises(ValueError, match=words):
        run.members[1].sync_shared_state(states[1], staging_directory=place)
    with pccl.Communicator(run.master.address) as newcomer, pytest.raises(ValueError, match=words):
        newcomer.connect(shared_state=state_of(w=weights(1)), staging_directory=str(place))
    assert [info.attempts for info in sync_all(run, states)] == [1, 1]


# -- other calls ---------------------------------------------------------------------------------


def test_collectives_that_are_open(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    states = [state_of(w=weights(rank)) for rank in range(2)]
    handle = run.members[0].all_reduce_async(np.ones(4))
    with pytest.raises(PendingOperations):
        run.members[0].sync_shared_state(states[0])
    run.members[1].all_reduce(np.ones(4))
    assert handle.wait()[0]
    sync_all(run, states)


def test_its_memory_is_lent(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays = [weights(0), weights(1)]
    states = [state_of(w=array) for array in arrays]
    call = run.start(run.members[0].sync_shared_state, states[0])
    run.until(lambda: run.requests == 1)
    with pytest.raises(ValueError, match="shared state still uses this memory"):
        run.members[0].all_reduce(arrays[0][10:20])
    with pytest.raises(ValueError, match="still uses this shared state"):
        run.members[0].sync_shared_state(states[0])
    with pytest.raises(PendingOperations):
        run.members[0].sync_shared_state(state_of(w=np.zeros(4)))
    run.members[1].sync_shared_state(states[1])
    call.result(LIMIT_S)
    assert arrays[0].tobytes() == arrays[1].tobytes()


def test_one_call_at_a_time_uses_a_state(new_run: Callable[..., Run], tmp_path: Path) -> None:
    """Also when it is of another communicator, or a checkpoint."""
    run, other = new_run(2), new_run(1)
    state, path = state_of(w=weights(0)), tmp_path / "state.safetensors"
    state.save(path)
    call = run.start(run.members[0].sync_shared_state, state)
    run.until(lambda: run.requests == 1)
    newcomer = other.newcomer()
    for use in (
        partial(other.members[0].sync_shared_state, state),
        partial(newcomer.connect, shared_state=state),
        partial(state.save, path),
        partial(state.restore, path),
    ):
        with pytest.raises(ValueError, match="another call still uses this shared state"):
            use()
    run.members[1].sync_shared_state(state_of(w=weights(1)))
    call.result(LIMIT_S)
    state.save(path)


def test_any_thread_and_progress(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    arrays = [weights(0, 5 * PIECE_FLOATS), weights(1, 5 * PIECE_FLOATS)]
    seen: list[pccl.SyncProgress] = []
    receive = run.members[1].sync_shared_state
    taking = run.start(receive, state_of(w=arrays[1]), RECEIVE_ONLY, on_progress=seen.append)
    run.members[0].sync_shared_state(state_of(w=arrays[0]), SEND_ONLY)
    assert taking.result(LIMIT_S).rx_bytes == 5 * PIECE_BYTES
    phases = list(dict.fromkeys(progress.phase for progress in seen))
    assert [phase for phase in phases if phase != "fetching"] == [
        "hashing",
        "waiting",
        "placing",
        "done",
    ]
    assert (seen[-1].done_bytes, seen[-1].total_bytes) == (5 * PIECE_BYTES, 5 * PIECE_BYTES)
    assert seen[-1].wrong_pieces == 0


def test_asyncio(new_run: Callable[..., Run]) -> None:
    run = new_run(1)
    held, received = weights(0), weights(1)
    state, mine = state_of(w=received), state_of(w=held)

    async def main() -> None:
        async with pccl.aio.Communicator(run.master.address, timing=run.timing) as comm:
            joining = run.start(
                run.admit,
                lambda: asyncio.run_coroutine_threadsafe(comm.connect(), loop).result(LIMIT_S),
            )
            await asyncio.wrap_future(joining)
            theirs = run.start(run.members[0].sync_shared_state, mine, SEND_ONLY)
            info = await comm.sync_shared_state(state, RECEIVE_ONLY)
            assert (info.tx_bytes, info.rx_bytes) == (0, 4000)
            assert theirs.result(LIMIT_S).tx_bytes == 4000
            verifying = run.start(run.members[0].verify, mine)
            await comm.verify(state)
            verifying.result(LIMIT_S)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), LIMIT_S))
    loop.close()
    assert held.tobytes() == received.tobytes()


# -- newcomers -----------------------------------------------------------------------------------


def test_newcomers_serve_each_other(new_run: Callable[..., Run]) -> None:
    size = 24 * PIECE_FLOATS
    run = new_run(1, Timing(heartbeat_s=0.1, tick_s=0.01, connect_retry_s=0.01))
    states = [state_of(w=weights(0, size))]
    sync_all(run, states)
    arrays = [weights(1, size), weights(2, size)]
    for array in arrays:
        run.join()
        states.append(state_of(w=array))
    states[0].push_revision()
    infos = sync_all(run, states)
    assert [info.rx_bytes for info in infos] == [0, 4 * size, 4 * size]
    assert sum(info.tx_bytes for info in infos) >= 8 * size
    assert infos[1].tx_bytes + infos[2].tx_bytes > 0
    assert all((array == weights(0, size)).all() for array in arrays)


def test_a_newcomer_that_is_done_stands_in_for_the_source(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only source is lost before the second newcomer knows what is missing."""
    run = new_run(3)
    arrays = [weights(rank, 3 * PIECE_FLOATS) for rank in range(3)]
    states = [
        SharedState(
            [
                TensorInfo.from_numpy(array, "w"),
                TensorInfo.from_numpy(
                    np.full(4, rank, np.int8), "own", allow_content_inequality=True
                ),
            ]
        )
        for rank, array in enumerate(arrays)
    ]
    states[0].revision = 5
    send_map = StateUpload.send_map

    def give_to_one(upload: StateUpload, peer: PeerId) -> None:
        source = upload.piece_map is states[0].memory.piece_map
        if not source or peer == run.members[1].peer_id:
            send_map(upload, peer)

    monkeypatch.setattr(StateUpload, "send_map", give_to_one)
    source, first, second = start_all(run, states, [POPULAR] * 3, {})
    run.until(lambda: bool((s := session_of(run.members[1])) and s.download.is_done))
    run.members[0].close()
    source.exception(LIMIT_S)
    infos = [first.result(LIMIT_S), second.result(LIMIT_S)]
    assert [(info.attempts, info.revision) for info in infos] == [(1, 5), (1, 5)]
    assert moved(infos) == [(12 * PIECE_FLOATS + 4, 12 * PIECE_FLOATS + 4), (0, infos[0].rx_bytes)]
    for array, state in zip(arrays[1:], states[1:], strict=True):
        assert array.tobytes() == arrays[0].tobytes()
        own: Any = state.tensor_infos[1].tensor
        assert own.tolist() == [0] * 4


def test_a_slow_newcomer_does_not_hold_up_the_others(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a newcomer again, within its call, and keeps what it has until they admit it."""
    run = new_run(
        1, Timing(heartbeat_s=0.1, tick_s=0.05, connect_retry_s=0.01, hold_s=0.5, deadline_s=4.0)
    )
    size = 8 * PIECE_FLOATS
    member, old = run.members[0], state_of(w=weights(0, size))
    member.sync_shared_state(old)
    newcomer = run.join()
    array = weights(1, size)
    state = state_of(w=array)
    given = threading.Event()
    give = StateUpload.send_pieces

    def give_some(upload: StateUpload, peer: PeerId, numbers: list[int]) -> None:
        give(upload, peer, numbers if given.is_set() else [n for n in numbers if n < 3])

    monkeypatch.setattr(StateUpload, "send_pieces", give_some)
    old.push_revision()
    call = run.start(newcomer.sync_shared_state, state)
    info = member.sync_shared_state(old)
    assert (info.revision, info.attempts) == (1, 1)
    assert (array == weights(1, size)).all()
    while member.world_size < 2:  # meanwhile nobody sends it what is missing
        member.update_topology()
    given.set()
    old.push_revision()
    assert member.sync_shared_state(old).tx_bytes == 5 * PIECE_BYTES
    info = call.result(LIMIT_S)
    assert (info.rx_bytes, info.attempts, info.revision) == (8 * PIECE_BYTES, 2, 2)
    assert (array == weights(0, size)).all()


# -- leaving -------------------------------------------------------------------------------------


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Pieces are given only once the event is set."""
    go = threading.Event()
    give = StateUpload.send_pieces

    def give_later(upload: StateUpload, peer: PeerId, numbers: list[int]) -> None:
        if go.is_set():
            give(upload, peer, numbers)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(0.005, give_later, upload, peer, numbers)

    monkeypatch.setattr(StateUpload, "send_pieces", give_later)
    return go


def session_of(comm: pccl.Communicator) -> StateSession | None:
    engine = engine_of(comm)
    return next(iter(engine.exchange.sessions.values()), None)


def is_fetching(comm: pccl.Communicator) -> bool:
    session = session_of(comm)
    return session is not None and session.download.pieces is not None


@pytest.mark.parametrize("in_place", [False, True])
def test_a_deadline_while_fetching(
    new_run: Callable[..., Run], slow: threading.Event, in_place: bool
) -> None:
    run = new_run(2)
    arrays = [weights(rank, 3 * PIECE_FLOATS) for rank in range(2)]
    states = [state_of(w=array) for array in arrays]
    giving = run.start(run.members[0].sync_shared_state, states[0], SEND_ONLY)
    with pytest.raises(DeadlineExceeded):
        run.members[1].sync_shared_state(states[1], RECEIVE_ONLY, timeout_s=0.2, in_place=in_place)
    assert (states[1].revision, states[1].lineage) == (0, None)
    assert (arrays[1] == weights(1, 3 * PIECE_FLOATS)).all()
    slow.set()
    run.members[1].sync_shared_state(states[1], RECEIVE_ONLY)
    assert giving.result(LIMIT_S).attempts == 2
    assert arrays[0].tobytes() == arrays[1].tobytes()


def test_a_deadline_while_waiting(new_run: Callable[..., Run]) -> None:
    run = new_run(2)
    state = state_of(w=weights(0))
    with pytest.raises(DeadlineExceeded, match="withdrawn for all members"):
        run.members[0].sync_shared_state(state, timeout_s=0.1)
    states = [state, state_of(w=weights(0))]
    assert moved(sync_all(run, states)) == [(0, 0), (0, 0)]
    run.check()


def test_ctrl_c_while_fetching(new_run: Callable[..., Run], slow: threading.Event) -> None:
    run = new_run(2)
    arrays = [weights(rank, 3 * PIECE_FLOATS) for rank in range(2)]
    states = [state_of(w=array) for array in arrays]
    giving = run.start(run.members[0].sync_shared_state, states[0], SEND_ONLY)
    main = threading.get_ident()

    def interrupt() -> None:
        run.until(lambda: is_fetching(run.members[1]))
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = run.start(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.members[1].sync_shared_state(states[1], RECEIVE_ONLY)
    interrupting.result(LIMIT_S)
    slow.set()
    assert (arrays[1] == weights(1, 3 * PIECE_FLOATS)).all()
    run.members[1].sync_shared_state(states[1], RECEIVE_ONLY)
    giving.result(LIMIT_S)
    assert arrays[0].tobytes() == arrays[1].tobytes()


def test_who_leaves_while_it_is_put_in_place_has_all_of_it(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed: the others have it. So the call ends only when it is done."""
    run = new_run(1)
    arrays = [weights(rank, 3 * PIECE_FLOATS) for rank in range(2)]
    states = [state_of(w=array) for array in arrays]
    run_in_thread = PooledHasher.run
    tasks: list[asyncio.Task[Any]] = []

    async def cancelled_before_it_begins(hasher: PooledHasher, function: Callable[[], Any]) -> Any:
        if tasks and hasher is theirs:
            tasks.pop().cancel()
            await asyncio.sleep(0)  # raises
        return await run_in_thread(hasher, function)

    newcomer = run.newcomer()
    run.admit(newcomer.connect)
    giving = run.start(run.members[0].sync_shared_state, states[0], SEND_ONLY)
    engine = engine_of(newcomer)
    theirs = engine._state._hasher  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(PooledHasher, "run", cancelled_before_it_begins)

    async def receive() -> None:
        request = SyncOptions(states[1], strategy=RECEIVE_ONLY)
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await engine.sync(request)

    call = asyncio.run_coroutine_threadsafe(
        receive(),
        engine._loop,  # pyright: ignore[reportPrivateUsage]
    )
    with pytest.raises(CancelledError):
        call.result(LIMIT_S)
    giving.result(LIMIT_S)
    assert arrays[0].tobytes() == arrays[1].tobytes()
    assert states[1].lineage == states[0].lineage


def test_what_cannot_be_put_in_place_is_known_to_be_torn(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(2)
    arrays = [weights(rank, 3 * PIECE_FLOATS) for rank in range(2)]
    states = [
        SharedState([TensorInfo.from_numpy(array, "w")], track_touched=True) for array in arrays
    ]
    apply = FetchedPieces.apply

    def fail(fetched: FetchedPieces, numbers: Sequence[int]) -> None:
        apply(fetched, numbers[:1])
        raise OSError("the disk has gone")

    with monkeypatch.context() as patch:
        patch.setattr(FetchedPieces, "apply", fail)
        giving = run.start(run.members[0].sync_shared_state, states[0], SEND_ONLY)
        with pytest.raises(OSError, match="the disk has gone"):
            run.members[1].sync_shared_state(states[1], RECEIVE_ONLY)
        with pytest.raises(OSError, match="the disk has gone"):
            giving.result(LIMIT_S)
    with pytest.raises(ResyncRequired):
        run.members[1].barrier()


def test_a_listener_that_fails_is_not_called_again(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(2)
    calls: list[object] = []

    def fail(progress: pccl.SyncProgress) -> None:
        calls.append(progress)
        raise ArithmeticError("a bug of the caller's")

    states = [state_of(w=weights(rank)) for rank in range(2)]
    sync_all(run, states, on_progress=fail)
    assert len(calls) == 2
    assert caplog.text.count("on_progress failed") == 2


@pytest.mark.parametrize("track_touched", [False, True])
def test_what_was_written_straight_in_is_not_offered_after_a_failure(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, track_touched: bool
) -> None:
    """The only source is lost half-way: what is left is a mixture that nobody may take for a
    state."""
    run = new_run(2)
    size = 8 * PIECE_FLOATS
    arrays = [weights(rank, size) for rank in range(2)]
    states = [
        SharedState([TensorInfo.from_numpy(array, "w")], track_touched=track_touched)
        for array in arrays
    ]
    give = StateUpload.send_pieces

    def give_some(upload: StateUpload, peer: PeerId, numbers: list[int]) -> None:
        give(upload, peer, [number for number in numbers if number < 3])

    monkeypatch.setattr(StateUpload, "send_pieces", give_some)
    giving = run.start(run.members[0].sync_shared_state, states[0])
    call = run.start(run.members[1].sync_shared_state, states[1], in_place=True)
    run.until(lambda: len(((s := session_of(run.members[1])) and s.fetched.verified) or ()) == 3)
    run.members[0].close()
    giving.exception(LIMIT_S)
    error = call.exception(LIMIT_S)
    assert isinstance(error, StateUnavailable)
    assert run.members[1].world_size == 1
    assert (states[1].revision, states[1].lineage) == (0, None)


def test_a_source_whose_budget_runs_out_again_and_again_is_waited_for(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only one. Nobody has given wrong bytes: the receiver goes on with what it has."""
    run = new_run(2)
    size = 8 * PIECE_FLOATS
    arrays = [weights(rank, size) for rank in range(2)]
    states = [state_of(w=array) for array in arrays]
    give = StateUpload.send_pieces

    def give_some(upload: StateUpload, peer: PeerId, numbers: list[int]) -> None:
        give(upload, peer, [number for number in numbers if number < 3])

    receiving = run.start(run.members[1].sync_shared_state, states[1])
    with monkeypatch.context() as patch:
        patch.setattr(StateUpload, "send_pieces", give_some)
        for _ in range(4):
            giving = run.start(run.members[0].sync_shared_state, states[0], timeout_s=0.4)
            assert isinstance(giving.exception(LIMIT_S), OutcomeUnknown)
            assert not receiving.done()
    run.start(run.members[0].sync_shared_state, states[0]).result(LIMIT_S)
    info = receiving.result(LIMIT_S)
    assert (info.attempts, info.rx_bytes, info.wrong_pieces) == (5, 8 * PIECE_BYTES, 0)
    assert np.array_equal(arrays[1], weights(0, size))


@pytest.mark.parametrize("phase", ["hashing", "waiting", "fetching"])
def test_closing(
    new_run: Callable[..., Run], slow: threading.Event, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """The call ends, the state is what it was, and no thread is left after the last one."""
    run = new_run(2)
    if phase == "hashing":
        hash_here = hashing.hash_here

        def hash_slowly(memory: StateMemory, numbers: Sequence[int]) -> None:
            time.sleep(0.1)
            hash_here(memory, numbers)

        monkeypatch.setattr(hashing, "hash_here", hash_slowly)
    array = weights(1, 40 * PIECE_FLOATS)
    seen: list[str] = []

    def note(progress: pccl.SyncProgress) -> None:
        seen.append(progress.phase)

    call = run.start(
        run.members[1].sync_shared_state, state_of(w=array), RECEIVE_ONLY, on_progress=note
    )
    giving: Future[SharedStateSyncInfo] | None = None
    if phase == "fetching":
        other = state_of(w=weights(0, 40 * PIECE_FLOATS))
        giving = run.start(run.members[0].sync_shared_state, other, SEND_ONLY)
        run.until(lambda: is_fetching(run.members[1]))
    else:
        run.until(lambda: phase in seen)
    began_s = time.monotonic()
    run.members[1].close()
    assert time.monotonic() - began_s < patient(3.0)
    error = call.exception(LIMIT_S)
    assert isinstance(error, NotConnected)
    assert (array == weights(1, 40 * PIECE_FLOATS)).all()
    if giving is not None:
        assert giving.result(LIMIT_S).attempts >= 1
    run.members[0].close()
    assert not [one for one in threading.enumerate() if one.name.startswith("pccl-work")]
