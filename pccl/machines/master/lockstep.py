"""Reports of long waits, and the diagnosis of members that wait for each other in vain.

A member is *blocked* when all its callers are inside calls that wait for other members. Blocked
members are *stuck* when each call that they wait in lacks a call of a stuck member. The master
finds the largest such set: it starts with all blocked members, and removes each member that may
still be released (deadlock detection in the OR model; Knapp, "Deadlock detection in distributed
databases", ACM Computing Surveys 1987, section 3).

A member may have been released between its report and the verdict. So once a set has been
stuck for ``lockstep_s``, the master asks each of its members again. A member answers after it has
handled all earlier messages of the master, and has sent all its own earlier messages. A member that
answers that it is free, perhaps because it has an open handle, is in no set for a while. The others
that have confirmed need not do so again.

Pure state: ``Waits`` carries out the findings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, OperationId, PeerId, RoundId

NO_CALL = "no call"

_FREE_HOLDS = 2
"""How many times ``lockstep_s`` a member counts as free after its answer, if it makes no call."""

_CALLS_NAMED_MAX = 16
"""The most calls of one member that a message names; the message counts the rest."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A round or an operation that is requested but not decided."""

    subject: RoundId | OperationId
    what: str
    """The call, as its callers know it."""
    requested: tuple[PeerId, ...]
    missing: tuple[PeerId, ...]
    """The members whose call it waits for; empty: it needs no further call."""


@dataclass(frozen=True, slots=True)
class LongWait:
    """Report to the requesters of a round or operation which members it waits for.

    Attributes:
        wait: the longest of all waits with the same requesters and the same missing members.
        waited_s: how long this wait has lasted.
        calls: for each missing member the calls that it is in, in words.
        others: the other waits with the same members, in the order of their requests.
    """

    wait: Wait
    waited_s: int
    calls: tuple[str, ...]
    others: tuple[Wait, ...] = ()


@dataclass(frozen=True, slots=True)
class AskBlocked:
    """Ask these members whether they are still blocked."""

    query: int
    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """End rounds or operations that cannot complete, with an error that says why."""

    subjects: tuple[RoundId | OperationId, ...]
    reason: str


Finding = LongWait | AskBlocked | Stuck


@dataclass(slots=True)
class _Case:
    """A set of members that seem to be stuck."""

    stuck: tuple[PeerId, ...]
    waits: tuple[Wait, ...]
    asked_ns: int
    """When its members were last asked; before that, when the case was first seen."""
    query: int | None = None
    confirmed: set[PeerId] = field(default_factory=set[PeerId])


class LockstepWatch:
    """Examines all waits at each tick.

    Args:
        timing: a wait is reported after ``waiting_report_s``, then after pauses that double;
            stuck members are asked after ``lockstep_s``.
    """

    def __init__(self, timing: Timing) -> None:
        self._hold_ns = timing.ns(timing.lockstep_s)
        self._report_ns = timing.ns(timing.waiting_report_s)
        self._since_ns: dict[RoundId | OperationId, int] = {}
        """When each wait for calls was first seen."""
        self._next_report_ns: dict[_Alike, int] = {}
        self._case: _Case | None = None
        self._free: dict[PeerId, tuple[int, list[RoundId | OperationId]]] = {}
        """Member that has answered that it is free -> until when it counts as free; its waits."""
        self._last_query = 0

    def look(self, waits: Sequence[Wait], blocked: Iterable[PeerId], now_ns: int) -> list[Finding]:
        """Return what the master has to do about all present ``waits``."""
        alike = _alike(waits)
        findings: list[Finding] = list(self._reports(waits, alike, now_ns))
        self._free = {
            peer: (until_ns, subjects)
            for peer, (until_ns, subjects) in self._free.items()
            if now_ns < until_ns and subjects == _waits_of(peer, waits)
        }
        blocked = [peer for peer in blocked if peer not in self._free]
        stuck = stuck_members(blocked, [same[0] for same in alike.values()])
        involved = tuple(w for w in waits if any(peer in stuck for peer in w.requested))
        case = self._case
        if not stuck:
            self._case = None
        elif case is None or (case.stuck, case.waits) != (stuck, involved):
            self._case = _Case(stuck, involved, now_ns)
            if case is not None and {*stuck} <= {*case.stuck} and {*involved} <= {*case.waits}:
                self._case = replace(case, stuck=stuck, waits=involved)  # the rest is free
        elif case.confirmed.issuperset(stuck):
            self._case = None
            findings.append(_verdict(case))
        elif now_ns - case.asked_ns >= self._hold_ns:
            findings.append(self._ask(case, now_ns))
        return findings

    def since_ns(self, subject: RoundId | OperationId) -> int | None:
        """Return when a round or operation was first seen to wait for calls; None: it was not."""
        return self._since_ns.get(subject)

    def answered(self, peer: PeerId, query: int, now_ns: int, *, blocked: bool) -> None:
        """Record the answer of a member that was asked: whether it is still blocked."""
        case = self._case
        if case is None or case.query != query or peer not in case.stuck:
            return
        if blocked:
            case.confirmed.add(peer)
        else:
            until_ns = now_ns + _FREE_HOLDS * self._hold_ns
            self._free[peer] = until_ns, _waits_of(peer, case.waits)

    def _ask(self, case: _Case, now_ns: int) -> AskBlocked:
        """Ask members that have not answered: a query or answer may be lost with a connection."""
        if case.query is None:
            self._last_query += 1
            case.query = self._last_query
        case.asked_ns = now_ns
        silent = tuple(peer for peer in case.stuck if peer not in case.confirmed)
        return AskBlocked(case.query, silent)

    def _reports(
        self, waits: Sequence[Wait], alike: Mapping[_Alike, Sequence[Wait]], now_ns: int
    ) -> Iterable[LongWait]:
        """Yield the due reports: one for all waits with the same members, which may be 10,000."""
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
            eldest = same[0]  # waits are in the order of their requests
            since_ns = self._since_ns[eldest.subject]
            self._next_report_ns[key] = next_ns = told.get(key, 0)
            if now_ns >= max(next_ns, since_ns + self._report_ns):
                self._next_report_ns[key] = now_ns + (now_ns - since_ns)
                calls = tuple(calls_of(peer) or NO_CALL for peer in eldest.missing)
                yield LongWait(eldest, (now_ns - since_ns) // NS_PER_S, calls, tuple(same[1:]))


_Alike = tuple[bool, tuple[PeerId, ...], tuple[PeerId, ...]]
"""Whether the wait is for a round, the members that requested it, and the missing members."""


def _alike(waits: Sequence[Wait]) -> dict[_Alike, list[Wait]]:
    """Return the waits, grouped by kind, requesters and missing members."""
    found: dict[_Alike, list[Wait]] = {}
    for wait in waits:
        key = (isinstance(wait.subject, RoundId), wait.requested, wait.missing)
        found.setdefault(key, []).append(wait)
    return found


def stuck_members(blocked: Iterable[PeerId], waits: Sequence[Wait]) -> tuple[PeerId, ...]:
    """Return the largest set of blocked members whose waits all lack a call from the set."""
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


def _waits_of(peer: PeerId, waits: Sequence[Wait]) -> list[RoundId | OperationId]:
    return [wait.subject for wait in waits if peer in wait.requested]


def calls_by_member(waits: Sequence[Wait]) -> dict[PeerId, str]:
    """Return the undecided calls of each member, in words; members without a call are omitted."""
    calls: dict[PeerId, list[str]] = {}
    for wait in waits:
        for peer in wait.requested:
            calls.setdefault(peer, []).append(wait.what)
    return {peer: _joined(named) for peer, named in calls.items()}


def _verdict(case: _Case) -> Stuck:
    """Return which calls to end: the collectives of stuck members, or else their rounds.

    A round spans the run, so its end disturbs members that have no part in the mistake.
    """
    operations = tuple(w.subject for w in case.waits if isinstance(w.subject, OperationId))
    rounds = tuple(w.subject for w in case.waits if isinstance(w.subject, RoundId))
    situation = ", ".join(f"peer {peer} in {_calls_of(peer, case.waits)}" for peer in case.stuck)
    reason = (
        f"the members wait in different calls: {situation}; "
        "make the same calls in the same order on all members"
    )
    return Stuck(operations or rounds, reason)


def _calls_of(peer: PeerId, waits: Sequence[Wait]) -> str:
    return _joined([wait.what for wait in waits if peer in wait.requested])


def _joined(calls: list[str]) -> str:
    more = len(calls) - _CALLS_NAMED_MAX
    named = calls[:_CALLS_NAMED_MAX] + ([f"{more} more"] if more > 0 else [])
    return " and ".join(named)
