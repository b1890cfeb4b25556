"""Ctrl-C while a model is taken over comes afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from pccl.bindings import interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_is_raised_at_the_end_of_the_outermost(depth: int) -> None:
    done: list[str] = []

    def work() -> None:
        with interrupts.deferred():
            with interrupts.deferred() if depth == 2 else nullcontext():
                signal.raise_signal(signal.SIGINT)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="mine"), interrupts.deferred():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.deferred():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen: list[object] = []

    def look() -> None:
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
