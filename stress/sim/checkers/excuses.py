"""``Excuses``: records what faults did, and decides which removals they explain.

Faults report here what they do when they strike. The master may remove a live process only if a
fault hit the process, its connections or the master. For a removal at a deadline, faults must have
stopped the data for a large part of the time. So the master removes no process without a fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, RemovalCause
from pccl.topology.ring_order import PAIRS_NAMED_MAX
from pccl.topology.segment_limit import RETRANSMITS_MIN
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.pipe import RETRANSMIT_NS

MASTER_NAME = "master"
STANDBY_NAME = "standby"
MASTERS = (MASTER_NAME, STANDBY_NAME)

_ACCUSER = re.compile(r"peer (\d+)")
_PAIR = re.compile(r"peers (\d+), (\d+)")


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A fault of one process, or of the connections between two processes."""

    a: str
    b: str
    """The other host. If it equals ``a``, the fault concerns all connections of ``a``."""
    since_ns: int
    until_ns: int

    def touches(self, a: str, b: str) -> bool:
        """Whether the fault concerns the connections between ``a`` and ``b``."""
        if self.a == self.b:
            return self.a in (a, b)
        return {self.a, self.b} == {a, b}

    def lasted_s(self, since_ns: int, now_ns: int) -> float:
        """Return how many seconds between ``since_ns`` and ``now_ns`` the fault lasted."""
        begin, end = max(self.since_ns, since_ns), min(self.until_ns, now_ns)
        return max(0, end - begin) / NS_PER_S


class Excuses:
    """Records the faults of one run, and decides which failures they explain.

    Args:
        timing: deadlines of the processes.
        latency_ns: longest one-way latency between two processes.
        now_ns: returns the virtual time.
    """

    def __init__(self, timing: Timing, latency_ns: int, now_ns: Callable[[], int]) -> None:
        self._timing = timing
        self._now_ns = now_ns
        self._latency_ns = latency_ns
        self._troubles: list[_Trouble] = []
        self._flips: list[_Trouble] = []
        self._stuck: list[_Trouble] = []
        self._dead: set[frozenset[str]] = set()
        """Hosts between which a connection stayed open without delivering data."""
        self._lags_ns: Counter[str] = Counter()
        self._dozed_ns: Counter[str] = Counter()
        self._narrow_ns: dict[str, int] = {}
        """Host -> longest time for which one fault made its links slow."""
        self._shut: set[str] = set()
        self._barred: set[str] = set()
        self._homes: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self.master_relays = False
        """Whether the master forwards what peers send that cannot dial each other."""
        self.is_master_gone = False
        """Whether a fault killed the master, and no new one will start."""
        self.masters_died = False
        """Whether the standby may have to take over, and may never get enough members for that."""
        self.majority_died = False
        """Whether, in a run with a standby, half of the members or more were lost."""
        self.masters_divided = False
        """Whether some members may follow the standby while other members still follow the first
        master. These other members wait without a fault of their own, and the run may continue
        without them."""
        self._restarts: list[tuple[int, int]] = []
        """When the master was restarted, and how long there was none."""
        self.master_blank = False
        """Whether a master started with an empty store. If that master begins a run, an older run
        still has precedence."""

    # -- what faults do ------------------------------------------------------------------------

    def broken(self, end: SimConnection) -> None:
        """Record that a fault ended the connection of ``end``."""
        self._note(end.local.host, end.other.local.host, 0)

    def deadened(self, end: SimConnection) -> None:
        """Record that a connection stays open without delivering data; other connections work."""
        self._dead.add(frozenset((end.local.host, end.other.local.host)))
        patience_s = 2 * max(self._timing.lane_stall_s, self._timing.deadline_s)
        self._note(end.local.host, end.other.local.host, round(patience_s * NS_PER_S))

    def stuck(self, end: SimConnection) -> None:
        """Record that a connection lost a large segment for good, so it has to be replaced.

        That alone explains no removal: before that, the link has to get smaller segments.
        """
        since_ns, patience_ns = self._now_ns(), self._timing.ns(2 * self._timing.lane_stall_s)
        hosts = end.local.host, end.other.local.host
        self._stuck.append(_Trouble(*hosts, since_ns, since_ns + patience_ns))

    def moved(self, host: str) -> None:
        """Record that the address of ``host`` has changed, and its connections are dead."""
        patience_s = 2 * max(self._timing.lane_stall_s, self._timing.deadline_s)
        self._note(host, host, self._timing.ns(patience_s))

    def silenced(self, a: str, b: str, duration_ns: int) -> None:
        """Record that no data moves between two hosts, at least in one direction."""
        self._note(a, b, duration_ns)

    def paused(self, host: str, duration_ns: int) -> None:
        """Record that the process on ``host`` does not run."""
        self._note(host, host, duration_ns)

    def slowed(self, host: str, lag_ns: int) -> None:
        """Record that the process on ``host`` does everything up to ``lag_ns`` late."""
        self._lags_ns[host] += lag_ns

    def dozed(self, host: str, duration_ns: int) -> None:
        """Record that the process on ``host`` sleeps again and again, which extends its waits."""
        self._dozed_ns[host] += duration_ns

    def shut(self, host: str, home: int | None = None, *, is_barred: bool = False) -> None:
        """Record that no host can dial ``host``; two such hosts have a link only by a relay.

        ``home``: its local network, whose hosts can dial each other; ``is_barred``: whether it can
        dial only masters.
        """
        self._shut.add(host)
        if is_barred:
            self._barred.add(host)
        if home is not None:
            self._homes[host] = home

    def restarted_master(self, away_ns: int) -> None:
        """Record that a new master starts at the address of the old one, after ``away_ns``."""
        self._restarts.append((self._now_ns(), away_ns))

    def has_version(self, host: str, version: int) -> None:
        """Record that ``host`` has only this version of IP."""
        self._versions[host] = version

    def need_relay(self, *hosts: str | None) -> bool:
        """Whether neither of two ``hosts`` can dial the other."""
        one, other = hosts
        return not self._can_dial(one, other) and not self._can_dial(other, one)

    def _can_dial(self, one: str | None, other: str | None) -> bool:
        if one is None or other is None:
            return True
        if one in self._homes and self._homes[one] == self._homes.get(other):
            return True
        versions = {self._versions[host] for host in (one, other) if host in self._versions}
        return len(versions) < 2 and other not in self._shut and one not in self._barred

    def waits_for_kernel(self, one: str, other: str) -> bool:
        """Whether ``one`` has no link to ``other``, which may never find out that it is dead.

        Only ``other`` can dial, and it sends nothing. Its kernel would end the dead connection
        within ``SILENCE_MAX_S``, because nothing answers its probes. The simulator has no probes.
        """
        return frozenset((one, other)) in self._dead and not self._can_dial(one, other)

    def are_apart(self, *hosts: str | None) -> bool:
        """Whether two ``hosts`` may never have a link; a member may forward, but may also die."""
        return self.need_relay(*hosts) and not self.master_relays

    def flipped(self, end: SimConnection) -> None:
        """Record damaged data at ``end``: the connection closes, and a peer dials it again."""
        since_ns = self._now_ns()
        self._flips.append(_Trouble(end.local.host, end.other.local.host, since_ns, since_ns))

    def garbled(self, a: str, b: str, duration_ns: int) -> None:
        """Record that data between two hosts is damaged repeatedly.

        If this lasts at least a quarter of ``resume_s``, it counts as silence.
        """
        if duration_ns >= self._timing.ns(self._timing.resume_s) // 4:
            self._note(a, b, duration_ns)

    def narrowed(self, a: str, b: str, duration_ns: int) -> None:
        """Record that little data moves between two hosts."""
        for host in (a, b):
            self._narrow_ns[host] = max(self._narrow_ns.get(host, 0), duration_ns)

    def _note(self, a: str, b: str, duration_ns: int) -> None:
        since_ns = self._now_ns()
        a, b = (MASTER_NAME if host in MASTERS else host for host in (a, b))
        self._troubles.append(_Trouble(a, b, since_ns, since_ns + duration_ns))

    # -- what faults explain -------------------------------------------------------------------

    def removal(
        self, host: str, cause: RemovalCause, why: str, host_of: Callable[[int], str | None]
    ) -> bool:
        """Whether faults explain that the master removed the living process on ``host``.

        Args:
            host: host of the process.
            cause: cause that the master names.
            why: explanation of the master, which names other peers by id.
            host_of: returns the host of a peer id; None: unknown id.
        """
        timing = self._timing
        with_master = self._any(host, MASTER_NAME)
        match cause:
            case RemovalCause.GOODBYE:
                return False  # only a peer itself says goodbye
            case RemovalCause.CONTROL_LOST:
                lost = with_master or self.is_master_gone or self.masters_divided
                return lost or self._resumed_late(host)
            case RemovalCause.CONNECTIONS_LOST:
                accuser = self._accuser(why, host_of)
                # A restarted master plans links again, and peers drop some of them meanwhile. With
                # two masters, members drop peers that their own master removed.
                lanes = (
                    self.master_restarted
                    or self.masters_divided
                    or accuser is None
                    or self._any(host, accuser)
                    or self._any(accuser, accuser)
                    or any(flip.touches(host, accuser) for flip in self._flips)
                )
                return (with_master or self.is_master_gone) and lanes
            case RemovalCause.SILENT:
                return self._stood_still(host, MASTER_NAME, timing.deadline_s, master=False)
            case RemovalCause.STATE_CONFLICT:
                return False  # all hold the same, or accept what they receive
            case RemovalCause.CROWDED_OUT:
                return False  # no simulated run has so many newcomers
            case RemovalCause.EXPELLED:
                return False  # no person watches
            case RemovalCause.TOO_SLOW:
                narrow_s = self._narrow_ns.get(host, 0) / NS_PER_S
                long = narrow_s >= timing.hold_s / 3
                # A hole is left after up to 2.2 times the stall; usually that is less than hold_s.
                stuck = any(host in (one.a, one.b) for one in self._stuck)
                long |= stuck and 2.2 * timing.lane_stall_s >= timing.hold_s
                return long or self._stood_still(host, None, timing.hold_s / 3)
            case RemovalCause.NO_PROGRESS:
                still = self._stood_still(host, None, timing.progress_s / 3)
                return still or self._is_stuck_unnoticed(host)
            case RemovalCause.LINK_BROKEN:
                if self.masters_divided:
                    return True  # members of the other master drop their links to this peer
                named = [{host_of(int(number)) for number in pair} for pair in _PAIR.findall(why)]
                other = next((ends - {host} for ends in named if host in ends), {None}).pop()
                if other is None:  # the master names only the first pairs
                    cut = len(named) == PAIRS_NAMED_MAX and host in self._shut
                    return cut and all(self.are_apart(*ends) for ends in named if len(ends) == 2)
                touched = self._any(host, other) or self.are_apart(host, other)
                # After the second damaged lane in a row a link counts as down.
                since_ns = self._now_ns() - timing.ns(timing.link_s)
                late = [flip for flip in self._flips if flip.since_ns >= since_ns]
                damaged = sum(flip.touches(host, other) for flip in late) > 1
                shut = not self._shut.isdisjoint({host, other})  # only one of them can dial
                return touched or damaged or (shut and self._meets_late(host, other))
            case RemovalCause.UNREACHABLE:
                # The neighbour may be dead or follow another master; this master cannot know.
                neighbour = self._accuser(why, host_of)
                return (
                    self.masters_divided
                    or self.are_apart(host, neighbour)
                    or self._stood_still(host, neighbour, timing.link_s / 2)
                    or (
                        self.need_relay(host, neighbour)
                        and (
                            self._stood_still(host, MASTER_NAME, timing.link_s / 2)
                            or self._meets_late(host, neighbour)
                        )
                    )
                    or (
                        neighbour is not None
                        and self._stood_still(neighbour, MASTER_NAME, timing.link_s / 2)
                    )
                )

    def lost_master(self, host: str) -> bool:
        """Whether faults explain that the process on ``host`` reports a lost master.

        Each restarted master waits for members to return before it answers for the run, and does
        not count the time that it sleeps meanwhile.
        """
        if self.master_blank or self.may_stay_without_master:
            return True
        timing = self._timing
        recovery_s = 0.0
        if self.was_master_restarted:
            since_ns = self._now_ns() - timing.ns(timing.master_lost_s + timing.recovery_s)
            away_ns = [away_ns for at_ns, away_ns in self._restarts if at_ns >= since_ns]
            dozed_ns = sum(self._dozed_ns[name] for name in MASTERS)
            recovery_s = max(1, len(away_ns)) * timing.recovery_s
            recovery_s += (sum(away_ns) + dozed_ns) / NS_PER_S
        return self._stood_still(host, MASTER_NAME, timing.master_lost_s - recovery_s)

    def was_cut_off(self, host: str) -> bool:
        """Whether a fault affected the connection of ``host`` to the master."""
        return self._any(host, MASTER_NAME)

    def is_touched(self, host: str) -> bool:
        """Whether a fault has affected ``host``, the master, or connections of one of them."""
        ends = {host, MASTER_NAME}
        troubles = (*self._troubles, *self._flips, *self._stuck)
        return (
            self.was_master_restarted
            or any(not ends.isdisjoint((one.a, one.b)) for one in troubles)
            or any(not ends.isdisjoint(known) for known in (self._lags_ns, self._narrow_ns))
        )

    @property
    def until_ns(self) -> int:
        """End of the last recorded fault, in ns; it may lie in the future."""
        return max((trouble.until_ns for trouble in self._troubles), default=0)

    def undialable(self, host: str) -> bool:
        """Whether faults explain that dials of ``host`` failed."""
        troubled = self._troubles or self._flips or self._lags_ns or self._narrow_ns
        return host in self._shut or host in self._versions or bool(troubled)

    @property
    def master_restarted(self) -> bool:
        """Whether the master was restarted; the new one plans the links again."""
        return bool(self._restarts)

    @property
    def was_master_restarted(self) -> bool:
        """Whether a new master may have had to find out what the old master had decided."""
        return self.master_restarted or self.master_blank or self.masters_died

    @property
    def may_lack_majority(self) -> bool:
        """Whether, in a run with a standby, a majority of the members may be gone."""
        return self.masters_died or self.majority_died

    @property
    def may_stay_without_master(self) -> bool:
        """Whether a peer may never find a master again."""
        return self.is_master_gone or self.may_lack_majority

    def _resumed_late(self, host: str) -> bool:
        """Whether ``host`` may have restored a lost connection to the master too late.

        The peer has to notice that the connection ended, dial, and answer twice in the handshake.
        """
        lag_s = (self._lags_ns[host] + self._lags_ns[MASTER_NAME]) / NS_PER_S
        damaged = any(flip.touches(host, MASTER_NAME) for flip in self._flips)
        patience_s = min(self._timing.resume_s, self._timing.dial_s)
        return (damaged or self.was_master_restarted) and 4 * lag_s >= patience_s

    def _meets_late(self, *hosts: str | None) -> bool:
        """Whether two hosts may meet too late: after a dial, and two handshakes."""
        lag_s = sum(self._lags_ns[host] for host in (*hosts, MASTER_NAME) if host) / NS_PER_S
        return 8 * lag_s >= self._timing.link_s / 2

    def _is_stuck_unnoticed(self, host: str) -> bool:
        """Whether large segments of ``host`` vanish lately, and no sender can find that out.

        A sender has to repeat its oldest segment some times, with pauses that double. If the other
        side replaces the lane before that, each lane of the link is stuck in turn.
        """
        first_s = (RETRANSMIT_NS + 2 * self._latency_ns) / NS_PER_S
        found_s = (2**RETRANSMITS_MIN - 1) * first_s + self._timing.tick_s
        now_ns = self._now_ns()
        since_ns = now_ns - self._timing.ns(self._timing.progress_s)
        lately = (one for one in self._stuck if one.lasted_s(since_ns, now_ns))
        is_stuck = any(host in (one.a, one.b) for one in lately)
        return is_stuck and found_s >= self._timing.lane_stall_s

    def _any(self, a: str, b: str) -> bool:
        return any(trouble.touches(a, b) for trouble in self._troubles)

    def _stood_still(
        self, host: str, other: str | None, wanted_s: float, *, master: bool = True
    ) -> bool:
        """Whether faults may have stopped the data between two hosts for about ``wanted_s``.

        Args:
            host: one of the two hosts.
            other: the other host; None: any other peer.
            wanted_s: the deadline, in seconds.
            master: whether faults of the master itself count.
        """
        now_ns, timing = self._now_ns(), self._timing
        slack_s = timing.heartbeat_s + 3 * timing.tick_s + 8 * self._latency_ns / NS_PER_S
        slack_s += (self._lags_ns[host] + self._lags_ns[MASTER_NAME]) / NS_PER_S
        window_s = 3 * wanted_s + timing.progress_s
        since_ns = now_ns - round(window_s * NS_PER_S)
        lasted_s = 0.0
        for trouble in self._troubles:
            if other is None:
                concerns = host in (trouble.a, trouble.b) and trouble.a != MASTER_NAME
                concerns = concerns and trouble.b != MASTER_NAME
            else:
                concerns = trouble.touches(host, other)
                if trouble.a == trouble.b == MASTER_NAME:
                    concerns = concerns and master
            if concerns:
                lasted_s += trouble.lasted_s(since_ns, now_ns)
        if lasted_s:
            stuck = (one for one in self._stuck if host in (one.a, one.b))
            lasted_s += sum(one.lasted_s(since_ns, now_ns) for one in stuck)
        return lasted_s >= wanted_s - slack_s

    @staticmethod
    def _accuser(why: str, host_of: Callable[[int], str | None]) -> str | None:
        for number in _ACCUSER.findall(why):
            host = host_of(int(number))
            if host is not None:
                return host
        return None
