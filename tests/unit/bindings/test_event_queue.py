"""Events that wait for their listeners."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

import pccl
from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import (
    Event,
    InnerStep,
    MembersChanged,
    OuterStep,
    RoundsMissed,
    StateSynced,
    TrainsAlone,
)
from pccl.observe.events import CallEnded, MasterDisconnected, MembershipLost, PeerReport


def test_members_are_compared_with_those_before() -> None:
    heard: list[Event] = []
    events = EventQueue(heard.append)
    assert events.met(0, 4, [9, 4])
    assert events.met(3, 4, [4, 7])
    assert not events.met(5, 4, [7, 4])  # in another order
    assert events.members == (4, 7)
    events.deliver()
    assert heard == [
        MembersChanged(step=0, peer_id=4, members=(4, 9), joined=(4, 9), lost=()),
        MembersChanged(step=3, peer_id=4, members=(4, 7), joined=(7,), lost=(9,)),
    ]


def test_what_an_interruption_leaves_is_delivered_the_next_time() -> None:
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise KeyboardInterrupt

    events = EventQueue(listen)
    first, second = TrainsAlone(step=1), TrainsAlone(step=2)
    events.put(first)
    events.put(second)
    assert heard == []
    with pytest.raises(KeyboardInterrupt):
        events.deliver()
    events.deliver()
    assert heard == [first, second]


# -- events of the peer ----------------------------------------------------------------------------

ENDED = CallEnded(
    call="all_reduce", tag=0, outcome="ok", reason="", seconds=0.5, waited_s=0.0, moved_s=0.5,
    attempts=1, tx_bytes=0, rx_bytes=0,
)  # fmt: skip
LOST = MasterDisconnected(reason="reset", gives_up_s=60.0)


class Peer:
    """A communicator whose events a test makes."""

    def __init__(self) -> None:
        self.consumer: Callable[[PeerReport], object] | None = None

    def on_event(self, consumer: Callable[[PeerReport], object]) -> Callable[[], None]:
        self.consumer = consumer
        return lambda: setattr(self, "consumer", None)

    def tell(self, event: PeerReport) -> None:
        assert self.consumer is not None
        self.consumer(event)


def test_events_of_the_peer_are_delivered_on_the_thread_of_the_training() -> None:
    heard: list[Event] = []
    events, peer = EventQueue(heard.append), Peer()
    end = events.listen_to(cast("pccl.Communicator", peer))
    failed = replace(ENDED, outcome="CollectiveAborted")
    closed = MembershipLost(cause="CLOSED", reason="closed")
    evicted = replace(closed, cause="SILENT")
    events.put(TrainsAlone(step=1))
    for event in (LOST, ENDED, failed, closed, evicted):
        peer.tell(event)
    assert heard == []
    events.deliver()
    assert heard == [TrainsAlone(step=1), LOST, failed, evicted]
    end()
    assert peer.consumer is None


def test_the_peer_does_not_keep_the_listeners_alive() -> None:
    class Consumer:
        def __call__(self, event: Event) -> None:
            pass

    peer, consumer = Peer(), Consumer()
    gone = weakref.ref(consumer)
    events = EventQueue(consumer)
    events.listen_to(cast("pccl.Communicator", peer))
    del events, consumer
    assert gone() is None


# -- the log ---------------------------------------------------------------------------------------

OUTER = OuterStep(
    step=100, number=7, fragment=0, contributors=(1, 4), own_weight=1.0, total_weight=2.0,
    tx_bytes=0, rx_bytes=0, reduce_s=1.5, hidden_s=0.5, exposed_s=1.0, pseudo_gradient_norm=0.0,
    mean_norm=0.0,
    step_norm=0.0,
    cosine=0.0,
    noise_scale=0.0,
)  # fmt: skip
SYNCED = StateSynced(step=1, revision=8, tx_bytes=0, rx_bytes=2_000_000, seconds=0.5)


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (OUTER, "INFO", "outer step 7: 2 contributors, waited 1.00 s"),
        (
            replace(OUTER, contributors=(1,)),
            "INFO",
            "outer step 7: 1 contributor, waited 1.00 s",
        ),
        (
            SYNCED,
            "INFO",
            "synchronized the shared state, revision 8: 2.0 MB received, 0 kB sent, 0.50 s",
        ),
        (
            replace(SYNCED, rx_bytes=0),
            "DEBUG",
            "synchronized the shared state, revision 8: 0 kB received, 0 kB sent, 0.50 s",
        ),
        (
            TrainsAlone(step=1),
            "WARNING",
            "trains alone: the group has no other member; a newcomer gets these parameters",
        ),
        (
            RoundsMissed(step=1, number=9, missed=2),
            "WARNING",
            "the group made 2 outer steps without this replica; now it has made 9",
        ),
    ],
)
def test_the_log_says_what_happened(
    event: Event, level: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pccl.diloco")
    events = EventQueue(lambda _: None)
    for one in (InnerStep(step=1, seconds=0.1), LOST, event):
        events.put(one)
    events.deliver()
    told = [(one.name, one.levelname, one.getMessage()) for one in caplog.records]
    assert told == [("pccl.diloco", level, text)]


def test_a_program_that_pauses_keeps_the_latest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.bindings.event_queue.KEPT_MAX", 3)
    heard: list[Event] = []
    queue = EventQueue(heard.append)
    for step in range(5):
        queue.put(InnerStep(step=step, seconds=0.5))
    queue.deliver()
    assert heard == [InnerStep(step=step, seconds=0.5) for step in (2, 3, 4)]
