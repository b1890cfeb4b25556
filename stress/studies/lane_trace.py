"""Watches the number of lanes being found: two peers, an emulated link, one tensor again and again.

Master, relays and peers are processes of their own. The first peer looks at its link twice a second
and says how many lanes there are, on how many it sends, and how fast; nothing while it is idle and
stays as it is. Every value of every call is checked.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import click
import numpy as np

import pccl
from pccl.cli.bench.arguments import Size
from pccl.cli.bench.crew import Crew, ProcessDied
from pccl.cli.bench.run import relays
from pccl.cli.streams import writing

MODULE = "pccl.stress.studies.lane_trace"
LOOK_S = 0.5
PERIOD = 8191
"""Of the values: a prime, so that no two segments are alike."""

USED_BYTES = 4096
"""A lane that sends less in a look is not used: it answers pings and says what has arrived."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the first peer's link did since the last look."""

    at_s: float
    lanes: int
    used: int
    sent_mbit_s: float


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One all-reduce of the first peer."""

    call: int
    seconds: float
    mbit_s: float
    """The tensor's size by the time: what each direction of a link between two peers carries."""
    lanes: int
    values_ok: bool


# -- a peer ----------------------------------------------------------------------------------------


def be_a_peer(
    master: str, listen: str, advertise: str, size: int, calls: int, pause_s: float
) -> None:
    """Reduce ``calls`` times; print lines of JSON."""
    with pccl.Communicator(master, listen=listen, advertise=advertise) as comm:
        comm.connect(min_peers=2)
        first = comm.rank == 0
        pattern = np.arange(size // 4) % PERIOD
        send, result = pattern.astype(np.float32) * (comm.rank + 1), np.zeros(size // 4, np.float32)
        expected = pattern.astype(np.float32) * 3
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(comm, stop), daemon=True)
        if first:
            watcher.start()
        for call in range(calls):
            time.sleep(pause_s if call else 0)
            result[:] = 0
            comm.barrier()
            began_s = time.monotonic()
            comm.all_reduce(send, result)
            seconds = time.monotonic() - began_s
            lanes = len(comm.status().links[0].lanes)
            ok = bool(np.array_equal(result, expected))
            if first or not ok:
                mbit_s = size * 8 / 1e6 / seconds
                _say(TracedCall(call + 1, round(seconds, 3), round(mbit_s, 1), lanes, ok))
        stop.set()
        if first:
            watcher.join()


def _watch(comm: pccl.Communicator, stop: threading.Event) -> None:
    began_s = looked_s = time.monotonic()
    before: dict[int, int] = {}
    while not stop.wait(LOOK_S):
        now_s = time.monotonic()
        lanes = [lane for link in comm.status().links for lane in link.lanes]
        sent = {lane.number: lane.sent_bytes for lane in lanes}
        moved = [sent[number] - before.get(number, 0) for number in sent]
        elapsed_s = now_s - looked_s
        used = sum(1 for nbytes in moved if nbytes > USED_BYTES)
        mbit_s = sum(moved) * 8 / 1e6 / elapsed_s
        if used or sent.keys() != before.keys():
            _say(Look(round(now_s - began_s, 2), len(lanes), used, round(mbit_s, 1)))
        before, looked_s = sent, now_s


def _say(what: Look | TracedCall) -> None:
    print(json.dumps(asdict(what)), flush=True)


# -- the command -----------------------------------------------------------------------------------


@click.command("lanes")
@click.option("--link", required=True, help="As for relay.")
@click.option("--size", type=Size(), default="256MiB", show_default=True)
@click.option("--calls", type=click.IntRange(1, 1000), default=4, show_default=True)
@click.option("--pause", "pause_s", type=click.FloatRange(0, 600), default=0.0, show_default=True,
              help="Seconds between two calls.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one object per line.")
def lanes(link: str, size: int, calls: int, pause_s: float, as_json: bool) -> None:
    """Show how many lanes two peers find good for an emulated link; exit code 1 on wrong values."""
    ok = True
    with writing():
        for line in _lines(link, size - size % 4, calls, pause_s):
            told = json.loads(line)
            ok = ok and told.get("values_ok", True)
            click.echo(line if as_json else _plain(told))
    sys.exit(0 if ok else 1)


def _lines(link: str, size: int, calls: int, pause_s: float) -> Iterator[str]:
    names = ["peer 0", "peer 1"]
    with (
        pccl.MasterNode("127.0.0.1:0") as node,
        Crew() as crew,
        relays(crew, link, node.address, len(names)) as (master, doors),
    ):
        for name, (listen, advertise) in zip(names, doors, strict=True):
            told = (master, listen, advertise, size, calls, pause_s)
            crew.start(name, MODULE, [json.dumps(told)])
        try:
            while crew.running(names):
                for _, line in crew.hear():
                    yield line
        except ProcessDied as death:
            said = "\n".join(death.said)
            raise click.ClickException(f"{death}\n{said}") from death


def _plain(told: dict[str, float]) -> str:
    if "call" in told:
        right = "values right" if told["values_ok"] else "WRONG VALUES"
        return (
            f"call {told['call']}: {told['seconds']:.2f} s, {told['mbit_s']:.0f} Mbit/s, "
            f"{told['lanes']} lanes, {right}"
        )
    return (
        f"{told['at_s']:7.2f} s  {told['lanes']:3} lanes, {told['used']:3} used  "
        f"{told['sent_mbit_s']:7.0f} Mbit/s"
    )


if __name__ == "__main__":
    be_a_peer(*json.loads(sys.argv[1]))
