"""A member that is a process of its own: reduces, verifies every bit, and counts what it pulled.

Values are small integers, exact in float32 in any order, so each member knows the result from the
contributors alone.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import sys
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

import pccl
from pccl.runtime.collective.transfers.inlet import Placement
from pccl.transports.link import Lane
from tests.support.insides import engine_of, let_callers_leave
from tests.support.members import Call, grow
from tests.support.peers import obey

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_size_t

Values = npt.NDArray[np.float32]


def contribution(peer: int, trial: int, count: int) -> Values:
    """What ``peer`` brings to a trial."""
    draw = np.random.default_rng((peer, trial)).integers(-(2**20), 2**20, min(count, 65521))
    return np.resize(draw.astype(np.float32), count)


def mapped(count: int) -> Values:
    """Memory of its own pages, which nothing gives back to the system but munmap(2)."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    size, zero = ctypes.c_size_t(4 * count), ctypes.c_size_t(0)
    address = LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, zero)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class LocalPeer:
    """Carries out the commands on stdin, and reports on stdout."""

    def __init__(self, address: str, uid: int, deadline_s: float) -> None:
        self._lines = Lines()
        logging.getLogger("pccl").setLevel(logging.INFO)
        logging.getLogger("pccl").addHandler(self._lines)
        self._pulled = 0
        self._kept: list[Any] = []
        self._begun: Call[dict[str, Any]] | None = None
        pulled = Lane.pulled

        def count(lane: Lane, nbytes: int) -> None:
            self._pulled += nbytes
            pulled(lane, nbytes)

        mock.patch.object(Lane, "pulled", count).start()
        self.comm = pccl.Communicator(address, timing=pccl.Timing(deadline_s=deadline_s))
        if uid:  # now everything is imported, which the other user may not be able to read
            os.setgid(uid)
            os.setuid(uid)

    def connect(self) -> int:
        self.comm.connect()
        return self.comm.peer_id

    def grow(self, size: int) -> None:
        grow(self.comm, size)

    def shrink(self, size: int) -> int:
        """Wait until so many are left."""
        while self.comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) > size:
            self.comm.update_topology()
        return size

    def logged(self) -> list[str]:
        return self._lines.texts

    @property
    def _socket_bytes(self) -> int:
        links = engine_of(self.comm).links.all()
        return sum(lane.received_bytes for link in links for lane in link.lanes)

    # -- a reduce ----------------------------------------------------------------------------------

    def reduce(self, trial: int, nbytes: int, how: dict[str, Any]) -> dict[str, Any]:
        """Reduce ``nbytes``, once; then unmap the input, so a process that still uses it dies.

        ``how`` has options of ``all_reduce``, and ``in_place``, ``parts``: number of arrays,
        ``reuse``: as soon as the call has failed, overwrite the memory instead.
        """
        count, options = nbytes // 4, dict(how)
        in_place, parts = options.pop("in_place", False), options.pop("parts", 0)
        reuse = options.pop("reuse", False)
        own = contribution(self.comm.peer_id, trial, count)
        send = mapped(count)
        send[:] = own
        recv: Values | None = None if in_place else np.full(count, -1, np.float32)
        pulled, received = self._pulled, self._socket_bytes
        report: dict[str, Any] = {"contributors": [], "error": ""}
        try:
            info = self._call(send, recv, parts, options)
        except pccl.PCCLError as error:
            report["error"] = f"{type(error).__name__}: {error}"
            report["exact"] = send.tobytes() == own.tobytes()
            if reuse:
                self._reuse(send, recv)
        else:
            brought = [contribution(peer, trial, count) for peer in info.contributors]
            expected = np.sum(brought, axis=0, dtype=np.float32).tobytes()
            report["exact"] = (send if recv is None else recv).tobytes() == expected
            report["exact"] &= recv is None or send.tobytes() == own.tobytes()
            report |= {"contributors": list(info.contributors), "rx": info.rx_bytes}
            report |= {"pulled": self._pulled - pulled, "socket": self._socket_bytes - received}
        if not reuse:
            assert LIBC.munmap(ctypes.c_void_p(send.ctypes.data), ctypes.c_size_t(nbytes)) == 0
        return report

    def _call(
        self, send: Values, recv: Values | None, parts: int, options: dict[str, Any]
    ) -> pccl.ReduceInfo:
        if not parts:
            return self.comm.all_reduce(send, recv, **options)
        split = np.array_split(send, parts)
        return self.comm.all_reduce_many(
            split, None if recv is None else np.array_split(recv, parts), **options
        )

    def _reuse(self, send: Values, recv: Values | None) -> None:
        """Write other values, and keep them to look at later."""
        for array in (send, send if recv is None else recv):
            array[:] = 7.0
            self._kept.append(array)

    def begin(self, trial: int, nbytes: int, how: dict[str, Any]) -> None:
        """Reduce in a thread, until the test says ``leave``."""
        self._begun = Call(self.reduce, trial, nbytes, how)

    def is_done(self, limit_s: float) -> bool:
        """Whether all of that reduce's result is here within this time."""
        until_s = time.monotonic() + limit_s
        while [each.phase for each in self.comm.status().transfers] != ["done"]:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.001)
        return True

    def leave(self) -> dict[str, Any]:
        """Leave that reduce, as when its time runs out."""
        let_callers_leave(self.comm)
        return self.finish()

    def finish(self) -> dict[str, Any]:
        """Wait for the end of that reduce."""
        assert self._begun is not None
        return self._begun.result()

    def kept(self) -> bool:
        """Whether nothing was written to memory after its call had returned."""
        return all((array == 7.0).all() for array in self._kept)

    # -- trouble -----------------------------------------------------------------------------------

    def _when(self, fraction: float, number: signal.Signals) -> None:
        """Get a signal, once, when this part of all incoming segments is here."""
        complete, struck = Placement.complete, [False]

        def complete_and_stop(placement: Placement) -> None:
            complete(placement)
            transfer = placement.transfer
            received = transfer.progress.received
            if received >= fraction * (received + transfer.lacking) and not struck[0]:
                struck[0] = True
                signal.pthread_kill(threading.get_ident(), number)  # no other thread goes first

        mock.patch.object(Placement, "complete", complete_and_stop).start()

    def die_after(self, fraction: float) -> None:
        self._when(fraction, signal.SIGKILL)

    def stop_after(self, fraction: float) -> None:
        self._when(fraction, signal.SIGSTOP)

    def fork_during(self, trial: int, nbytes: int, how: dict[str, Any]) -> dict[str, Any]:
        """Reduce in a thread, and fork meanwhile; the children try to go on."""
        call, children = Call(self.reduce, trial, nbytes, how), list[int]()
        for _ in range(4):
            child = os.fork()
            if not child:
                self._go_on_as_a_child()
            children.append(child)
        report = call.result()
        states = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return report | {"children": states}

    def _go_on_as_a_child(self) -> None:
        status = 1
        try:
            self.comm.all_reduce(np.ones(1 << 20, np.float32))
        except pccl.PCCLError as error:
            status = 0 if "belongs to the parent process" in str(error) else 2
        finally:
            os._exit(status)


if __name__ == "__main__":
    obey(LocalPeer(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
