"""Conclusions from evidence: one test for each cause, and that no answer of a peer breaks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.observe import summary
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.status_report import (
    GroupStatus,
    LinkSpeed,
    MemberStatus,
    OperationStatus,
    RoundStatus,
)
from pccl.protocol.status_report import StatusReport as Status
from pccl.protocol.types import AlgorithmTable, OperationId, PeerId, RoundId, RoundKind
from pccl.telemetry.blame import Cause, Clues, find_blame, waits_in_words

ONE, TWO, THREE = PeerId(1), PeerId(2), PeerId(3)


def member(
    peer: int, calls: str = "", *, group: int = 0, connected: bool = True, silent_ms: int = 100
) -> MemberStatus:
    return MemberStatus(
        PeerId(peer), f"p{peer - 1}", group, peer - 1, "10.0.0.1", 4000, connected, silent_ms, None,
        calls, "tag 0 (barrier)", 4200, 7, 0,
    )  # fmt: skip


def operation(tag: int, *missing: PeerId, started: bool = False, still_ms: int = 100) -> Any:
    number = OperationId(1, 0, 1, tag, 0)
    what = f"tag {tag} (SUM of 8 x float32)"
    return OperationStatus(number, what, started, 5000, still_ms, 3, missing, len(missing), 0, 0)


def update(*missing: PeerId) -> RoundStatus:
    return RoundStatus(RoundId(RoundKind.UPDATE_TOPOLOGY, 4), 3000, 1, missing, len(missing))


def status(
    *members: MemberStatus,
    rounds: tuple[RoundStatus, ...] = (),
    operations: tuple[OperationStatus, ...] = (),
) -> Status:
    return Status(
        run=b"r" * 16, term=1, uptime_ms=1, roster_version=1, member_count=len(members),
        members=members, newcomer_count=0, newcomers=(), group_count=1,
        groups=(GroupStatus(0, 1, len(members), (1,), AlgorithmTable()),), rounds=rounds,
        operation_count=len(operations), operations=operations, removal_count=0, removals=(),
        link_count=0, links=(), ended_count=0, ended=(),
        waits_for="",
    )  # fmt: skip


WAITING = status(member(1, "tag 0"), member(2), member(3, "tag 0"), operations=(operation(0, TWO),))
"""Peers 1 and 3 wait for a call of peer 2."""


def path(peer: int, **measured: Any) -> dict[str, Any]:
    return {"peer_id": peer, "lane": 0, "bytes_per_s": 100_000_000, **measured}


def process(state: str, *waits_in: str, busy: float = 0.0, stacks: str = "") -> dict[str, Any]:
    threads = [{"name": "python", "state": state, "waits_in": one} for one in waits_in]
    return {"pid": 77, "state": state, "busy": busy, "threads": threads, "stacks": stacks}


DUMP = 'Thread 0x1 (most recent call first):\n  File a\n\nCurrent thread 0x2 (x):\n  File "b.py"\n'


@pytest.mark.parametrize(
    ("clues", "cause", "words"),
    [
        (Clues(silent=True, process=process("T")), Cause.STOPPED, "process 77 is stopped (SIGSTOP"),
        (Clues(silent=True, process=process("t")), Cause.STOPPED, "by a debugger"),
        (Clues(silent=True, process=process("gone")), Cause.GONE, "process 77 has ended"),
        (
            Clues(silent=True, path={"unacknowledged": 0}),
            Cause.UNKNOWN,
            "does not answer, though its system acknowledges what it receives: its process is "
            "stopped, or C code holds its interpreter lock",
        ),
        (Clues(silent=True), Cause.UNKNOWN, "does not answer: its process is stopped, or C code"),
        (
            Clues(silent=True, process=process("S", "nanosleep", "futex_do_wait", stacks=DUMP)),
            Cause.LOCK_HELD,
            'held by C code that waits at File "b.py"',
        ),
        (
            Clues(silent=True, process=process("R", "0", "futex_do_wait", busy=0.98)),
            Cause.LOCK_HELD,
            "held by C code that computes",
        ),
        (
            Clues(threads=[{"is_main": True, "waits_in": "futex_do_wait", "frames": ["x.py:3"]}]),
            Cause.BLOCKED,
            "its main thread is at x.py:3, and waits for a lock",
        ),
        (
            Clues(threads=[{"is_main": True, "waits_in": "", "frames": ["a.py:1", "x.py:3"]}]),
            Cause.NO_CALL,
            "peer 2 has not made the call tag 0 (SUM of 8 x float32); its last call was tag 0 "
            "(barrier), 4.2 s ago, at step 7; its main thread is at x.py:3",
        ),
        (
            Clues(state={"happened": [{"text": "no room for the pieces: full", "ago_s": 1.5}]}),
            Cause.NO_ROOM,
            "no room for the pieces: full",
        ),
    ],
)
def test_a_member_whose_call_is_missing(clues: Clues, cause: Cause, words: str) -> None:
    (found,) = find_blame(WAITING, {TWO: clues})
    assert (found.cause, found.peers) == (cause, (2,))
    assert words in found.text


BUSY = "64 questions are open; ask again later"


def test_a_member_without_evidence_is_not_blamed_for_that() -> None:
    """The master was busy, say. It is no less blamed for a call that it has not made."""
    members = (member(1, "tag 0"), member(2, "tag 0", silent_ms=4000), member(3))
    case = status(*members, operations=(operation(0, THREE),))
    dead: Any = {"retransmits": 4, "ack_ago_ms": 4000}
    (found,) = find_blame(case, {TWO: Clues(refusal=BUSY, path=dead)})
    assert (found.cause, found.peers) == (Cause.NO_CALL, (3,))
    (found,) = find_blame(WAITING, {TWO: Clues(refusal=BUSY)})
    assert (found.cause, found.peers) == (Cause.NO_CALL, (2,))
    assert find_blame(status(member(1), member(2)), {TWO: Clues(refusal=BUSY)}) == []


def test_a_member_that_has_lost_its_connection_while_others_reach_it() -> None:
    members = (member(1, "tag 0"), member(2, connected=False, silent_ms=5000), member(3, "tag 0"))
    case = status(*members, operations=(operation(0, TWO),))
    alive = {"paths": [path(2, unacknowledged=0, ack_ago_ms=9000)]}
    dead = {"paths": [path(2, unacknowledged=3, ack_ago_ms=9000)]}
    (found,) = find_blame(case, {ONE: Clues(state=alive), THREE: Clues(state=dead)})
    assert found.cause is Cause.MASTER_UNREACHABLE
    assert found.text == "peer 2 has not reached the master for 5.0 s; peer 1 can still reach it"


@pytest.mark.parametrize(
    "clues",
    [
        Clues(silent=True, path={"retransmits": 4, "ack_ago_ms": 4000}),
        Clues(silent=True, process=process("S", "futex_do_wait", "do_epoll_wait")),
    ],
    ids=["the kernel gets no acknowledgements", "its I/O thread waits for messages"],
)
def test_a_connected_member_from_which_the_network_lets_nothing_through(clues: Clues) -> None:
    members = (member(1, "tag 0"), member(2, silent_ms=4000), member(3, "tag 0"))
    (found,) = find_blame(status(*members, operations=(operation(0, TWO),)), {TWO: clues})
    assert (found.cause, found.peers) == (Cause.MASTER_UNREACHABLE, (2,))


def test_members_that_wait_for_each_other() -> None:
    members = (member(1, "tag 1"), member(2, "tag 2"), member(3, "tag 2"))
    case = status(*members, operations=(operation(1, TWO, THREE), operation(2, ONE)))
    (found,) = find_blame(case, {})
    assert (found.cause, found.peers) == (Cause.CROSSED_CALLS, (1, 2, 3))
    assert found.text.endswith(
        "peer 1 in tag 1 (SUM of 8 x float32), peers 2, 3 in tag 2 (SUM of 8 x float32)"
    )


def test_a_round_of_the_run_that_waits_for_another_group() -> None:
    members = (member(1, "update_topology"), member(2, group=1), member(3, group=1))
    found = find_blame(status(*members, rounds=(update(TWO, THREE),)), {})
    assert [(one.cause, one.peers) for one in found] == [
        (Cause.OTHER_GROUP, (2,)),
        (Cause.OTHER_GROUP, (3,)),
    ]


MOVING = status(member(1), member(2), member(3), operations=(operation(0, ONE, started=True),))
STILL = status(
    *(member(peer) for peer in (1, 2, 3)),
    operations=(operation(0, ONE, started=True, still_ms=2500),),
)


def test_a_link_that_takes_nothing_is_dead_and_one_that_takes_little_is_slow() -> None:
    full = {"paths": [path(1, backlog_bytes=9, bytes_per_s=900_000), path(2)]}
    fine = {"paths": [path(1), path(3)]}
    clues = {THREE: Clues(state=full), TWO: Clues(state=fine)}
    (slow,) = find_blame(MOVING, clues)
    assert (slow.cause, slow.peers) == (Cause.SLOW_LINK, (3, 1))
    assert "carries 0.90 MB/s, the median of all links is 100.00 MB/s" in slow.text
    (dead,) = find_blame(STILL, clues)
    assert (dead.cause, dead.peers) == (Cause.DEAD_LINK, (1, 3))


def test_a_relayed_link_that_is_slow_may_become_better() -> None:
    full = {"paths": [path(1, backlog_bytes=9, bytes_per_s=900_000), path(2)]}
    clues = {THREE: Clues(state=full), TWO: Clues(state={"paths": [path(1), path(3)]})}
    link = LinkSpeed(THREE, ONE, 1, 900_000, TWO, LinkPath.RELAYED, False, False)
    (slow,) = find_blame(replace(MOVING, links=(link, replace(link, peer=TWO))), clues)
    assert slow.cause is Cause.SLOW_LINK
    assert "; it is relayed by peer 2: neither peer 1 nor peer 3 can be dialled" in slow.text
    assert slow.remedy.startswith("open a port of one of them")
    assert slow.remedy.endswith("; or quantize, average less often, or run without one of the two")


def test_a_link_on_which_large_packets_vanish_is_named_once() -> None:
    def clues(peer: int) -> Clues:
        return Clues(state={"narrow_links": [{"peer_id": peer, "segment_bytes": 1200}]})

    quiet = status(member(1), member(2), member(3))
    (found,) = find_blame(quiet, {ONE: clues(3), TWO: clues(9), THREE: clues(1)})
    assert (found.cause, found.peers) == (Cause.LARGE_PACKETS_LOST, (1, 3))
    said = "large packets vanish between peer 1 and peer 3; segments of 1200 bytes pass"
    assert found.text == said
    assert found.remedy.startswith("lower the MTU of the VPN or tunnel")


def test_links_are_not_blamed_for_a_member_that_is_stopped() -> None:
    full = {"paths": [path(1, backlog_bytes=9, probes=3)]}
    clues = {ONE: Clues(silent=True, process=process("T")), TWO: Clues(state=full)}
    (found,) = find_blame(STILL, clues)
    assert found.cause is Cause.STOPPED


def test_nobody_is_blamed_while_data_moves() -> None:
    fine = {"paths": [path(1), path(3)]}
    assert find_blame(MOVING, {TWO: Clues(state=fine)}) == []
    assert find_blame(status(member(1), member(2)), {}) == []


def test_what_waits_is_said_in_words() -> None:
    case = status(
        member(1, "tag 0"), member(2), member(3),
        rounds=(update(TWO),), operations=(operation(0, TWO, THREE),),
    )  # fmt: skip
    assert list(waits_in_words(case)) == [
        "update_topology #4: 1 member waits for peer 2, for 3.0 s",
        "tag 0 (SUM of 8 x float32): waits for the calls of peers 2, 3, nothing for 0.1 s",
    ]
    idle = replace(status(), waits_for="no member has returned to it")
    assert list(waits_in_words(idle)) == [
        "this master coordinates no run: no member has returned to it"
    ]
    assert summary.names_of(case).explain("peers 1, 2") == "peers 1 (p0), 2 (p1)"


KEYS = st.sampled_from(
    ["happened", "narrow_links", "segment_bytes", "paths", "peer_id",
     "backlog_bytes", "bytes_per_s", "probes", "ack_ago_ms",
     "text", "ago_s", "is_main", "waits_in", "frames", "state", "threads", "stacks", "pid", "busy"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats()
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
OBJECTS = st.dictionaries(KEYS, JSON, max_size=5)


@pytest.mark.parametrize("number", [10**400, float("inf"), float("nan")])
def test_a_number_beyond_all_reason_is_none(number: float) -> None:
    clues = {ONE: Clues(state={"paths": [path(2, bytes_per_s=number), path(3, bytes_per_s=1e6)]})}
    assert find_blame(MOVING, clues) == []


@given(
    case=st.sampled_from([WAITING, MOVING, STILL]),
    silent=st.booleans(),
    state=OBJECTS,
    threads=st.lists(JSON, max_size=3),
    master_path=OBJECTS,
    seen=OBJECTS,
)
def test_no_answer_of_a_peer_breaks_the_conclusions(
    case: Status,
    silent: bool,
    state: dict[str, Any],
    threads: list[Any],
    master_path: dict[str, Any],
    seen: dict[str, Any],
) -> None:
    clues = Clues(silent, "", state, threads, master_path, seen)
    for found in find_blame(case, dict.fromkeys((ONE, TWO, THREE), clues)):
        assert found.text
        assert set(found.peers) <= {1, 2, 3}
