"""The demo's bookkeeping: what is made of what workers tell, and how the end is judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pccl.cli.demo.record import ACCURACY_MIN, DemoRecord, DemoTask, Told, Worker, judge
from pccl.cli.processes.reports import decode, encode

GOOD = ACCURACY_MIN + 0.02


def worker(shard: int, *, late: bool = False, alone: bool = False) -> Worker:
    task = DemoTask(shard, 4, 4, 0, "" if alone else "host:1", late=late)
    return Worker(task, pid=10 + shard)


def step(number: int, peer_id: int, *contributors: int) -> Told:
    bytes_sent = 1000 * number
    return Told("training", "", peer_id, number, 0.5, contributors, bytes_sent, 2000.0)


def finished(told: Told, accuracy: float = GOOD, digest: str = "aa") -> Told:
    return replace(told, status="finished", accuracy=accuracy, digest=digest)


def add(record: DemoRecord, now: float, who: Worker, told: Told) -> list[str]:
    return list(record.add(now, who, told))


def story(*, lost_from: int = 3, accuracy: float = GOOD) -> DemoRecord:
    """Three peers take four steps; peer 2 is killed after the second."""
    peers, alone = [worker(shard) for shard in range(3)], worker(0, alone=True)
    record = DemoRecord([*peers, alone], step_count=4)
    for number in range(1, 5):
        if number == 3:
            record.add_kill(2.5, peers[1])
        for index, peer in enumerate(peers):
            who = (1, 3) if number >= lost_from else (1, 2, 3)
            add(record, float(number), peer, step(number, index + 1, *who))
    for peer in (peers[0], peers[2]):
        add(record, 5.0, peer, finished(peer.told, accuracy))
    add(record, 5.0, alone, finished(Told(step=4), 0.9, "bb"))
    return record


def story_with_a_newcomer(*, fetched_bytes: int = 700_000, with_all: bool = True) -> DemoRecord:
    """Peer 4 joins the others of the story in step 4."""
    record = story()
    newcomer = worker(3, late=True)
    record.workers.insert(3, newcomer)
    first, _, third, _, _ = record.workers
    add(record, 4.5, first, finished(step(4, 1, 1, 3, 4)))
    add(record, 4.5, third, finished(step(4, 3, *((1, 3, 4) if with_all else (1, 3)))))
    told = replace(step(4, 4, 1, 3, 4), fetched_bytes=fetched_bytes)
    add(record, 4.5, newcomer, finished(told))
    return record


def failures(record: DemoRecord, lost_expected: int = 1, problem: str = "") -> list[str]:
    return judge(record, seconds=5.0, lost_expected=lost_expected, problem=problem)[1]


def found(record: DemoRecord) -> dict[str, Any]:
    return judge(record, seconds=5.0, lost_expected=1)[0]


def test_what_is_told_survives_the_pipe() -> None:
    told = finished(step(7, 1, 2, 4))
    assert decode(encode(told), (Told,)) == told


def test_a_good_end() -> None:
    assert failures(story()) == []
    assert found(story()) == {
        "accuracy": GOOD,
        "single_shard_accuracy": 0.9,
        "digests_equal": True,
        "lost_peers": 1,
        "joined_peers": 3,
        "fetched_bytes": 0,
        "seconds": 5.0,
    }


def test_a_good_end_with_a_newcomer() -> None:
    record = story_with_a_newcomer()
    assert failures(record) == []
    assert (found(record)["joined_peers"], found(record)["fetched_bytes"]) == (4, 700_000)


def test_a_newcomer_that_fetched_nothing_is_a_failure() -> None:
    assert failures(story_with_a_newcomer(fetched_bytes=0)) == ["peer 4 downloaded nothing"]


def test_a_newcomer_that_did_not_train_with_all_is_a_failure() -> None:
    assert failures(story_with_a_newcomer(with_all=False)) == [
        "peer 4 did not train with all other peers"
    ]


def test_a_newcomer_that_never_joined_is_a_failure() -> None:
    record = story()
    record.workers.insert(3, worker(3, late=True))
    assert failures(record) == [
        "3 of 4 peers joined",
        "2 of 3 survivors finished",
        "shard 3 downloaded nothing",
        "shard 3 did not train with all other peers",
    ]


def test_nobody_lost_where_nobody_should_be() -> None:
    assert failures(story(lost_from=9), lost_expected=0) == []


def test_a_kill_that_the_survivors_did_not_see_is_a_failure() -> None:
    assert failures(story(lost_from=9)) == ["0 peers were lost, not 1"]


def test_low_accuracy_is_a_failure() -> None:
    assert failures(story(accuracy=0.9375)) == ["held-out accuracy 0.938 is below 0.95"]


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"digest": "cc"}, "the survivors' weights differ"),
        ({"digest": ""}, "1 of 2 survivors finished"),
        ({"contributors": (1, 2, 3)}, "the survivors disagree on which peers were lost"),
        ({"peer_id": 0}, "2 of 3 peers joined"),
    ],
)
def test_what_one_survivor_does_wrong(change: dict[str, Any], failure: str) -> None:
    record = story()
    record.workers[0].told = replace(record.workers[0].told, **change)
    assert failures(record) == [failure]


def test_the_one_alone_has_to_finish() -> None:
    record = story()
    record.workers[-1].told = Told()
    assert failures(record) == ["the process that trains alone did not finish"]


def test_an_empty_record_can_be_judged() -> None:
    record = DemoRecord([worker(0), worker(1), worker(0, alone=True)], step_count=4)
    assert found(record)["accuracy"] is found(record)["single_shard_accuracy"] is None
    assert failures(record, problem="nothing was heard")[:2] == [
        "nothing was heard",
        "0 of 2 peers joined",
    ]


def test_a_loss_is_told_once_and_by_name() -> None:
    first, second, third = peers = [worker(shard) for shard in range(3)]
    record = DemoRecord(peers, step_count=20)
    assert add(record, 0.1, third, Told(peer_id=1, note="joined")) == ["peer 1 joined"]
    assert add(record, 1.0, first, step(1, 2, 1, 2, 3)) == [
        "all 3 peers train together",
        "step 1/20  loss 0.5000  world size 3  0.0 MB/s",
    ]
    assert add(record, 1.0, second, step(1, 3, 1, 2, 3)) == []
    assert record.add_kill(1.5, third) == "peer 1 killed (SIGKILL to pid 12) at step 1"
    assert add(record, 1.6, third, step(2, 1, 1, 2, 3)) == []  # it was on its way
    assert add(record, 1.75, second, step(2, 3, 2, 3)) == ["peer 1 lost, continuing with 2"]
    assert add(record, 1.9, first, step(2, 2, 2, 3)) == []
    assert record.resumed_s == 0.25
    assert [(point.step, point.world_size) for point in record.points] == [(1, 3), (2, 2)]


def test_a_newcomer_s_first_step_is_told() -> None:
    record = story()
    newcomer = worker(3, late=True)
    record.workers.insert(3, newcomer)
    assert add(record, 4.5, newcomer, step(4, 4, 1, 3, 4)) == ["peer 4 joins training at step 4"]
    assert record.grown is not None
    assert (record.grown.at_s, record.grown.step) == (4.5, 4)


def test_names() -> None:
    peer, alone = worker(2), worker(2, alone=True)
    assert (peer.label, alone.label) == ("shard 2", "shard 2 alone")
    peer.told = Told(peer_id=7)
    assert peer.label == "peer 7"
