"""Processes that stop without dying, machines that fall off the network, and those that are slow.

The master and the proxies live in the test's process, the peers are processes of their own. This
file is also the peers' program, so it imports only what they need.

Verdicts do not depend on luck: who is removed, and why, is asserted exactly. How long it took is
printed (``-rP`` shows it), and bounded loosely, because the machine may be busy with other things.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

import pccl
from pccl.errors import Evicted
from pccl.runtime.collective.transfers.inlet import Placement
from tests.support import members
from tests.support.insides import knows_the_time
from tests.support.patience import LIMIT_S, LONG_LIMIT_S, patient
from tests.support.peers import PeerProcess, obey
from tests.support.ports import free_port
from tests.support.processes import wait_stopped
from tests.support.waiting import until

PROMISE_S = 3.0
"""From the freeze to the survivors' result, with a deadline of two seconds."""

LOADED_S = patient(15.0)
"""Granted on top of that: the machine may be busy with other things."""

QUICK = pccl.Timing(deadline_s=2.0, heartbeat_s=0.2, tick_s=0.05)
PATIENT = pccl.Timing(deadline_s=5.0, heartbeat_s=0.2, tick_s=0.05)
CUT_OFF = replace(QUICK, resume_s=LONG_LIMIT_S)
"""Members that have no link to a peer for ``resume_s`` blame the link: here long after silence."""
TIMINGS = {"quick": QUICK, "patient": PATIENT, "cut off": CUT_OFF}


# -- the peers' program ----------------------------------------------------------------------------


class Peer:
    """A member that does what it is told on stdin and reports on stdout."""

    def __init__(self, address: str, timing: str, **options: Any) -> None:
        self.comm = pccl.Communicator(address, timing=TIMINGS[timing], **options)

    def connect(self, min_peers: int) -> dict[str, Any]:
        self.comm.connect(min_peers=min_peers)
        self.comm.update_topology()
        until(lambda: knows_the_time(self.comm))  # to say later for how long it was out
        return {"peer": self.comm.peer_id}

    def reduce(self, count: int) -> dict[str, Any]:
        own = float(self.comm.peer_id)
        array = np.full(count, own, np.float32)
        try:
            info = self.comm.all_reduce(array, retry=True)
        except Evicted as error:
            told = {"cause": error.cause.name if error.cause else "", "ago_s": error.ago_s}
            return {"evicted": told, "intact": bool((array == own).all())}
        exact = bool((array == float(sum(info.contributors))).all())
        return {"contributors": info.contributors, "exact": exact, "attempts": info.attempts}

    def grow(self, size: int) -> dict[str, Any]:
        members.grow(self.comm, size)
        return {"peer": self.comm.peer_id}

    def rejoin(self) -> dict[str, Any]:
        self.comm.update_topology()
        return {"peer": self.comm.peer_id}

    def hold_the_lock(self, duration_s: float) -> dict[str, Any]:
        ctypes.PyDLL(None).usleep(round(duration_s * 1e6))  # unlike CDLL it keeps the lock
        return {}

    def freeze_after(self, fraction: float) -> dict[str, Any]:
        """Stop like after SIGSTOP when this part of all incoming segments is here."""
        complete = Placement.complete
        frozen = False

        def complete_and_freeze(placement: Placement) -> None:
            nonlocal frozen
            complete(placement)
            transfer = placement.transfer
            due = fraction * (transfer.progress.received + transfer.lacking)
            if not frozen and transfer.progress.received >= due:
                frozen = True
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # no thread goes on

        mock.patch.object(Placement, "complete", complete_and_freeze).start()
        return {}


def serve(address: str, timing: str, options: dict[str, Any]) -> None:
    peer = Peer(address, timing, **options)
    obey(peer)
    peer.comm.close()


# -- the test's side -------------------------------------------------------------------------------


class Process(PeerProcess):
    """A peer that can be frozen."""

    def __init__(self, address: str, timing: str, **options: Any) -> None:
        super().__init__(__name__, address, timing, json.dumps(options))

    def wait_frozen(self) -> float:
        """Return when it has stopped."""
        wait_stopped(self.process.pid)
        return time.monotonic()

    def stop(self) -> float:
        """Return when it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        return self.wait_frozen()

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class Crew:
    """A master, its peers, and what it says of them."""

    def __init__(self, timing: str) -> None:
        self._stack = contextlib.ExitStack()
        self._timing = timing
        master = pccl.MasterNode("127.0.0.1:0", timing=TIMINGS[timing])
        self.address = self._stack.enter_context(master).address
        self.peers: list[Process] = []

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        self._stack.close()

    def own(self, context: contextlib.AbstractContextManager[Any]) -> Any:
        return self._stack.enter_context(context)

    def start(self, address: str | None = None, **options: str) -> Process:
        peer = Process(address or self.address, self._timing, **options)
        self.peers.append(peer)
        return peer

    def connect(self, size: int) -> None:
        """All that were started, and as many more as it takes, in the order of their ids."""
        for number in range(size):
            if number == len(self.peers):
                self.start()
            self.peers[number].tell("connect", size)
            self.until(partial(self._has_registered, number + 1))
        for peer in self.peers:
            peer.id = peer.answer()["peer"]
        assert [peer.id for peer in self.peers] == list(range(1, size + 1))

    def _has_registered(self, count: int) -> bool:
        seen = self.seen()
        return bool(seen.newcomer_count + seen.member_count == count)

    def seen(self) -> Any:
        return pccl.master_status(self.address, timeout_s=LIMIT_S)

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, pause_s=0.01)

    def removals(self) -> list[tuple[int, str]]:
        return [(one.peer, one.cause.name) for one in self.seen().removals]

    def all_reduce(self) -> None:
        """Everybody is a member and agrees."""
        for peer in self.peers:
            peer.tell("reduce", 1000)
        told = [peer.answer() for peer in self.peers]
        ids = sorted(peer.id for peer in self.peers)
        assert [sorted(one["contributors"]) for one in told] == [ids] * len(self.peers)
        assert all(one["exact"] for one in told)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
else:
    import pytest

    from pccl.stress.emulator import LinkSpec, ProxyThread, Side

    COUNT = (8 << 20) // 4

    @pytest.fixture
    def crew_of() -> Iterator[Callable[[str], Crew]]:
        with contextlib.ExitStack() as stack:

            def make(timing: str) -> Crew:
                crew = Crew(timing)
                stack.callback(crew.close)
                return crew

            yield make

    def survivors_finish(crew: Crew, victim: Process, began_s: float) -> None:
        """The others have a result, all the same; exactly the victim was removed, for its silence.

        They reduce again without it, unless all of the result was already among them.
        """
        others = [peer for peer in crew.peers if peer is not victim]
        contributors: set[tuple[int, ...]] = set()
        for peer in others:
            came_s, told = peer.hear()
            print(f"peer {peer.id} has its result after {came_s - began_s:.3f} s")  # noqa: T201
            assert told["exact"]
            contributors.add(tuple(sorted(told["contributors"])))
            assert came_s - began_s < PROMISE_S + LOADED_S
        assert len(contributors) == 1
        assert set(contributors.pop()) - {victim.id} == {peer.id for peer in others}
        assert crew.removals() == [(victim.id, "SILENT")]

    def comes_back(crew: Crew, victim: Process, out_s: float) -> None:
        """The victim, which has been out for ``out_s`` or more, hears why and joins again."""
        told = victim.answer()
        assert told["intact"]
        assert told["evicted"]["cause"] == "SILENT"
        assert told["evicted"]["ago_s"] > out_s
        victim.tell("rejoin")
        for peer in crew.peers:
            if peer is not victim:
                peer.tell("grow", len(crew.peers))
        renewed = [peer.answer()["peer"] for peer in crew.peers]
        victim.id = max(renewed)
        assert victim.id == len(crew.peers) + 1
        crew.all_reduce()

    @pytest.mark.parametrize("fraction", [0.25, 0.75])
    def test_a_process_that_stops_in_the_middle_of_a_reduce(
        crew_of: Callable[[str], Crew], fraction: float
    ) -> None:
        crew = crew_of("quick")
        crew.connect(4)
        victim = crew.peers[2]
        victim.ask("freeze_after", fraction)
        for peer in crew.peers:
            peer.tell("reduce", 8 * COUNT)  # several segments per chunk
        frozen_s = victim.wait_frozen()
        survivors_finish(crew, victim, frozen_s)
        crew.until(lambda: crew.seen().removals[0].ago_ms >= 1000)
        victim.thaw()
        comes_back(crew, victim, 0.5)

    @pytest.mark.usefixtures("over_tcp")
    @pytest.mark.parametrize("fault", ["stall", "half_open"])
    def test_a_machine_that_falls_off_the_network(
        crew_of: Callable[[str], Crew], fault: str
    ) -> None:
        """It is the eldest, so that all its connections go by way of two proxies."""
        crew = crew_of("cut off")
        port = free_port()
        slow = LinkSpec.parse("rate=40mbit,rtt=2ms")
        door = crew.own(ProxyThread(f"127.0.0.1:{port}", slow))
        way = crew.own(ProxyThread(crew.address, LinkSpec.parse("")))
        victim = crew.start(
            str(way.address), advertise=str(door.address), listen=f"127.0.0.1:{port}"
        )
        crew.connect(3)
        for peer in crew.peers:
            peer.tell("reduce", COUNT)
        crew.until(lambda: sum(flow.forward_bytes for flow in door.flows()) > 1_000_000)
        for proxy, gone in ((door, Side.TARGET), (way, Side.DIALLER)):
            proxy.blackhole_new()
            if fault == "stall":
                proxy.stall()
            else:
                proxy.half_open(gone)
        survivors_finish(crew, victim, time.monotonic())
        crew.until(lambda: crew.seen().removals[0].ago_ms >= 1000)
        for proxy in (door, way):
            proxy.accept_new()
            proxy.resume()
        comes_back(crew, victim, 0.5)

    def test_a_stop_that_is_shorter_than_the_deadline(crew_of: Callable[[str], Crew]) -> None:
        crew = crew_of("patient")
        crew.connect(3)
        victim = crew.peers[1]
        victim.ask("freeze_after", 0.5)
        for peer in crew.peers:
            peer.tell("reduce", COUNT)
        victim.wait_frozen()
        crew.until(lambda: crew.seen().members[1].silent_ms >= 1500)
        victim.thaw()
        for peer in crew.peers:
            told = peer.answer()
            assert (told["contributors"], told["exact"]) == ([1, 2, 3], True)
            assert told["attempts"] == 1
        assert crew.removals() == []

    def test_a_lock_that_is_held_for_less_than_the_deadline(crew_of: Callable[[str], Crew]) -> None:
        """The I/O thread of the second peer does not run, and the others wait for its call."""
        crew = crew_of("patient")
        crew.connect(3)
        holder = crew.peers[1]
        holder.tell("hold_the_lock", 2.0)
        holder.tell("reduce", 1000)
        for peer in (crew.peers[0], crew.peers[2]):
            peer.tell("reduce", 1000)
        crew.until(lambda: crew.seen().members[1].silent_ms >= 1000)
        (operation,) = crew.seen().operations
        assert operation.missing == (holder.id,)
        holder.answer()
        for peer in crew.peers:
            assert peer.answer()["contributors"] == [1, 2, 3]
        assert crew.removals() == []

    def test_a_lock_that_is_held_for_long_while_nobody_waits(
        crew_of: Callable[[str], Crew],
    ) -> None:
        """Silence for twice the deadline; there was nothing to hear from it."""
        crew = crew_of("quick")
        crew.connect(3)
        crew.peers[1].ask("hold_the_lock", 4.0)
        crew.all_reduce()
        assert crew.removals() == []
