"""What was done to whom: which causes of a removal the faults of a run can have brought about.

Faults tell it what they do when they strike. A live process may be removed only if something was
done to itself, to its connections, or to the master; and by a deadline only if nothing moved for
about as long. So a verdict must name the culprit that was planted, and nobody else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, RemovalCause
from pccl.transports.sim.connection import SimConnection

MASTER_NAME = "master"
STANDBY_NAME = "standby"
MASTERS = (MASTER_NAME, STANDBY_NAME)

_ACCUSER = re.compile(r"peer (\d+)")
_PAIR = re.compile(r"peers (\d+) and (\d+)")


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Something that befell one process, or what is between two."""

    a: str
    b: str
    """The other one; the same as ``a``: all of its connections."""
    since_ns: int
    until_ns: int

    def touches(self, a: str, b: str) -> bool:
        """Whether it concerns what is between these two."""
        if self.a == self.b:
            return self.a in (a, b)
        return {self.a, self.b} == {a, b}

    def lasted_s(self, since_ns: int, now_ns: int) -> float:
        """For how long of that time."""
        begin, end = max(self.since_ns, since_ns), min(self.until_ns, now_ns)
        return max(0, end - begin) / NS_PER_S


class Excuses:
    """Everything that has been done to the processes of one run.

    Args:
        timing: their deadlines.
        latency_ns: the longest way between two of them.
        now_ns: the present.
    """

    def __init__(self, timing: Timing, latency_ns: int, now_ns: Callable[[], int]) -> None:
        self._timing = timing
        self._now_ns = now_ns
        self._latency_ns = latency_ns
        self._troubles: list[_Trouble] = []
        self._flips: list[_Trouble] = []
        self._lags_ns: Counter[str] = Counter()
        self._narrow_ns: dict[str, int] = {}
        """For how long the links of a host were slow in one go, at most."""
        self._shut: set[str] = set()
        self.is_master_gone = False
        """There will be no master any more."""
        self.masters_died = False
        """The standby has to take over, and waits for ever if too few members are left."""
        self.majority_died = False
        """Half of the members or more are dead at once, and there is a standby: nobody goes on."""
        self.masters_divided = False
        """Members may move to the standby, and the first master keep the others for a while.

        Those stand still without a fault of their own, and may find that the run went on."""
        self.master_restarted = False
        """Another incarnation has begun: links are planned anew."""
        self.master_blank = False
        """A master has started that knew of no run; a run that it begins gives way to an older
        one."""

    # -- what faults do ------------------------------------------------------------------------

    def broken(self, end: SimConnection) -> None:
        """A connection ends."""
        self._note(end.local.host, end.remote.host, 0)

    def deadened(self, end: SimConnection) -> None:
        """A connection delivers nothing any more and does not end; others of the pair live on."""
        patience_s = 2 * max(self._timing.lane_stall_s, self._timing.deadline_s)
        self._note(end.local.host, end.remote.host, round(patience_s * NS_PER_S))

    def silenced(self, a: str, b: str, duration_ns: int) -> None:
        """Nothing moves between two hosts, one way at least."""
        self._note(a, b, duration_ns)

    def paused(self, host: str, duration_ns: int) -> None:
        """The process there does not run."""
        self._note(host, host, duration_ns)

    def slowed(self, host: str, lag_ns: int) -> None:
        """The process there does everything late."""
        self._lags_ns[host] += lag_ns

    def shut(self, host: str) -> None:
        """Nobody can dial this host: two such never have a link."""
        self._shut.add(host)

    def are_apart(self, *hosts: str | None) -> bool:
        """Whether neither of two hosts can dial the other."""
        return self._shut.issuperset(hosts)

    def flipped(self, end: SimConnection) -> None:
        """What has arrived on a connection was damaged: it is closed, and made again at once."""
        since_ns = self._now_ns()
        self._flips.append(_Trouble(end.local.host, end.remote.host, since_ns, since_ns))

    def garbled(self, a: str, b: str, duration_ns: int) -> None:
        """What passes between two hosts is damaged, again and again.

        Longer than a fraction of the time in which connections are to come back, that is silence.
        """
        if duration_ns >= self._timing.ns(self._timing.resume_s) // 4:
            self._note(a, b, duration_ns)

    def narrowed(self, a: str, b: str, duration_ns: int) -> None:
        """Little moves between two hosts."""
        for host in (a, b):
            self._narrow_ns[host] = max(self._narrow_ns.get(host, 0), duration_ns)

    def _note(self, a: str, b: str, duration_ns: int) -> None:
        since_ns = self._now_ns()
        a, b = (MASTER_NAME if host in MASTERS else host for host in (a, b))
        self._troubles.append(_Trouble(a, b, since_ns, since_ns + duration_ns))

    # -- what they excuse ----------------------------------------------------------------------

    def removal(
        self, host: str, cause: RemovalCause, why: str, host_of: Callable[[int], str | None]
    ) -> bool:
        """Whether the living process on ``host`` may have been removed for this.

        Args:
            host: where it runs.
            cause: what the master says.
            why: in words; they name others by their ids.
            host_of: where the peer of an id runs.
        """
        timing = self._timing
        with_master = self._any(host, MASTER_NAME)
        match cause:
            case RemovalCause.GOODBYE:
                return False  # whoever leaves does it himself
            case RemovalCause.CONTROL_LOST:
                lost = with_master or self.is_master_gone or self.masters_divided
                return lost or self._resumed_late(host)
            case RemovalCause.CONNECTIONS_LOST:
                accuser = self._accuser(why, host_of)
                # A restarted master plans links anew, and some are given up for a moment. Members
                # of one of two masters drop those whom it has removed.
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
                return False  # they all have the same, or take what they get
            case RemovalCause.CROWDED_OUT:
                return False  # no simulated run has so many newcomers
            case RemovalCause.TOO_SLOW:
                narrow_s = self._narrow_ns.get(host, 0) / NS_PER_S
                long = narrow_s >= timing.hold_s / 3
                return long or self._stood_still(host, None, timing.hold_s / 3)
            case RemovalCause.NO_PROGRESS:
                return self._stood_still(host, None, timing.progress_s / 3)
            case RemovalCause.LINK_BROKEN:
                named = ({host_of(int(number)) for number in pair} for pair in _PAIR.findall(why))
                other = next((ends - {host} for ends in named if host in ends), {None}).pop()
                if other is None:
                    return False  # nobody says whom it could not talk to
                touched = self._any(host, other) or self.are_apart(host, other)
                # After the second damaged lane in a row a link counts as down.
                since_ns = self._now_ns() - timing.ns(timing.link_s)
                late = [flip for flip in self._flips if flip.since_ns >= since_ns]
                damaged = sum(flip.touches(host, other) for flip in late) > 1
                return touched or damaged or self.masters_divided
            case RemovalCause.UNREACHABLE:
                # Its neighbour may be dead, and the master not have heard of that.
                neighbour = self._accuser(why, host_of)
                return (
                    self.are_apart(host, neighbour)
                    or self._stood_still(host, neighbour, timing.link_s / 2)
                    or (
                        neighbour is not None
                        and self._stood_still(neighbour, MASTER_NAME, timing.link_s / 2)
                    )
                )

    def lost_master(self, host: str) -> bool:
        """Whether the process on ``host`` may say that it has lost its master.

        One that was restarted waits for members to return before it speaks for the run.
        """
        if self.master_blank or self.may_stay_without_master:
            return True
        timing = self._timing
        recovery_s = timing.recovery_s if self.was_master_restarted else 0.0
        return self._stood_still(host, MASTER_NAME, timing.master_lost_s - recovery_s)

    def was_cut_off(self, host: str) -> bool:
        """Whether a fault affected the connection of ``host`` to the master."""
        return self._any(host, MASTER_NAME)

    @property
    def until_ns(self) -> int:
        """When everything is over that has been done so far; it may lie ahead."""
        return max((trouble.until_ns for trouble in self._troubles), default=0)

    def undialable(self, host: str) -> bool:
        """Whether dials of this host may have failed."""
        troubled = self._troubles or self._flips or self._lags_ns or self._narrow_ns
        return host in self._shut or bool(troubled)

    @property
    def was_master_restarted(self) -> bool:
        """Whether another incarnation had to find out what the one before had decided."""
        return self.master_restarted or self.master_blank or self.masters_died

    @property
    def may_lack_majority(self) -> bool:
        """Whether a master with a standby may have to begin a term with whoever is left."""
        return self.masters_died or self.majority_died

    @property
    def may_stay_without_master(self) -> bool:
        """Whether it may be in vain to look for one again."""
        return self.is_master_gone or self.may_lack_majority

    def _resumed_late(self, host: str) -> bool:
        """Whether a damaged connection to the master may have been made again too late.

        The peer has to hear of the end, dial, and answer in two steps of the handshake.
        """
        lag_s = (self._lags_ns[host] + self._lags_ns[MASTER_NAME]) / NS_PER_S
        damaged = any(flip.touches(host, MASTER_NAME) for flip in self._flips)
        return damaged and 4 * lag_s >= self._timing.resume_s

    def _any(self, a: str, b: str) -> bool:
        return any(trouble.touches(a, b) for trouble in self._troubles)

    def _stood_still(
        self, host: str, other: str | None, wanted_s: float, *, master: bool = True
    ) -> bool:
        """Whether nothing may have moved between the two (None: any other peer) for about so long.

        Args:
            host: one of the two.
            other: the other one.
            wanted_s: the deadline.
            master: whether it counts if the master itself stood still.
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
        return lasted_s >= wanted_s - slack_s

    @staticmethod
    def _accuser(why: str, host_of: Callable[[int], str | None]) -> str | None:
        for number in _ACCUSER.findall(why):
            host = host_of(int(number))
            if host is not None:
                return host
        return None
