"""What the page shows of a status, as JSON. Pure.

The browser shows every text as text, never as markup: peers choose their names and calls.
"""

from __future__ import annotations

from typing import Any

from pccl.observe import summary
from pccl.observe.summary import Names, duration, who
from pccl.protocol.status_report import MemberStatus, StatusReport
from pccl.telemetry.names import is_long

US_PER_MS = 1000

ROWS_MAX = 64
"""Members in the matrix of links and in the chart of losses, and waits in the list."""


def picture(status: StatusReport) -> dict[str, Any]:
    """Return everything that the page shows of a status, for ``json.dumps``."""
    names = summary.names_of(status)
    slow = summary.slowest(status)
    return {
        "run": status.run.hex(),
        "term": status.term,
        "up": duration(status.uptime_ms * US_PER_MS),
        "idle": status.waits_for,
        "member_count": status.member_count,
        "newcomer_count": status.newcomer_count,
        "removal_count": status.removal_count,
        "slowest": slow and {**slow._asdict(), "who": who(names, slow.peer)},
        "members": [_member(member, names) for member in status.members],
        "waits": _waits(status, names),
        "ended": [
            {
                "what": call.what,
                "ago": duration(call.ago_ms * US_PER_MS),
                "took": duration(call.took_us),
                "last": who(names, call.last),
                "late": duration(call.late_us),
                "outcome": summary.outcome(call),
            }
            for call in status.ended
        ],
        "links": _links(status, names),
    }


def point(before: StatusReport, now: StatusReport, passed_s: float) -> dict[str, Any]:
    """Return what has happened between two statuses, for the charts.

    Args:
        before: the earlier status, of the same incarnation of the master.
        now: the later one.
        passed_s: time between them, in seconds.
    """
    new = now.ended_count - before.ended_count
    latest = now.ended[: max(new, 0)]
    done = [call for call in latest if call.cause is None]
    share = new / len(latest) if latest else 0.0
    return {
        "calls_per_s": max(new, 0) / passed_s if passed_s else 0.0,
        "failed_per_s": share * (len(latest) - len(done)) / passed_s if passed_s else 0.0,
        "took_ms": sum(call.took_us for call in done) / len(done) / US_PER_MS if done else 0.0,
        "bytes_per_s": share * sum(call.tensor_bytes for call in done) / passed_s
        if passed_s
        else 0.0,
        "losses": {
            member.peer: member.loss for member in now.members[:ROWS_MAX] if member.loss is not None
        },
    }


def _member(member: MemberStatus, names: Names) -> dict[str, Any]:
    return {
        "peer": member.peer,
        "who": who(names, member.peer),
        "where": f"group {member.group}, rank {member.rank}, {member.host}:{member.port}",
        "state": summary.state(member),
        "awaited": "" if member.awaited_ms is None else duration(member.awaited_ms * US_PER_MS),
        "progress": summary.progress(member),
        "figures": ", ".join(f"{one.name} {one.value:.3g}" for one in member.figures),
        "call": member.calls,
        "last_call": member.last_call,
    }


def _waits(status: StatusReport, names: Names) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for opened in status.rounds:
        missing = ", ".join(who(names, peer) for peer in opened.missing)
        found.append({"what": opened.round.kind.call_name, "whom": missing})
        found[-1]["time"] = duration(opened.waiting_ms * US_PER_MS)
    for operation in status.operations:
        missing = ", ".join(who(names, peer) for peer in operation.missing)
        found.append({"what": operation.what, "whom": missing})
        found[-1]["time"] = duration(operation.open_ms * US_PER_MS)
    for newcomer in status.newcomers:
        whom = names.explain(newcomer.waits_for)
        found.append({"what": f"newcomer {who(names, newcomer.peer)}", "whom": whom})
        found[-1]["time"] = duration(newcomer.waiting_ms * US_PER_MS)
    return found[:ROWS_MAX]


def _links(status: StatusReport, names: Names) -> dict[str, Any]:
    """Return the matrix of links: the peers, their headings, and the measured pairs among them."""
    peers = sorted({peer for link in status.links for peer in (link.peer, link.other)})[:ROWS_MAX]
    return {
        "peers": peers,
        "heads": [who(names, peer) if is_long(peer) else str(peer) for peer in peers],
        "who": [who(names, peer) for peer in peers],
        "pairs": [
            [link.peer, link.other, link.bytes_per_s, link.rtt_us, *summary.path(link, names)]
            for link in status.links
            if link.peer in peers and link.other in peers
        ],
    }
