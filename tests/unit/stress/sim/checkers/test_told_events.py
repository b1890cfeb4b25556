"""The judge of events: what a listener may hear, and what it must not miss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pccl.machines.peer.machine import Standing
from pccl.protocol.types import PeerId
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.checkers.told_events import ToldEvents
from pccl.telemetry import events as tell
from pccl.telemetry.stream import EventStream
from tests.support.scenarios import roster

JOINED = tell.Joined(
    peer_id=2, name="", run="", rank=0, world_size=2, rejoined=False, away_s=0.0
)  # fmt: skip
LOST = tell.MembershipLost(cause="SILENT", reason="")
CAME = tell.MemberJoined(peer_id=3, name="", host="h", world_size=3)
WENT = tell.MemberLost(peer_id=3, name="", cause="", reason="", world_size=2)
DOWN = tell.LinkLost(peer_id=1, name="", reason="")
UP = tell.LinkRestored(peer_id=1, name="", away_s=1.0)
WAITS = tell.Waiting(call="barrier", waits_for="", waited_s=2)
ENDED = tell.WaitingEnded(call="barrier", waited_s=2.0)


class Judged:
    """Peer 2 of a run with peer 1, and its judge."""

    def __init__(self, *members: int, may_lose_packets: bool = False) -> None:
        machine = SimpleNamespace(standing=Standing.MEMBER, peer=PeerId(2), newest=None)
        parts: Any = SimpleNamespace(events=EventStream(), machine=machine, calls=[1])
        self.engine = parts
        self.judge = ToldEvents("p2", self.engine, may_lose_packets=may_lose_packets)
        self.has(*(members or (1, 2)))

    def has(self, *members: int) -> None:
        self.engine.machine.newest = roster(1, 1, *members)

    def hears(self, *events: tell.PeerReport) -> None:
        for event in events:
            self.engine.events.put(event, 0)
        self.judge.check()


def test_what_happens_in_a_run() -> None:
    peer = Judged()
    peer.hears(JOINED, DOWN, WAITS)
    peer.has(1, 2, 3)
    peer.hears(CAME, UP, WAITS, ENDED)
    peer.hears()
    peer.has(1, 2)
    peer.hears(WENT, DOWN)
    peer.engine.machine.standing = Standing.LOST
    peer.hears(LOST)
    peer.engine.machine.standing = Standing.MEMBER
    peer.hears(JOINED, DOWN)


@pytest.mark.parametrize(
    "second",
    [JOINED, WENT, UP, ENDED, tell.MemberJoined(peer_id=1, name="", host="h", world_size=2)],
)
def test_what_contradicts_earlier_events(second: tell.PeerReport) -> None:
    peer = Judged()
    with pytest.raises(Violation, match=r"p2: its events say \[1\], and then"):
        peer.hears(JOINED, second)


@pytest.mark.parametrize("first", [LOST, CAME, WENT, DOWN])
def test_what_is_said_of_others_before_it_joined(first: tell.PeerReport) -> None:
    with pytest.raises(Violation, match="p2: its events say none, and then"):
        Judged().hears(first)


def test_large_packets_are_lost_only_where_they_vanish() -> None:
    lost = tell.LargePacketsLost(peer_id=1, name="", segment_bytes=1200)
    Judged(may_lose_packets=True).hears(JOINED, lost)
    with pytest.raises(Violation, match=r"p2: its events say \[1\], and then LargePacketsLost"):
        Judged().hears(JOINED, lost)


def test_what_is_not_said() -> None:
    peer = Judged()
    with pytest.raises(Violation, match=r"p2: the members are \{1\}, its events say none"):
        peer.hears()
    peer = Judged()
    peer.hears(JOINED)
    peer.has(1, 2, 3)
    with pytest.raises(Violation, match=r"its events say \[1\]"):
        peer.hears()
    peer = Judged()
    peer.hears(JOINED)
    peer.engine.machine.standing = Standing.LOST
    with pytest.raises(Violation, match="the members are None"):
        peer.hears()


def test_a_wait_that_does_not_end_with_its_call() -> None:
    peer = Judged()
    peer.hears(JOINED, WAITS)
    peer.engine.calls = []
    with pytest.raises(Violation, match=r"its events say that calls wait: \{'barrier'\}"):
        peer.hears()
