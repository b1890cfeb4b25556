"""What the training thread does while it waits for a round."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from pccl.bindings.diloco.conductor import Conductor
from pccl.bindings.diloco.replica import Replica
from pccl.bindings.diloco.rounds import (
    Average,
    Contribution,
    Members,
    RoundCommitted,
)
from pccl.bindings.diloco.schedule import Schedule
from pccl.bindings.diloco.telling import Telling
from pccl.bindings.diloco.trainee import RoundWait
from pccl.bindings.diloco.training import Training
from pccl.bindings.events import Event, MembersChanged

COMMITTED = RoundCommitted(Contribution(7, 0, 1.0, None, 1), Average((1, 2), 2.0), 0.5)


class FakeConductor:
    """Has one piece of news; its rounds end when the listeners have heard that."""

    def __init__(self, heard: list[Event]) -> None:
        self._news: list[Any] = [(Members(1, (1, 2)), None)]
        self._heard = heard
        self.heard_before_waiting: list[Event] | None = None

    def notices(self, *, after_failure: bool = False) -> list[Any]:
        assert not after_failure
        news, self._news = self._news, []
        return news

    def wait(self, number: int) -> tuple[RoundCommitted, float]:
        assert number == COMMITTED.contribution.number
        self.heard_before_waiting = list(self._heard)
        return COMMITTED, 0.25


def test_listeners_hear_what_is_known_before_a_round_is_waited_for() -> None:
    """A round may last as long as too few peers are there; why that is must be told before."""
    heard: list[Event] = []
    conductor, telling = FakeConductor(heard), Telling(heard.append)
    replica = cast("Replica", type("NoReplica", (), {"parts": ()}))
    training = Training(Schedule(4), replica, 0.0, cast("Conductor", conductor), telling)
    training.hear()
    assert heard == []

    def steps() -> Generator[RoundWait, RoundCommitted | None, bool]:
        assert (yield RoundWait(7)) is COMMITTED
        return False

    training.carry_out(steps())
    lost = MembersChanged(step=0, peer_id=1, members=(1, 2), joined=(1, 2), lost=())
    assert conductor.heard_before_waiting == [lost]
