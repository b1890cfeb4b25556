"""The calls of a replica with a quorum, on a communicator whose answers the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pccl.errors import NotConnected, PCCLError, ResyncRequired
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import SYNC_TAG, OperationId
from pccl.runtime.requests import ReduceInfo, SharedStateSyncInfo
from tests.support.patience import LIMIT_S
from tests.support.waiting import until

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco import DiLoCo  # noqa: E402
from pccl.bindings.diloco.joint_caller import JointCaller  # noqa: E402

MINE, OTHERS = 1, (8, 9)
QUORUM: dict[str, Any] = {"quorum": 2, "grace_s": 0.3}


class Quorate:
    """A communicator of three members. This one is late if ``took_part`` says so.

    Attributes:
        calls: names of the calls, with their options.
        excluded: members that the guards of the next reduces exclude.
        is_open: cleared: a reduce waits.
        fails: errors that the next calls of a name raise.
        mean: what a late reduce returns.
        has_newcomers: whether the next update admits a newcomer.
        looks: how often the replica has looked for newcomers.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_awaited = self.is_connected = self.has_newcomers = self.is_leaving = False
        self.looks = 0
        self.is_open = threading.Event()
        self.is_open.set()
        self.took_part: list[bool] = []
        self.fails: dict[str, list[PCCLError]] = {}
        self.mean = 0.0
        self.others: tuple[int, ...] = OTHERS
        self.apart: list[bool] = []
        self.excluded: list[tuple[int, ...]] = []

    @property
    def newcomers_wait(self) -> bool:
        self.looks += 1
        return self.has_newcomers

    @property
    def peer_id(self) -> int:
        if not self.is_connected:
            raise NotConnected
        return MINE

    def _called(self, name: str, options: dict[str, Any]) -> None:
        self.calls.append((name, options))
        if self.fails.get(name):
            raise self.fails[name].pop(0)

    def connect(self, **options: Any) -> None:
        self.is_connected = True
        self._called("connect", options)

    def update_topology(self, **options: Any) -> None:
        if self.has_newcomers:
            self.has_newcomers = False
            self.others = (*self.others, max(self.others) + 1)
        self._called("update", options)

    def members(self) -> list[Any]:
        return [_Member(peer) for peer in (MINE, *self.others)]

    def sync_shared_state(self, state: Any, *, resume: str, **options: Any) -> SharedStateSyncInfo:
        self._called("sync", options)
        state.synchronized(state.revision, Lineage(b"r" * 16, OperationId(1, 0, 1, SYNC_TAG, 0)))
        return SharedStateSyncInfo(0, 0, state.revision, members=OTHERS)  # without this one

    def all_reduce(self, values: Any, result: Any, **options: Any) -> ReduceInfo:
        assert self.is_open.wait(LIMIT_S)
        self._called("reduce", options)
        self.apart.append(result.data_ptr() != values.data_ptr())
        took_part = self.took_part.pop(0) if self.took_part else True
        if options.get("weight") is None:
            result.copy_(values)
            return ReduceInfo(3, 0, 0, contributors=(MINE, *OTHERS))
        who = (MINE, *OTHERS) if took_part else OTHERS
        result.copy_(values) if took_part else result.fill_(self.mean)
        excluded = self.excluded.pop(0) if self.excluded else ()
        return ReduceInfo(
            *(3, 10, 20),
            contributors=who,
            weights=(2.0,) * len(who),
            took_part=took_part,
            excluded=excluded,
        )

    def close(self) -> None:
        self.is_open.set()

    def expect_notice(self, has_work: Callable[[], bool]) -> None:
        assert not has_work()

    def report_step(self, step: int, *, figures: dict[str, float]) -> None:
        pass

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class _Member:
    def __init__(self, peer_id: int) -> None:
        self.peer_id = peer_id


class Replica:
    """One weight that becomes smaller by 1 in each inner step; the outer step adds the average."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.comm = Quorate()
        self.weight = torch.nn.Parameter(torch.zeros(1)) if model is None else model.weight
        self.inner = torch.optim.SGD([self.weight], lr=1.0)
        comm: Any = self.comm
        self.optimizer = DiLoCo(
            [("w", self.weight)] if model is None else model,
            inner=self.inner,
            comm=comm,
            outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            **options,
        )

    @property
    def caller(self) -> JointCaller:
        caller: JointCaller = vars(self.optimizer)["_caller"]
        return caller

    def settle(self) -> None:
        with self.caller.settled():
            pass

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.weight.grad = torch.ones(1)
            self.optimizer.step()

    @property
    def value(self) -> float:
        value: float = self.weight.item()
        return value


Make = Callable[..., Replica]


@pytest.fixture
def replica() -> Iterator[Make]:
    made: list[Replica] = []

    def make(**options: Any) -> Replica:
        made.append(Replica(**options))
        return made[-1]

    yield make
    for one in made:
        one.optimizer.close()


def quorum_of(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("quorum", "grace_s") if key in options}


@pytest.mark.parametrize("options", [QUORUM, {"quorum": 0.5}, {}], ids=["count", "share", "none"])
def test_each_joint_call_names_the_quorum(replica: Make, options: dict[str, Any]) -> None:
    buffers = [("mean", torch.ones(1))]
    one = replica(sync_every=1, buffers=buffers, **options)
    one.steps(1)
    one.settle()
    names = [name for name, _ in one.comm.calls if name != "sync"]
    assert names == ["connect", "update", "reduce", "reduce"]
    expected = {"grace_s": "auto", **options} if options else {}
    assert all(quorum_of(asked) == expected for _, asked in one.comm.calls[1:])
    # With a quorum, the sums of the buffers have memory of their own: the input stays intact.
    assert one.comm.apart == [bool(options), True]
    reduces = [asked for name, asked in one.comm.calls if name == "reduce"]
    assert all(asked["observable"] and asked["retry"] for asked in reduces)


def test_members_that_a_late_synchronization_does_not_name_are_synchronized(replica: Make) -> None:
    """Those that are late synchronize by themselves: the next round has no newcomers."""
    one = replica(sync_every=1, **QUORUM)
    one.steps(2)
    one.settle()
    assert one.comm.names()[2:] == ["update", "reduce", "sync"] * 2
    assert one.optimizer.members == (MINE, *OTHERS)


def test_without_a_quorum_members_are_those_that_synchronized(replica: Make) -> None:
    one = replica(sync_every=1)
    one.steps(2)
    one.settle()
    assert one.comm.names()[2:] == ["update", "sync", "reduce", "sync"] * 2


@pytest.mark.parametrize("has_quorum", [True, False])
def test_a_replica_is_awaited_while_it_is_idle(replica: Make, *, has_quorum: bool) -> None:
    one = replica(sync_every=2, delay=2, **(QUORUM if has_quorum else {}))
    assert one.caller.has_quorum is has_quorum
    one.optimizer.join()
    one.settle()
    assert not one.caller.is_awaited
    one.comm.is_awaited = True
    assert one.caller.is_awaited
    one.comm.is_open.clear()
    one.steps(1)
    assert len(one.comm.calls) >= 2
    assert not one.caller.is_awaited, "its contribution is on its way"
    one.comm.is_open.set()
    one.settle()
    assert one.caller.is_awaited


def test_an_awaited_replica_launches_after_its_next_step(replica: Make) -> None:
    one = replica(sync_every=10, **QUORUM)
    one.steps(3)
    assert "reduce" not in one.comm.names()
    one.comm.is_awaited = True
    one.steps(1)
    assert one.optimizer.round == 1
    (options,) = [asked for name, asked in one.comm.calls if name == "reduce"]
    assert options["weight"] == 4.0


def test_a_late_replica_takes_the_average_and_keeps_its_work(replica: Make) -> None:
    """The outer step subtracts the mean of the others, which is 5."""
    one = replica(sync_every=2, **QUORUM)
    one.comm.took_part, one.comm.mean = [False, True], 5.0
    one.steps(2)
    assert one.value == -5.0 - 2.0
    one.steps(2)
    weights = [asked["weight"] for name, asked in one.comm.calls if name == "reduce"]
    # The next round is due earlier; its work is that of three steps.
    assert weights == [2.0, 3.0]
    assert one.optimizer.outer_steps == 2


def test_a_checkpoint_keeps_the_work_of_a_missed_round_that_is_not_merged(replica: Make) -> None:
    one = replica(sync_every=4, delay=3, **QUORUM)
    one.comm.took_part, one.comm.mean = [False], 5.0
    one.steps(4)
    saved = one.optimizer.state_dict()
    assert saved["position"]["watched"] == [0]
    assert saved["position"]["work"] == [4.0]
    assert saved["base"][0].tolist() == [0.0]
    other = replica(sync_every=4, delay=3, **QUORUM)
    with torch.no_grad():
        other.weight.copy_(one.weight)
    other.optimizer.load_state_dict(saved)
    other.steps(3)  # the merge is due after seven
    assert other.value == -5.0 - 7.0
    other.steps(1)
    other.settle()
    weights = [asked["weight"] for name, asked in other.comm.calls if name == "reduce"]
    assert weights == [8.0]


def test_a_replica_that_lacks_results_synchronizes_then_joins_again(replica: Make) -> None:
    one = replica(sync_every=1, **QUORUM)
    one.steps(1)
    one.settle()
    began = len(one.comm.calls)
    one.comm.fails = {"update": [ResyncRequired()]}
    one.steps(1)
    one.settle()
    assert one.comm.names()[began:] == ["update", "sync"]
    one.steps(1)
    one.settle()
    assert one.comm.names()[began + 2 :] == ["update", "reduce", "sync"]
    assert one.comm.calls[-2][1]["weight"] == 2.0, "its work goes into the next round"
    began = len(one.comm.calls)
    one.comm.fails = {"update": [ResyncRequired()], "sync": [ResyncRequired()]}
    one.steps(1)
    one.settle()
    assert one.comm.names()[began:] == ["update", "sync", "connect", "sync"]
    joins = [asked for name, asked in one.comm.calls if name == "connect"]
    # The first join replays the rounds of the members. Later, the replica's own state may be newer.
    assert [asked["on_reduction"] is None for asked in joins] == [False, True]
    assert all(asked["shared_state"] is one.optimizer.shared_state for asked in joins)


def test_a_replica_that_computes_admits_newcomers(replica: Make) -> None:
    """They can train at once, and take part in the next round."""
    one = replica(sync_every=5, **QUORUM)
    one.steps(1)
    one.settle()
    began = len(one.comm.calls)
    one.comm.has_newcomers = True
    until(lambda: one.comm.names()[began:] == ["update", "sync"])
    one.settle()
    one.steps(4)
    one.settle()
    assert one.comm.names()[began + 2 :] == ["update", "reduce", "sync"]
    assert one.comm.calls[-2][1]["weight"] == 5.0
    assert one.optimizer.members == (MINE, *OTHERS, 10)


def test_the_shared_state_does_not_change_while_it_is_read(replica: Make) -> None:
    """An admission would synchronize, and could bring the state of rounds that were missed."""
    one = replica(sync_every=5, **QUORUM)
    one.steps(1)
    with one.caller.settled():
        began = len(one.comm.calls)
        one.comm.has_newcomers = True
        looks = one.comm.looks
        until(lambda: one.comm.looks >= looks + 2)
        assert one.comm.names()[began:] == []
    until(lambda: one.comm.names()[began:] == ["update", "sync"])


@pytest.mark.parametrize("save", [DiLoCo.state_dict, DiLoCo.finish])
def test_a_program_reads_a_shared_state_that_does_not_change(
    replica: Make, save: Callable[[DiLoCo], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replica(sync_every=1, **QUORUM)
    one.steps(1)
    is_held: list[bool] = []
    reader = vars(one.optimizer)["_pipeline"]
    name = "position" if save is DiLoCo.state_dict else "leave_out_work"
    read = getattr(reader, name)

    def reads() -> object:
        is_held.append(vars(one.caller)["_is_held"])
        return read()

    monkeypatch.setattr(reader, name, reads)
    save(one.optimizer)
    assert is_held == [True]
    assert not vars(one.caller)["_is_held"]


def test_without_a_quorum_newcomers_wait_for_a_round(replica: Make) -> None:
    one = replica(sync_every=5)
    one.steps(1)
    one.settle()
    one.comm.has_newcomers = True
    one.steps(4)
    one.settle()
    assert one.comm.names()[2:] == ["update", "sync", "reduce", "sync"]


def make_model() -> Any:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1))
    return model


RADIAL: dict[str, Any] = {"averaging": "radial-directional", "sync_every": 2}


def reduces(one: Replica) -> list[dict[str, Any]]:
    return [options for name, options in one.comm.calls if name == "reduce"]


def test_lengths_go_before_directions_and_have_the_guard(replica: Make) -> None:
    one = replica(model=make_model(), compression="int8", **RADIAL)
    one.steps(2)
    lengths, directions = reduces(one)
    assert (lengths["tag"], directions["tag"]) == (3, 1)
    assert lengths["weight"] == directions["weight"] == 2.0
    assert lengths["guard"] is not None
    assert directions["guard"] is None
    assert "quantization_options" not in lengths
    assert directions["quantization_options"].name == "directions 0"
    assert one.value == -2.0


@pytest.mark.parametrize("late_in", [0, 1])
def test_work_that_is_late_in_either_reduce_goes_into_the_next_round(
    replica: Make, late_in: int
) -> None:
    """The mean length of the others is 5, and their direction is 1, if this replica is late."""
    one = replica(model=make_model(), **RADIAL, **QUORUM)
    one.comm.mean = 5.0 if late_in == 0 else 1.0
    one.comm.took_part = [late_in != 0, late_in != 1]
    one.steps(2)
    lengths, directions = reduces(one)
    assert lengths["weight"] == 2.0
    assert directions["weight"] == (0.0 if late_in == 0 else 2.0)
    one.steps(2)
    assert reduces(one)[2]["weight"] > 2.0, "the work of both rounds"


def test_a_replica_whose_lengths_are_excluded_gives_no_direction(replica: Make) -> None:
    one = replica(model=make_model(), **RADIAL)
    one.comm.excluded = [(MINE,)]
    one.steps(2)
    one.settle()
    lengths, directions = reduces(one)
    assert (lengths["weight"], directions["weight"]) == (2.0, 0.0)
    assert one.value == 0.0, "it drops its work"
