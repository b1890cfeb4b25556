"""Items that another thread takes: none is waited for, and none is taken twice or out of order."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from pccl.observe import handoff
from pccl.observe.handoff import Handoff
from tests.support.patience import LIMIT_S
from tests.support.waiting import until


class Slow:
    """Takes items, but waits before each until ``goes_on``."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.taken: list[int] = []

    def __call__(self, item: int) -> None:
        self.began.set()
        assert self.goes_on.wait(LIMIT_S)
        self.taken.append(item)


@pytest.fixture(autouse=True)
def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "FLUSH_S_MAX", LIMIT_S)


@pytest.fixture(name="slow")
def make_slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.goes_on.set()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_items_are_taken_in_order_in_a_thread_that_ends() -> None:
    taken: list[tuple[int, str]] = []
    items = Handoff[int]("order", lambda n: taken.append((n, threading.current_thread().name)))
    assert threads("order") == []
    for n in range(1000):
        items.put(n)
    (thread,) = threads("order")
    assert thread.daemon
    items.close()
    assert taken == [(n, "order") for n in range(1000)]
    assert threads("order") == []


def test_items_beyond_the_bound_are_dropped(slow: Slow) -> None:
    with patch.object(handoff, "KEPT_MAX", 3):
        items = Handoff("full", slow)
        items.put(0)
        assert slow.began.wait(LIMIT_S)
        for n in range(1, 9):
            items.put(n)  # returns, although nothing is taken
        slow.goes_on.set()
        items.close()
    assert slow.taken == [0, 1, 2, 3]


def test_close_waits_no_longer_than_its_limit(slow: Slow) -> None:
    items = Handoff("stuck", slow)
    with patch.object(handoff, "FLUSH_S_MAX", 0.01):
        items.put(0)
        items.put(1)
        assert slow.began.wait(LIMIT_S)
        items.close()
    assert slow.taken == []
    (stuck,) = threads("stuck")
    slow.goes_on.set()
    stuck.join(LIMIT_S)
    assert not stuck.is_alive()
    assert slow.taken == [0, 1]


def test_closing_twice_or_before_the_first_item_is_harmless() -> None:
    items = Handoff[int]("idle", lambda _: None)
    items.close()
    items.close()
    assert threads("idle") == []


def test_items_after_close_begin_anew(slow: Slow) -> None:
    """A configuration of logging closes handlers that stay in use."""
    items = Handoff("anew", slow)
    with patch.object(handoff, "FLUSH_S_MAX", 0.01):
        items.put(0)
        assert slow.began.wait(LIMIT_S)
        items.close()
    items.put(1)
    slow.goes_on.set()
    items.close()
    until(lambda: len(slow.taken) == 2)  # this close has waited for the second thread only
    assert sorted(slow.taken) == [0, 1]


def test_close_within_the_function_ends_the_thread() -> None:
    items: Handoff[int] = Handoff("inside", lambda _: items.close())
    items.put(0)
    for thread in threads("inside"):
        thread.join(LIMIT_S)
    assert threads("inside") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_a_function_has_raised_items_are_dropped() -> None:
    taken: list[int] = []

    def take(item: int) -> None:
        taken.append(item)
        raise RuntimeError

    items = Handoff("broken", take)
    items.put(0)
    for thread in threads("broken"):
        thread.join(LIMIT_S)
    items.put(1)
    items.close()
    assert taken == [0]


def test_the_end_of_the_program_waits_for_what_is_queued(slow: Slow) -> None:
    with patch("atexit.register") as register:
        items = Handoff("exit", slow)
        items.put(0)
    ((flush,),) = [call.args for call in register.call_args_list]
    slow.goes_on.set()
    flush()
    assert slow.taken == [0]
    items.put(1)  # a later function of atexit logs, too
    flush()
    assert slow.taken == [0, 1]
    items.close()


def test_an_interpreter_that_starts_no_thread_any_more_drops_items() -> None:
    """Python 3.12 does so at its end; an exception would break down the peer that logs."""
    taken: list[int] = []
    items = Handoff("late", taken.append)
    late = RuntimeError("can't create new thread at interpreter shutdown")
    with patch.object(threading.Thread, "start", side_effect=late):
        items.put(0)
    assert taken == []
    items.close()


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    taken: list[int] = []
    first = threading.Event()

    def take(item: int) -> None:
        taken.append(item)
        first.set()

    items = Handoff("fork", take)
    items.put(0)
    assert first.wait(LIMIT_S)
    pid = os.fork()
    if pid == 0:
        items.put(1)
        items.close()
        os._exit(taken != [0, 1])
    assert os.waitpid(pid, 0) == (pid, 0)
    items.close()
    assert taken == [0]
