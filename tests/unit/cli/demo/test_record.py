"""The demo's bookkeeping: what is read from the workers, and how the end is judged."""

import dataclasses
import json

import pytest

from pccl.cli.demo.record import (
    ACCURACY_MIN,
    DemoRecord,
    DemoVerdict,
    Event,
    Finished,
    Joined,
    Ready,
    Stepped,
    Synced,
    Worker,
    decode,
    encode,
    judge,
    name_peers,
)
from pccl.progress import SyncProgress

GOOD = ACCURACY_MIN + 0.02


def step(number: int, *contributors: int) -> Stepped:
    return Stepped(number, 0.5, contributors, 1000 * number, 1000 * number)


def story(*, lost_from: int = 3, accuracy: float = GOOD) -> DemoRecord:
    """Three peers take four steps; peer 2 is killed after the second."""
    peers = [Worker(shard) for shard in range(3)]
    alone = Worker(0, alone=True)
    record = DemoRecord([*peers, alone], step_count=4)
    for index, peer in enumerate(peers):
        record.add(1.0, peer, Joined(index + 1))
    for number in range(1, 5):
        if number == 3:
            record.add_kill(2.5, peers[1])
        for peer in peers:
            if not peer.killed:
                who = (1, 3) if number >= lost_from else (1, 2, 3)
                record.add(float(number), peer, step(number, *who))
    for peer in (peers[0], peers[2]):
        record.add(5.0, peer, Finished(accuracy, "aa"))
    record.add(4.0, alone, step(4))
    record.add(5.0, alone, Finished(0.9, "bb"))
    return record


def story_with_a_newcomer(*, fetched_bytes: int = 700_000, with_all: bool = True) -> DemoRecord:
    """Peer 4 joins the others of the story in step 4."""
    record = story()
    newcomer = Worker(3, late=True, pid=14)
    record.workers.insert(3, newcomer)
    first, _, third, _, _ = record.workers
    record.add(3.1, newcomer, Ready())
    record.add(3.2, newcomer, Joined(4))
    record.add(3.3, newcomer, Synced(fetched_bytes, 200_000, 0.02))
    last = step(4, 1, 3, 4)
    for peer in (first, newcomer):
        record.add(4.5, peer, last)
    record.add(4.5, third, last if with_all else step(4, 1, 3))
    record.add(5.0, newcomer, Finished(GOOD, "aa"))
    return record


def judged(record: DemoRecord, lost_expected: int = 1, problem: str = "") -> DemoVerdict:
    return judge(record, seconds=5.0, lost_expected=lost_expected, problem=problem)


@pytest.mark.parametrize(
    "event",
    [Ready(), SyncProgress("fetching", 1, 2, 3.5, 4, 5), Joined(3), Synced(3, 2, 0.5),
     step(7, 1, 2, 4), step(7), Finished(0.98, "ab12")],
)  # fmt: skip
def test_events_survive_the_pipe(event: Event) -> None:
    line = encode(event)
    assert "\n" not in line
    assert decode(line + "\n") == event


@pytest.mark.parametrize(
    "line",
    ["", "Traceback (most recent call last):", "3", "[]", "{}", '{"event": "left"}',
     '{"event": "joined"}', '{"event": "joined", "peer_id": 1, "more": 2}', '{"event": []}'],
)  # fmt: skip
def test_other_output_is_no_event(line: str) -> None:
    assert decode(line) is None


def test_a_good_end() -> None:
    verdict = judged(story())
    assert verdict == DemoVerdict(GOOD, 0.9, True, 1, 3, 0, 5.0, ())
    assert json.loads(verdict.to_json()) == {
        "accuracy": GOOD,
        "single_shard_accuracy": 0.9,
        "digests_equal": True,
        "lost_peers": 1,
        "joined_peers": 3,
        "fetched_bytes": 0,
        "seconds": 5.0,
    }


def test_a_good_end_with_a_newcomer() -> None:
    assert judged(story_with_a_newcomer()) == DemoVerdict(GOOD, 0.9, True, 1, 4, 700_000, 5.0, ())


def test_a_newcomer_that_fetched_nothing_is_a_failure() -> None:
    verdict = judged(story_with_a_newcomer(fetched_bytes=0))
    assert verdict.failures == ("peer 4 has fetched nothing",)


def test_a_newcomer_that_did_not_train_with_all_is_a_failure() -> None:
    verdict = judged(story_with_a_newcomer(with_all=False))
    assert verdict.failures == ("peer 4 did not train with all the others",)


def test_a_newcomer_that_never_joined_is_a_failure() -> None:
    record = story()
    record.workers.insert(3, Worker(3, late=True))
    assert judged(record).failures == (
        "3 of 4 peers joined",
        "2 of 3 survivors finished",
        "peer on shard 3 has fetched nothing",
        "peer on shard 3 did not train with all the others",
    )


def test_what_a_newcomer_does_is_told() -> None:
    record = story()
    newcomer = Worker(3, late=True, pid=14)
    record.workers.insert(3, newcomer)
    told: list[str] = []
    states = [newcomer.status]
    for event in (
        Ready(),
        SyncProgress("prefetching", 0, 0, 0.0, 2, 0),
        SyncProgress("prefetching", 100_000, 800_000, 1e6, 2, 0),
        SyncProgress("prefetching", 150_000, 800_000, 1e6, 2, 0),
        Joined(4),
        SyncProgress("done", 800_000, 800_000, 1e6, 2, 0),
        Synced(800_000, 200_000, 0.0204),
        step(4, 1, 3, 4),
    ):
        told += record.add(4.5, newcomer, event)
        states.append(newcomer.status)
    assert told == [
        "peer on shard 3 fetches: 12 %, 100 kB of 800 kB, 1.0 MB/s, 1 s left, 2 sources",
        "peer 4 joined (shard 3, pid 14)",
        "peer 4 fetches: 100 %, 800 kB of 800 kB, all here",
        "peer 4 took over 800 kB, 200 kB of it while all waited 20 ms",
        "peer 4 trains along from step 4",
    ]
    assert states == [
        *("starting", "ready", "ready", "fetching", "fetching"),
        *("waiting", "waiting", "waiting", "training"),
    ]
    assert record.grown_at == (4.5, 4)


def test_nobody_lost_where_nobody_should_be() -> None:
    record = story(lost_from=9)
    assert judged(record, lost_expected=0).failures == ()


def test_a_kill_that_the_survivors_did_not_see_is_a_failure() -> None:
    verdict = judged(story(lost_from=9))
    assert verdict.lost_peers == 0
    assert verdict.failures == ("0 peers were lost, not 1",)


def test_low_accuracy_is_a_failure() -> None:
    verdict = judged(story(accuracy=ACCURACY_MIN - 0.01))
    assert verdict.failures == ("held-out accuracy 0.940 is below 0.95",)


def test_different_weights_are_a_failure() -> None:
    record = story()
    record.survivors[0].finished = Finished(GOOD, "cc")
    verdict = judged(record)
    assert not verdict.digests_equal
    assert verdict.failures == ("the survivors' weights differ",)


def test_a_survivor_that_did_not_finish_is_a_failure() -> None:
    record = story()
    record.survivors[0].finished = None
    verdict = judged(record, problem="peer 1 ended unexpectedly")
    assert verdict.accuracy is None
    assert not verdict.digests_equal
    assert verdict.failures == ("peer 1 ended unexpectedly", "1 of 2 survivors finished")


def test_survivors_must_agree_on_who_was_lost() -> None:
    record = story()
    record.survivors[0].lost = frozenset()
    verdict = judged(record)
    assert verdict.failures == ("the survivors disagree on who was lost",)


def test_more_lost_than_killed_is_a_failure() -> None:
    record = story()
    for survivor in record.survivors:
        survivor.lost |= {3}
    assert judged(record).failures == ("2 peers were lost, not 1",)


def test_an_empty_record_can_be_judged() -> None:
    verdict = judged(DemoRecord([Worker(0), Worker(1)], step_count=4), problem="nothing was heard")
    assert (verdict.accuracy, verdict.single_shard_accuracy) == (None, None)
    assert verdict.failures[:2] == ("nothing was heard", "0 of 2 peers joined")


def test_a_loss_is_told_once_and_by_name() -> None:
    first, second, third = peers = [Worker(shard, pid=10 + shard) for shard in range(3)]
    record = DemoRecord(peers, step_count=4)
    assert record.add(0.1, third, Joined(1)) == ["peer 1 joined (shard 2, pid 12)"]
    assert record.add(1.0, first, step(1, 1, 2, 3)) == ["all 3 train together"]
    assert record.add(1.0, second, step(1, 1, 2, 3)) == []
    assert record.add_kill(1.5, third) == "peer 1 killed (SIGKILL to pid 12) at step 1"
    assert record.add(1.75, second, step(2, 2, 3)) == ["peer 1 lost, continuing with 2"]
    assert record.add(1.9, first, step(2, 2, 3)) == []
    assert record.resumed_s == 0.25
    assert [(point.step, point.world_size) for point in record.points] == [(1, 3), (2, 2)]
    assert record.moved_bytes == 2 * 2000


def test_peers_are_named() -> None:
    assert name_peers([3]) == "peer 3"
    assert name_peers([2, 3]) == "peers 2, 3"


def test_bandwidth_is_that_of_the_last_moments() -> None:
    peer = Worker(0)
    record = DemoRecord([peer], step_count=100)
    assert peer.rate(0.0) == 0.0
    for number in range(1, 11):
        record.add(float(number), peer, step(number, 1))
    assert peer.rate(10.0) == 2000.0
    assert peer.rate(60.0) == 0.0
    assert len(peer.moved) <= 3


def test_a_worker_says_what_it_is_doing() -> None:
    peer = Worker(0)
    states = [peer.status]
    for change in (
        {"peer_id": 1},
        {"latest": step(1, 1)},
        {"finished": Finished(1.0, "aa")},
        {"killed": True},
    ):
        peer = dataclasses.replace(peer, **change)
        states.append(peer.status)
    assert states == ["starting", "waiting", "training", "finished", "killed"]
