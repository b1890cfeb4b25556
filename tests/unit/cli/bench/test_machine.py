"""What a benchmark asks of this machine: a signal is never lost while memory is given back."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

import pytest

from pccl.cli.bench import machine


class Stop(Exception):
    """What the signal's handler raises."""


def raise_stop(signum: int, frame: FrameType | None) -> None:
    raise Stop


class Garbage:
    """A cycle, which only the collector frees; the process gets a signal meanwhile."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_during_the_collection_is_not_lost() -> None:
    before = signal.signal(signal.SIGUSR1, raise_stop)
    gc.disable()  # nothing else collects it
    try:
        Garbage()
        with pytest.raises(Stop):
            machine.give_back()
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, before)
