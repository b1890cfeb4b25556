"""What a status says to people: names, states, speeds, the slowest member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.inquiry import LinkPath, LinkSpeed
from pccl.observe import summary
from pccl.protocol.types import AbortCause, PeerId
from tests.support.statuses import SAMPLE, ended, member


def test_names_of_members_and_of_removed_peers() -> None:
    names = summary.names_of(SAMPLE)
    assert summary.who(names, 1) == "1 (alice)"
    assert summary.who(names, 9) == "9 (ivan)"
    assert summary.who(names, 77) == "77"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "works"),
        ({"calls": "tag 3"}, "waits"),
        ({"calls": "tag 3", "awaited_ms": 5}, "awaited"),
        ({"connected": False, "awaited_ms": 5}, "lost"),
    ],
)
def test_the_state_of_a_member(change: dict[str, object], state: str) -> None:
    idle = member(1, "alice", calls="", awaited_ms=None)
    assert summary.state(replace(idle, **change)) == state  # type: ignore[arg-type]


def test_the_slowest_is_the_member_that_cost_most_time() -> None:
    calls = (ended(last=2, late_us=10), ended(last=2, late_us=30), ended(last=1, late_us=35))
    found = summary.slowest(replace(SAMPLE, ended=calls))
    assert found == summary.Slowest(peer=2, calls=2, of=3, late_us=20)
    assert summary.slowest(replace(SAMPLE, ended=())) is None
    assert summary.slowest(replace(SAMPLE, ended=(ended(last=2, late_us=0),))) is None


def test_throughput_counts_calls_with_a_result_up_to_now() -> None:
    calls = (
        ended(ago_ms=100, tensor_bytes=600),
        ended(ago_ms=200, tensor_bytes=400, cause=AbortCause.MEMBER_LOST),
        ended(ago_ms=900, took_us=100_000, tensor_bytes=400),
    )
    assert summary.throughput(replace(SAMPLE, ended=calls)) == (2.0, 1000.0)
    assert summary.throughput(replace(SAMPLE, ended=())) == (0.0, 0.0)


def test_steps_per_second_and_outcomes() -> None:
    stepping = replace(member(1, "alice"), step_us=250_000)
    assert summary.steps_per_s(stepping) == 4.0
    assert summary.steps_per_s(replace(stepping, step_us=0)) == 0.0
    assert summary.outcome(ended()) == "ok"
    assert summary.outcome(ended(cause=AbortCause.LOCKSTEP)) == "LOCKSTEP"
    assert ended().last == PeerId(2)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0, "0 us"),
        (850, "850 us"),
        (12_000, "12.0 ms"),
        (3_400_000, "3.40 s"),
        (99_900_000, "99.9 s"),
        (125_000_000, "2:05"),
        (7_500_000_000, "2:05:00"),
    ],
)
def test_durations(time_us: int, text: str) -> None:
    assert summary.duration(time_us) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (98_100_000, "98.1 MB"), (5e12, "5.00 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert summary.size(nbytes) == text


def test_the_links_that_could_be_better_the_relayed_ones_first() -> None:
    paths = {
        (1, 2): LinkPath.DIALLED_BACK,
        (2, 1): LinkPath.DIALLED_BACK,
        (2, 3): LinkPath.DIALLED_BACK,  # the elder can be dialled
        (3, 4): LinkPath.PUNCHED,  # as good as a direct one
        (4, 5): LinkPath.DIRECT,
        (5, 6): None,
        (7, 6): LinkPath.RELAYED,
    }
    links = tuple(
        LinkSpeed(PeerId(peer), PeerId(other), 0, 0, None, path, peer != 1, other != 1)
        for (peer, other), path in paths.items()
    )
    found = summary.indirect_links(replace(SAMPLE, links=links))
    assert [(link.peer, link.other) for link in found] == [(7, 6), (1, 2)]
