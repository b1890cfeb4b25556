"""``PeerMetrics``: the values of one peer's metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pccl.machines.peer.machine import Standing
from pccl.observe.metrics import Durations, Reading, Readings, bytes_of, library_version
from pccl.protocol.types import NS_PER_S, PeerId, Roster
from pccl.runtime.engine import PeerEngine
from pccl.telemetry.events import CallEnded, MasterDisconnected, MasterReconnected, MembershipLost
from pccl.telemetry.stream import Stamped
from pccl.transports.base import Traffic

RATED_NS = NS_PER_S
"""Shortest time over which the throughput of a link is computed."""


class PeerMetrics:
    """The metrics of one peer. All methods run on the I/O thread.

    Args:
        engine: the peer.
    """

    def __init__(self, engine: PeerEngine) -> None:
        self._engine = engine
        self._version = library_version()
        self._rounds: Counter[tuple[str, str]] = Counter()
        self._durations: dict[str, Durations] = {}
        self._waited_s = self._moved_s = self._away_s = 0.0
        self._away_since_ns: int | None = None
        self._links: dict[PeerId, _LinkRate] = {}
        self._lanes = Traffic()
        engine.events.listen(self._note)

    def _note(self, stamped: Stamped) -> None:
        match stamped.event:
            case CallEnded(call=call, outcome=outcome) as ended:
                self._rounds[call, outcome] += 1
                self._waited_s += ended.waited_s
                self._moved_s += ended.moved_s
                if outcome == "ok":
                    self._durations.setdefault(call, Durations()).add(ended.seconds)
            case MasterDisconnected():
                self._away_since_ns = stamped.at_ns
            case MasterReconnected(away_s=away_s):
                self._away_s += away_s
                self._away_since_ns = None
            case MembershipLost() if self._away_since_ns is not None:
                self._away_s += (stamped.at_ns - self._away_since_ns) / NS_PER_S
                self._away_since_ns = None
            case _:
                pass

    def read(self) -> Readings:
        """Yield all values."""
        engine, machine = self._engine, self._engine.machine
        is_member = machine.standing is Standing.MEMBER
        roster = machine.newest if is_member else None
        ring = roster.ring if roster is not None else ()
        rank = str(ring.index(machine.peer)) if machine.peer in ring else ""
        peer_id = str(machine.peer) if is_member else ""
        yield Reading("pccl_info", (self._version, peer_id, rank, machine.run.hex()), 1)
        yield Reading("pccl_peers", ("member",), len(ring))
        yield Reading("pccl_state_revision", (), engine.revision)
        yield Reading("pccl_step", (), engine.step)
        if engine.loss is not None:
            yield Reading("pccl_loss", (), engine.loss)
        yield Reading("pccl_master_connected", (), machine.contact.connected)
        yield Reading("pccl_term", (), machine.term)
        for labels, count in self._rounds.items():
            yield Reading("pccl_rounds_total", labels, count)
        for call, durations in self._durations.items():
            yield Reading("pccl_round_seconds", (call,), durations)
        yield from self._blocked()
        yield from self._wire()
        yield from self._rates(roster)

    def _blocked(self) -> Readings:
        """Yield the seconds of all calls, the open ones included."""
        now_ns = self._engine.now_ns()
        waited_s, moved_s, away_s = self._waited_s, self._moved_s, self._away_s
        for call in self._engine.calls:
            moves_ns = now_ns if call.moves_ns is None else call.moves_ns
            waited_s += (moves_ns - call.tried_ns) / NS_PER_S
            moved_s += (now_ns - moves_ns) / NS_PER_S
        if self._away_since_ns is not None:
            away_s += (now_ns - self._away_since_ns) / NS_PER_S
        for on, seconds in (("peers", waited_s), ("transfer", moved_s), ("master", away_s)):
            yield Reading("pccl_blocked_seconds_total", (on,), seconds)

    def _wire(self) -> Readings:
        lanes = [lane for link in self._engine.links.all() for lane in link.lanes]
        ended, kept = self._engine.ended_lanes, self._lanes
        # A lane that is closing is in neither count for a moment; a total never falls.
        sent = ended.sent_bytes + sum(lane.sent_bytes for lane in lanes)
        received = ended.received_bytes + sum(lane.received_bytes for lane in lanes)
        kept.sent_bytes = max(kept.sent_bytes, sent)
        kept.received_bytes = max(kept.received_bytes, received)
        yield from bytes_of("data", kept)
        yield from bytes_of("control", self._engine.control_traffic)
        relayed = self._engine.relayed_bytes
        yield from bytes_of("relay", Traffic(relayed, relayed))
        if (limit := self._engine.upload_bytes_per_s_max) is not None:
            yield Reading("pccl_upload_limit_bytes_per_second", (), limit)

    def _rates(self, roster: Roster | None) -> Readings:
        """Yield the throughput of the links to the members of the group, and to no other peer."""
        now_ns = self._engine.now_ns()
        before, self._links = self._links, {}
        if roster is None:
            return
        names = Counter(member.name for member in roster.members)
        for member in roster.members:
            link = self._engine.links.find(member.peer)
            if link is None:
                continue
            sent = sum(lane.sent_bytes for lane in link.lanes)
            received = sum(lane.received_bytes for lane in link.lanes)
            rate = self._links[member.peer] = before.get(member.peer) or _LinkRate(now_ns)
            rate.look(sent, received, now_ns)
            is_unique = bool(member.name) and names[member.name] == 1
            peer = member.name if is_unique else f"{member.name} ({member.peer})".lstrip()
            yield Reading("pccl_link_bytes_per_second", (peer, "sent"), rate.sent_per_s)
            yield Reading("pccl_link_bytes_per_second", (peer, "received"), rate.received_per_s)


@dataclass(slots=True)
class _LinkRate:
    """The throughput of one link: its bytes at the last look, and the rate before it."""

    at_ns: int
    sent: int = 0
    received: int = 0
    sent_per_s: float = 0.0
    received_per_s: float = 0.0

    def look(self, sent: int, received: int, now_ns: int) -> None:
        """Compute the rates since the last look, if that is long enough ago."""
        passed_ns = now_ns - self.at_ns
        if passed_ns >= RATED_NS:
            # The bytes of a lost lane are gone; then the rate is that of the new ones.
            self.sent_per_s = (sent - self.sent if sent >= self.sent else sent) * 1e9 / passed_ns
            gained = received - self.received if received >= self.received else received
            self.received_per_s = gained * 1e9 / passed_ns
        elif passed_ns:
            return
        self.at_ns, self.sent, self.received = now_ns, sent, received
