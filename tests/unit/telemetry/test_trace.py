"""The trace of hand-made records: slices, phases, arrows, clocks and names."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pccl.telemetry.records import Record, check_record
from pccl.telemetry.trace import TRACKS_MAX, merge
from tests.support.trace_format import check_trace
from tests.unit.telemetry.test_records import GOOD

US = 1000
MS = 1000 * US


def record(peer: int, ahead_ns: int = 0, **fields: Any) -> Record:
    """The record of a peer whose clock is behind the master's by ``ahead_ns``; error 10 us."""
    empty: dict[str, Any] = {key: [] for key in ("events", "open_calls", "phases", "segments")}
    made = {**GOOD, **empty, "name": f"p{peer}", "peer_ids": [peer], "now_ns": 900 * MS}
    made["clock"] = [[0, ahead_ns - 10 * US, ahead_ns + 10 * US]]
    return check_record({**made, **fields})


def of(trace: dict[str, Any], phase: str, name: str | None = None) -> list[dict[str, Any]]:
    entries = [entry for entry in trace["traceEvents"] if entry["ph"] == phase]
    return [entry for entry in entries if name in (None, entry["name"])]


def segment(at_us: int, peer: int, *, sent: bool, n: int = 0, us: int = 50) -> list[Any]:
    return [at_us * US, (at_us + us) * US, peer, 0, sent, 100, "DATA", 0, 0, n]


def test_an_operation_shows_its_phases_and_its_call() -> None:
    times = {"requested": 1, "started": 3, "done": 7, "committed": 8}
    phases = [[at_ms * MS + 500, phase, 0] for phase, at_ms in times.items()]
    ended = {"at_ns": 9 * MS + 500, "event": "CallEnded", "call": "all_reduce", "tag": 5}
    ended |= {"seconds": 0.008, "outcome": "ok"}
    trace = merge([record(1, 100 * MS, phases=phases, events=[ended])], {})
    check_trace(trace)
    found = {entry["name"]: (entry["ts"], entry["dur"]) for entry in of(trace, "X")}
    assert found == {
        "all_reduce tag 5": (101_000, 8_000),
        "SUM tag 5": (101_000, 7_000),
        "wait for members": (101_000, 2_000),
        "move data": (103_000, 4_000),
        "wait for the outcome": (107_000, 1_000),
    }


def test_what_has_not_ended_lasts_until_the_record() -> None:
    calls, phases = [[1 * MS, "all_reduce", 5]], [[1 * MS, "requested", 0]]
    trace = merge([record(1, open_calls=calls, phases=phases)], {})
    check_trace(trace)
    ends = {entry["name"]: entry["ts"] + entry["dur"] for entry in of(trace, "X")}
    assert ends == dict.fromkeys(("all_reduce tag 5", "SUM tag 5", "wait for members"), 900_000)


def test_an_arrow_leads_from_a_sent_segment_to_its_receipt_on_one_clock() -> None:
    sender = record(1, 500 * MS, segments=[segment(1_000, 2, sent=True)])
    receiver = record(2, -300 * MS, segments=[segment(801_200, 1, sent=False)])
    trace = merge([sender, receiver], {"peer 3 (carol)": "did not answer"})
    check_trace(trace)
    (start,), (end,) = of(trace, "s"), of(trace, "f")
    assert (start["pid"], end["pid"]) == (1, 2)
    assert abs(end["ts"] - start["ts"] - 200) <= 2
    about = trace["otherData"]
    assert about["unanswered"] == {"peer 3 (carol)": "did not answer"}
    assert all(10 <= peer["clock_error_us"] <= 500 for peer in about["peers"])
    names = {entry["args"]["name"] for entry in of(trace, "M", "thread_name")}
    assert names == {"events", "to peer 2 (p2), lane 0", "from peer 1 (p1), lane 0"}
    labels = [entry["args"]["labels"] for entry in of(trace, "M", "process_labels")]
    assert all(label.startswith("clock ±0.") for label in labels)


def test_clocks_are_shifted_within_their_errors_until_no_receipt_comes_first() -> None:
    """By their clocks, the segment arrives 8 us before it is sent; each may be wrong by 10 us."""
    sender = record(1, segments=[segment(1_000, 2, sent=True)])
    receiver = record(2, segments=[segment(992, 1, sent=False)])
    trace = merge([sender, receiver], {})
    check_trace(trace)
    sent, received = of(trace, "X")
    assert (sent["pid"], received["pid"]) == (1, 2)
    assert received["ts"] - sent["ts"] in (0, 1)


def test_an_arrow_that_clocks_contradict_does_not_lead_back() -> None:
    sender = record(1, segments=[segment(50_000, 2, sent=True)])
    receiver = record(2, segments=[segment(1_000, 1, sent=False, us=100_000)])
    trace = merge([sender, receiver], {})
    check_trace(trace)
    (start,), (end,) = of(trace, "s"), of(trace, "f")
    assert start["ts"] == end["ts"]
    receiver = record(2, segments=[segment(1_000, 1, sent=False, us=100)])
    trace = merge([sender, receiver], {})
    check_trace(trace)
    assert (of(trace, "s"), trace["otherData"]["arrows_left_out"]) == ([], 1)


def test_a_segment_that_was_sent_twice_and_received_once() -> None:
    again = [segment(1_000, 2, sent=True), segment(5_000, 2, sent=True)]
    trace = merge(
        [record(1, segments=again), record(2, segments=[segment(5_100, 1, sent=False)])], {}
    )
    check_trace(trace)
    (start,) = of(trace, "s")
    assert abs(start["ts"] - 5_000) <= 2


def test_peers_of_two_runs_have_no_arrows_between_them() -> None:
    sender = record(1, segments=[segment(1_000, 2, sent=True)])
    receiver = record(2, segments=[segment(1_000, 1, sent=False)], run="cd" * 16)
    assert of(merge([sender, receiver], {}), "s") == []


def test_events_are_instants_of_their_process() -> None:
    event = {"at_ns": 5 * MS, "event": "LinkLost", "peer_id": 4, "reason": "reset"}
    trace = merge([record(1, events=[event])], {})
    check_trace(trace)
    (instant,) = of(trace, "i")
    assert (instant["name"], instant["args"]) == ("LinkLost", {"peer_id": 4, "reason": "reset"})


def test_slices_that_overlap_get_threads_of_their_own_up_to_a_limit() -> None:
    calls = [[n * US, f"call{n}", None] for n in range(1, TRACKS_MAX + 10)]
    trace = merge([record(1, open_calls=calls)], {})
    check_trace(trace)
    assert len({entry["tid"] for entry in of(trace, "X")}) == TRACKS_MAX
    assert trace["otherData"]["slices_left_out"] == 9


def test_a_peer_without_heartbeats_is_placed_by_the_time_of_day() -> None:
    """The master's clock is 2 s ahead of p1's, so it shows 3 s when it is 11 s by the wall."""
    known = record(1, 2000 * MS, now_ns=1000 * MS, time_s=11.0)
    event = {"at_ns": 7000 * MS, "event": "Joined"}
    unknown = record(2, clock=[], now_ns=7000 * MS, time_s=12.0, events=[event])
    trace = merge([known, unknown], {})
    check_trace(trace)
    (instant,) = of(trace, "i")
    assert abs(instant["ts"] - 4_000_000) <= US
    assert [peer["clock_error_us"] is None for peer in trace["otherData"]["peers"]] == [False, True]


def test_nothing_is_a_trace_too() -> None:
    check_trace(merge([], {}))


@pytest.mark.parametrize("seed", range(20))
def test_records_that_make_no_sense_give_a_sound_trace(seed: int) -> None:
    """Every field within its bounds, and nothing fits anything."""
    rng = random.Random(seed)

    def time_ns() -> int:
        return rng.choice((0, 1, 10**9, 1 << 62, rng.randrange(1 << 62), rng.randrange(10**6)))

    def number() -> int:
        return rng.choice((0, 1, 2, (1 << 64) - 1))

    def nonsense(peer: int) -> Record:
        return record(
            peer,
            clock=[[time_ns(), *sorted((-time_ns(), time_ns()))] for _ in range(rng.randrange(9))],
            operations=[[*(number() for _ in range(5)), "x"] for _ in range(3)],
            events=[
                {
                    "at_ns": time_ns(),
                    "event": rng.choice(("CallEnded", "Else")),
                    "seconds": number(),
                }
                for _ in range(20)
            ],
            open_calls=[[time_ns(), "x", None] for _ in range(20)],
            phases=[
                [time_ns(), rng.choice(("requested", "started", "done", "committed")), n % 3]
                for n in range(20)
            ],
            segments=[
                [
                    *sorted((time_ns(), time_ns())),
                    *(number(), number(), rng.random() < 0.5, number(), "DATA", n % 3),
                    *(number(), number()),
                ]
                for n in range(50)
            ],
        )

    check_trace(merge([nonsense(number()) for _ in range(4)], {}))
