"""The wrapper around a communicator that does as it is told: what outlives which mishap."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import pccl
from pccl.bindings.events import Event, InnerStep, MembersChanged
from pccl.errors import DescriptorMismatch, Evicted, MasterLost, PCCLError, TooFewPeers
from pccl.observe.events import MasterDisconnected
from pccl.protocol.shared_state import Lineage
from pccl.protocol.types import SYNC_TAG, OperationId
from tests.support.patience import LIMIT_S

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco import DiLoCo  # noqa: E402
from pccl.bindings.diloco.schedule import schedule  # noqa: E402
from pccl.bindings.gradient_averager import GradientAverager  # noqa: E402


@dataclass
class Info:
    """What a joint call returns."""

    revision: int = 0
    members: tuple[int, ...] = (1,)
    contributors: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    excluded: tuple[int, ...] = ()
    total_weight: float = 0.0
    tx_bytes: int = 0
    rx_bytes: int = 0
    took_part: bool = True


@dataclass(eq=False)
class Alone:
    """A communicator of one member; ``reduces`` and ``syncs`` say what else is to happen once."""

    reduces: list[Callable[[Any], Info]] = field(default_factory=lambda: [])
    syncs: list[Callable[[], None]] = field(default_factory=lambda: [])
    options: list[Any] = field(default_factory=lambda: [])
    peer_id: int = 1
    others: int = 0
    is_closed: bool = False
    is_awaited: bool = False
    is_leaving: bool = False
    steps: list[int] = field(default_factory=lambda: [])
    consumers: list[Callable[[Any], object]] = field(default_factory=lambda: [])

    def expect_notice(self, has_work: Callable[[], bool]) -> None:
        assert not has_work()

    def report_step(self, step: int, *, figures: dict[str, float]) -> None:
        assert set(figures) <= {"own norm", "mean norm", "outer step", "cosine", "noise scale"}
        self.steps.append(step)

    def on_event(self, consumer: Callable[[Any], object]) -> Callable[[], None]:
        self.consumers.append(consumer)
        return lambda: self.consumers.remove(consumer)

    def update_topology(self) -> None:
        pass

    def members(self) -> list[Any]:
        return [self, *[self] * self.others]

    def sync_shared_state(self, state: pccl.SharedState, resume: str) -> Info:
        assert resume == "advanced"
        if self.syncs:
            self.syncs.pop(0)()
        state.synchronized(state.revision, Lineage(b"the run", OperationId(1, 0, 1, SYNC_TAG, 0)))
        return Info(state.revision)

    def all_reduce(self, values: Any, result: Any = None, **options: Any) -> Info:
        self.options.append(options)
        if self.reduces:
            return self.reduces.pop(0)(values if result is None else result.copy_(values))
        raise TooFewPeers

    def close(self) -> None:
        self.is_closed = True


class Trained:
    """One weight that becomes smaller by 1 in each inner step; the outer step adds the average."""

    def __init__(self, **options: Any) -> None:
        self.comm = Alone()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.inner = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer = DiLoCo(
            [("w", self.weight)],
            inner=self.inner,
            comm=self.comm,  # type: ignore[arg-type]
            outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            **options,
        )

    def step(self, weight: float = 1.0) -> None:
        self.weight.grad = torch.ones(1)
        self.optimizer.step(weight=weight)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def replaced(self, value: float, number: int, *, is_open: bool) -> Callable[[], None]:
        """A synchronization that brings the others' state."""

        def sync() -> None:
            outer = vars(self.optimizer)["_outer"]
            outer.fragments[0].flat.fill_(value)
            while outer.ledger.number < number:
                outer.ledger.close([7])
            if is_open:
                outer.ledger.open()

        return sync

    @property
    def value(self) -> float:
        value: float = self.weight.item()
        return value


@pytest.fixture
def trained() -> Iterator[Callable[..., Trained]]:
    made: list[Trained] = []

    def make(**options: Any) -> Trained:
        made.append(Trained(**options))
        return made[-1]

    yield make
    for one in made:
        one.optimizer.close()


def cut_off(values: Any) -> Info:
    raise Evicted


def others(values: Any) -> Info:
    values.fill_(10.0)
    return Info(contributors=(7,), weights=(3.0,), total_weight=3.0)


def of_this_one(values: Any) -> Info:
    return Info(contributors=(1,), weights=(1.0,), total_weight=1.0)


def falling(step: int) -> float:
    return 1 / (1 + step)


def test_work_outlives_the_open_round_that_follows_a_return(
    trained: Callable[..., Trained],
) -> None:
    one = trained(sync_every=2)
    one.step()
    one.comm.reduces += [cut_off, others]
    one.comm.syncs += [one.replaced(100.0, 5, is_open=True)]
    one.step()  # round 0: cut off; back in round 5, which has begun without it
    assert one.value == 98.0
    one.step()  # round 5 is over: 100 - 10
    assert one.value == 87.0
    one.step()  # round 6, alone, with all 4 steps
    assert one.value == 86.0
    assert [one["weight"] for one in one.comm.options] == [2.0, 0.0, 4.0]
    assert one.optimizer.outer_steps == 7


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"sync_every": 4, "delay": 2, "mixing": 0.0}, [10.0, 7.0, 7.0]),
        ({"sync_every": 4, "delay": 2, "mixing": 0.25}, [10.0, 7.75, 7.75]),
        ({"sync_every": 4, "delay": 2}, [10.0, 8.5, 8.5]),
        ({"sync_every": 4, "delay": 4}, [10.0, 10.0, 10.0]),
        ({"sync_every": 4}, [10.0, 10.0, 10.0]),
    ],
)
def test_steps_that_a_late_merge_replaces_do_not_count_in_the_next_weight(
    trained: Callable[..., Trained], options: dict[str, Any], weights: list[float]
) -> None:
    """Steps of weights 1 to 4; with a delay of 2 a merge replaces those of 1 and 2."""
    one = trained(**options)
    one.comm.reduces += [of_this_one] * 3
    for step in range(12):
        one.step(weight=float(step % 4 + 1))
    one.optimizer.finish()
    assert [each["weight"] for each in one.comm.options] == weights


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("advances", [True, False])
def test_what_a_late_peer_drops_and_what_is_late_in_it_is_told_once(
    trained: Callable[..., Trained], caplog: pytest.LogCaptureFixture, *, advances: bool
) -> None:
    one = trained(sync_every=2)
    scheduler = torch.optim.lr_scheduler.StepLR(one.optimizer, 100)
    one.comm.syncs.append(one.replaced(100.0, 5, is_open=False))
    if advances:
        one.optimizer.join()
        for _ in range(one.optimizer.steps):
            scheduler.step()
    one.steps(2)
    lines = [record.message.partition(", ")[0] for record in caplog.records]
    told = [line for line in lines if not line.startswith("trains alone")]
    dropped = "step() dropped the gradients of one inner step"
    assert told == ([] if advances else ["StepLR begins at step 0", dropped])
    assert one.value == 100.0 - one.optimizer.inner_steps


@pytest.mark.parametrize("of_inner", [True, False])
def test_a_followed_scheduler_is_at_the_step_of_the_run(
    trained: Callable[..., Trained], caplog: pytest.LogCaptureFixture, *, of_inner: bool
) -> None:
    """When it joins late, when it was cut off in a step, and between two steps."""
    one = trained(sync_every=2)
    owner = one.inner if of_inner else one.optimizer
    made = torch.optim.lr_scheduler.LambdaLR(owner, falling)
    scheduler = one.optimizer.follow(made)
    assert scheduler is made

    def train() -> None:
        one.step()
        scheduler.step()
        assert scheduler.last_epoch == one.optimizer.steps
        assert one.inner.param_groups[0]["lr"] == 1 / (1 + one.optimizer.steps)

    one.comm.syncs.append(one.replaced(100.0, 5, is_open=False))
    one.optimizer.join()
    assert (scheduler.last_epoch, one.optimizer.steps) == (10, 10)
    train()
    one.comm.reduces += [cut_off]
    one.comm.syncs += [one.replaced(100.0, 9, is_open=False)]
    train()  # round 5: cut off; back before round 9
    assert one.optimizer.steps == 18
    train()
    other = torch.optim.lr_scheduler.ConstantLR(one.inner)
    assert one.optimizer.follow(other).last_epoch == 19
    assert "begins at step 0" not in caplog.text


def test_schedulers_that_it_cannot_follow(trained: Callable[..., Trained]) -> None:
    one, other = trained(), trained(sync_every="1s")
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        one.optimizer.follow(torch.optim.lr_scheduler.StepLR(other.inner, 1))
    with pytest.raises(ValueError, match="the run counts no steps"):
        other.optimizer.follow(torch.optim.lr_scheduler.StepLR(other.inner, 1))


def test_a_warm_up_outlives_a_checkpoint(trained: Callable[..., Trained]) -> None:
    """Moves are the rates: from a fifth, in steps of a fifth."""
    one, two, three = (trained(sync_every=100, warm_up=4) for _ in range(3))
    one.comm.syncs.append(one.replaced(0.0, 5, is_open=False))
    one.steps(2)
    assert one.value == pytest.approx(-1 / 5 - 2 / 5)
    saved = one.optimizer.state_dict()
    two.optimizer.load_state_dict(saved)
    two.weight.data.fill_(one.value)
    two.steps(3)
    assert two.value == pytest.approx(-1 / 5 - 2 / 5 - 3 / 5 - 4 / 5 - 1)
    three.steps(2)  # it began the run
    assert three.value == -2.0
    del saved["warm_up"]  # of a version without
    four = trained(sync_every=100, warm_up=4)
    four.optimizer.load_state_dict(saved)


def test_params_are_those_of_inner() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    for given, names in (
        (weights, ("0", "1")),
        ([("a", weights[0]), ("b", weights[1])], ("a", "b")),
        ([{"params": weights[:1]}, {"params": weights[1:], "lr": 2.0}], ("0", "1")),
    ):
        inner = torch.optim.SGD(given, lr=1.0)
        comm: Any = Alone()
        assert DiLoCo(inner=inner, comm=comm).fragments == (names,)


def test_who_has_done_nothing_does_not_pay_what_it_owes(trained: Callable[..., Trained]) -> None:
    """If nobody has, the average is not applied, and what was paid would be lost."""
    one = trained(sync_every=2, compression="int8")
    one.step()
    one.comm.reduces += [cut_off, others]
    one.comm.syncs += [one.replaced(100.0, 5, is_open=True)]
    one.step()
    one.step()
    feedback = [one["quantization_options"].error_feedback for one in one.comm.options]
    assert [each is None for each in feedback] == [False, True]


@pytest.mark.parametrize("is_applied", [True, False])
def test_what_was_owed_in_a_reduce_that_others_have_committed_is_not_paid_twice(
    trained: Callable[..., Trained], *, is_applied: bool
) -> None:
    one = trained(sync_every=1, compression="int8")
    one.step()
    feedback = one.comm.options[0]["quantization_options"].error_feedback
    feedback.load_state_dict({"fragment 0": [0.25]})

    def sync() -> None:
        vars(one.optimizer)["_outer"].ledger.close([1, 7] if is_applied else [7])

    one.comm.reduces.append(cut_off)
    one.comm.syncs.append(sync)
    one.step()
    one.optimizer.finish()
    kept = feedback.state_dict()
    assert {name: list(owed) for name, owed in kept.items()} == (
        {} if is_applied else {"fragment 0": [0.25]}
    )


def test_a_scheduler_reaches_the_inner_optimizer_after_a_resume(
    trained: Callable[..., Trained],
) -> None:
    first, second = trained(sync_every=2), trained(sync_every=2)
    first.step()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.optimizer.param_groups[0]["lr"] = 0.25
    assert second.inner.param_groups[0]["lr"] == 0.25
    assert second.optimizer.state is second.inner.state


def test_what_a_listener_raises_does_not_keep_it_from_entering(
    trained: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once and dropped; what it was told of goes on."""

    def tell(event: Event) -> None:
        if isinstance(event, MembersChanged):
            raise KeyError("mine")

    one = trained(sync_every=1, on_event=tell)
    one.step()
    one.step()
    assert one.optimizer.outer_steps == 2
    assert [record.name for record in caplog.records if "KeyError" in record.message] == [
        "pccl.events"
    ]


def test_outcomes_are_forgotten_when_they_are_merged(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=1, delay=1)
    for _ in range(20):
        one.step()
    one.optimizer.finish()
    assert vars(one.optimizer)["_driver"].trainer.commits == {}


def averager(comm: Any) -> GradientAverager:
    model = torch.nn.Linear(1, 1)
    return GradientAverager(model, torch.optim.SGD(model.parameters(), lr=1.0), comm=comm)


def optimizer(comm: Any) -> DiLoCo:
    weight = torch.nn.Parameter(torch.zeros(1))
    return DiLoCo([weight], inner=torch.optim.SGD([weight], lr=1.0), comm=comm)


@pytest.mark.parametrize("second", [averager, optimizer])
@pytest.mark.parametrize("first", [averager, optimizer])
def test_two_wrappers_cannot_share_a_communicator(
    first: Callable[[Any], Any], second: Callable[[Any], Any]
) -> None:
    comm = Alone()
    one = first(comm)
    with pytest.raises(ValueError, match=rf"a {type(one).__name__} uses .* close\(\) the"):
        second(comm)
    second(Alone()).close()
    one.close()
    two = second(comm)  # the first one is closed
    assert not comm.is_closed
    del one, two
    gc.collect()
    first(comm).close()  # the second one is gone


def test_repr(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=4, delay=1)
    one.steps(5)
    assert repr(one.optimizer) == (
        "<DiLoCo: every 4 steps, delay 1, inner SGD, outer SGD, inner steps: 5, outer steps: 1, "
        "members: 1>"
    )
    assert str(schedule("30s", 2, 0)) == "every 30 s, 2 fragments"


def test_closing_does_not_wait_for_peers_that_are_missing(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=1, delay=1, min_peers=2)
    one.comm.others = 1
    one.optimizer.join()
    one.comm.others = 0
    one.step()  # what it has launched waits for a second member
    closing = threading.Thread(target=one.optimizer.close, daemon=True)
    closing.start()
    closing.join(LIMIT_S)
    assert not closing.is_alive()


def test_an_optimizer_that_nobody_has_is_collected_and_its_thread_ends() -> None:
    before = set(threading.enumerate())
    one = Trained(sync_every=1, delay=1)
    one.step()
    (thread,) = set(threading.enumerate()) - before
    gone = weakref.ref(one.optimizer)
    del one
    gc.collect()
    assert gone() is None
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_steps_are_told_in_order(trained: Callable[..., Trained]) -> None:
    told: list[Event] = []
    one = trained(sync_every=2, on_event=told.append)
    for _ in range(3):
        one.step()
    assert [event.step for event in told if isinstance(event, InnerStep)] == [1, 2, 3]


@pytest.mark.parametrize(("error", "in_doubt"), [(DescriptorMismatch, 0), (MasterLost, 2)])
def test_what_is_saved_after_an_error_has_all_work_that_is_not_in_doubt(
    trained: Callable[..., Trained], error: type[PCCLError], in_doubt: int
) -> None:
    def fail_again() -> None:
        raise error

    def fail(values: Any) -> Info:
        one.comm.update_topology = fail_again  # type: ignore[method-assign]
        raise error

    one = trained(sync_every=2, delay=2)
    one.comm.reduces += [fail]
    one.step()
    one.step()  # round 0 is launched, with 2 steps in it
    with pytest.raises(error):
        one.steps(2)
    saved = one.optimizer.state_dict()
    (base,) = saved["base"]
    assert one.value == -float(saved["position"]["steps"])
    assert base.item() - one.value == saved["position"]["steps"] - in_doubt
    two = trained(sync_every=100)
    two.optimizer.load_state_dict(saved)
    assert two.optimizer.inner_steps == saved["position"]["steps"]


def test_work_that_is_committed_and_not_merged_outlives_the_run(
    trained: Callable[..., Trained],
) -> None:
    """It was reduced, applied, and copied over: none of that touches what is kept of it."""
    one = trained(sync_every=4, delay=3)

    def commit(values: Any) -> Info:
        return Info(contributors=(1,), weights=(4.0,), total_weight=4.0)

    def elect_others() -> None:
        outer = vars(one.optimizer)["_outer"]
        outer.record[:] = 0
        outer.fragments[0].flat.fill_(100.0)
        has_entered.set()

    def lose_place() -> None:
        raise Evicted

    has_entered = threading.Event()
    one.comm.reduces.append(commit)
    one.comm.syncs += [lambda: None, lose_place, elect_others]
    one.steps(4)
    assert has_entered.wait(LIMIT_S)
    with vars(one.optimizer)["_caller"].settled():
        pass
    one.step()
    assert one.value == 100.0 - 5.0


def interrupt_a_step(one: Trained, info: Info) -> None:
    """Send Ctrl-C while its step waits for a reduce, which gives this in the end."""
    is_reducing, may_end = threading.Event(), threading.Event()

    def wait(values: Any) -> Info:
        is_reducing.set()
        assert may_end.wait(LIMIT_S)
        return info

    def interrupt() -> None:
        assert is_reducing.wait(LIMIT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    one.comm.reduces.append(wait)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        one.step()
    interrupting.join()
    may_end.set()


def test_ctrl_c_while_a_step_waits_loses_no_step(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=2)
    one.step()
    interrupt_a_step(one, Info(contributors=(1,), weights=(2.0,), total_weight=2.0))
    one.steps(2)
    assert one.value == -4.0
    assert [each["weight"] for each in one.comm.options] == [2.0, 2.0]


def test_ctrl_c_in_the_first_step_does_no_harm(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=4)
    one.comm.syncs.append(one.replaced(3.0, 0, is_open=True))
    interrupt_a_step(one, Info(contributors=(1,), weights=(0.0,), total_weight=0.0))
    one.step()
    one.step()
    assert one.value == 3.0 - 1.0


def test_options_get_a_feedback_for_each_fragment(trained: Callable[..., Trained]) -> None:
    own = pccl.ErrorFeedback()
    options = pccl.QuantizationOptions(format="int8", block=64, error_feedback=own, name="mine")
    one = trained(sync_every=1, compression=options)
    one.step()
    used = one.comm.options[0]["quantization_options"]
    assert (used.format, used.block, used.name) == ("int8", 64, "fragment 0")
    assert used.error_feedback is vars(vars(one.optimizer)["_compression"])["feedback"]
    assert "compression=int8 block=64" in vars(vars(one.optimizer)["_outer"])["_book"]


def test_a_checkpoint_does_not_change_the_outer_settings(trained: Callable[..., Trained]) -> None:
    first = trained(sync_every=1)
    first.step()
    saved = first.optimizer.state_dict()
    saved["outer"]["optimizers"][0]["param_groups"][0]["lr"] = 0.25
    second = trained(sync_every=1)
    second.optimizer.load_state_dict(saved)
    outer = vars(second.optimizer)["_outer"]
    assert outer.fragments[0].optimizer.param_groups[0]["lr"] == 1.0


class TrainedTwo(Trained):
    """Two weights, each a fragment of its own."""

    def __init__(self, **options: Any) -> None:
        self.comm = Alone()
        self.weight, self.other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.inner = torch.optim.SGD([self.weight, self.other], lr=1.0)
        self.optimizer = DiLoCo(
            [("w", self.weight), ("o", self.other)],
            inner=self.inner,
            comm=self.comm,  # type: ignore[arg-type]
            outer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            fragments=2,
            **options,
        )

    def step(self, weight: float = 1.0) -> None:
        self.other.grad = torch.ones(1)
        super().step(weight)


def test_finish_averages_what_fragments_have_left(caplog: pytest.LogCaptureFixture) -> None:
    one = TrainedTwo(sync_every=4)
    one.steps(4)
    one.optimizer.finish()
    one.optimizer.finish()  # nothing is left
    assert (one.value, one.other.item()) == (-4.0, -4.0)
    assert [each["weight"] for each in one.comm.options] == [2.0, 4.0, 2.0]
    assert (one.optimizer.round, one.optimizer.steps) == (3, 4)
    one.steps(4)  # the round that came early was that of step 6
    assert [each["weight"] for each in one.comm.options] == [2.0, 4.0, 2.0, 4.0]
    assert (one.optimizer.round, one.optimizer.steps) == (4, 8)
    assert "dropped" not in caplog.text
    one.optimizer.close()


def test_what_finish_leaves_out_is_said(
    trained: Callable[..., Trained], caplog: pytest.LogCaptureFixture
) -> None:
    one = trained(sync_every=4)
    one.steps(4)
    one.optimizer.finish()
    assert "dropped" not in caplog.text
    one.steps(3)
    one.optimizer.finish()
    assert one.value == -4.0
    assert "dropped local work of weight 3 that no average contains" in caplog.text
    one.steps(1)
    assert [each["weight"] for each in one.comm.options] == [4.0, 1.0]  # it weighs nothing more


def test_finish_of_what_was_resumed_at_the_end_takes_part() -> None:
    first, second = TrainedTwo(sync_every=4), TrainedTwo(sync_every=4)
    first.steps(4)
    saved = first.optimizer.state_dict()
    for mine, other in ((second.weight, first.weight), (second.other, first.other)):
        mine.data.copy_(other.data)
    second.optimizer.load_state_dict(saved)
    second.optimizer.finish()
    assert (second.value, second.other.item()) == (-4.0, -4.0)
    for one in (first, second):
        one.optimizer.close()


def test_an_outcome_of_a_checkpoint_weighs_nothing_after_a_cut() -> None:
    """Its work is in the outer parameters already. Until it is merged, this peer is cut off."""
    first, second = (TrainedTwo(sync_every=4, delay=3, mixing=0.0) for _ in range(2))
    first.steps(3)  # the round of the first fragment is over, and merged after step 5
    saved = first.optimizer.state_dict()
    assert len(saved["in_flight"]) == 1
    for mine, other in ((second.weight, first.weight), (second.other, first.other)):
        mine.data.copy_(other.data)
    second.optimizer.load_state_dict(saved)
    second.comm.reduces.append(cut_off)
    second.step()
    with vars(second.optimizer)["_caller"].settled():
        pass
    second.steps(6)
    second.optimizer.finish()
    assert [each["weight"] for each in second.comm.options] == [4.0, 6.0, 6.0, 1.0, 2.0]
    assert (second.value, second.other.item()) == (-10.0, -7.0)  # a merge replaced three steps
    for one in (first, second):
        one.optimizer.close()


def test_a_weight_in_place_of_a_closure_is_told(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=4)
    with pytest.raises(TypeError, match=r"closure must be a function, not 3\.0; pass a weight"):
        one.optimizer.step(3.0)  # type: ignore[arg-type]


def test_min_peers_may_come_from_the_environment(
    trained: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_MIN_PEERS", "3")
    one = trained(sync_every=1)
    assert "min_peers=3," in vars(vars(one.optimizer)["_outer"])["_book"]
    other = trained(sync_every=1, min_peers=2)
    assert "min_peers=2," in vars(vars(other.optimizer)["_outer"])["_book"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quorum": 1 / 3}, "a quorum of 0.333333333 of the members and an adaptive grace"),
        ({"quorum": 2, "grace_s": 1}, "a quorum of 2 members and 1 s"),
        ({"guard": "off"}, "guard off"),
        ({"guard": "exclude"}, "guard not finite: exclude, outliers: exclude above 8 deviations"),
    ],
)
def test_members_compare_quorums_and_guards_when_one_joins(
    trained: Callable[..., Trained], options: dict[str, Any], text: str
) -> None:
    one = trained(sync_every=1, **options)
    assert f", {text}" in vars(vars(one.optimizer)["_outer"])["_book"]


# -- what the run and the program hear -------------------------------------------------------------


def test_each_step_is_reported_to_the_run(trained: Callable[..., Trained]) -> None:
    one = trained(sync_every=4)
    one.steps(3)
    assert one.comm.steps == [1, 2, 3]


def test_consumers_hear_the_peer_until_the_end(trained: Callable[..., Trained]) -> None:
    heard: list[Event] = []
    one = trained(sync_every=4, on_event=heard.append)
    lost, found = (MasterDisconnected(reason=why, gives_up_s=60.0) for why in ("reset", "again"))
    (tell,) = one.comm.consumers
    tell(lost)
    assert lost not in heard
    one.step()
    assert lost in heard
    tell(found)
    with pytest.raises(PCCLError), one.optimizer:
        raise PCCLError
    assert found in heard
    assert one.comm.consumers == []


def test_closing_tells_nothing_more(trained: Callable[..., Trained]) -> None:
    heard: list[Event] = []
    one = trained(sync_every=4, on_event=heard.append)
    (tell,) = one.comm.consumers
    tell(MasterDisconnected(reason="reset", gives_up_s=60.0))
    one.optimizer.close()
    assert heard == []
    assert one.comm.consumers == []


def test_without_consumers_nothing_is_listened_to(trained: Callable[..., Trained]) -> None:
    assert trained().comm.consumers == []
