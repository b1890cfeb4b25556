"""Who waits for whom: reports of long waits, and the diagnosis of members that wait in a circle.

A member is *blocked* when all its callers are inside calls that wait for other members. Blocked
members are *stuck* when nothing that any of them waits for can come about, because each of these
things lacks a call by one of the stuck themselves: the largest such set, found by taking away
everybody who may yet be released (deadlock detection in the OR model; Knapp, "Deadlock detection in
distributed databases", ACM Computing Surveys 1987, section 3).

A member may have been released between its report and the verdict. So once a set has been stuck for
a while, each of its members is asked again: its answer is given after it has seen everything that
the master had sent it before, and after everything that it had sent itself.

Pure state: ``Waits`` carries out what is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, OperationId, PeerId, RoundId

_CALLS_NAMED_MAX = 16
"""Of one member, in words to people."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A round or an operation that was requested and isn't decided."""

    subject: RoundId | OperationId
    what: str
    """How its callers know it."""
    requested: tuple[PeerId, ...]
    missing: tuple[PeerId, ...]
    """Whose call it waits for; empty: it goes on without any call."""


@dataclass(frozen=True, slots=True)
class LongWait:
    """Tell the members that have requested it whom they wait for.

    Attributes:
        wait: the one that has waited longest, of all with the same requests and the same missing.
        waited_s: for how long.
        whom: the missing members, and what they are in.
        others: the others of those, in the order in which they were requested.
    """

    wait: Wait
    waited_s: int
    whom: str
    others: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class AskBlocked:
    """Ask these members whether they are still blocked."""

    query: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """These can't come about: end them with an error that says why."""

    subjects: tuple[RoundId | OperationId, ...]
    reason: str


Finding = LongWait | AskBlocked | Stuck


@dataclass(slots=True)
class _Case:
    """A set of members that seem to be stuck."""

    stuck: tuple[PeerId, ...]
    waits: tuple[Wait, ...]
    asked_ns: int
    """When its members were asked last; until they are, when the case was first seen."""
    query: int | None = None
    confirmed: set[PeerId] = field(default_factory=set[PeerId])


class LockstepWatch:
    """Looks at all waits from time to time.

    Args:
        timing: ``waiting_report_s`` until the first report of a wait (the pauses double),
            ``lockstep_s`` until stuck members are asked.
    """

    def __init__(self, timing: Timing) -> None:
        self._hold_ns = timing.ns(timing.lockstep_s)
        self._report_ns = timing.ns(timing.waiting_report_s)
        self._since_ns: dict[RoundId | OperationId, int] = {}
        """When each wait for calls was first seen."""
        self._next_report_ns: dict[_Alike, int] = {}
        self._case: _Case | None = None
        self._last_query = 0

    def look(self, waits: Sequence[Wait], blocked: Iterable[PeerId], now_ns: int) -> list[Finding]:
        """What is to be done about all present ``waits``."""
        alike = _alike(waits)
        findings: list[Finding] = list(self._reports(waits, alike, now_ns))
        stuck = stuck_members(blocked, [same[0] for same in alike.values()])
        involved = tuple(w for w in waits if any(peer in stuck for peer in w.requested))
        case = self._case
        if not stuck:
            self._case = None
        elif case is None or (case.stuck, case.waits) != (stuck, involved):
            self._case = _Case(stuck, involved, now_ns)
        elif case.confirmed.issuperset(stuck):
            self._case = None
            findings.append(_verdict(case))
        elif now_ns - case.asked_ns >= self._hold_ns:
            findings.append(self._ask(case, now_ns))
        return findings

    def since_ns(self, subject: RoundId | OperationId) -> int | None:
        """When this was first seen to wait for calls; None: it does not, or was not seen yet."""
        return self._since_ns.get(subject)

    def answered(self, peer: PeerId, query: int, *, blocked: bool) -> None:
        """A member that was asked is still blocked, or it has been released meanwhile."""
        case = self._case
        if case is None or case.query != query or peer not in case.stuck:
            return
        if blocked:
            case.confirmed.add(peer)
        else:  # what is stuck from now on has to last as long as anything else
            self._case = None

    def _ask(self, case: _Case, now_ns: int) -> AskBlocked:
        """Ask those who haven't answered: a query, or its answer, may be lost with a connection."""
        if case.query is None:
            self._last_query += 1
            case.query = self._last_query
        case.asked_ns = now_ns
        silent = tuple(peer for peer in case.stuck if peer not in case.confirmed)
        return AskBlocked(case.query, silent)

    def _reports(
        self, waits: Sequence[Wait], alike: Mapping[_Alike, Sequence[Wait]], now_ns: int
    ) -> Iterable[LongWait]:
        """One report of all waits that are alike: of 10,000 open tags nobody reads 10,000 lines."""
        before = self._since_ns
        self._since_ns = {
            wait.subject: before.get(wait.subject, now_ns) for wait in waits if wait.missing
        }
        told, self._next_report_ns = self._next_report_ns, {}

        @cache
        def calls_of(peer: PeerId) -> str:
            return _calls_of(peer, waits)

        for key, same in alike.items():
            if not same[0].missing:
                continue
            eldest = same[0]  # they are in the order in which they were requested
            since_ns = self._since_ns[eldest.subject]
            self._next_report_ns[key] = next_ns = told.get(key, 0)
            if now_ns >= max(next_ns, since_ns + self._report_ns):
                self._next_report_ns[key] = now_ns + (now_ns - since_ns)
                whom = ", ".join(
                    f"peer {p} (in {calls_of(p) or 'no call'})" for p in eldest.missing
                )
                yield LongWait(eldest, (now_ns - since_ns) // NS_PER_S, whom, tuple(same[1:]))


_Alike = tuple[bool, tuple[PeerId, ...], tuple[PeerId, ...]]
"""Whether it is a round, who has requested it, and who is missing."""


def _alike(waits: Sequence[Wait]) -> dict[_Alike, list[Wait]]:
    """The waits, those together of which nobody can be told apart by who does what."""
    found: dict[_Alike, list[Wait]] = {}
    for wait in waits:
        key = (isinstance(wait.subject, RoundId), wait.requested, wait.missing)
        found.setdefault(key, []).append(wait)
    return found


def stuck_members(blocked: Iterable[PeerId], waits: Sequence[Wait]) -> tuple[PeerId, ...]:
    """The largest set of blocked members of whose waits none can come about without the set."""
    waiting = {peer for wait in waits for peer in wait.requested}
    stuck = {peer: None for peer in blocked if peer in waiting}
    while True:
        released = {
            peer
            for wait in waits
            if not any(peer in stuck for peer in wait.missing)
            for peer in wait.requested
            if peer in stuck
        }
        if not released:
            return tuple(stuck)
        stuck = {peer: None for peer in stuck if peer not in released}


def calls_by_member(waits: Sequence[Wait]) -> dict[PeerId, str]:
    """What each member is in, in words; who is not named is in nothing that is undecided."""
    calls: dict[PeerId, list[str]] = {}
    for wait in waits:
        for peer in wait.requested:
            calls.setdefault(peer, []).append(wait.what)
    return {peer: _joined(named) for peer, named in calls.items()}


def _verdict(case: _Case) -> Stuck:
    """End what is narrowest: collectives, if any of the stuck waits in one, else the rounds.

    A round spans the run, so to end it disturbs members that have nothing to do with the mistake.
    """
    operations = tuple(w.subject for w in case.waits if isinstance(w.subject, OperationId))
    rounds = tuple(w.subject for w in case.waits if isinstance(w.subject, RoundId))
    situation = ", ".join(f"peer {peer} in {_calls_of(peer, case.waits)}" for peer in case.stuck)
    reason = (
        f"the members wait for different things: {situation}; "
        "make them make the same calls in the same order"
    )
    return Stuck(operations or rounds, reason)


def _calls_of(peer: PeerId, waits: Sequence[Wait]) -> str:
    return _joined([wait.what for wait in waits if peer in wait.requested])


def _joined(calls: list[str]) -> str:
    more = len(calls) - _CALLS_NAMED_MAX
    named = calls[:_CALLS_NAMED_MAX] + ([f"{more} more"] if more > 0 else [])
    return " and ".join(named)
