"""What follows the end of a peer of a Ray run, and what a peer is started with."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.bindings.ray.policy import (
    PAUSE_S,
    PAUSE_S_MAX,
    SETTLED_S,
    EndKind,
    PeerEnd,
    SlotAction,
    SlotRestarts,
    is_late,
    peer_environment,
    peer_options,
)


@pytest.mark.parametrize(
    ("kind", "is_late", "is_ending", "follows"),
    [
        (EndKind.RETURNED, False, False, SlotAction.FINISH),
        (EndKind.RETURNED, True, True, SlotAction.FINISH),
        (EndKind.LEFT, False, False, SlotAction.REPLACE),
        (EndKind.LEFT, False, True, SlotAction.ABANDON),
        (EndKind.NODE_LOST, False, False, SlotAction.REPLACE),
        (EndKind.NODE_LOST, False, True, SlotAction.ABANDON),
        (EndKind.RAISED, False, False, SlotAction.REPLACE),
        (EndKind.RAISED, False, True, SlotAction.FAIL),
        (EndKind.RAISED, True, True, SlotAction.ABANDON),
        (EndKind.DIED, False, False, SlotAction.REPLACE),
        (EndKind.DIED, False, True, SlotAction.ABANDON),
    ],
)
def test_what_follows(kind: EndKind, is_late: bool, is_ending: bool, follows: SlotAction) -> None:
    end = PeerEnd(kind, 1.0, is_late)
    assert SlotRestarts(1).after(end, is_ending=is_ending)[0] is follows


@pytest.mark.parametrize("kind", [EndKind.RAISED, EndKind.DIED])
def test_failures_in_a_row_end_the_run_after_growing_pauses(kind: EndKind) -> None:
    restarts = SlotRestarts(3)
    ends = [restarts.after(PeerEnd(kind, 1.0), is_ending=False) for _ in range(4)]
    assert ends == [
        (SlotAction.REPLACE, PAUSE_S),
        (SlotAction.REPLACE, 2 * PAUSE_S),
        (SlotAction.REPLACE, 4 * PAUSE_S),
        (SlotAction.FAIL, 0.0),
    ]
    assert SlotRestarts(0).after(PeerEnd(kind), is_ending=False)[0] is SlotAction.FAIL


def test_pauses_have_a_limit() -> None:
    restarts = SlotRestarts(100)
    pauses = [restarts.after(PeerEnd(EndKind.DIED), is_ending=False)[1] for _ in range(100)]
    assert max(pauses) == PAUSE_S_MAX


def test_only_failures_soon_after_the_start_are_in_a_row() -> None:
    restarts = SlotRestarts(1)
    for _ in range(5):
        end = PeerEnd(EndKind.DIED, SETTLED_S)
        assert restarts.after(end, is_ending=False) == (SlotAction.REPLACE, PAUSE_S)
    assert restarts.after(PeerEnd(EndKind.DIED, 1.0), is_ending=False)[0] is SlotAction.FAIL


@pytest.mark.parametrize("kind", [EndKind.LEFT, EndKind.NODE_LOST])
def test_what_a_peer_cannot_help_is_no_failure(kind: EndKind) -> None:
    restarts = SlotRestarts(0)
    ends = [restarts.after(PeerEnd(kind), is_ending=False) for _ in range(5)]
    assert ends == [(SlotAction.REPLACE, 0.0)] * 5


def test_a_peer_is_late_if_it_replaces_one_or_waited_for_resources() -> None:
    assert not is_late(0, SETTLED_S - 1)
    assert is_late(1, 0.0)
    assert is_late(0, SETTLED_S)


def environment(**changes: Any) -> dict[str, str]:
    given: dict[str, Any] = {"peers": 4, "master": "a:1", "token": "t", "drain_s": 7.5, "given": {}}
    return peer_environment(2, **given | changes)


def test_the_environment_of_a_peer() -> None:
    assert environment() == {
        "PCCL_MASTER": "a:1",
        "PCCL_TOKEN": "t",
        "PCCL_PEERS": "4",
        "PCCL_PEER_INDEX": "2",
        "PCCL_NAME": "p2",
        "PCCL_DRAIN": "1",
        "PCCL_DRAIN_S": "7.5",
        "PCCL_LOG": "info",
    }
    assert "PCCL_TOKEN" not in environment(token=None)


def test_the_user_may_change_settings_but_not_the_run() -> None:
    changed = environment(given={"PCCL_LOG": "off", "PCCL_MASTER": "b:2", "A": "1"})
    assert (changed["PCCL_LOG"], changed["PCCL_MASTER"], changed["A"]) == ("off", "a:1", "1")


def test_options_of_the_actors() -> None:
    assert peer_options(None) == {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    assert peer_options({"num_cpus": 0, "num_gpus": 1}) == {
        "num_cpus": 0,
        "num_gpus": 1,
        "scheduling_strategy": "SPREAD",
    }
    with pytest.raises(ValueError, match="remove max_restarts, name"):
        peer_options({"name": "x", "max_restarts": 3, "num_gpus": 1})
