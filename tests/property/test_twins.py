"""Deliberately dumb twins of a ballot and of the membership: same facts, same conclusions."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master.ballots.ballot import Abort, Commit, Decision, Start
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol.data_type import DataType
from pccl.protocol.types import (
    AbortCause,
    AlgorithmTable,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
)

DESCRIPTORS = [
    Descriptor(DataType.FLOAT, ReduceOp.SUM, 8),
    Descriptor(DataType.FLOAT, ReduceOp.AVG, 8),
]
SEEDS = st.integers(0, (1 << 32) - 1)

# -- a ballot -----------------------------------------------------------------

Fact = tuple[str, PeerId, object]


@dataclass(frozen=True)
class Verdict:
    """What was decided; ``named``: whom the reason must name."""

    what: object
    named: tuple[object, ...] = ()


STARTED = Verdict("start")
HOLDINGS = "holdings"
"""A fact whose value is how many losses the member knows, and whether it can go on."""


def verdict_of(members: tuple[PeerId, ...], facts: list[Fact]) -> list[Verdict]:
    """Everything decided by these facts, from scratch: each prefix is judged by itself."""
    decided: list[Verdict] = []
    for length in range(1, len(facts) + 1):
        now = _judge_prefix(members, facts[:length], started=STARTED in decided)
        if now is not None:
            decided.append(now)
            if now != STARTED:
                break
    return decided


def _judge_prefix(
    members: tuple[PeerId, ...], facts: list[Fact], *, started: bool
) -> Verdict | None:
    lost = {peer for kind, peer, _ in facts if kind == "lose"}
    present = [peer for peer in members if peer not in lost]
    asked = dict[PeerId, object]()
    done = dict[PeerId, object]()
    everyone_asked = False
    for kind, peer, value in facts:
        if kind == "request":
            asked.setdefault(peer, value)
        if kind == "done" and everyone_asked:
            done.setdefault(peer, value)
        everyone_asked = set(asked) >= set(members)
    kind, peer, _ = facts[-1]
    if kind == "withdraw":
        return Verdict(AbortCause.WITHDRAWN, (peer,))
    if kind == "stuck":
        return Verdict(AbortCause.LOCKSTEP, (peer,))
    if not started and len(set(asked.values())) > 1:
        return Verdict(AbortCause.DESCRIPTOR_MISMATCH, tuple(sorted(asked)))
    if not started and set(asked) >= set(present) and kind == "request":
        return STARTED
    if started and present and all(peer in done for peer in present):
        results = [done[peer] for peer in present]
        most = max(results.count(result) for result in results)
        if most == len(results):
            return Verdict("commit")
        winner = next(result for result in results if results.count(result) == most)
        minority = [peer for peer in present if done[peer] != winner]
        return Verdict(AbortCause.DIGEST_MISMATCH, tuple(sorted(minority)))
    if kind == "lose" and not (started and present):
        return Verdict(AbortCause.MEMBER_LOST, (peer,))
    if facts[-1][2] == (len(lost), False) and started and peer not in done:
        losses = [at for at, fact in enumerate(facts) if fact[0] == "lose"]
        answered = (HOLDINGS, peer, (len(lost), True)) in facts[losses[-1] if losses else 0 :]
        if members[members.index(peer) - 1] in lost and not answered:
            return Verdict(AbortCause.MEMBER_LOST, (facts[losses[-1]][1],))
    return None


def as_verdict(decision: Start | Commit | Abort) -> tuple[object, str]:
    match decision:
        case Start():
            return "start", ""
        case Commit():
            return "commit", ""
        case Abort(cause, reason):
            return cause, reason


@settings(max_examples=300)
@given(SEEDS, st.integers(1, 5))
def test_a_ballot_decides_as_its_dumb_twin_does(seed: int, size: int) -> None:
    rng = random.Random(seed)
    members = tuple(PeerId(n) for n in sorted(rng.sample(range(1, 30), size)))
    ballot = CollectiveBallot(OperationId(1, 0, 1, 0, 0), members, members[0], 0)
    facts: list[Fact] = []
    decisions: list[Start | Commit | Abort] = []
    careless = rng.random() < 0.5
    while not ballot.phase.ended and len(facts) < 60:
        assert ballot.survivors == [m for m in members if ("lose", m, "gone") not in facts]
        peer = rng.choice(ballot.survivors)
        rare = ["lose", "withdraw", "stuck"][: 1 + 2 * careless]
        kind = rng.choice(["request"] * 6 + ["done"] * 6 + [HOLDINGS] * 3 + rare)
        decision: Decision | None
        match kind:
            case "request":
                descriptor = DESCRIPTORS[rng.random() < 0.04]
                facts.append((kind, peer, descriptor))
                decision = ballot.request(peer, descriptor, 1)
            case "done":
                digest = rng.choice([b"a"] * 8 + [b"b", b"c"])
                facts.append((kind, peer, digest))
                decision = ballot.done(peer, digest, 1)
            case "holdings":
                lost_count = len(members) - len(ballot.survivors) - (rng.random() < 0.2)
                facts.append((kind, peer, (lost_count, complete := rng.random() < 0.8)))
                decision = ballot.holdings(peer, lost_count, complete=complete)
            case "lose":
                if rng.random() < 0.7:
                    continue
                facts.append((kind, peer, "gone"))
                decision = ballot.lose([peer], "gone", 1)
            case "stuck":
                if STARTED in [Verdict(as_verdict(made)[0]) for made in decisions]:
                    continue  # only what waits for calls can be stuck
                facts.append((kind, peer, "who waits where"))
                decision = ballot.get_stuck(f"peer {peer} waits")
            case _:
                facts.append((kind, peer, "bye"))
                decision = ballot.withdraw(peer, "bye")
        if isinstance(decision, Start | Commit | Abort):
            decisions.append(decision)
        expected = verdict_of(members, facts)
        assert len(decisions) == len(expected)
        lost = {member for what, member, _ in facts if what == "lose"}
        asked = {member for what, member, _ in facts if what == "request"}
        assert ballot.requested_by() == [m for m in members if m in asked and m not in lost]
        for made, wanted in zip(decisions, expected, strict=True):
            what, reason = as_verdict(made)
            assert what == wanted.what
            assert all(str(peer) in reason for peer in wanted.named)


# -- membership ---------------------------------------------------------------


class DumbMembership:
    """Keeps every view that ever was, and works everything out anew."""

    def __init__(self) -> None:
        self.groups: dict[PeerId, int] = {}
        self.min_peers: dict[PeerId, int] = {}
        self.admitted: list[PeerId] = []
        self.views: list[tuple[int, int, list[PeerId]]] = []
        """(group, number, ring) of all views, oldest first."""
        self.closed: set[tuple[int, int]] = set()
        self.version = 0
        self.links: list[tuple[PeerId, PeerId, bool]] = []

    def ring(self, group: int) -> list[PeerId]:
        return [peer for peer in self.admitted if self.groups[peer] == group]

    def open_view(self, group: int) -> None:
        number = 1 + sum(1 for g, _, _ in self.views if g == group)
        self.views.append((group, number, self.ring(group)))

    def open_views(self, group: int) -> list[tuple[int, list[PeerId]]]:
        return [(n, r) for g, n, r in self.views if g == group and (g, n) not in self.closed]

    def admit(self, peers: list[PeerId], busy: set[tuple[int, int]]) -> None:
        _, _, self.admitted = self.lined_up(peers, set(peers))
        for group in {self.groups[peer] for peer in peers}:
            self.open_view(group)
            still_open = [number for number, _ in self.open_views(group)]
            for number in still_open[: max(len(still_open) - 2, 0)]:
                if (group, number) not in busy:
                    self.closed.add((group, number))
        self.version += 1

    def remove(self, peer: PeerId) -> list[int]:
        group = self.groups.pop(peer)
        self.links = [link for link in self.links if peer not in link[:2]]
        if peer not in self.admitted:
            return []
        self.admitted.remove(peer)
        closing = [number for number, ring in self.open_views(group) if peer in ring]
        self.closed |= {(group, number) for number in closing}
        if self.ring(group):
            self.open_view(group)
        self.version += 1
        return closing

    def linked(self, one: PeerId, other: PeerId) -> bool:
        last = {(reporter, target): up for reporter, target, up in self.links}
        return last.get((one, other), False) or last.get((other, one), False)

    def tried_in_vain(self, one: PeerId, other: PeerId) -> bool:
        last = {(reporter, target): up for reporter, target, up in self.links}
        return last.get((one, other)) is last.get((other, one)) is False

    def admissible(self, connected: set[PeerId]) -> list[PeerId]:
        """Leave out those for whom there are too few, until there are enough for all others."""
        left_out: set[PeerId] = set()
        while True:
            newcomers = sorted(set(self.groups) - set(self.admitted) - left_out)
            ready, _, _ = self.lined_up(newcomers, connected)
            size = len(self.admitted) + len(ready)
            dissatisfied = [peer for peer in ready if self.min_peers[peer] > size]
            if not dissatisfied:
                return ready
            left_out |= set(dissatisfied)

    def lined_up(
        self, newcomers: list[PeerId], connected: set[PeerId]
    ) -> tuple[list[PeerId], dict[PeerId, PeerId], list[PeerId]]:
        """Who can take a place, to whom the others lack a link, and the order of all then.

        A place is behind those before; of those that can't be linked there, between two others.
        """
        ready: list[PeerId] = []
        lacking: dict[PeerId, PeerId] = {}
        order = list(self.admitted)
        late: list[PeerId] = []
        for peer in newcomers:
            ring = [p for p in order if self.groups[p] == self.groups[peer]]
            strangers = [p for p in ring[-1:] + ring[:1] if not self.linked(peer, p)]
            if strangers:
                lacking[peer] = strangers[0]
                if any(self.tried_in_vain(peer, p) for p in strangers):
                    late.append(peer)
            elif peer in connected:
                ready.append(peer)
                order.append(peer)
        for peer in late:
            ring = [p for p in order if self.groups[p] == self.groups[peer]]
            places = [b for a, b in pairwise(ring) if self.linked(peer, a) and self.linked(peer, b)]
            if places:
                del lacking[peer]
                if peer in connected:
                    ready.append(peer)
                    order.insert(order.index(places[-1]), peer)
        return ready, lacking, order

    def unlinked(self, connected: set[PeerId]) -> dict[PeerId, PeerId]:
        newcomers = sorted(set(self.groups) - set(self.admitted))
        _, lacking, _ = self.lined_up(newcomers, connected)
        may_come = self.admissible(connected)
        return {peer: other for peer, other in lacking.items() if peer not in may_come}

    def roster(self, group: int) -> Roster:
        sizes = [len(self.ring(g)) for g in {self.groups[peer] for peer in self.admitted}]
        numbers = [number for g, number, _ in self.views if g == group]
        return Roster(
            version=self.version,
            group=group,
            view=max(numbers),
            members=tuple(Member(peer, "h", 9) for peer in self.ring(group)),
            open_views=tuple(number for number, _ in self.open_views(group)),
            global_world_size=len(self.admitted),
            peer_groups=len(sizes),
            largest_group_size=max(sizes),
        )


def without_algorithms(roster: Roster) -> Roster:
    """Which are the quickest is the cost model's business, and tested with it."""
    return replace(roster, algorithms=AlgorithmTable())


@settings(max_examples=150)
@given(SEEDS)
def test_membership_agrees_with_its_dumb_twin(seed: int) -> None:
    rng = random.Random(seed)
    real, dumb = Membership(term=1), DumbMembership()
    published: dict[int, list[Roster]] = {}
    for last in range(1, 50):
        match rng.choice(["register"] * 3 + ["link"] * 6 + ["admit"] * 3 + ["remove", "cut"]):
            case "register":
                peer, group = PeerId(last), rng.choice([0, 0, 1, 5])
                min_peers = rng.choice([1, 1, 1, 2, 3, 6])
                real.peers[peer] = RegisteredPeer(
                    peer, group, Member(peer, "h", 9), min_peers, connection=1
                )
                dumb.groups[peer] = group
                dumb.min_peers[peer] = min_peers
            case "link" if len(real.peers) > 1:
                for _ in range(3):
                    one, other = rng.sample([*real.peers], 2)
                    up = rng.random() < 0.85
                    real.report_link(one, other, None if up else "no", last)
                    dumb.links.append((one, other, up))
            case "admit":
                ready = real.admissible()
                busy = {(rng.choice([0, 1]), rng.randint(1, 6))}
                if ready:
                    real.admit(ready, {}, busy)
                    dumb.admit([p.id for p in ready], busy)
            case "remove" if real.peers:
                peer = rng.choice([*real.peers])
                group = real.peers[peer].group
                closed = {(group, view) for view in dumb.remove(peer)}
                assert real.remove([real.peers[peer]]) == closed
            case "cut" if real.peers:
                peer = rng.choice([*real.peers])
                real.peers[peer].connection = rng.choice([None, 1])
            case _:
                pass
        connected = {p.id for p in real.peers.values() if p.connection is not None}
        assert [p.id for p in real.admissible()] == dumb.admissible(connected)
        unlinked = {peer: other for peer, (other, _) in real.unlinked().items()}
        assert unlinked == dumb.unlinked(connected)
        assert [p.id for p in real.members()] == sorted(dumb.admitted)
        assert real.version == dumb.version
        alive = {dumb.groups[peer] for peer in dumb.admitted}
        published = {group: known for group, known in published.items() if group in alive}
        for group in alive:
            roster = dumb.roster(group)
            assert without_algorithms(real.roster(group)) == roster
            assert real.newest_view(group) == roster.view
            rosters = published.setdefault(group, [])
            if not rosters or rosters[-1].version < roster.version:
                rosters.append(roster)
            for known in (0, roster.version - 2, roster.version):
                newer = [r for r in rosters if r.version > known]
                after = real.rosters_after(group, known)
                assert [without_algorithms(one) for one in after] == newer
            for _, number, ring in [view for view in dumb.views if view[0] == group]:
                expected = None if (group, number) in dumb.closed else tuple(ring)
                assert real.ring(group, number) == expected
