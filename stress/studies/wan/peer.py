"""One peer of the study: enters its site, joins the run in its turn, and plays the rounds."""

from __future__ import annotations

import contextlib
import copy
import importlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import pccl
from pccl.cli.bench.peer import Library, Ours, ReduceSide, gather, new_buffer
from pccl.cli.bench.plan import Variant
from pccl.cli.bench.statistics import OURS, CaseDone, Figures, Timed, side_of
from pccl.cli.bench.values import Array, Exact, Rounded
from pccl.cli.processes.reports import Doing, say, work
from pccl.stress.emulator.sites.tunnels import INTERFACE, enter_site

TURN = signal.SIGUSR1
"""Tells a peer to join, and later to go on after a phase. So the ids, and with them the ring, have
the order of the sites, and no peer leaves while the command asks the master about links."""

READY = "ready"

SETTLE_S = 3.0
"""Peers report the measures of their links about every two seconds."""

GLOO = "gloo"
GLOO_PORT = 29_500

GLOO_MODULE = "pccl.cli.bench.gloo"
"""Imports torch."""

_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WanTask:
    """The task of one peer.

    Attributes:
        namespace: path of its site's namespace.
        master: address of the master.
        peers: number of peers.
        size: size of the tensors, in bytes of float32.
        lanes: connections per link; 0: the library chooses.
        algorithms: algorithms, each with each of ``formats``.
        formats: wire formats.
        rounds: measured rounds of each phase.
        warmup: rounds before those of the first phase.
        optimize: number of phases after the first; each begins with ``optimize_topology``, and has
            ``auto`` alone.
        store: address at which the first peer serves Gloo's store; empty: without Gloo.
        measures: whether to wait after each phase until the measures of links are reported.
    """

    namespace: str
    master: str
    peers: int
    size: int
    lanes: int
    algorithms: tuple[str, ...]
    formats: tuple[str, ...]
    rounds: int
    warmup: int
    optimize: int
    store: str
    measures: bool


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """The report that a phase has ended, of rank 0."""

    phase: int
    name: str


class _GlooAt:
    """Gloo behind the barrier of this library, which does not wait for round trips of links."""

    def __init__(self, gloo: Library, comm: pccl.Communicator) -> None:
        self.result = gloo.result
        self.reduce = gloo.reduce
        self.figures = gloo.figures
        self.barrier = comm.barrier


class WanPeer:
    """The peer of this process.

    Args:
        task: its task.
        comm: its connected communicator.
        group: makes Gloo's all-reduce of a buffer; None: without Gloo.
    """

    def __init__(
        self,
        task: WanTask,
        comm: pccl.Communicator,
        group: Callable[[Array, Array], Library] | None,
    ) -> None:
        self._task = task
        self._comm = comm
        self._send = new_buffer(task.size, np.dtype(np.float32))
        self._recv = new_buffer(task.size, np.dtype(np.float32))
        self._group = group
        self._number = 0
        place = np.dtype(np.float32), comm.rank, comm.world_size
        self._values = {
            wire: Exact(*place) if wire == "none" else Rounded(*place, wire)
            for wire in {*task.formats, "none"}
        }

    def play(self) -> None:
        """Play all phases; rank 0 reports their figures."""
        task = self._task
        chosen = [Variant(how, wire) for wire in task.formats for how in task.algorithms]
        self._phase(0, "start", self._sides(chosen, with_gloo=True), task.warmup)
        again = [Variant("auto", wire) for wire in task.formats]
        for phase in range(1, task.optimize + 1):
            self._comm.optimize_topology()
            self._phase(phase, f"optimized {phase}", self._sides(again), 0)

    def _sides(self, variants: Sequence[Variant], *, with_gloo: bool = False) -> list[ReduceSide]:
        libraries: list[tuple[str, Variant, Library]] = [
            (OURS, one, Ours(self._comm, self._send, self._recv, one)) for one in variants
        ]
        if with_gloo and self._group is not None:
            gloo = self._group(self._recv, self._recv)
            libraries.append((GLOO, Variant(), _GlooAt(gloo, self._comm)))
        return [
            # The reduce of Gloo is in place. Its input is filled in each round.
            ReduceSide(name, one, self._recv if name == GLOO else self._send, library,
                       copy.copy(self._values[one.quantize]), 1009 * number)
            for number, (name, one, library) in enumerate(libraries)
        ]  # fmt: skip

    def _phase(self, phase: int, name: str, sides: list[ReduceSide], warmup: int) -> None:
        for done in range(-warmup, self._task.rounds):
            for side in sides if done % 2 == 0 else reversed(sides):
                side.play(self._number, keep=done >= 0)
                if self._comm.rank == 0:
                    say(Doing(f"{name}: {side.name} {side.variant}, round {done + 1}"))
            self._number += 1
        for side in sides:
            figures = self._figures(phase, name, side)
            if self._comm.rank == 0:
                say(CaseDone(figures))
        if self._task.measures:
            time.sleep(SETTLE_S)
        self._comm.barrier()
        if self._comm.rank == 0:
            say(PhaseDone(phase, name))
        signal.sigwait({TURN})

    def _figures(self, phase: int, name: str, side: ReduceSide) -> Figures:
        known = side.library.figures()
        parts: list[Timed] = gather(self._comm, side.log)
        return {
            "phase": phase,
            "after": name,
            "side": side.name,
            "algorithm_asked": side.variant.algorithm if side.name == OURS else "",
            "quantize": side.variant.quantize,
            "bytes": self._task.size,
            "peers": len(parts),
            "wire_bytes_per_value": float(_VALUE_BYTES),
            **known,
            **side_of(self._task.size, parts),
            "error": max(part.error for part in parts),
        }


def run(task: WanTask) -> None:
    """Play the task."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {TURN})
    enter_site(task.namespace)
    if task.store:
        importlib.import_module(GLOO_MODULE)  # takes seconds, so before the turn
    say(Doing(READY))
    signal.sigwait({TURN})
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(pccl.Communicator(task.master, lanes=task.lanes or None))
        comm.connect(min_peers=task.peers)
        group = _joined(stack, task, comm) if task.store else None
        WanPeer(task, comm, group).play()


def _joined(
    stack: contextlib.ExitStack, task: WanTask, comm: pccl.Communicator
) -> Callable[[Array, Array], Library]:
    """Join Gloo's group; return what makes its all-reduce of a buffer."""
    gloo: Any = importlib.import_module(GLOO_MODULE)
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(
        task.store, GLOO_PORT, is_master=comm.rank == 0, wait_for_workers=False
    )
    groups = stack.enter_context(gloo.joined(store, comm.rank, task.peers, None, ""))
    [(name, group)] = groups.items()
    return lambda buffer, result: gloo.Gloo(group, name, buffer, result)


GLOO_INTERFACE = {"GLOO_SOCKET_IFNAME": INTERFACE}
"""Variable with which Gloo takes the address of the site."""

if __name__ == "__main__":
    work(WanTask, run)
