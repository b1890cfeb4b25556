"""A round that goes on without a replica: its work is kept, and goes into the next one.

The model is one number. An inner step adds -1, so a pseudo-gradient is the number of its steps.
"""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from pccl.bindings.data.reader import LeaseReader, PeerLease  # noqa: E402
from pccl.bindings.diloco.local_trainer import LocalTrainer, RoundMerged  # noqa: E402
from pccl.bindings.diloco.model.local_model import LocalFragment  # noqa: E402
from pccl.bindings.diloco.rounds import (  # noqa: E402
    Average,
    Contribution,
    Entered,
    RoundCommitted,
)
from pccl.bindings.diloco.schedule import Schedule  # noqa: E402

OTHERS, BOTH = (5,), (3, 5)


class Bench:
    """A replica, each of whose fragments is one parameter; it begins at 100 in round 0."""

    def __init__(
        self,
        sync_steps: int,
        fragments: int = 1,
        delay: int = 0,
        *,
        mixing: float = 0.0,
        eager: bool = False,
        samples: LeaseReader | None = None,
    ) -> None:
        self.params = [torch.full((2,), 100.0) for _ in range(fragments)]

        def outer(params: Any) -> Any:
            return torch.optim.SGD(params, lr=0.5)

        self.parts = [LocalFragment([("w", p)], outer) for p in self.params]
        self.now_s = 0.0
        schedule = Schedule(fragments, sync_steps, 0.0, delay)
        self.is_eager = eager
        self.trainer = LocalTrainer(
            schedule, self.parts, mixing, lambda: self.now_s, eager=eager, samples=samples
        )
        self.sent: list[Contribution] = []
        self.merged: list[RoundMerged] = []
        self.answers: dict[int, tuple[float, bool]] = {}
        """Number of a round -> the outer parameters after it, and whether it had own work."""
        self.enter(0, 100.0)

    def enter(self, number: int, value: float, **facts: Any) -> None:
        common = [torch.full((2,), value) for _ in self.parts]
        entered = Entered(self.trainer.entry + 1, number, is_open=False, applied=(), **facts)
        self.trainer.enter(entered, common)

    def step(self, *, is_awaited: bool = False) -> None:
        for part, p in zip(self.parts, self.params, strict=True):
            part.hold()
            p -= 1.0
        self.carry_out(self.trainer.step(1.0, is_awaited=is_awaited))

    def carry_out(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Contribution):
                self.sent.append(action)
            elif isinstance(action, RoundMerged):
                self.merged.append(action)
            else:
                self.commit(self.trainer.awaited)

    def commit(self, number: int) -> None:
        value, took_part = self.answers.pop(number)
        sent = next(one for one in self.sent if one.number == number)
        values = torch.full((2,), value)
        weight = sent.weight if took_part else 0.0
        average = Average(BOTH if took_part else OTHERS, 8.0, took_part=took_part)
        told = Contribution(number, sent.fragment, weight, values, sent.entry)
        state: Any = [{"state": {}}] if self.is_eager else None
        self.trainer.commit(RoundCommitted(told, average, (1.0, 1.0), state))

    @property
    def contributed(self) -> list[tuple[int, float, list[float]]]:
        return [(one.number, one.weight, one.values.tolist()) for one in self.sent]

    @property
    def model(self) -> list[list[float]]:
        return [p.tolist() for p in self.params]


def test_without_delay() -> None:
    bench = Bench(2)
    bench.answers = {0: (90.0, False), 1: (70.0, True)}
    bench.step()
    bench.step()
    assert bench.contributed == [(0, 2.0, [2.0, 2.0])]
    # The outer parameters of the others, and the own two steps.
    assert bench.model == [[88.0, 88.0]]
    assert not bench.merged[0].merge.is_taken
    bench.step()
    assert bench.model == [[87.0, 87.0]]
    bench.step()
    assert bench.contributed[1:] == [(1, 4.0, [4.0, 4.0])]
    assert bench.model == [[70.0, 70.0]]


def test_with_a_delay_that_drops_steps() -> None:
    """The steps during the missed round are kept, too; those during the next one are not."""
    bench = Bench(4, delay=2)
    bench.answers = {0: (90.0, False), 1: (70.0, True)}
    for _ in range(6):
        bench.step()
    assert bench.contributed == [(0, 4.0, [4.0, 4.0])]
    assert bench.model == [[84.0, 84.0]]  # six own steps
    for _ in range(4):
        bench.step()
    assert bench.contributed[1:] == [(1, 8.0, [8.0, 8.0])]
    assert bench.model == [[70.0, 70.0]]


def test_the_outcome_is_known_before_the_merge() -> None:
    bench = Bench(4, delay=3)
    bench.answers = {0: (90.0, False)}
    for _ in range(4):
        bench.step()
    bench.commit(0)
    base: Any = bench.parts[0].base
    assert base.tolist() == [100.0, 100.0]
    assert bench.model == [[96.0, 96.0]]
    for _ in range(3):
        bench.step()
    assert bench.model == [[83.0, 83.0]]


def test_with_mixing_all_of_the_work_is_kept() -> None:
    bench = Bench(4, delay=2, mixing=0.5)
    bench.answers = {0: (90.0, False), 1: (70.0, True)}
    for _ in range(6):
        bench.step()
    assert bench.model == [[84.0, 84.0]]
    for _ in range(4):
        bench.step()
    # Two steps since the pseudo-gradient: half of the way to 70 from 90 - 10.
    assert bench.contributed[1:] == [(1, 8.0, [8.0, 8.0])]
    assert bench.model == [[75.0, 75.0]]


def test_streaming_only_the_missed_fragment_keeps_its_work() -> None:
    bench = Bench(4, fragments=2, delay=1)
    bench.answers = {0: (90.0, False), 1: (60.0, True), 2: (80.0, True)}
    for _ in range(5):
        bench.step()
    # Fragment 0 launched after two steps and merged after three, fragment 1 after four and five.
    assert bench.contributed == [(0, 2.0, [2.0, 2.0]), (1, 4.0, [4.0, 4.0])]
    assert bench.model == [[85.0, 85.0], [60.0, 60.0]]
    bench.step()
    assert bench.contributed[2:] == [(2, 6.0, [6.0, 6.0])]


def test_a_round_that_is_launched_meanwhile_keeps_the_work_that_comes_back() -> None:
    """It takes part, but its merge drops no step of the missed one."""
    bench = Bench(6, delay=3)
    bench.answers = {0: (90.0, False), 1: (80.0, True), 2: (50.0, True)}
    for _ in range(6):
        bench.step()
    bench.step(is_awaited=True)  # the others begin round 1
    assert bench.contributed == [(0, 6.0, [6.0, 6.0]), (1, 1.0, [1.0, 1.0])]
    assert bench.model == [[84.0, 84.0]]  # 90 and the work of round 0; that of round 1 is taken
    for _ in range(3):
        bench.step()
    assert not bench.merged[1].merge.is_taken
    assert bench.model == [[71.0, 71.0]]  # 80, six steps of round 0, and three since round 1
    for _ in range(3):
        bench.step()
    assert bench.contributed[2:] == [(2, 12.0, [12.0, 12.0])]


def test_eager_the_missed_work_is_in_the_next_preview() -> None:
    """Outer steps have a rate of 1/2; a merge previews the share 2/8 of the own work in flight."""
    bench = Bench(2, delay=2, eager=True)
    bench.answers = {0: (90.0, False), 1: (70.0, True)}
    for _ in range(4):
        bench.step()
    assert bench.contributed == [(0, 2.0, [2.0, 2.0]), (1, 2.0, [2.0, 2.0])]
    # 90, less half of 2 * 2/8 for the work in flight, less the two steps that came back.
    assert bench.model == [[87.75, 87.75]]
    bench.step()
    bench.step()
    assert bench.contributed[2:] == [(2, 4.0, [4.0, 4.0])]
    # Round 1 had a share of 2/8 of the weight, which counts for the four steps in flight.
    assert bench.model == [[69.5, 69.5]]


def test_two_rounds_missed_in_a_row() -> None:
    bench = Bench(2)
    bench.answers = {0: (90.0, False), 1: (80.0, False), 2: (60.0, True)}
    for _ in range(6):
        bench.step()
    assert bench.contributed == [(0, 2.0, [2.0] * 2), (1, 4.0, [4.0] * 2), (2, 6.0, [6.0] * 2)]
    assert bench.model == [[60.0, 60.0]]


def test_after_a_missed_round_an_entry_keeps_its_work_once() -> None:
    bench = Bench(4, delay=2)
    bench.answers = {0: (90.0, False)}
    for _ in range(5):
        bench.step()
    bench.commit(0)
    bench.enter(5, 40.0)
    assert bench.model == [[35.0, 35.0]]
    bench.answers = {5: (20.0, True)}
    for _ in range(4):
        bench.step()
    assert bench.contributed[1:] == [(5, 9.0, [9.0, 9.0])]


def test_after_a_missed_round_a_reset_drops_its_work() -> None:
    bench = Bench(4, delay=2)
    bench.answers = {0: (90.0, False)}
    for _ in range(5):
        bench.step()
    bench.commit(0)
    bench.enter(5, 40.0, is_reset=True)
    assert bench.model == [[40.0, 40.0]]
    for _ in range(4):
        bench.step()
    assert bench.contributed[1:] == [(5, 4.0, [4.0, 4.0])]


def test_a_late_replica_is_behind_until_it_launches() -> None:
    bench = Bench(4)
    bench.answers = {0: (90.0, False)}
    for _ in range(4):
        bench.now_s += 1.0
        bench.step()
    assert bench.trainer.is_behind()
    bench.answers = {1: (80.0, True)}
    bench.now_s += 4.0
    bench.step(is_awaited=True)
    assert bench.contributed[1:] == [(1, 5.0, [5.0, 5.0])]
    assert not bench.trainer.is_behind()


# -- samples -------------------------------------------------------------------------------------


def reading(count: int) -> LeaseReader:
    """Return a reader that has read so many positions, one for each step."""
    reader = LeaseReader(1)
    reader.entered(PeerLease(((0, 100),)), None)
    for _ in range(count):
        reader.issue()
        reader.hand_over()
        assert reader.stepped() == 1
    return reader


def test_samples_of_replaced_work_count_as_done() -> None:
    bench = Bench(4, delay=2, samples=LeaseReader(1))
    bench.answers = {0: (90.0, True), 1: (70.0, True)}
    for _ in range(8):
        bench.step()
    assert bench.contributed == [(0, 4.0, [4.0, 4.0]), (1, 4.0, [2.0, 2.0])]


def test_a_replica_without_samples_takes_part_in_the_next_round_at_once() -> None:
    bench = Bench(4)
    bench.answers = {0: (90.0, True), 1: (80.0, True), 2: (70.0, True)}
    bench.step()
    bench.carry_out(bench.trainer.idle())
    assert bench.contributed == [(0, 1.0, [1.0, 1.0])]
    bench.carry_out(bench.trainer.idle())
    assert bench.contributed[1:] == [(1, 0.0, [0.0, 0.0])]
    for _ in range(4):
        bench.step()
    assert bench.contributed[2:] == [(2, 4.0, [4.0, 4.0])]
    assert bench.model == [[70.0, 70.0]]


def test_a_replica_without_samples_waits_for_the_round_in_flight_first() -> None:
    bench = Bench(4, delay=3)
    bench.answers = {0: (90.0, True), 1: (80.0, True)}
    for _ in range(4):
        bench.step()
    bench.carry_out(bench.trainer.idle())
    assert [one.number for one in bench.sent] == [0]
    assert not bench.merged  # it is due after three steps
    bench.carry_out(bench.trainer.idle())
    assert [one.number for one in bench.sent] == [0, 1]
    assert [one.merge.number for one in bench.merged] == [0]


@pytest.mark.parametrize(("start", "is_lost"), [(0, False), (50, True)])
def test_work_is_dropped_if_others_have_its_samples(*, start: int, is_lost: bool) -> None:
    """Three steps of work, of which the lease in the run's state has all samples, or none."""
    reader = reading(3)
    bench = Bench(4, samples=reader)
    for _ in range(3):
        bench.step()
    entered = Entered(2, 5, is_open=False, applied=())
    lease = PeerLease(((start, start + 20),))
    entered = bench.trainer.read_on(entered, lease)
    assert entered.is_reset is is_lost
    bench.trainer.enter(entered, [torch.full((2,), 40.0)])
    assert bench.model == [[40.0, 40.0]] if is_lost else [[37.0, 37.0]]
    assert reader.issue().tolist() == [50] if is_lost else [3]
    reader.restart()
    assert bench.trainer.pipeline.work(0) == (0.0 if is_lost else 3.0)


def test_after_a_guard_all_samples_are_read_again() -> None:
    reader = reading(3)
    bench = Bench(4, samples=reader)
    entered = Entered(2, 5, is_open=False, applied=(), is_reset=True)
    assert bench.trainer.read_on(entered, PeerLease(((0, 20),))) == entered
    assert reader.issue().tolist() == [0]


def test_what_is_handed_over_is_all_work() -> None:
    """One round is in flight, each fragment gets one, and one of them went on without it."""
    bench = Bench(4, fragments=2, delay=3)
    bench.step()
    bench.step()
    assert bench.contributed == [(0, 2.0, [2.0, 2.0])]
    bench.step()
    bench.answers = {0: (90.0, True), 1: (80.0, False), 2: (70.0, True), 3: (60.0, True)}
    bench.carry_out(bench.trainer.hand_over())
    assert bench.contributed[1:] == [
        (1, 3.0, [3.0, 3.0]),
        (2, 1.0, [1.0, 1.0]),
        (3, 3.0, [3.0, 3.0]),
    ]
    assert not bench.trainer.pipeline.has_work
    assert not bench.trainer.pipeline.in_flight()


def test_nothing_is_handed_over_without_work() -> None:
    bench = Bench(2)
    bench.carry_out(bench.trainer.hand_over())
    assert bench.contributed == []
