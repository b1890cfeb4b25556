"""What people want to know of a status: names, states, speeds, and which member is the slowest.

``pccl status``, ``pccl top`` and the page show these. Pure.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pccl.protocol.status_report import (
    EndedStatus,
    LinkSpeed,
    MemberStatus,
    NewcomerStatus,
    RemovalStatus,
    StatusReport,
)
from pccl.protocol.types import AbortCause
from pccl.telemetry.link_paths import PathWords, path_in_words
from pccl.telemetry.names import Names, with_name

__all__ = [
    "Names",
    "Slowest",
    "Throughput",
    "duration",
    "indirect_links",
    "names_of",
    "outcome",
    "pair",
    "path",
    "path_in_words",
    "progress",
    "size",
    "slowest",
    "state",
    "steps_per_s",
    "throughput",
    "who",
]

US_PER_MS = 1000
US_PER_S = 1_000_000


class Slowest(NamedTuple):
    """The member for which the last calls waited longest.

    Attributes:
        peer: its id.
        calls: number of the last calls in which its request came last.
        of: number of these calls.
        late_us: mean time from the first request to its request, in microseconds.
    """

    peer: int
    calls: int
    of: int
    late_us: int


class Throughput(NamedTuple):
    """How much the last calls did, up to now.

    Attributes:
        calls_per_s: calls that ended, per second.
        bytes_per_s: bytes of their tensors, per second; those of one member count.
    """

    calls_per_s: float
    bytes_per_s: float


def names_of(status: StatusReport) -> Names:
    """Return the names of all peers that a status mentions."""
    names = Names()
    listed: tuple[RemovalStatus | NewcomerStatus | MemberStatus, ...] = (
        *status.removals,
        *status.newcomers,
        *status.members,
    )
    for peer in listed:
        names.note(peer.peer, peer.name)
    return names


def who(names: Names, peer: int) -> str:
    """Return ``3 (alice)``; ``3`` if the name is unknown; ``alice`` if the id is long."""
    return with_name(peer, names.of(peer))


def pair(link: LinkSpeed, names: Names) -> str:
    """Return ``1 (alice) to 2 (bob)``."""
    return f"{who(names, link.peer)} to {who(names, link.other)}"


def path(link: LinkSpeed, names: Names) -> PathWords:
    """Return how the two ends of a link are connected, and why that is not better."""
    return PathWords(*map(names.explain, path_in_words(link)))


def indirect_links(status: StatusReport) -> list[LinkSpeed]:
    """Return one direction of each link whose path could be better, the relayed links first."""
    found: dict[frozenset[int], LinkSpeed] = {}
    for link in status.links:
        if path_in_words(link).remedy:
            found.setdefault(frozenset((link.peer, link.other)), link)
    return sorted(found.values(), key=lambda link: -(link.path or 0))


def state(member: MemberStatus) -> str:
    """Return ``lost``, ``awaited``, ``waits`` or ``works``: what a member does for the run.

    It ``waits`` in a call for other members; ``works`` means that it is in no call.
    """
    if not member.connected:
        return "lost"
    if member.awaited_ms is not None:
        return "awaited"
    return "waits" if member.calls else "works"


def progress(member: MemberStatus) -> str:
    """Return ``step 119, loss 2.31, 4 steps/s``, or what of it is known."""
    known = [f"step {member.step}" if member.step else "no step"]
    if member.loss is not None:
        known.append(f"loss {member.loss:.4g}")
    if speed := steps_per_s(member):
        known.append(f"{speed:.3g} steps/s")
    return ", ".join(known)


def steps_per_s(member: MemberStatus) -> float:
    """Return the steps of a member's program per second; 0: unknown."""
    return US_PER_S / member.step_us if member.step_us else 0.0


def slowest(status: StatusReport) -> Slowest | None:
    """Return the member for which the last calls waited longest; None: no call waited."""
    late_us: Counter[int] = Counter()
    for call in status.ended:
        late_us[call.last] += call.late_us
    if not late_us.total():
        return None
    peer, total_us = late_us.most_common(1)[0]
    calls = sum(call.last == peer for call in status.ended)
    return Slowest(peer, calls, len(status.ended), total_us // calls)


def throughput(status: StatusReport) -> Throughput:
    """Return how much the last calls did, from the first request of the oldest of them to now."""
    if not status.ended:
        return Throughput(0.0, 0.0)
    oldest = status.ended[-1]
    window_s = max(oldest.ago_ms * US_PER_MS + oldest.took_us, US_PER_MS) / US_PER_S
    done = [call for call in status.ended if call.cause is None]
    return Throughput(len(done) / window_s, sum(call.tensor_bytes for call in done) / window_s)


def outcome(call: EndedStatus) -> str:
    """Return ``ok``, or the cause for which a call ended without a result."""
    return "ok" if call.cause is None else AbortCause(call.cause).name


def duration(time_us: float) -> str:
    """Return a time in three digits: ``850 us``, ``12.0 ms``, ``3.40 s``, ``2:05:00``."""
    if time_us < US_PER_MS:
        return f"{time_us:.0f} us"
    if time_us < US_PER_S:
        return f"{_three_digits(time_us / US_PER_MS)} ms"
    if time_us < 100 * US_PER_S:
        return f"{_three_digits(time_us / US_PER_S)} s"
    minutes, seconds = divmod(int(time_us / US_PER_S), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size(nbytes: float) -> str:
    """Return a number of bytes in three digits and a decimal unit: ``98.1 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{_three_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{_three_digits(nbytes)} TB"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
