"""The line of the log for an event: its level and its text, or none."""

from __future__ import annotations

from enum import IntEnum

from pccl.protocol.types import NS_PER_S, RemovalCause
from pccl.telemetry import events as tell
from pccl.telemetry.names import with_name
from pccl.telemetry.stream import Stamped


class Level(IntEnum):
    """The levels of Python's logging."""

    DEBUG = 10
    INFO = 20
    WARNING = 30


_LEFT = RemovalCause.GOODBYE.name

FIRST_PAUSE_S = 2
PAUSE_S_MAX = 300
"""Shortest and longest time between two warnings about waits. It doubles with each warning, and is
short again after it has passed twice without a wait. So a run with one slow peer, in which every
round waits, does not fill the log."""


class LogWords:
    """Turns the events of one peer into lines; says less of waits the more there are."""

    def __init__(self) -> None:
        self._warned_ns: int | None = None
        self._waited_ns = 0
        self._pause_s = FIRST_PAUSE_S
        self._warned: set[str] = set()
        """Calls whose wait the log has warned of, and that have not ended."""

    def line(self, stamped: Stamped) -> tuple[Level, str]:
        """Return the level and the text of an event."""
        event = stamped.event
        level, text = line_of(event)
        match event:
            case tell.Waiting(call=call):
                if not self._may_warn(stamped.at_ns):
                    return Level.DEBUG, text
                self._warned.add(call)
            case tell.WaitingEnded(call=call):
                if call not in self._warned:
                    return Level.DEBUG, text
                self._warned.remove(call)
            case _:
                pass
        return level, text

    def _may_warn(self, now_ns: int) -> bool:
        """Whether a warning about a wait is due, and if so, make the next pause longer."""
        before_ns, self._waited_ns = self._waited_ns, now_ns
        if now_ns - before_ns > 2 * self._pause_s * NS_PER_S:
            self._warned_ns, self._pause_s = None, FIRST_PAUSE_S
        if self._warned_ns is not None:
            if now_ns - self._warned_ns < self._pause_s * NS_PER_S:
                return False
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self._warned_ns = now_ns
        return True


NARROW_REMEDY = "lower the MTU of the VPN or tunnel between them, or let ICMP through its firewall"


def line_of(event: tell.PeerReport) -> tuple[Level, str]:
    """Return the level and the text of an event, whatever came before it."""
    match event:
        case tell.Joined():
            who = _peer(event.peer_id, event.name)
            place = f"{who}, rank {event.rank} of {event.world_size}"
            if not event.rejoined:
                return Level.INFO, f"joined the run {event.run[:8]} as {place}"
            return Level.WARNING, f"rejoined the run as {place}, after {event.away_s:.1f} s"
        case tell.MembershipLost(cause="CLOSED"):
            return Level.INFO, "left the run"
        case tell.MembershipLost(cause=cause, reason=reason):
            code = "" if f"[{cause}]" in reason else f" [{cause}]"
            return Level.WARNING, f"is no longer a member{code}: {reason}"
        case tell.MemberJoined():
            who = _peer(event.peer_id, event.name)
            return Level.INFO, f"{who} joined from {event.host}; {_members(event.world_size)}"
        case tell.MemberLost():
            who = _peer(event.peer_id, event.name)
            level = Level.INFO if event.cause == _LEFT else Level.WARNING
            return level, f"{who} {_why_lost(event)}; {_members(event.world_size)}"
        case tell.MasterDisconnected(reason=reason, gives_up_s=gives_up_s):
            text = f"lost the master, retrying for {gives_up_s:.0f} s: {reason}; if it has ended"
            return Level.WARNING, f"{text}, start it again at the same address"
        case tell.MasterReconnected(away_s=away_s, term=term):
            return Level.WARNING, f"the master is back after {away_s:.1f} s (term {term})"
        case tell.Waiting(call=call, waits_for=whom, waited_s=waited_s, others=others):
            return Level.WARNING, f"{call} {_have(others)} waited {waited_s} s for {whom}"
        case tell.WaitingEnded(call=call, waited_s=waited_s):
            return Level.WARNING, f"{call} waits no longer, after {waited_s:.1f} s"
        case tell.LinkLost():
            who = _peer(event.peer_id, event.name)
            return Level.WARNING, f"lost the link to {who}, dialling again: {event.reason}"
        case tell.LinkRestored():
            who = _peer(event.peer_id, event.name)
            return Level.WARNING, f"the link to {who} works again, after {event.away_s:.1f} s"
        case tell.LargePacketsLost():
            who = _peer(event.peer_id, event.name)
            text = f"large packets vanish between this peer and {who}; segments of"
            return Level.WARNING, f"{text} {event.segment_bytes} bytes pass; {NARROW_REMEDY}"
        case tell.ContributionFlagged():
            return Level.WARNING, _flagged(event)
        case tell.NoRoom(reason=reason):
            return Level.WARNING, f"no room for the pieces of the shared state: {reason}"
        case tell.AddressUnreachable(reason=reason):
            return Level.WARNING, reason
        case tell.PortForwarded():
            return Level.INFO, _forwarded(event)
        case tell.PortNotForwarded(port=0, reason=reason):
            return Level.INFO, f"the router forwards no port to this peer: {reason}"
        case tell.PortNotForwarded(port=port, reason=reason):
            return Level.INFO, f"the router no longer forwards port {port} to this peer: {reason}"
        case tell.RunChanged():
            who = f"{_peer(event.peer_id, event.name)} of group {event.group}"
            level = Level.INFO if event.cause in ("", _LEFT) else Level.WARNING
            cause = f"{event.cause}: " if event.cause else ""
            return level, f"{who} {event.what}: {cause}{event.reason}"
        case tell.CallEnded(outcome="ok"):
            return Level.DEBUG, f"{event.call} ended after {event.seconds:.3f} s"
        case tell.CallEnded():
            return Level.DEBUG, f"{event.call} raised {event.outcome}: {event.reason}"


def _flagged(event: tell.ContributionFlagged) -> str:
    what = "is not finite"
    if event.norm is not None and event.limit is not None:
        what = f"has a norm of {event.norm:.3g}, above the limit of {event.limit:.3g}"
    done = "the average excludes it" if event.excluded else "the average contains it"
    who = _peer(event.peer_id, event.name)
    return f"tag {event.tag}: the contribution of {who} {what}; {done}"


def _why_lost(event: tell.MemberLost) -> str:
    if event.cause == _LEFT:
        return "left"
    return f"is gone [{event.cause}]: {event.reason}" if event.cause else "left or failed"


def _forwarded(event: tell.PortForwarded) -> str:
    host = f" of {event.host}" if event.host else ""
    text = f"the router forwards port {event.port}{host} to this peer ({event.by})"
    if event.public or not event.host:
        return text
    return f"{text}, but this address is not public: a router before it must forward the port, too"


def _peer(peer_id: int, name: str) -> str:
    return f"peer {with_name(peer_id, name)}"


def _members(count: int) -> str:
    return f"the group has {count} member{'' if count == 1 else 's'}"


def _have(others: int) -> str:
    """Return the verb for a call, or for one and several others."""
    return f"and {others} other{'s' * (others > 1)} have" if others else "has"
