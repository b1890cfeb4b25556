"""The record of one peer: copied into an answer, or written to the folder ``PCCL_RECORD``.

It is written when this peer loses its membership (evicted, master lost, a bug in the library), and
on SIGQUIT. Then ``faulthandler`` writes to a pipe, which wakes the I/O thread. Its handler is C
code that runs at the moment of the signal, in any thread. So this works while the main thread is
inside a C call, and beside programs that use ``signal.set_wakeup_fd``. It writes no file while a
thread holds the interpreter lock: the I/O thread cannot run.

What ``faulthandler`` writes is thrown away. It may only be asked for the thread that it interrupts:
when it reads the frames of threads that run meanwhile, it can crash the process. The I/O thread
takes the stacks of all threads itself.

A Python handler would wait for the main thread. A thread in ``sigwait`` needs the signal blocked in
all threads, also in those of other libraries, and child processes inherit that.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import ClassVar

from pccl.machines.peer.words import call_name
from pccl.observe.records import write_json
from pccl.observe.stacks import stacks
from pccl.runtime.engine import PeerEngine
from pccl.telemetry.events import MembershipLost
from pccl.telemetry.recorder import Snapshot, record_of
from pccl.telemetry.stream import Stamped

FILES_MAX = 16
"""Once a process has written so many files, it writes further ones only on SIGQUIT."""

STACKS_CHARS_MAX = 64 << 10
"""Characters of stacks in one record."""

QUIET_S = 0.1
"""How long the pipe must be silent until a signal counts as told."""

_DRAIN_BYTES = 64 << 10

_log = logging.getLogger("pccl.record")
_numbers = count(1)


def snapshot_of(engine: PeerEngine, name: str) -> Snapshot:
    """Return a copy of what a peer has recorded; short. I/O thread."""
    machine, recorder = engine.machine, engine.recorder
    return Snapshot(
        name=name,
        host=os.uname().nodename,
        pid=os.getpid(),
        run=machine.run.hex(),
        peer_ids=tuple(peer for peer in (*recorder.former, machine.peer) if peer),
        now_ns=engine.now_ns(),
        time_s=time.time(),
        clock=tuple(machine.contact.clocks.kept),
        events=tuple(engine.events.kept),
        open_calls=tuple(
            (call.began_ns, *call_name(call.event))
            for call in engine.calls
            if call.began_ns is not None and call.event is not None
        ),
        phases=tuple(recorder.phases),
        segments=tuple(recorder.segments),
    )


class Recording:
    """Writes the records of one peer. All methods run on the I/O thread.

    Args:
        loop: loop of the I/O thread.
        engine: the peer.
        name: its name.
        folder: where the files go.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: PeerEngine, name: str, folder: Path
    ) -> None:
        self._loop, self._engine, self._name, self._folder = loop, engine, name, folder
        self._stop_listening = engine.events.listen(self._note)
        QuitSignal.add(loop, self._asked)

    def stop(self) -> None:
        """Write no further record."""
        self._stop_listening()
        QuitSignal.remove(self._asked)

    def _note(self, stamped: Stamped) -> None:
        event = stamped.event
        if type(event) is MembershipLost and event.cause != "CLOSED":
            number = next(_numbers)
            if number <= FILES_MAX:
                self._write(number, f"{event.cause}: {event.reason}", "")

    def _asked(self, stacks: str) -> None:
        self._write(next(_numbers), "SIGQUIT", stacks)

    def _write(self, number: int, why: str, stacks: str) -> None:
        snapshot = snapshot_of(self._engine, self._name)
        name = re.sub(r"[^A-Za-z0-9.-]", "_", self._name)
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self._folder / f"pccl-{name}-{os.getpid()}-{at}-{number}.json"

        def write() -> None:
            try:
                write_json(path, {**record_of(snapshot), "why": why, "stacks": stacks})
            except OSError as error:
                _log.warning("cannot write the record %s: %s", path, error)
            else:
                _log.warning("wrote the record %s (%s)", path, why)

        try:
            self._loop.run_in_executor(None, write)
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            write()


class QuitSignal:
    """SIGQUIT for all peers of this process, as long as there are any.

    Nothing changes if the program has its own handler. A forked child gets the default back.
    """

    _askers: ClassVar[list[Callable[[str], None]]] = []
    _loop: ClassVar[asyncio.AbstractEventLoop | None] = None
    _timer: ClassVar[asyncio.TimerHandle | None] = None
    _pipe: ClassVar[tuple[int, int] | None] = None
    _stacks: ClassVar[str] = ""

    @classmethod
    def add(cls, loop: asyncio.AbstractEventLoop, ask: Callable[[str], None]) -> None:
        """Call ``ask`` with the stacks of all threads at each SIGQUIT. I/O thread."""
        if cls._pipe is not None:
            cls._askers.append(ask)
            return
        if signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL:
            _log.info("the program has its own SIGQUIT handler, so SIGQUIT writes no record")
            return
        cls._pipe = reader, writer = os.pipe()
        cls._loop = loop
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)  # the handler must not wait for the I/O thread
        loop.add_reader(reader, cls._read)
        # Threads that this one starts inherit its mask. A new thread that took the signal before it
        # has a state in Python would write nothing, and the signal would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGQUIT})
        faulthandler.unregister(signal.SIGQUIT)  # if `abandon` left it; else nothing happens
        faulthandler.register(signal.SIGQUIT, file=writer, all_threads=False)
        cls._askers.append(ask)

    @classmethod
    def remove(cls, ask: Callable[[str], None]) -> None:
        """Stop calling ``ask``. I/O thread."""
        cls._askers[:] = [one for one in cls._askers if one != ask]
        if not cls._askers and cls._pipe is not None:
            assert cls._loop is not None
            cls._loop.remove_reader(cls._pipe[0])
            if cls._timer is not None:
                cls._timer.cancel()
            cls.abandon()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGQUIT})

    @classmethod
    def abandon(cls) -> None:
        """Restore the default action, and close the pipe. Also in a forked child.

        A handler that the program has installed meanwhile stays.
        """
        if cls._pipe is not None:
            if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
                faulthandler.unregister(signal.SIGQUIT)
            for end in cls._pipe:
                os.close(end)
        cls._askers.clear()
        cls._pipe = cls._loop = cls._timer = None

    @classmethod
    def _read(cls) -> None:
        assert cls._pipe is not None
        assert cls._loop is not None
        with suppress(BlockingIOError):
            os.read(cls._pipe[0], _DRAIN_BYTES)
        if cls._timer is not None:
            cls._timer.cancel()
        else:
            lines = [line for one in stacks() for line in (f"{one['thread']}:", *one["frames"])]
            cls._stacks = "\n".join(lines)[:STACKS_CHARS_MAX]
        cls._timer = cls._loop.call_later(QUIET_S, cls._ask)

    @classmethod
    def _ask(cls) -> None:
        cls._timer = None
        for ask in list(cls._askers):
            ask(cls._stacks)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=QuitSignal.abandon)
