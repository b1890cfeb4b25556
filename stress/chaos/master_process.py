"""The master process of a chaos run.

It reports each announcement about a peer to the harness.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from types import FrameType

import pccl
from pccl.observe.events import PeerReport, RunChanged
from pccl.stress.chaos.events import Announced, Listens, sample, tell
from pccl.stress.chaos.peer_process import baseline, settled
from pccl.stress.chaos.settings import timing_of

SAMPLE_S = 2.0


def hear(event: PeerReport) -> None:
    """Report an announcement of the master to the harness."""
    if isinstance(event, RunChanged):
        text = f"{event.cause}: {event.reason}" if event.cause else event.reason
        tell(Announced(time.monotonic(), event.peer_id, event.what, text))


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m pccl.stress.chaos.master_process")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--state", required=True)
    parser.add_argument("--standby")
    parser.add_argument("--standby-of")
    given = parser.parse_args()
    stopped = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends it
    signal.signal(signal.SIGTERM, stop)
    before = baseline()
    node = pccl.MasterNode(
        given.listen,
        timing=timing_of(given.deadline),
        state=given.state,
        standby=given.standby,
        standby_of=given.standby_of,
    )
    with node:
        node.on_event(hear)
        tell(Listens(time.monotonic(), node.address))
        tell(before)
        while not stopped.wait(SAMPLE_S):
            tell(sample())
    settled(before.descriptors, before.threads)
    tell(sample(ends=True))


if __name__ == "__main__":
    main()
