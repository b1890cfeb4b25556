"""``StateCheckers``: checks the synchronization of shared state.

* After a synchronization all members hold the bytes that one of them held when it made the call,
  with the same revision and lineage. Tensors that may differ come from a source, or do not change.
* A failure changes no tensor, revision or lineage. The library writes into a tensor neither before
  the outcome nor after the call.
* Elected revision and contents follow the election rule. The master expects the result of the last
  synchronization that any member knows of.
* Members do not elect without the only member that holds the group's state.
* A member receives exactly the bytes of its differing pieces.
* ``verify`` reports whether contents differ, and names a tensor that differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from pccl.machines.master.ballots import sync_ballot
from pccl.machines.peer.events import SyncResult
from pccl.protocol.errors import StateMismatch
from pccl.protocol.shared_state import (
    Differ,
    Elected,
    Expected,
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
    Unavailable,
    Verdict,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.requests import SharedStateSyncInfo
from pccl.state.election import elect
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Violation
from pccl.stress.sim.workloads.syncs import Contents, SimState, Syncs, free, shared

_RECEIVES = SharedStateSyncStrategy.RECEIVE_ONLY
_SENDS = SharedStateSyncStrategy.SEND_ONLY


@dataclass(frozen=True, slots=True)
class _Given:
    """The offer and contents of a member when it made the call."""

    offer: Offer
    contents: Contents


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attempts of one call."""

    contents: list[Contents]
    """Contents of the process at each attempt."""
    wanted: set[tuple[bytes, bytes | None]]
    """Elected digests: of tensors that must be equal, and of tensors that may differ."""


@dataclass(frozen=True, slots=True)
class Before:
    """Contents, revision and lineage of a process when it made a call."""

    contents: Contents
    revision: int
    lineage: Lineage | None

    @staticmethod
    def of(state: SimState) -> Before:
        """Copy contents, revision and lineage of ``state``."""
        return Before(state.contents(), state.revision, state.lineage)


@dataclass(frozen=True, slots=True)
class Election:
    """The input and the answer of one election on a master's machine."""

    offers: Sequence[tuple[PeerId, Offer]]
    expected: Expected
    commits: int
    verdict: Verdict


class StateCheckers:
    """Checks all uses of shared state by the processes of one run.

    Args:
        syncs: the shared state, and how members synchronize it.
        done: counts of the run.
        known: returns the committed operations of a run that a follower of a term's master knows.
        may_part: whether the run may have two masters for a while, of which one cannot commit.
    """

    def __init__(
        self,
        syncs: Syncs,
        done: Counter[str],
        known: Callable[[bytes, int], Iterable[OperationId]],
        *,
        may_part: bool,
    ) -> None:
        self._may_part = may_part
        self._syncs = syncs
        self._done = done
        self._known = known
        self._given: dict[InRun, dict[PeerId, _Given]] = {}
        self._calls: dict[str, _Attempts] = {}
        """Process -> attempts of its last call."""
        self._revisions: dict[str, int] = {}
        """Process -> revision that it offered last."""
        self._needed: dict[str, bool] = {}
        """Process -> whether it lacked contents in the last synchronization that began."""
        self._results: dict[InRun, tuple[int, Contents]] = {}
        """Committed synchronization -> revision and shared contents."""
        self._groups: dict[tuple[bytes, PeerId], int] = {}
        self._states: list[SimState] = []
        self._elections: list[Election] = []
        """Elections that ``judge`` has not checked yet."""

    # -- memory ----------------------------------------------------------------------------------

    def owns(self, state: SimState) -> None:
        """Watch the shared state of a process."""
        self._states.append(state)

    def look_at(self, state: SimState) -> None:
        """Check that only its own process has written into ``state``."""
        if not state.is_lent_in_place and not state.is_intact:
            raise Violation(f"{state.holder}: its shared state was changed outside its calls")

    def look_at_memory(self) -> None:
        """Check the shared state of every process that ever ran."""
        for state in self._states:
            self.look_at(state)

    # -- the election ----------------------------------------------------------------------------

    def calls(self, name: str) -> None:
        """Record that a process is about to make a call."""
        self._calls[name] = _Attempts([], set())

    def offered(
        self, name: str, operation: InRun, peer: PeerId, offer: Offer, contents: Contents
    ) -> None:
        """Record the offer and contents with which a member takes part."""
        self._given.setdefault(operation, {})[peer] = _Given(offer, contents)
        self._groups[operation.run, peer] = operation.operation.group
        self._calls[name].contents.append(contents)
        self._revisions[name] = offer.revision

    def begun(self, name: str, peer: PeerId, elected: Elected) -> None:
        """Record the elected contents that a member received; each attempt has its own election."""
        extra = elected.extra if peer in elected.outdated and elected.extra_sources else None
        self._calls[name].wanted.add((elected.content, extra))
        needy = peer in elected.behind or peer in elected.outdated
        self._needed[name] = needy or self._revisions[name] != elected.revision

    @contextmanager
    def hear_elections(self) -> Generator[None]:
        """Record the elections of all masters while the block runs."""

        def elect_and_tell(
            offers: Sequence[tuple[PeerId, Offer]], expected: Expected, commits: int
        ) -> Verdict:
            verdict = elect(offers, expected, commits)
            self._elections.append(Election(offers, expected, commits, verdict))
            return verdict

        with patch.object(sync_ballot, "elect", elect_and_tell):
            yield

    def take_elections(self) -> list[Election]:
        """Return the elections since the last call of this method."""
        taken, self._elections = self._elections, []
        return taken

    def judge(self, run: bytes, term: int, election: Election) -> None:
        """Check an election that the master of a run held."""
        offers, expected, verdict = election.offers, election.expected, election.verdict
        if not self._may_part:
            self._check_expected(run, term, offers[0][0], expected)
        contents = {offer.content for _, offer in offers}
        if offers[0][1].purpose is SyncPurpose.VERIFY:
            if isinstance(verdict, Elected) is not (len(contents) == 1):
                raise Violation(f"for {len(contents)} different contents verify says {verdict}")
            return
        right = _winner([offer for _, offer in offers], expected, election.commits)
        if right is None or isinstance(verdict, Unavailable):
            if right is not None or not isinstance(verdict, Unavailable):
                raise Violation(f"{right} should win among {offers}, but the result is {verdict}")
            return
        revision, content = right
        if isinstance(verdict, Differ):
            sends = {offer.content for _, offer in offers if offer.strategy is _SENDS}
            surprised = any(o.unchanged and o.content != content for _, o in offers)
            if len(sends) < 2 and not surprised:
                raise Violation(f"{offers} have no conflict, but the result is {verdict}")
            return
        has = [peer for peer, offer in offers if offer.content == content]
        sources = {peer for peer, offer in offers if peer in has and offer.strategy != _RECEIVES}
        behind = {peer for peer, _ in offers if peer not in has}
        found = (verdict.revision, verdict.content, set(verdict.sources), set(verdict.behind))
        if found != (revision, content, sources, behind):
            raise Violation(f"revision {revision} should win among {offers}, not {verdict}")

    def _check_expected(self, run: bytes, term: int, member: PeerId, expected: Expected) -> None:
        """Check what the master expects; a restart may lose commits that no member knows."""
        group = self._groups[run, member]
        known = (o for o in self._known(run, term) if InRun(run, o) in self._results)
        newest = max((o for o in known if o.group == group), key=_place, default=None)
        lineage = expected.lineage
        if lineage is None:
            if newest is not None:
                raise Violation(f"the master does not know {newest}, but a member does")
            return
        if newest is not None and lineage.run == run and _place(lineage.operation) < _place(newest):
            raise Violation(f"the master expects the successor of {lineage}, not of {newest}")
        result = self._results.get(InRun(lineage.run, lineage.operation))
        if result is not None and expected.revision != result[0] + 1:
            raise Violation(f"the master expects {expected} after revision {result[0]}")

    # -- results of callers --------------------------------------------------------------------

    def missed(self, name: str, operation: InRun) -> None:
        """Check a synchronization without a process, which may lack its contents now.

        If the process held the group's state, a member that took part must have held it, too.
        """
        self._needed[name] = True
        state = next(one for one in reversed(self._states) if one.holder == name)
        mine, given = state.lineage, self._given.get(operation, {}).values()
        if self._may_part or mine is None or mine.run != operation.run:
            return
        lineages = [one.offer.lineage for one in given]
        theirs = [_place(known.operation) for known in lineages if known and known.run == mine.run]
        newest = max(theirs, default=(0, 0, 0))
        if newest < _place(mine.operation) < _place(operation.operation):
            raise Violation(f"{operation} replaced {mine.operation}, which only {name} had")

    def out_of_step(self, name: str) -> None:
        """Check that a process that must resynchronize had contents to receive."""
        if not self._needed.get(name, True):
            raise Violation(f"{name} must resynchronize, but had nothing to receive")

    def synchronized(
        self, who: str, run: bytes, peer: PeerId, info: SharedStateSyncInfo, state: SimState
    ) -> None:
        """Check a synchronization that returned to the process with this state."""
        tensors = self._syncs.tensors
        outcome = outcome_of(info)
        operation, elected = InRun(run, outcome.operation), outcome.elected
        given, now = self._given[operation], state.returned()
        mine = given.get(peer)
        if (state.revision, state.lineage) != (elected.revision, Lineage(*operation)):
            raise Violation(
                f"{who}: after {operation} it has revision {state.revision} of {state.lineage}, "
                f"but revision {elected.revision} was elected"
            )
        common = shared(now, tensors)
        known = self._results.setdefault(operation, (elected.revision, common))
        if known != (elected.revision, common):
            raise Violation(f"{who}: {operation} gave other contents than on another member")
        sources = [
            one.contents
            for one in given.values()
            if one.offer.content == elected.content and one.offer.strategy is not _RECEIVES
        ]
        if common not in [shared(contents, tensors) for contents in sources]:
            raise Violation(f"{who}: {operation} gave contents that no source held")
        if mine is None:  # the members went on without it; it had these contents, or fetched them
            if peer in outcome.members:
                raise Violation(f"{who}: {operation} returned without its offer")
            self._done["late sync"] += 1
            self._done["late sync fetched"] += info.rx_bytes > 0
            return
        keeps = mine.offer.strategy is _SENDS or mine.offer.unchanged
        if keeps and common != shared(mine.contents, tensors):
            raise Violation(f"{who}: {operation} changed contents that it should keep")
        extras = [free(mine.contents, tensors)]
        if peer in elected.outdated:
            heirs = (given[heir].contents for heir in elected.extra_sources if heir in given)
            theirs = [free(contents, tensors) for contents in (*sources, *heirs)]
            extras = theirs + ([] if elected.extra_sources else extras)  # no source of them is left
        if free(now, tensors) not in extras:
            raise Violation(f"{who}: {operation} gave wrong contents of tensors that may differ")
        if peer in outcome.members:  # otherwise it may have received more before it was left out
            self._check_bytes(who, info, state, now)
        self._count(info)

    def unwritten(self, who: str, before: Contents, state: SimState) -> None:
        """Check that joining the run left the tensors unchanged."""
        if state.contents() != before:
            raise Violation(f"{who}: the library wrote into its tensors before its admission")

    def _check_bytes(
        self, who: str, info: SharedStateSyncInfo, state: SimState, now: Contents
    ) -> None:
        """Check that all attempts of a call together received each differing piece once."""
        attempts = self._calls[state.holder]
        if len(attempts.wanted) > 1:
            return
        if not attempts.contents:  # the previous call, which it left, was committed
            self._done["sync returned when called again"] += 1
            attempts.contents.append(now)
        size = self._syncs.piece_bytes
        differing = sum(
            len(mine[at : at + size])
            for mine, ours in zip(attempts.contents[0], now, strict=True)
            for at in range(0, len(mine), size)
            if mine[at : at + size] != ours[at : at + size]
        )
        if state.has_prefetched:
            self._done["sync after a prefetch"] += 1
            self._done["prefetched"] += info.rx_bytes < differing
            if info.rx_bytes <= differing:
                return
        if info.attempts > 1 and info.rx_bytes < differing:
            # A piece whose sender was lost meanwhile is not counted. If the peer read it into the
            # tensor itself, the next attempt finds it there.
            self._done["found in place"] += 1
            return
        if info.rx_bytes != differing:
            raise Violation(
                f"{who}: {differing} bytes differed in {outcome_of(info).operation}, but it got "
                f"{info.rx_bytes}"
            )

    def _count(self, info: SharedStateSyncInfo) -> None:
        done = self._done
        done["sync"] += 1
        done["sync fetched"] += info.rx_bytes > 0
        done["sync in several attempts"] += info.attempts > 1
        done["wrong piece"] += info.wrong_pieces

    def survived(self, info: SharedStateSyncInfo, *, lost: bool, restarted: bool) -> None:
        """Count a sync that fetched data despite a lost member, or whose master was restarted."""
        self._done["sync repaired"] += lost and info.rx_bytes > 0
        self._done["sync under a restarted master"] += restarted

    def unavailable(self) -> None:
        """Count a call that failed because no member has or sends the needed contents."""
        self._done["StateUnavailable"] += 1

    def waits_for_next(self) -> None:
        """Count a member that was late, and that waits for the next synchronization."""
        self._done["late sync again"] += 1

    def unchanged(
        self, who: str, state: SimState, before: Before, why: BaseException | None
    ) -> None:
        """Check that a failed call or a verify changed nothing but tensors lent for writing."""
        is_lent, state.is_lent_in_place = state.is_lent_in_place, False
        now = Before.of(state)
        if is_lent:
            before = Before(now.contents, before.revision, before.lineage)
        if now != before:
            raise Violation(f"{who}: a failed call or verify changed its shared state: {why!r}")
        state.returned()

    def verified(self, who: str, run: bytes, info: SharedStateSyncInfo) -> None:
        """Check a comparison that found no difference."""
        self._done["verified"] += 1
        outcome = outcome_of(info)
        operation = InRun(run, outcome.operation)
        tensors = self._syncs.tensors
        # The library need not compare a member that was lost before the outcome.
        contents = {
            shared(one.contents, tensors)
            for one in self._given[operation].values()
            if one.offer.content == outcome.elected.content
        }
        lost = len(outcome.elected.sources) < len(self._given[operation])
        everybody = {shared(one.contents, tensors) for one in self._given[operation].values()}
        if len(contents) != 1 or (len(everybody) > 1 and not lost):
            raise Violation(f"{who}: {operation} found no difference, but contents differ")

    def mismatch(self, who: str, operation: InRun, error: StateMismatch, *, clean: bool) -> None:
        """Check the ``StateMismatch`` of a call that found different contents.

        Args:
            who: name of the process.
            operation: last operation that the process began.
            error: error that the call raised.
            clean: whether the contents cannot differ.
        """
        self._done["state mismatch"] += 1
        if clean:
            raise Violation(f"{who} got a mismatch, but contents cannot differ: {error}")
        if not error.tensor:
            self._done["state mismatch without a name"] += 1
            return
        index = int(error.tensor[1:])
        found = {one.contents[index] for one in self._given[operation].values()}
        if len(found) < 2 and not self._done["liar"]:  # a liar may have sent wrong digests
            raise Violation(f"{who}: {error.tensor} does not differ in {operation}: {error}")


def outcome_of(info: SharedStateSyncInfo) -> SyncResult:
    """Return the outcome of a synchronization that succeeded."""
    assert info.outcome is not None
    return info.outcome


def _winner(offers: list[Offer], expected: Expected, commits: int) -> tuple[int, bytes] | None:
    """Return the revision and contents that must win the election; None: no offer may win."""
    standing = [offer for offer in offers if offer.strategy is not _RECEIVES]
    wanted = (expected.revision, expected.lineage, False)
    valid = [o for o in standing if (o.revision, o.lineage, o.stale) == wanted]
    valid = valid or _held_before(offers, standing, expected, commits)
    if not valid or not expected.revision:
        pool = [offer for offer in standing if not offer.stale]
        if (expected.revision or not pool) and offers[0].resume is ResumePolicy.NEVER:
            return None
        pool = pool or standing
        if expected.revision and offers[0].resume is ResumePolicy.ADVANCED:
            begun = [offer for offer in standing if offer.revision or expected.revision == 1]
            begun = [offer for offer in begun if offer.revision] or begun
            pool = [offer for offer in begun if not offer.stale] or begun
            pool = [o for o in pool if _is_in_reach(o, offers, expected, commits)] or pool
        top = max((offer.revision for offer in pool), default=None)
        valid = [offer for offer in pool if offer.revision == top]
    if not valid:
        return None
    votes = Counter(offer.content for offer in standing)
    most = max(votes[offer.content] for offer in valid)
    return valid[0].revision, next(o.content for o in valid if votes[o.content] == most)


def _held_before(
    offers: list[Offer], standing: list[Offer], expected: Expected, commits: int
) -> list[Offer]:
    """Return the equal offers of the last synchronization's members, if all lack a later commit."""
    theirs = [offer for offer in offers if offer.lineage == expected.lineage]
    held = [offer for offer in theirs if offer in standing]
    if not expected.revision or not held or not all(offer.stale for offer in theirs):
        return []
    if any((o.revision, o.content) != (held[0].revision, held[0].content) for o in held):
        return []
    advanced = held[0].resume is ResumePolicy.ADVANCED
    further = advanced and _is_in_reach(held[0], offers, expected, commits)
    lag = expected.revision - held[0].revision
    return held if lag in (0, 1) or (lag < 0 and further) else []


def _is_in_reach(offer: Offer, offers: list[Offer], expected: Expected, commits: int) -> bool:
    as_far = [o for o in offers if o.lineage == expected.lineage and o.revision >= offer.revision]
    return offer.revision <= expected.revision + commits or 2 * len(as_far) > len(offers)


def _place(operation: OperationId) -> tuple[int, int, int]:
    return (operation.term, operation.view, operation.n)
