"""A replica of a storm as a real process: an ordinary program that trains with ``DiLoCo``."""

from __future__ import annotations

import argparse
import faulthandler
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import pccl
from gpt.model import GPT, digest
from pccl.bindings.diloco import DiLoCo
from pccl.bindings.events import Event, MembersChanged, OuterStep
from pccl.errors import PCCLError
from pccl.stress.chaos.events import CallFailed, PeerJoined, ProcessReady, Reduced, sample, tell
from pccl.stress.chaos.peer_process import DUMP_SIGNAL, Leaving
from pccl.stress.chaos.settings import timing_of
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaDone,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaSynced,
    ReplicaTrains,
    RoundDone,
)
from pccl.stress.studies.storm.work import StormWork, state_digest

NAP_S = 0.05
AGAIN_S = 1.0
"""Pause before a new communicator, after an error that ended the training."""


class StormCommunicator(pccl.Communicator):
    """Reports the shared state after each synchronization. ``index``: that of the replica."""

    index = 0

    def sync_shared_state(self, *arguments: Any, **options: Any) -> pccl.SharedStateSyncInfo:
        """Make the shared states equal."""
        info = super().sync_shared_state(*arguments, **options)
        state: pccl.SharedState = arguments[0]
        lineage = state.lineage
        assert lineage is not None
        run, content = lineage.run.hex(), state_digest(state)
        tell(ReplicaSynced(time.monotonic(), self.index, run, state.revision, content))
        return info


class StormReplica:
    """One life of a replica.

    Args:
        comm: a communicator that is not connected.
        storm: the storm.
        work: what it computes.
        index: its number.
        stop: a file; when it exists, the replica ends after its next round.
        nap: a file; while it exists, the replica makes no step.
    """

    def __init__(
        self,
        comm: pccl.Communicator,
        storm: Storm,
        work: StormWork,
        index: int,
        stop: Path,
        nap: Path,
    ) -> None:
        self._storm, self._work, self._index = storm, work, index
        self._stop, self._nap = stop, nap
        training = storm.training
        self._step_s = training.step_s * training.pace(index, storm.timeline.peers)
        self._model, inner = work.model()
        self._inner = inner
        self._peer = 0
        self._opt = DiLoCo(
            self._model,
            inner=inner,
            comm=comm,
            sync_every=training.sync_every,
            delay=training.delay,
            fragments=training.fragments,
            eager=training.eager,
            compression=training.compression,
            quorum=training.quorum,
            grace_s=training.grace_s,
            on_event=self._on_event,
        )

    def run(self) -> None:
        """Train until the stop file exists, and finish.

        Raises:
            PCCLError: the training cannot continue.
        """
        life, made = self._work.next_life(), 0
        with self._opt as opt:
            opt.join()
            due_s, ends_after = time.monotonic(), None
            while ends_after is None or opt.round <= ends_after:
                if ends_after is None and self._stop.exists():
                    ends_after = opt.round
                while self._nap.exists():
                    time.sleep(NAP_S)
                self._work.gradients(life, made, self._model)
                made += 1
                due_s = max(due_s + self._step_s, time.monotonic())
                time.sleep(max(0.0, due_s - time.monotonic()))
                opt.step()
                opt.zero_grad()
            opt.finish()
            now = time.monotonic()
            tell(ReplicaDone(now, self._index, opt.outer_steps, _digest(self._model)))

    def _on_event(self, event: Event) -> None:
        match event:
            case MembersChanged(peer_id=peer) if peer != self._peer:
                self._peer, now = peer, time.monotonic()
                tell(PeerJoined(now, peer, 0.0))
                tell(ReplicaTrains(now, self._index, peer))
            case OuterStep():
                self._stepped(event)
            case _:
                pass

    def _stepped(self, event: OuterStep) -> None:
        now, number, contributors = time.monotonic(), event.number - 1, event.contributors
        lineage = self._opt.shared_state.lineage
        run = "" if lineage is None else lineage.run.hex()
        tell(Reduced(now, int(run[:12] or "0", 16), number, event.fragment, contributors, 1, ""))
        tell(
            RoundDone(
                now, self._index, run, number, contributors, event.total_weight, event.own_weight,
                event.tx_bytes,
            )
        )  # fmt: skip
        peers = self._storm.timeline.peers
        if self._work.judges(number) and self._work.turn(number) % peers == self._index:
            loss = self._work.judge(number, lambda model: _copy(self._model, model))
            tell(HeldOutLoss(now, number, loss))


def _copy(source: GPT, target: GPT) -> None:
    target.load_state_dict(source.state_dict())


def _digest(model: GPT) -> str:
    return digest(model.parameters())


def _leave(signum: int, frame: FrameType | None) -> None:
    raise Leaving


def main() -> None:
    """Read the command line and take part."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.studies.storm.replica_process")
    for name in ("master", "listen", "advertise"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "group", "lanes", "index", "judged-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    for name in ("stop", "nap", "storm"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends the replica
    torch.set_num_threads(1)
    storm = Storm.load(given.storm)
    work = StormWork(storm.training, given.seed, given.judged_every, first_life=time.time_ns())
    signal.signal(signal.SIGTERM, _leave)
    tell(ProcessReady(time.monotonic()))
    try:
        while True:
            comm = StormCommunicator(
                given.master,
                given.group,
                timing=timing_of(given.deadline),
                listen=given.listen,
                advertise=given.advertise,
                lanes=given.lanes,
            )
            comm.index = given.index
            try:
                StormReplica(comm, storm, work, given.index, given.stop, given.nap).run()
            except PCCLError as error:
                now = time.monotonic()
                tell(CallFailed(now, "step", type(error).__name__, error.reason, True))
                tell(ReplicaKilled(now, given.index, by_itself=True))
                if given.stop.exists():
                    break
                time.sleep(AGAIN_S)
                tell(ReplicaStarted(time.monotonic(), given.index))
            else:
                break
    except Leaving:
        pass
    tell(sample(ends=True))


if __name__ == "__main__":
    main()
