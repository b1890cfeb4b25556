"""The events: what there is, that they cannot be changed, and that the documents name them all."""

import dataclasses
import math
from typing import Any, get_args

import pytest

from pccl.bindings import events
from pccl.bindings.events import Event, InnerStep, MembersChanged, PeerReport

FIELDS = {
    "InnerStep": "step seconds",
    "OuterStep": "step number fragment contributors own_weight total_weight tx_bytes rx_bytes"
    " reduce_s hidden_s exposed_s pseudo_gradient_norm mean_norm"
    " step_norm cosine noise_scale",
    "MembersChanged": "step peer_id members joined lost",
    "StateSynced": "step revision tx_bytes rx_bytes seconds",
    "RoundsMissed": "step number missed",
    "TrainsAlone": "step",
    "GradientsAveraged": "step contributors tx_bytes rx_bytes hidden_s exposed_s",
}
"""Logs are read by other programs: a name that changes breaks them."""


def kinds() -> list[Any]:
    """Of training; tests of the schema look at those of a peer."""
    return [kind for kind in get_args(Event) if kind not in get_args(PeerReport)]


def test_event_is_the_union_of_all() -> None:
    assert {kind.__name__ for kind in kinds()} == set(FIELDS)
    assert set(get_args(PeerReport)) < set(get_args(Event))
    assert set(events.__all__) == {*FIELDS, "Event", "PeerReport", "Consumer"}


@pytest.mark.parametrize("kind", kinds())
def test_fields_and_their_documentation(kind: Any) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    assert names == FIELDS[kind.__name__].split()
    assert [name for name in names if f"        {name}: " not in kind.__doc__] == []


def test_events_are_values() -> None:
    event = InnerStep(step=3, seconds=0.5)
    assert event == InnerStep(step=3, seconds=0.5)
    assert not hasattr(event, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 4  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        InnerStep(3, math.nan)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_they_can_be_matched_by_name() -> None:
    event: Event = MembersChanged(step=9, peer_id=1, members=(1, 3), joined=(3,), lost=(2,))
    match event:
        case MembersChanged(lost=lost, joined=joined):
            assert (lost, joined) == ((2,), (3,))
        case _:
            raise AssertionError(event)
