"""What the training thread does while it waits for a round, and what it reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.diloco.joint_caller import JointCaller  # noqa: E402
from pccl.bindings.diloco.model.local_model import LocalModel  # noqa: E402
from pccl.bindings.diloco.pipeline import Launch  # noqa: E402
from pccl.bindings.diloco.replica_calls import JointNews  # noqa: E402
from pccl.bindings.diloco.rounds import (  # noqa: E402
    Average,
    Contribution,
    Entered,
    Members,
    Notice,
    RoundCommitted,
)
from pccl.bindings.diloco.schedule import Schedule  # noqa: E402
from pccl.bindings.diloco.training_driver import (  # noqa: E402
    TrainingDriver,
    cosine,
    noise_scale,
)
from pccl.bindings.event_queue import EventQueue  # noqa: E402
from pccl.bindings.events import (  # noqa: E402
    Event,
    InnerStep,
    MembersChanged,
    OuterStep,
    RoundsMissed,
    TrainsAlone,
)

MINE = 4


class WholeModel:
    """One fragment, of which nothing is kept."""

    def take(self) -> Any:
        return torch.zeros(1)

    def merge(self, common: Any, mixing: float) -> None:
        pass

    def anchor(self, common: Any, lost: Any) -> bool:
        return False


class OneModel:
    """A model of one fragment."""

    buffers = None
    shards = 1

    def __init__(self) -> None:
        self.parts = (WholeModel(),)
        self.held = 0

    def hold(self) -> None:
        self.held += 1


class ScriptedCaller:
    """Has news, and makes more when it is waited for."""

    def __init__(self, on_wait: Callable[[], Notice]) -> None:
        self.queue: list[JointNews] = []
        self.on_wait = on_wait
        self.contributions: list[Contribution] = []
        self.on_settled: Callable[[], None] = lambda: None
        self.is_awaited = self.has_quorum = self.is_leaving = self.is_closed = False

    def tell(self, notice: Notice, at_s: float = 0.0) -> None:
        self.queue.append(JointNews(notice, at_s, [torch.zeros(1)]))

    def news(self) -> list[JointNews]:
        taken, self.queue = self.queue, []
        return taken

    def wait(self) -> None:
        if not self.queue:
            self.tell(self.on_wait())

    def check(self) -> None:
        pass

    def put(self, contribution: Contribution) -> None:
        self.contributions.append(contribution)

    def expect_notice(self, has_work: Callable[[], bool]) -> None:
        assert not has_work()

    def close(self, *, abandon: bool) -> None:
        self.is_closed = not abandon

    @contextmanager
    def settled(self) -> Generator[None]:
        self.on_settled()
        yield


class Trained:
    """A replica that makes a round every few inner steps, among these contributors."""

    def __init__(self, delay: int = 0, sync_steps: int = 1) -> None:
        self.heard: list[Event] = []
        self.heard_before_waiting: list[Event] = []
        self.contributors: tuple[int, ...] = (MINE,)
        self.caller = ScriptedCaller(self.commit)
        self.model = OneModel()
        model = cast("LocalModel", self.model)
        self.listen: Callable[[Event], None] = self.heard.append
        self.events = EventQueue(lambda event: self.listen(event))
        caller = cast("JointCaller", self.caller)
        schedule = Schedule(1, sync_steps, 0.0, delay)
        self.driver = TrainingDriver(schedule, model, 0.0, caller, self.events)
        self.caller.tell(Entered(1, 0, is_open=False, applied=()))
        self.driver.enter()

    def commit(self) -> RoundCommitted:
        self.heard_before_waiting = list(self.heard)
        return RoundCommitted(
            self.caller.contributions[-1], Average(self.contributors, 1.0), (0.5, 0.25)
        )

    def step(self) -> list[Event]:
        self.heard.clear()
        self.driver.stepped(1.0)
        self.events.deliver()
        return list(self.heard)


def test_listeners_hear_what_is_known_before_a_round_is_waited_for() -> None:
    """A round may last as long as too few peers are there; why that is must be told before."""
    one = Trained()
    one.caller.tell(Members(MINE, (MINE, 9)))
    one.driver.hear()
    assert one.heard == []
    one.driver.stepped(1.0)
    joined = MembersChanged(step=0, peer_id=MINE, members=(MINE, 9), joined=(MINE, 9), lost=())
    assert joined in one.heard_before_waiting


def test_a_listener_may_hear_the_news_that_a_merge_waits_for() -> None:
    """``state_dict`` does so, to checkpoint between two rounds; no more news would come."""
    one = Trained()

    def listen(event: Event) -> None:
        one.heard.append(event)
        if isinstance(event, InnerStep):
            one.caller.tell(one.commit())
            one.driver.hear()

    def nothing_comes() -> Notice:
        raise AssertionError("it waits in vain")

    one.caller.on_wait = nothing_comes
    one.listen = listen
    assert [event for event in one.step() if isinstance(event, OuterStep)]


def test_a_newcomer_that_adds_nothing_yet_is_company() -> None:
    one = Trained()
    alone: list[list[Event]] = []
    for members in ((MINE, 9), (MINE,), (MINE,)):
        one.caller.tell(Members(MINE, members))
        one.driver.hear()
        alone.append([event for event in one.step() if isinstance(event, TrainsAlone)])
    assert alone == [[], [TrainsAlone(step=2)], []]  # it is told once


def test_what_was_contributed_and_what_came_of_it_is_told_together() -> None:
    one = Trained()
    one.contributors = (9, MINE)
    (outer,) = [event for event in one.step() if isinstance(event, OuterStep)]
    assert (outer.step, outer.number, outer.contributors) == (1, 1, (MINE, 9))
    assert (outer.own_weight, outer.total_weight) == (1.0, 1.0)
    assert (outer.mean_norm, outer.step_norm) == (0.5, 0.25)


def test_a_return_makes_what_was_waited_for_void() -> None:
    one = Trained()
    one.caller.tell(Entered(2, 5, is_open=False, applied=()))
    assert not [event for event in one.step() if isinstance(event, OuterStep)]
    assert one.driver.trainer.entry == 2
    (outer,) = [event for event in one.step() if isinstance(event, OuterStep)]
    assert outer.number == 6


def test_outer_steps_that_the_group_made_meanwhile_are_counted() -> None:
    one = Trained()
    one.step()  # this replica knows one outer step
    for entered, missed in (
        (Entered(2, 4, is_open=False, applied=()), 3),
        (Entered(3, 5, is_open=False, applied=(4,)), 0),  # with its work, which was in doubt
        (Entered(4, 7, is_open=True, applied=(5,)), 1),
        (Entered(5, 7, is_open=False, applied=()), 0),
        (Entered(6, 6, is_open=False, applied=()), 0),  # the election chose an older state
    ):
        one.heard.clear()
        one.caller.tell(entered)
        one.driver.hear()
        one.events.deliver()
        found = [event for event in one.heard if isinstance(event, RoundsMissed)]
        number = entered.number
        assert found == ([RoundsMissed(step=1, number=number, missed=missed)] if missed else [])


def test_a_newcomer_has_missed_nothing() -> None:
    one = Trained()
    one.driver.known = None
    one.caller.tell(Entered(1, 9, is_open=False, applied=()))
    one.driver.hear()
    one.events.deliver()
    assert not any(isinstance(event, RoundsMissed) for event in one.heard)


@pytest.mark.parametrize(("number", "is_forgotten"), [(16, False), (17, True)])
def test_work_that_the_run_has_forgotten_is_told(
    number: int, caplog: pytest.LogCaptureFixture, *, is_forgotten: bool
) -> None:
    """The ledger keeps 16 rounds; work in an older one counts as averaged, and may be lost."""
    one = Trained()
    one.caller.tell(Entered(2, number, is_open=False, applied=(0,)))
    one.driver.trainer.step(1.0).send(None)  # round 0 is launched
    one.driver.hear()
    (line,) = [record.message for record in caplog.records] or [""]
    assert ("has averaged this peer's work of weight 1;" in line) == is_forgotten


def test_a_contribution_waits_for_the_merge_before_it() -> None:
    """Else its average would get memory while that of the round before still has some."""
    one = Trained(delay=1)
    sent: list[list[int]] = []

    def commit() -> Notice:
        sent.append([given.number for given in one.caller.contributions])
        return one.commit()

    one.caller.on_wait = commit
    for _ in range(3):
        one.step()
    assert sent == [[0], [0, 1]]
    assert [given.number for given in one.caller.contributions] == [0, 1, 2]


def test_ctrl_c_in_a_wait_loses_no_contribution() -> None:
    one = Trained(delay=1)
    one.step()

    def interrupt() -> Notice:
        raise KeyboardInterrupt

    one.caller.on_wait = interrupt
    held = one.model.held
    with pytest.raises(KeyboardInterrupt):
        one.step()
    assert one.model.held == held + 1, "the program may train on, and that work must count"
    assert [given.number for given in one.caller.contributions] == [0]
    one.driver.send_all()
    assert [given.number for given in one.caller.contributions] == [0, 1]


def test_the_cosine_of_two_vectors() -> None:
    assert cosine(6.0, 2.0, 3.0) == 1.0
    assert cosine(-3.0, 2.0, 3.0) == -0.5
    assert math.isnan(cosine(0.0, 0.0, 3.0))
    assert math.isnan(cosine(math.nan, 2.0, 3.0))


def test_the_noise_scale() -> None:
    """Contributions (3, 4) and (3, -4): the signal is (3, 0), the noise 16 in each."""
    # The unbiased estimates from two: noise 2 * (25 - 9), signal 2 * 9 - 25 < 0.
    assert noise_scale(5.0, 3.0, 2.0) == math.inf
    # (3, 1) and (3, -1): noise 2 * (10 - 9) = 2, signal 2 * 9 - 10 = 8.
    assert noise_scale(math.sqrt(10), 3.0, 2.0) == pytest.approx(0.25)
    assert noise_scale(3.0, 3.0, 4.0) == 0.0
    assert math.isnan(noise_scale(3.0, 3.0, 1.0))
    assert math.isnan(noise_scale(0.0, 3.0, 2.0))


def test_the_noise_scale_of_drawn_vectors() -> None:
    """4 contributions of 50,000 values: 1.0 each, and noise of variance 9; the scale is 9."""
    drawn = 1 + 3 * torch.randn(4, 50_000, generator=torch.Generator().manual_seed(1))
    found = noise_scale(drawn[0].norm().item(), drawn.mean(0).norm().item(), 4.0)
    assert found == pytest.approx(9.0, rel=0.05)


def test_a_sharded_replica_without_a_quorum_never_launches_early() -> None:
    """Its processes launch after the same step, and would have to ask each other in each one."""
    for shards, rounds in ((1, 1), (2, 0)):
        one = Trained(sync_steps=5)
        one.model.shards = shards
        one.caller.is_awaited = True
        one.step()
        assert len(one.caller.contributions) == rounds


def test_work_is_handed_over_again_if_a_member_that_returned_reverted_it() -> None:
    one = Trained(sync_steps=5)
    one.step()
    assert one.driver.has_work()
    reverted = [Entered(2, 0, is_open=False, applied=())]

    def settle() -> None:
        if one.caller.contributions and reverted:
            one.driver.trainer.pipeline.carry(Launch(0, 0, 1.0))
            one.caller.tell(reverted.pop())

    one.caller.on_settled = settle
    one.driver.leave_if_asked()
    assert one.driver.has_work(), "there was no notice"
    one.caller.is_leaving = True
    with pytest.raises(SystemExit) as left:
        one.driver.leave_if_asked()
    assert left.value.code == 0
    assert one.caller.is_closed
    assert [given.weight for given in one.caller.contributions] == [1.0, 1.0]
    assert not one.driver.has_work()
