"""What the page shows of a status."""

from __future__ import annotations

import json
from dataclasses import replace

from pccl.inquiry import LinkSpeed
from pccl.observe.page.picture import ROWS_MAX, picture, point
from pccl.protocol.status_report import Figure
from pccl.protocol.types import AbortCause, PeerId
from tests.support.statuses import REDUCE, SAMPLE, SPEEDS, ended, with_long_ids

LOSSES = {1: 2.5, 2: 2.5, 3: 2.5}


def test_members_waits_calls_and_links() -> None:
    shown = json.loads(json.dumps(picture(SAMPLE)))
    bob = shown["members"][1]
    assert (bob["peer"], bob["who"], bob["state"]) == (2, "2 (bob)", "awaited")
    assert (bob["awaited"], bob["progress"]) == ("3.20 s", "step 1196, loss 2.5, 1.92 steps/s")
    assert shown["slowest"]["who"] == "2 (bob)"
    assert shown["waits"] == [
        {"what": "update_topology", "whom": "2 (bob), 4 (dave)", "time": "3.20 s"},
        {"what": REDUCE, "whom": "2 (bob), 4 (dave)", "time": "3.30 s"},
        {"what": "newcomer 12 (erin)", "whom": "the members' update_topology()", "time": "1.40 s"},
    ]
    assert [call["outcome"] for call in shown["ended"]] == ["ok", "ok", "MEMBER_LOST", "ok"]
    assert shown["links"]["peers"] == [1, 2, 3]
    assert shown["links"]["heads"] == ["1", "2", "3"]
    assert shown["links"]["who"] == ["1 (alice)", "2 (bob)", "3 (carol)"]
    pairs = {(peer, other): speed for peer, other, speed, *_ in shown["links"]["pairs"]}
    assert pairs == SPEEDS
    paths = {(peer, other): path for peer, other, _, _, *path in shown["links"]["pairs"]}
    assert paths[1, 3] == ["direct", "", ""]
    assert paths[1, 2] == paths[2, 1]
    path, why, remedy = paths[1, 2]
    assert path == "relayed by peer 3 (carol)"
    assert why.startswith("neither peer 1 (alice) nor peer 2 (bob) can be dialled, and ")
    assert remedy.startswith("open a port of one of them")


def test_figures_of_a_member_are_shown_in_one_line() -> None:
    figures = (Figure("cosine", 0.98765), Figure("own norm", 1e9))
    first = replace(SAMPLE.members[0], figures=figures)
    shown = picture(replace(SAMPLE, members=(first,)))
    assert shown["members"][0]["figures"] == "cosine 0.988, own norm 1e+09"


def test_a_peer_with_a_long_id_is_shown_by_its_name() -> None:
    shown = picture(with_long_ids(SAMPLE))
    assert [member["who"] for member in shown["members"]] == ["alice", "bob", "carol", "dave"]
    assert shown["links"]["heads"] == shown["links"]["who"] == ["alice", "bob", "carol"]


def test_the_matrix_and_the_list_of_waits_are_bounded() -> None:
    links = tuple(LinkSpeed(PeerId(n), PeerId(n + 1), 1, 1) for n in range(1, 2 * ROWS_MAX))
    many = replace(SAMPLE, links=links, operations=SAMPLE.operations * 2 * ROWS_MAX)
    shown = picture(many)
    assert len(shown["links"]["peers"]) == ROWS_MAX
    assert len(shown["links"]["pairs"]) == ROWS_MAX - 1
    assert len(shown["waits"]) == ROWS_MAX


def test_a_point_counts_what_has_ended_meanwhile() -> None:
    calls = (
        ended(took_us=10_000, tensor_bytes=100),
        ended(took_us=30_000, tensor_bytes=300),
        ended(cause=AbortCause.MEMBER_LOST, tensor_bytes=7),
        ended(took_us=999_000),
    )
    now = replace(SAMPLE, ended=calls, ended_count=50)
    before = replace(SAMPLE, ended_count=47)
    assert point(before, now, 2.0) == {
        "calls_per_s": 1.5, "failed_per_s": 0.5, "took_ms": 20.0, "bytes_per_s": 200.0,
        "losses": LOSSES,
    }  # fmt: skip
    nothing = dict.fromkeys(("calls_per_s", "failed_per_s", "took_ms", "bytes_per_s"), 0.0)
    assert point(now, now, 2.0) == {**nothing, "losses": LOSSES}
    assert point(before, now, 0.0)["calls_per_s"] == 0.0


def test_a_point_estimates_what_the_status_does_not_list() -> None:
    calls = (ended(tensor_bytes=100), ended(tensor_bytes=100, cause=AbortCause.LOCKSTEP))
    now = replace(SAMPLE, ended=calls, ended_count=20)
    found = point(replace(SAMPLE, ended_count=0), now, 1.0)
    assert (found["calls_per_s"], found["failed_per_s"]) == (20.0, 10.0)
    assert found["bytes_per_s"] == 1000.0
