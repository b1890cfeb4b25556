"""Schedules are what their sources say, for any number of replicas."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.stress.studies.storm.schedules import CALM_S, SCHEDULES, make_storm
from pccl.stress.timeline import LASTING, FaultKind


@given(
    st.sampled_from(sorted(SCHEDULES)), st.integers(2, 40), st.floats(60, 3600), st.integers(0, 999)
)
def test_a_storm_depends_on_its_arguments_and_ends_in_calm(
    name: str, replicas: int, seconds: float, seed: int
) -> None:
    storm = make_storm(name, replicas, seconds, seed)
    assert storm == make_storm(name, replicas, seconds, seed)
    assert storm.timeline.peers == replicas
    for fault in storm.timeline.faults:
        if fault.kind is not FaultKind.BANDWIDTH:
            assert fault.end_s <= seconds - CALM_S
    assert not storm.quiet.timeline.faults
    assert storm.quiet.training == storm.training


@given(st.integers(2, 20), st.integers(0, 99))
def test_no_replica_has_two_faults_at_once(replicas: int, seed: int) -> None:
    free_s = [0.0] * replicas
    for fault in make_storm("ft-diloco", replicas, 3600, seed).timeline.faults:
        assert fault.at_s >= free_s[fault.peer]
        free_s[fault.peer] = fault.end_s


def test_ft_diloco_strikes_125_times_an_hour_among_32() -> None:
    """28 kills to 9 partitions to 8 stops, over many hours; among 8 a quarter as often."""
    hours = 40
    faults = [
        fault
        for seed in range(hours)
        for fault in make_storm("ft-diloco", 32, 3600, seed).timeline.faults
    ]
    assert len(faults) / hours == pytest.approx(125, rel=0.04)
    kinds = Counter(fault.kind for fault in faults)
    for kind, count in ((FaultKind.RESTART, 28), (FaultKind.PARTITION, 9), (FaultKind.FREEZE, 8)):
        assert kinds[kind] / len(faults) == pytest.approx(count / 45, rel=0.1)
    few = [
        fault
        for seed in range(hours)
        for fault in make_storm("ft-diloco", 8, 3600, seed).timeline.faults
    ]
    assert len(few) / hours == pytest.approx(125 / 4, rel=0.08)


@pytest.mark.parametrize(("name", "every_s"), [("torchft-60", 60), ("torchft-15", 15)])
def test_torchft_kills_one_at_a_time(name: str, every_s: int) -> None:
    faults = make_storm(name, 8, 600, 1).timeline.faults
    assert [fault.at_s for fault in faults] == list(range(every_s, 590, every_s))
    assert {fault.kind for fault in faults} == {FaultKind.RESTART}
    assert len({fault.peer for fault in faults}) > 3


def test_at_home_each_peer_has_its_uplink() -> None:
    faults = make_storm("home-internet", 8, 1800, 1).timeline.faults
    ups = {f.peer: f.amount * 8 / 1e6 for f in faults if f.kind is FaultKind.BANDWIDTH}
    assert sorted(ups) == list(range(8))
    assert all(10 <= up <= 100 for up in ups.values())
    assert all(fault.duration_s for fault in faults if fault.kind in LASTING)


def test_at_home_faults_of_each_kind_come_as_often_as_the_source_says() -> None:
    """An hour of 32 replicas: 4 naps, 2 sleeps, a restart and 4 resets for each, all the time."""
    hours = 10
    faults = [
        fault
        for seed in range(hours)
        for fault in make_storm("home-internet", 32, 3600, seed).timeline.faults
    ]
    kinds = Counter(fault.kind for fault in faults)
    for kind, each in (("nap", 4), ("clock_pause", 2), ("restart", 1), ("reset", 4)):
        assert kinds[FaultKind(kind)] / hours / 32 == pytest.approx(each, rel=0.12)
    early = Counter(fault.kind for fault in faults if fault.at_s < 1800)
    assert early[FaultKind.RESTART] / kinds[FaultKind.RESTART] == pytest.approx(0.5, abs=0.1)


def test_a_given_link_replaces_that_of_the_schedule() -> None:
    assert make_storm("slow-links", 4, 60, 1).timeline.link == "rate=10mbit,rtt=40ms"
    assert make_storm("slow-links", 4, 60, 1, link="rate=1mbit").timeline.link == "rate=1mbit"
