"""``Listeners``: a consumer that fails is named once and dropped; the others hear everything."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pccl.bindings.consumers import JsonlWriter, Listeners
from pccl.bindings.events import Event, InnerStep, TrainsAlone

EVENTS = [TrainsAlone(step=step) for step in range(5)]


def fail(event: TrainsAlone) -> None:
    if event.step >= 2:
        raise ZeroDivisionError("a bug")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_said_once_with_the_name_of_the_file(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Event] = []
    with JsonlWriter("/dev/full") as log:
        tell = Listeners([log, heard.append])
        for event in EVENTS:
            tell(event)
    assert heard == EVENTS
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is None
    assert record.getMessage() == (
        "the on_event consumer JsonlWriter('/dev/full') failed, and is not called again; "
        "training continues. OSError: [Errno 28] No space left on device: '/dev/full'"
    )


def test_a_bug_is_said_once_with_its_place(caplog: pytest.LogCaptureFixture) -> None:
    first: list[Event] = []
    last: list[Event] = []
    tell = Listeners([first.append, fail, last.append])
    for event in EVENTS:
        tell(event)
    assert first == last == EVENTS
    (record,) = caplog.records
    assert "ZeroDivisionError: a bug" in record.getMessage()
    assert record.exc_info is not None


def test_the_same_consumer_is_called_as_often_as_it_was_given() -> None:
    heard: list[Event] = []
    tell = Listeners([heard.append, heard.append])
    tell(InnerStep(step=1, seconds=0.5))
    assert len(heard) == 2


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_the_wish_to_end_is_no_failure(kind: type[BaseException]) -> None:
    wishes = [kind()]

    def listen(_: Event) -> None:
        if wishes:
            raise wishes.pop()

    tell = Listeners([listen])
    with pytest.raises(kind):
        tell(EVENTS[0])
    tell(EVENTS[1])
    assert not wishes
