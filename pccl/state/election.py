"""Decides from all members' offers which contents of a shared state count.

1. **Layout.** All members must have the same tensors: names, dtypes, lengths and flags, in the
   same order. If more than half of the members agree, the other members fail. Otherwise all fail.
   If some members were in the group's last synchronization, only they vote, so newcomers cannot
   outvote them.
2. **Verify.** ``verify`` compares contents, whatever the revisions and strategies. If they differ,
   all members fail.
3. **Revision.** Contents are *valid* if they have the expected revision, come from the group's last
   synchronization (their lineage), and lack nothing that the group has committed since. All other
   contents are *outdated*: their holder receives the elected ones, and does not fail. A group that
   has not synchronized yet expects the highest revision on offer, of any lineage.
4. **Lost revision.** If no member offers valid contents, the call fails, with three exceptions:

   * All members whose contents come from the last synchronization lack a committed result. So
     no member has it, and the contents from before it count. These members must offer the same
     contents and the same revision. This is the expected one or that of the last synchronization;
     with ``resume="advanced"``, also a later one in reach.
   * ``resume="highest"``: the highest revision on offer counts, of any lineage. Contents that lack
     a committed result count only if there are no others.
   * ``resume="advanced"``: the same, but revisions in reach come first. Revision 0, a beginning,
     counts only if nothing else is offered and the group has synchronized nothing higher.

   With ``resume="advanced"`` a higher revision also replaces the expected one in rule 3. Its
   contents must come from the last synchronization, lack nothing committed and be *in reach*. Their
   holder completed a call that other members missed. A revision is in reach in two cases:
   it exceeds the expected one by at most the number of collectives that the master has seen the
   group commit since, or more than half of the members have reached it.
5. **Election.** RECEIVE_ONLY members offer nothing. Of the contents with a valid holder, those that
   most members offer win; outdated members vote too. In a tie, the valid holder that comes first in
   the ring wins.
6. **SEND_ONLY** contents are never overwritten. If they differ, and more than half of the SEND_ONLY
   members have the elected contents, the other SEND_ONLY members fail. Otherwise all members fail.
7. **Result.** Members with other contents receive the elected ones, from all members that offer
   them. Outdated members receive the revision. Unless they are SEND_ONLY, they also receive the
   first valid holder's version of the tensors that may differ.
8. **Unchanged.** If a member that expects no change would receive contents, all members fail.

A failed election changes no state. The same offers always have the same outcome, in any order of
arrival. Once a failing member is removed, the rest cannot fail for that reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pccl.protocol.operation import name_peers
from pccl.protocol.shared_state import (
    REVISION_MAX,
    Conflict,
    Differ,
    Elected,
    Expected,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
    Unavailable,
    Verdict,
)
from pccl.protocol.types import PeerId

_Members = Mapping[PeerId, Offer]
"""The offers of members, in ring order."""


@dataclass(frozen=True, slots=True)
class _Footing:
    """The revision that counts, and the members that have valid contents, offered or not."""

    revision: int
    valid: frozenset[PeerId]


def elect(offers: Sequence[tuple[PeerId, Offer]], expected: Expected, commits: int) -> Verdict:
    """Elect the contents that count, by the rules above.

    Args:
        offers: offers of all members, in ring order; at least one. All have the same purpose and
            resume policy, and ENFORCE_POPULAR is not mixed with other strategies.
        expected: revision that valid contents have, and lineage of the last synchronization.
        commits: number of collectives that the master has seen the group commit since then.

    Returns:
        The elected contents, and the members that lack them. Or the sets of members that conflict.
        Or the reason why no contents count.
    """
    members = dict(offers)
    _check(members, len(offers))
    conflict = _layouts_differ(members, expected)
    if conflict is not None:
        return conflict
    if offers[0][1].purpose is SyncPurpose.VERIFY:
        return _verify(members, expected)
    standing = {peer: offer for peer, offer in members.items() if _stands(offer)}
    footing = _footing(members, standing, expected, commits)
    if footing is None:
        return Unavailable(_why_nothing(members, standing, expected))
    content = _winner(standing, footing)
    conflict = _senders_differ(members, content) or _changed(members, content)
    return conflict or _elected(members, footing, content)


def has_valid(offers: Sequence[tuple[PeerId, Offer]], expected: Expected, commits: int) -> bool:
    """Whether a member offers valid contents, so that the election needs no further members.

    Otherwise a member that has not offered may hold the group's state, and rule 4 would replace it.
    In a group that has not synchronized yet, any contents may be elected.

    Args: see ``elect``.
    """
    members = dict(offers)
    standing = {peer: offer for peer, offer in members.items() if _stands(offer)}
    fresh = [offer for offer in standing.values() if not offer.stale]
    if not expected.revision:
        return bool(fresh)
    revision = _revision_met(fresh, expected, _reach(members, expected, commits))
    return any(_meets(offer, Expected(revision, expected.lineage)) for offer in fresh)


def _check(members: _Members, count: int) -> None:
    """Assert what the caller has checked."""
    assert 0 < count == len(members), "each member offers once"
    assert len({(offer.purpose, offer.resume) for offer in members.values()}) == 1
    popular = SharedStateSyncStrategy.ENFORCE_POPULAR
    assert len({offer.strategy is popular for offer in members.values()}) == 1


def _layouts_differ(members: _Members, expected: Expected) -> Differ | None:
    """Apply rule 1. The first of the sets has the layout of most voters."""
    voters = {peer: offer for peer, offer in members.items() if _belongs(offer, expected)}
    of_voters = _sets(voters or members, lambda offer: offer.layout)
    reference = members[of_voters[0][0]].layout
    sets = _sets(members, lambda offer: offer.layout, reference)
    if len(sets) == 1:
        return None
    wrong = _losers(voters or members, of_voters)
    is_settled = len(of_voters) == 1 or wrong
    losers = tuple(peer for peer in members if peer not in sets[0]) if is_settled else ()
    return Differ(sets, losers, Conflict.LAYOUTS)


def _belongs(offer: Offer, expected: Expected) -> bool:
    """Whether the member was in the group's last synchronization, and lacks nothing committed."""
    return bool(expected.revision) and offer.lineage == expected.lineage and not offer.stale


def _verify(members: _Members, expected: Expected) -> Verdict:
    """Apply rule 2."""
    sets = _sets(members, lambda offer: offer.content)
    if len(sets) > 1:
        return Differ(sets, (), Conflict.CONTENTS)
    any_of_them = next(iter(members.values()))
    return Elected(
        revision=expected.revision,
        layout=any_of_them.layout,
        content=any_of_them.content,
        sources=tuple(members),
        behind=(),
        outdated=(),
    )


def _footing(
    members: _Members, standing: _Members, expected: Expected, commits: int
) -> _Footing | None:
    """Apply rules 3 and 4. Return None if no contents count."""
    fresh = [offer for offer in standing.values() if not offer.stale]
    reach = _reach(members, expected, commits)
    if expected.revision:
        at = Expected(_revision_met(fresh, expected, reach), expected.lineage)
        valid = [peer for peer, offer in members.items() if _meets(offer, at)]
        if not standing.keys().isdisjoint(valid):
            return _Footing(at.revision, frozenset(valid))
        shared = _shared_before(members, standing, expected, reach)
        if shared is not None:
            return shared
    elif fresh:
        return _highest(members, fresh)
    if not standing:
        return None
    resume = next(iter(standing.values())).resume
    if resume is ResumePolicy.NEVER:
        return None
    stocks = (fresh, list(standing.values()))
    ranges = [(0, REVISION_MAX)]
    if resume is ResumePolicy.ADVANCED and expected.revision:
        ranges = [(1, reach), (1, REVISION_MAX)]
    for stock, (least, most) in product(stocks, ranges):
        pool = [offer for offer in stock if least <= offer.revision <= most]
        if pool:
            return _highest(members, pool)
    # All offers have revision 0.
    return _highest(members, standing.values()) if expected.revision == 1 else None


def _shared_before(
    members: _Members, standing: _Members, expected: Expected, reach: int
) -> _Footing | None:
    """Apply rule 4, first exception: all members of the last synchronization lack a result."""
    heirs = {peer: offer for peer, offer in members.items() if offer.lineage == expected.lineage}
    offered = [offer for peer, offer in heirs.items() if peer in standing]
    if not offered or not all(offer.stale for offer in heirs.values()):
        return None
    if len({(offer.revision, offer.content) for offer in offered}) > 1:
        return None
    revision, resume = offered[0].revision, offered[0].resume
    most = reach if resume is ResumePolicy.ADVANCED else expected.revision
    if not expected.revision - 1 <= revision <= most:
        return None
    return _Footing(
        revision, frozenset(p for p, offer in heirs.items() if offer.revision == revision)
    )


def _reach(members: _Members, expected: Expected, commits: int) -> int:
    """Return the highest revision in reach, as rule 4 defines it."""
    came = sorted(
        (offer.revision for offer in members.values() if offer.lineage == expected.lineage),
        reverse=True,
    )
    majority = len(members) // 2 + 1
    vouched = came[majority - 1] if len(came) >= majority else 0
    return max(expected.revision + commits, vouched)


def _revision_met(fresh: Collection[Offer], expected: Expected, reach: int) -> int:
    """Return the revision of valid contents in a group that has synchronized before."""
    further = (
        offer.revision
        for offer in fresh
        if offer.resume is ResumePolicy.ADVANCED
        and offer.lineage == expected.lineage
        and offer.revision <= reach
    )
    return max([expected.revision, *further])


def _meets(offer: Offer, expected: Expected) -> bool:
    """Whether these contents are valid in a group that has synchronized before."""
    has = (offer.revision, offer.lineage)
    return has == (expected.revision, expected.lineage) and not offer.stale


def _highest(members: _Members, pool: Collection[Offer]) -> _Footing:
    """Return the highest revision in ``pool``, of any lineage, and the members that have it."""
    revision = max(offer.revision for offer in pool)
    stale_too = all(offer.stale for offer in pool)
    valid = (
        peer
        for peer, offer in members.items()
        if offer.revision == revision and (stale_too or not offer.stale)
    )
    return _Footing(revision, frozenset(valid))


def _winner(standing: _Members, footing: _Footing) -> bytes:
    """Apply rule 5: return the digest of the elected contents."""
    votes = Counter(offer.content for offer in standing.values())
    # In a tie max returns the first candidate, whose valid holder comes first in the ring.
    candidates = [offer.content for peer, offer in standing.items() if peer in footing.valid]
    return max(candidates, key=lambda content: votes[content])


def _senders_differ(members: _Members, content: bytes) -> Differ | None:
    """Apply rule 6. Return None if the SEND_ONLY members agree with ``content``."""
    senders = {
        peer: offer
        for peer, offer in members.items()
        if offer.strategy is SharedStateSyncStrategy.SEND_ONLY
    }
    sets = _sets(senders, lambda offer: offer.content, content)
    return Differ(sets, _losers(senders, sets), Conflict.SENDERS) if len(sets) > 1 else None


def _changed(members: _Members, content: bytes) -> Differ | None:
    """Apply rule 8. Return None unless a member that expects no change would receive contents."""
    if not any(offer.unchanged and offer.content != content for offer in members.values()):
        return None
    return Differ(_sets(members, lambda offer: offer.content, content), (), Conflict.CHANGED)


def _elected(members: _Members, footing: _Footing, content: bytes) -> Elected:
    """Apply rule 7: name the sources, and the members that receive contents."""
    sources = [
        peer for peer, offer in members.items() if _stands(offer) and offer.content == content
    ]
    first_valid = next(peer for peer in sources if peer in footing.valid)
    extra = members[first_valid].extra
    return Elected(
        revision=footing.revision,
        layout=members[first_valid].layout,
        content=content,
        sources=tuple(sources),
        behind=tuple(peer for peer, offer in members.items() if offer.content != content),
        outdated=tuple(
            peer
            for peer, offer in members.items()
            if peer not in footing.valid and offer.strategy is not SharedStateSyncStrategy.SEND_ONLY
        ),
        extra=extra,
        extra_sources=tuple(peer for peer in sources if members[peer].extra == extra),
    )


def _stands(offer: Offer) -> bool:
    """Whether the member offers its contents for election."""
    return offer.strategy is not SharedStateSyncStrategy.RECEIVE_ONLY


def _sets(
    members: _Members, digest_of: Callable[[Offer], bytes], reference: bytes | None = None
) -> tuple[tuple[PeerId, ...], ...]:
    """Group members with equal digests. The first set has the reference, else the most members.

    The other sets follow in the order of their first members.
    """
    sets: dict[bytes, list[PeerId]] = {}
    for peer, offer in members.items():
        sets.setdefault(digest_of(offer), []).append(peer)
    if reference is None:
        reference = max(sets, key=lambda digest: len(sets[digest]))
    return tuple(tuple(sets[digest]) for digest in sorted(sets, key=lambda d: d != reference))


def _losers(members: _Members, sets: tuple[tuple[PeerId, ...], ...]) -> tuple[PeerId, ...]:
    """Return the members outside the first set, if more than half of all are in it."""
    others = tuple(peer for peer in members if peer not in sets[0])
    return others if len(sets[0]) > len(others) else ()


def _why_nothing(members: _Members, standing: _Members, expected: Expected) -> str:
    """Describe what is missing, what users can do, and what each member has."""
    if not standing:
        return (
            "no member offers contents, because all of them are RECEIVE_ONLY; make at least one of "
            "them SEND_ONLY"
        )
    lacks, advice = f"revision {expected.revision}", "load a checkpoint of that revision"
    if not expected.revision:
        lacks, advice = "all results that the group has committed", "load a checkpoint"
    if next(iter(standing.values())).resume is ResumePolicy.ADVANCED:
        advice = (
            "let a peer join that has this revision, or a checkpoint of any revision above 0; or "
            "start a new master, which expects no revision"
        )
    else:
        advice += ', or continue from the highest revision on offer (resume="highest")'
    before = Expected(expected.revision - 1, expected.lineage)
    if expected.revision and any(_meets(offer, before) for offer in standing.values()):
        advice = "call push_revision() (or set the revision) before each synchronization"
    there_is: dict[str, list[PeerId]] = {}
    for peer, offer in members.items():
        there_is.setdefault(_in_words(offer, expected), []).append(peer)
    claims = "; ".join(f"{name_peers(peers)}: {words}" for words, peers in there_is.items())
    return f"no member offers contents with {lacks}: {advice}. Members have: {claims}"


def _in_words(offer: Offer, expected: Expected) -> str:
    """Describe what a member has, and why it does not count."""
    words = f"revision {offer.revision}"
    if expected.revision and offer.lineage != expected.lineage:
        words += " of another lineage"
    if offer.stale:
        words += " without a result that was committed since"
    return words if _stands(offer) else f"{words} (RECEIVE_ONLY)"
