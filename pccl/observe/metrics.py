"""The metrics of peers and masters, for Prometheus: their names, labels and meanings.

Nothing is counted per message. The end of a call costs a few additions; all other values are read
from the peer or master when a scraper asks. :mod:`metrics_server` serves them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pccl.transports.base import Traffic

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histogram's buckets, in seconds: a small reduce takes one millisecond, a
reduce of a large model over the internet minutes."""


class Described(NamedTuple):
    """A metric: its kind in Prometheus, its labels besides ``name``, and its meaning."""

    kind: str
    labels: tuple[str, ...]
    help: str


METRICS: Mapping[str, Described] = {
    "pccl_info": Described(
        "gauge", ("version", "peer_id", "rank", "run"), "Always 1; the labels say who this is."
    ),
    "pccl_peers": Described(
        "gauge",
        ("state",),
        "Peer: members of its group. Master: peers of the run by state "
        "(member, disconnected, newcomer).",
    ),
    "pccl_rounds_total": Described(
        "counter",
        ("call", "outcome"),
        "Joint calls that ended, failed attempts included.",
    ),
    "pccl_round_seconds": Described(
        "histogram", ("call",), "Duration of joint calls that returned, with all their attempts."
    ),
    "pccl_blocked_seconds_total": Described(
        "counter",
        ("on",),
        "Seconds of joint calls. peers: until all members had made the call; transfer: from then "
        "to the end. master: seconds without a master, also contained in the other two if a call "
        "was open.",
    ),
    "pccl_wire_bytes_total": Described(
        "counter",
        ("direction", "plane"),
        "Bytes on connections. data: to other peers, tensors and shared state; control: between "
        "master and peers; relay: forwarded between other peers. Pulls inside one machine cross no "
        "connection.",
    ),
    "pccl_link_bytes_per_second": Described(
        "gauge",
        ("peer", "direction"),
        "Bytes per second on a link since the previous scrape.",
    ),
    "pccl_upload_limit_bytes_per_second": Described(
        "gauge", (), "Peer: what it sends to other machines, at most; absent: no limit."
    ),
    "pccl_state_revision": Described(
        "gauge", (), "Revision that was synchronized or compared last."
    ),
    "pccl_step": Described("gauge", (), "Step that the program has reported; 0: none."),
    "pccl_loss": Described("gauge", (), "Loss that the program has reported, if it reports any."),
    "pccl_master_connected": Described("gauge", (), "1 while the peer has a master, otherwise 0."),
    "pccl_operations_open": Described("gauge", (), "Master: collectives without an outcome."),
    "pccl_removals_total": Described(
        "counter", ("cause",), "Master: peers that left or were removed, by cause."
    ),
    "pccl_term": Described("gauge", (), "Number of the master's incarnation."),
    "pccl_uptime_seconds": Described("gauge", (), "Master: seconds since it started."),
}
"""All metrics by name. Each has the label ``name`` too: the peer's name, or ``master``."""


@dataclass(slots=True)
class Durations:
    """A histogram over ``BUCKETS_S``."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Durations in each bucket alone; the last one has no upper bound."""
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class Reading(NamedTuple):
    """One value of one metric."""

    metric: str
    labels: tuple[str, ...]
    value: float | Durations


Readings: TypeAlias = Iterator[Reading]


def library_version() -> str:
    """Return the version of the installed library; empty: it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms

    try:
        return version("pccl")
    except PackageNotFoundError:
        return ""


def bytes_of(plane: str, traffic: Traffic) -> Readings:
    """Yield the bytes of one plane."""
    yield Reading("pccl_wire_bytes_total", ("sent", plane), traffic.sent_bytes)
    yield Reading("pccl_wire_bytes_total", ("received", plane), traffic.received_bytes)
