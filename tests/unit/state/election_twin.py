"""A deliberately simple twin of the election: every rule as a sentence about everybody, no sharing.

It asks of each member and each digest, again and again, whether the rule holds; it is slow, and has
no word for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from pccl.protocol.shared_state import (
    Conflict,
    Differ,
    Elected,
    Expected,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import PeerId

Offers = Sequence[tuple[PeerId, Offer]]

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY


def elect(  # noqa: PLR0915 - the rules, one after the other
    offers: Offers, expected: Expected, commits: int
) -> Elected | Differ | None:
    """None: there is nothing to go on with."""
    ranks = range(len(offers))
    everyone = [offer for _, offer in offers]
    ids = [peer for peer, _ in offers]

    def named(chosen: list[int]) -> tuple[PeerId, ...]:
        return tuple(ids[rank] for rank in sorted(chosen))

    def differ(digests: dict[int, bytes], first: bytes, majority: bool, what: str) -> Differ:
        sets = {d: [r for r in digests if digests[r] == d] for d in digests.values()}
        right = sets.pop(first)
        rest = sorted(sets.values(), key=min)
        wrong = [r for r in digests if r not in right]
        enough = majority and len(right) / len(digests) > 0.5
        return Differ(
            (named(right), *(named(s) for s in rest)),
            named(wrong) if enough else (),
            Conflict(what),
        )

    def most(digests: dict[int, bytes]) -> bytes:
        """The one that no other one beats."""
        for order in permutations(set(digests.values())):
            keys = [
                (-list(digests.values()).count(d), min(r for r in digests if digests[r] == d))
                for d in order
            ]
            if keys == sorted(keys):
                return order[0]
        raise AssertionError("some order is sorted")

    layouts = {r: everyone[r].layout for r in ranks}
    if any(layouts[a] != layouts[b] for a in ranks for b in ranks):
        voters = {r: layouts[r] for r in ranks if votes_on_layout(everyone[r], expected)}
        voters = voters or layouts
        right = most(voters)
        enough = sum(voters[r] == right for r in voters) / len(voters) > 0.5
        all_in_words = differ(layouts, right, False, "the tensors' names, dtypes or lengths")
        wrong = [r for r in ranks if layouts[r] != right]
        return replace(all_in_words, losers=named(wrong) if enough else ())

    contents = {r: everyone[r].content for r in ranks}
    if everyone[0].purpose is SyncPurpose.VERIFY:
        if any(contents[a] != contents[b] for a in ranks for b in ranks):
            return differ(contents, most(contents), False, "contents that must be equal")
        return Elected(expected.revision, layouts[0], contents[0], tuple(ids), (), ())

    standing = [r for r in ranks if everyone[r].strategy is not RECEIVE_ONLY]
    fresh = [r for r in standing if not everyone[r].stale]

    def believed(pool: list[int]) -> list[int]:
        """Nobody else need say so up to what was committed; beyond, more than half must."""
        line = [o for o in everyone if o.lineage == expected.lineage]

        def is_vouched(revision: int) -> bool:
            return sum(o.revision >= revision for o in line) > len(everyone) / 2

        top = expected.revision + commits
        return [r for r in pool if everyone[r].revision <= top or is_vouched(everyone[r].revision)]

    def right_revision(rank: int, rule: str) -> bool:
        own = everyone[rank]
        if rule == "expected":
            matches = own.revision == expected.revision and own.lineage == expected.lineage
            return matches and not own.stale
        if rule == "further":  # than anybody else of the same line that is believed
            line = [r for r in believed(fresh) if everyone[r].lineage == expected.lineage]
            best = sorted(everyone[r].revision for r in line)[-1:]
            is_best = [own.revision] == best and own.lineage == expected.lineage
            return is_best and own.revision > expected.revision and not own.stale
        if rule == "before what all lack":
            line = [r for r in ranks if everyone[r].lineage == expected.lineage]
            offering = [r for r in line if r in standing]
            alike = len({(everyone[r].content, everyone[r].revision) for r in offering}) == 1
            if not alike or any(not everyone[r].stale for r in line) or rank not in line:
                return False
            base = everyone[offering[0]].revision
            near = [expected.revision - 1, expected.revision]
            if own.resume is ResumePolicy.ADVANCED and believed(offering):
                near.append(max(base, expected.revision))
            return base in near and own.revision == base
        pool = {"highest": fresh, "highest of the stale": standing}[rule.removesuffix(" believed")]
        if rule.endswith(" believed"):
            pool = believed(pool)
            if rank not in pool and own.revision not in [everyone[r].revision for r in pool]:
                return False
        reached = [everyone[other].revision for other in pool]
        return (
            own.revision in reached
            and all(own.revision >= r for r in reached)
            and (rule.startswith("highest of the stale") or not own.stale)
        )

    rules = ["highest"] if expected.revision == 0 else ["expected", "before what all lack"]
    if everyone[0].resume is ResumePolicy.ADVANCED and expected.revision > 0:
        rules = ["further", "expected", "before what all lack"]
        rules += ["highest believed", "highest"]
        rules += ["highest of the stale believed", "highest of the stale"]
    elif everyone[0].resume is not ResumePolicy.NEVER:
        rules += ["highest", "highest of the stale"]
    valid: list[int] = []
    for rule in rules:
        valid = [r for r in ranks if right_revision(r, rule)]
        is_lost = rule.startswith("highest") and expected.revision > 1
        if everyone[0].resume is ResumePolicy.ADVANCED and is_lost:
            valid = [r for r in valid if everyone[r].revision > 0]
        if any(r in standing for r in valid):
            break
    else:
        return None

    def strength(content: bytes) -> tuple[bool, int, int]:
        holders = [r for r in standing if contents[r] == content]
        good = [r for r in holders if r in valid]
        return bool(good), len(holders), -min(good, default=len(offers))

    candidates = sorted({contents[r] for r in standing}, key=strength)
    winner = candidates[-1]

    senders = {r: contents[r] for r in ranks if everyone[r].strategy is SEND_ONLY}
    if any(content != winner for content in senders.values()):
        return differ(senders, winner, True, "contents of SEND_ONLY members")
    if any(everyone[r].unchanged for r in ranks if contents[r] != winner):
        return differ(contents, winner, False, "contents that a member expected to be unchanged")

    sources = [r for r in standing if contents[r] == winner]
    speaker = everyone[min(set(sources) & set(valid))]
    return Elected(
        revision=speaker.revision,
        layout=speaker.layout,
        content=winner,
        sources=named(sources),
        behind=named([r for r in ranks if contents[r] != winner]),
        outdated=named([r for r in ranks if r not in valid + list(senders)]),
        extra=speaker.extra,
        extra_sources=named([r for r in sources if everyone[r].extra == speaker.extra]),
    )


def votes_on_layout(offer: Offer, expected: Expected) -> bool:
    """Whoever was there the last time."""
    return expected.revision > 0 and offer.lineage == expected.lineage and not offer.stale
