"""The master process of a chaos run.

It reports each announcement about a peer to the harness.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
import time
from types import FrameType

import pccl
from pccl.stress.chaos.events import Announced, Listens, sample, tell
from pccl.stress.chaos.peer_process import baseline, settled
from pccl.stress.chaos.settings import timing_of

SAMPLE_S = 2.0

ANNOUNCEMENT = "peer %d of group %d %s: %s"
"""Format of the master's log lines about a peer."""


class AnnouncementHandler(logging.Handler):
    """Reports the announcements of the master to the harness."""

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record of the master's log, if it is an announcement."""
        if record.msg == ANNOUNCEMENT and isinstance(record.args, tuple):
            peer, _, what, text = record.args
            assert isinstance(peer, int)
            tell(Announced(time.monotonic(), peer, str(what), str(text)))


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
    log = logging.getLogger("pccl.master")
    log.setLevel(logging.INFO)
    log.addHandler(AnnouncementHandler())
    log.propagate = False
    before = baseline()
    node = pccl.MasterNode(
        given.listen,
        timing=timing_of(given.deadline),
        state=given.state,
        standby=given.standby,
        standby_of=given.standby_of,
    )
    with node:
        tell(Listens(time.monotonic(), node.address))
        tell(before)
        while not stopped.wait(SAMPLE_S):
            tell(sample())
    settled(before.descriptors, before.threads)
    tell(sample(ends=True))


if __name__ == "__main__":
    main()
