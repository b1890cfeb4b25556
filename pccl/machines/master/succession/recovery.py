"""The reports of returning peers, and whether they are enough to continue the run.

Peers know everything that a master has sent them. So ``recovered`` can rebuild the run from the
reports of these peers.

Any process with the token can send a report. If an earlier master has named the members of the run
(``vouched``), only their reports count. The rosters in these reports can name more members.

Pure state: ``Succession`` passes the messages in, and closes connections.
"""

from __future__ import annotations

from pccl.machines.master.connections import Caller
from pccl.machines.master.credible import check_roster
from pccl.machines.master.succession.footprint import footprint
from pccl.machines.master.succession.majority import Basis
from pccl.machines.master.succession.recovered import Recovered, recovered_run
from pccl.machines.master.succession.report import (
    Report,
    SharedRoster,
)
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import (
    PEERS_MAX,
    REPORT_BYTES_MAX,
    REPORTS_BYTES_MAX,
    REQUEST_BYTES_MIN,
    ROSTER_BYTES_MIN,
    ROSTERS_KEPT_MAX,
    Timing,
)
from pccl.protocol.types import PeerId, Roster

_LOOKS_MAX = 8
"""The most searches between two ticks that find members missing. Any message may cause one."""


class Recovery:
    """Collects the reports of returning peers for a while.

    Args:
        timing: the master waits ``recovery_s`` for all members.
        run: the run's id; None: the run of the first peer that returns.
        incumbent: id of this master.
        now_ns: current time.
        ratified: the newest roster that a majority acknowledged to this master; 0: none is known.
        vouched: the members of the run, as its master has named them.
    """

    def __init__(
        self,
        timing: Timing,
        run: bytes | None,
        incumbent: bytes,
        now_ns: int,
        ratified: int = 0,
        vouched: Vouched = NOT_TOLD,
    ) -> None:
        self.run = self._given_run = run
        self.vouched, self._heard_ns = vouched, now_ns
        self._stale_ns = timing.ns(timing.master_lost_s) // 2
        self._is_stale = False
        """Whether the list of named members is so old that all of them may have been replaced."""
        self._patience_ns = timing.ns(timing.recovery_s)
        self._incumbent, self._ratified_here = incumbent, ratified
        self._since_ns = now_ns
        self._reports: dict[PeerId, Report] = {}
        self._named: dict[PeerId, Report] = {}
        """The reports of peers that the run's master has named."""
        self._by_connection: dict[int, Report] = {}
        self._said_goodbye: set[tuple[bytes, PeerId, bytes]] = set()
        """(run, peer, its key); members of several runs may return to a standby."""
        self._rosters: dict[tuple[Roster, int], SharedRoster] = {}
        """The rosters in all reports; equal rosters are stored once."""
        self._nbytes = 0
        """About how much memory all reports take."""
        self._newest_known: Roster | None = None
        """The newest roster in the complete reports that count."""
        self._has_newest = True
        """Whether ``_newest_known`` is up to date."""
        self._came = 0  # complete reports of peers that were members
        self._is_whole: bool | None = None
        """Whether all members are back; None if that is unknown."""
        self._looks = 0
        """How often a search has found members missing since the last tick."""

    def learn(self, run: bytes, vouched: Vouched, now_ns: int) -> list[int]:
        """Record the run and members that a master names; the run stays while there are reports.

        Returns:
            Connections to close: of processes that returned under a member's id without its key.
        """
        self._given_run = run
        if not self._reports:
            self.run = run
        if self._is_stale or vouched is not self.vouched:
            self._count_again()
        self._heard_ns, self._is_stale = now_ns, False
        if vouched is self.vouched:
            return []
        self.vouched, named = vouched, vouched.keys or {}
        false = [r for r in self._reports.values() if named.get(r.peer, r.key) != r.key]
        connections = [report.connection for report in false if report.connection is not None]
        for report in false:
            self._drop(report)
        self._named = {r.peer: r for r in self._reports.values() if r.peer in named}
        return connections

    def believes(self, report: Report) -> bool:
        """Whether the rosters, outcomes and answers in a report count.

        A report counts if the run's master has named the peer, or has named no members at all. It
        also counts if the list of named members is too old, and none of them has returned.
        """
        return report.peer in self._named or self._all_count

    @property
    def _all_count(self) -> bool:
        if self.vouched.keys is None:
            return True
        return self._is_stale and not any(one.complete for one in self._named.values())

    def _believed(self) -> list[Report]:
        """Return the complete reports that count."""
        reports = self._reports if self._all_count else self._named
        return [report for report in reports.values() if report.complete]

    def _count_again(self) -> None:
        self._is_whole, self._has_newest = None, False

    @property
    def _newest(self) -> Roster | None:
        """The newest roster in the complete reports that count."""
        if not self._has_newest:
            self._newest_known, self._has_newest = None, True
            for report in self._believed():
                self._newest_known = _newer(self._newest_known, report.newest)
        return self._newest_known

    def begins(self, connection: int, caller: Caller, header: msg.Return, now_ns: int) -> list[int]:
        """Begin the report of a returning peer.

        Returns:
            Connections to close: an older one of this peer, or that of a report dropped for it.

        Raises:
            RemoteProtocolError: another process returned under this id, or too many peers did.
        """
        if connection in self._by_connection:
            raise RemoteProtocolError(reason="the peer sent Return twice on one connection")
        known = self._reports.get(header.peer)
        if known is not None and known.key != caller.key and not self._is_named(known, caller.key):
            raise RemoteProtocolError(reason=f"another process has returned as peer {header.peer}")
        named = self.vouched.keys or {}
        if named.get(header.peer, caller.key) != caller.key:
            raise RemoteProtocolError(reason=f"the key is not that of peer {header.peer}")
        goes = known
        if known is None and len(self._reports) >= PEERS_MAX:
            others = (r for peer, r in self._reports.items() if peer not in self._named)
            goes = next(others, None) if header.peer in named else None
            if goes is None:
                raise RemoteProtocolError(reason=f"{PEERS_MAX} peers have returned already")
        is_first = not self._reports or (header.peer in named and not self._named)
        if is_first:  # the other members have ``recovery_s`` from now on
            self._since_ns = now_ns
        if goes is not None:
            self._drop(goes)
        if self.run is None:
            self.run = header.run
        nbytes = REQUEST_BYTES_MIN + footprint(header)
        report = Report(header, caller, connection, nbytes=nbytes, own_nbytes=nbytes)
        self._reports[header.peer] = self._by_connection[connection] = report
        if header.peer in named:
            self._named[header.peer] = report
        self._nbytes += nbytes
        return [goes.connection] if goes is not None and goes.connection is not None else []

    def _is_named(self, impostor: Report, key: bytes) -> bool:
        """Whether a member says that ``key`` is that of the peer whose id another process gave."""
        rosters = (report.newest for report in self._believed() if report is not impostor)
        return any(
            (member.peer, member.key) == (impostor.peer, key)
            for roster in rosters
            if roster is not None
            for member in roster.members
        )

    def take(self, report: Report, message: msg.Message) -> list[int]:
        """Add the next message of a report; return connections whose reports had to be dropped.

        Raises:
            RemoteProtocolError: the message does not belong in a report, or makes it too large.
        """
        match message:
            case msg.KnownRoster(roster, teller) if not report.complete:
                self._take_roster(report, roster, teller)
            case _:
                before = report.own_nbytes
                report.take(message)
                self._nbytes += report.own_nbytes - before
                if isinstance(message, msg.Reported):
                    self._is_whole = None
                    self._came += bool(report.rosters)
                    if self._is_stale:
                        self._count_again()
                    elif self.believes(report):
                        self._newest_known = _newer(self._newest, report.newest)
        if report.nbytes > REPORT_BYTES_MAX:
            raise RemoteProtocolError(reason="the peer's report takes too much memory")
        return self._make_room()

    def _take_roster(self, report: Report, roster: Roster, teller: bytes) -> None:
        if len(report.rosters) >= ROSTERS_KEPT_MAX or roster.version in report.rosters:
            raise RemoteProtocolError(reason="the peer reported too many rosters, or one twice")
        check_roster(roster, report.peer, report.key, report.header.registration.group)
        key = (roster, roster.updates)
        shared = self._rosters.get(key)
        if shared is None:
            nbytes = max(footprint(roster), ROSTER_BYTES_MIN)
            shared = self._rosters[key] = SharedRoster(roster, nbytes)
            self._nbytes += nbytes
        shared.holders += 1
        report.shares.append(shared)
        report.nbytes += shared.nbytes
        report.rosters[roster.version] = shared.roster
        report.tellers[roster.version] = teller

    def _make_room(self) -> list[int]:
        """Drop the largest reports until the rest has room; return the connections to close."""
        connections: list[int] = []
        while self._nbytes > REPORTS_BYTES_MAX:
            largest = max(
                self._reports.values(),
                key=lambda report: (report.peer not in self._named, report.freed_nbytes),
            )
            if largest.connection is not None:
                connections.append(largest.connection)
            self._drop(largest)
        return connections

    def _drop(self, report: Report) -> None:
        """Forget a report, and rosters that no other report contains."""
        del self._reports[report.peer]
        self._named.pop(report.peer, None)
        if report.connection is not None:
            del self._by_connection[report.connection]
        self._nbytes -= report.own_nbytes
        for shared in report.shares:
            shared.holders -= 1
            if not shared.holders:
                del self._rosters[shared.roster, shared.roster.updates]
                self._nbytes -= shared.nbytes
        if report.complete:
            self._came -= bool(report.rosters)
            self._count_again()

    def report_on(self, connection: int) -> Report | None:
        """Return the report that arrives on a connection; None if there is none."""
        return self._by_connection.get(connection)

    def closed(self, connection: int) -> None:
        """Record a closed connection; drop its report if the report is incomplete."""
        report = self._by_connection.get(connection)
        if report is None:
            return
        if report.complete:
            del self._by_connection[connection]
            report.connection = None
            self._is_whole = None
        else:
            self._drop(report)
            if not self._reports:  # members of another run may return now
                self.run = self._given_run

    def leave(self, connection: int) -> None:
        """Drop the report of a peer that says goodbye."""
        self._drop(report := self._by_connection[connection])
        if len(self._said_goodbye) < PEERS_MAX:
            self._said_goodbye.add((report.header.run, report.peer, report.key))
        self._is_whole = None

    @property
    def _left(self) -> set[PeerId]:
        named = self.vouched.keys or {}
        return {
            peer
            for run, peer, key in self._said_goodbye
            if run == self.run and named.get(peer, key) == key
        }

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift all deadlines by ``gap_ns``, because this process slept that long."""
        self._since_ns = min(self._since_ns + gap_ns, now_ns)
        self._heard_ns = min(self._heard_ns + gap_ns, now_ns)

    def look_again(self, now_ns: int) -> None:
        """Allow new searches for missing members, at a tick; note if named members are too old."""
        self._looks = 0
        if not self._is_stale and now_ns - self._heard_ns >= self._stale_ns:
            self._is_stale = True
            self._count_again()

    def is_over(self, now_ns: int) -> bool:
        """Whether all members are back, or ``recovery_s`` has passed."""
        return self.is_late(now_ns) or self._is_complete()

    def is_late(self, now_ns: int) -> bool:
        """Whether ``recovery_s`` has passed, since the start or since the first return."""
        return now_ns - self._since_ns >= self._patience_ns

    def begin_anew(self, now_ns: int) -> list[int]:
        """Forget all reports, and wait again; return the connections to close."""
        connections = list(self._by_connection)
        for memory in (self._reports, self._named, self._by_connection, self._rosters):
            memory.clear()
        self._nbytes = self._came = 0
        self._count_again()
        self.run = self._given_run
        self._since_ns = now_ns
        return connections

    @property
    def has_reports(self) -> bool:
        """Whether any peer has returned."""
        return bool(self._reports)

    def connections(self) -> list[int]:
        """Return the connections on which peers have returned."""
        return list(self._by_connection)

    def progress(self) -> str:
        """Return how many members are back, for people; the run must be known."""
        assert self.run is not None
        size = self.world_size or "?"
        return f"{self._came} of {size} members of run {self.run.hex()} have returned to it"

    def shortage(self) -> str:
        """Return why there is no majority, and what to do, for people."""
        came = len(self.result().returned)
        had = max((basis.size for basis in self.bases()), default=0)
        them = f"{came} of {had} members" if came else "no member"
        return (
            f"{them} came back; without a majority this master waits. If the rest is gone for "
            "good: stop every master of the run, move their state away, and start a new run"
        )

    def complete_reports(self) -> list[Report]:
        """Return the complete reports of connected peers, in order of id."""
        reports = (report for _, report in sorted(self._reports.items()))
        return [r for r in reports if r.complete and r.connection is not None]

    def bases(self) -> list[Basis]:
        """Return the memberships that have to consent to a successor, by the reports.

        These are the newest ratified roster, and all later ones. There are none if no returning
        peer knows that roster: members that know it may have continued without these peers.
        """
        known: dict[int, list[tuple[Roster, bytes]]] = {}
        for report in self._believed():
            for version, roster in report.rosters.items():
                known.setdefault(version, []).append((roster, report.tellers[version]))
        ratified = self.ratified
        if ratified and ratified not in known:
            return []
        return [
            Basis(
                frozenset(peer for roster, _ in told for peer in roster.ring),
                told[0][0].global_world_size,
                is_ours=any(teller == self._incumbent for _, teller in told),
            ).without(self._left)
            for version, told in sorted(known.items())
            if version >= ratified
        ]

    @property
    def ratified(self) -> int:
        """The version of the newest roster that a majority is known to have acknowledged."""
        told = (report.header.ratified for report in self._believed())
        return max(self._ratified_here, *told, 0)

    def has_promises(self) -> bool:
        """Whether enough members have promised to follow this master."""
        return self._is_enough([r.peer for r in self.complete_reports() if r.promised])

    def all_promised(self) -> bool:
        """Whether all returned members have promised; a disconnected member may still do so."""
        newest = [report.newest for report in self._believed() if report.newest is not None]
        rings = {(roster.group, roster.version): roster.ring for roster in newest}
        members = {peer for ring in rings.values() for peer in ring}
        return all(
            report.promised
            for report in self._reports.values()
            if report.peer in members or self.believes(report)
        )

    def _is_enough(self, peers: list[PeerId]) -> bool:
        if self.vouched.keys is not None and not self._is_stale:
            peers = [peer for peer in peers if peer in self._named]
        bases = self.bases()
        return bool(bases) and all(basis.consents(peers) for basis in bases)

    @property
    def world_size(self) -> int:
        """How many members the run had, by the newest roster."""
        return self._newest.global_world_size if self._newest is not None else 0

    @property
    def knows_another_master(self) -> bool:
        """Whether some of the run's members know the addresses of several masters."""
        return any(report.header.registration.masters > 1 for report in self._believed())

    def has_majority(self) -> bool:
        """Whether the connected members are enough of each membership in ``bases``.

        If the run's master has named members, only named members count, unless the list of names
        is too old: any other peer may be an impostor.
        """
        return self._is_enough([report.peer for report in self.complete_reports()])

    def result(self, *, promised: bool = False) -> Recovered:
        """Return the run that the complete reports describe.

        With ``promised``, members that do not follow this master count as missing.
        """
        return recovered_run(
            [report for _, report in sorted(self._reports.items()) if report.complete],
            sorted(self._believed(), key=lambda report: report.peer),
            self._left,
            version=self._newest.version if self._newest is not None else 0,
            ratified=self.ratified,
            promised=promised,
        )

    def _is_complete(self) -> bool:
        if not self.world_size or self._came + len(self._left) < self.world_size:
            return False
        if self._is_whole is None and self._looks < _LOOKS_MAX:
            self._is_whole = self._look()
            self._looks += not self._is_whole
        return bool(self._is_whole)

    def _look(self) -> bool:
        recovered = self.result()
        return len(recovered.members) == self.world_size and self._left.issuperset(
            recovered.missing
        )


def _newer(one: Roster | None, other: Roster | None) -> Roster | None:
    """Return the newer one of two rosters; the first if both have the same version."""
    if one is None or other is None:
        return one or other
    return other if other.version > one.version else one
