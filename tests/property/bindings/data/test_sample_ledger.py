"""Peers come, go, are late and come back: each position is done once, and none is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.bindings.data.sample_ledger import RUNS_MAX, SampleLedger

PATIENCE = 2


@dataclass
class Twin:
    """The same with sets and lists of positions."""

    done: set[int] = field(default_factory=lambda: set())
    leases: dict[int, deque[int]] = field(default_factory=lambda: {})
    missed: dict[int, int] = field(default_factory=lambda: {})

    def close(self, counts: dict[int, int], patience: int) -> None:
        for peer in list(self.leases):
            self.missed[peer] = 0 if peer in counts else self.missed.get(peer, 0) + 1
            if self.missed[peer] > patience:
                del self.leases[peer]
        for peer, count in counts.items():
            lease = self.leases.get(peer, deque())
            for _ in range(min(count, len(lease))):
                position = lease.popleft()
                assert position not in self.done, "done twice"
                self.done.add(position)

    def grown(self, ledger: SampleLedger, peers: set[int]) -> None:
        """Check the leases of the ledger, and take what is new in them."""
        held: set[int] = set()
        for peer in peers | set(self.leases):
            lease = [p for start, end in ledger.lease(peer) for p in range(start, end)]
            before = list(self.leases.get(peer, ()))
            assert lease[: len(before)] == before, "a lease only grows, at its end"
            assert not held.intersection(lease), "leased twice"
            assert not self.done.intersection(lease), "leased again"
            held.update(lease)
            self.leases[peer] = deque(lease)


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[set[int], dict[int, int]]]:
    """Newcomers and outcomes; the ids of newcomers are new."""
    made: list[tuple[set[int], dict[int, int]]] = []
    alive: list[int] = []
    started = 0
    for _ in range(draw(st.integers(1, 40))):
        newcomers = set(range(started, started + draw(st.integers(0, 2 if alive else 3))))
        started += len(newcomers)
        alive += sorted(newcomers)
        members = [one for one in alive if draw(st.integers(0, 9))]
        if draw(st.booleans()):  # the others are gone for good
            alive = list(members)
        counts = {one: draw(st.sampled_from([0, 1, 3, 8, 30])) for one in members}
        made.append((newcomers, counts))
    return made


@settings(max_examples=100)
@given(
    made=rounds(),
    lease=st.integers(1, 20),
    total=st.one_of(st.none(), st.integers(1, 200)),
    patience=st.sampled_from([0, PATIENCE]),
)
def test_each_position_is_done_once(
    made: list[tuple[set[int], dict[int, int]]], lease: int, total: int | None, patience: int
) -> None:
    record = np.zeros(SampleLedger.SIZE, np.int64)
    ledger, twin = SampleLedger(record, lease, total), Twin()
    peers: set[int] = set()
    for newcomers, counts in made:
        peers |= newcomers
        ledger.admit(newcomers)
        twin.grown(ledger, peers)
        ledger.close(counts, patience)
        twin.close(counts, patience)
        twin.grown(ledger, peers)
        assert ledger.done == len(twin.done)
        assert twin.done.isdisjoint(p for s, e in ledger.rest for p in range(s, e))
        held = sum(len(one) for one in twin.leases.values())
        returned = sum(end - start for start, end in ledger.rest) - held
        assert ledger.unleased == (None if total is None else total - ledger.next + returned)
        assert total is None or ledger.next <= total
        assert SampleLedger(record.copy(), lease, total).rest == ledger.rest
    last = max(peers, default=0) + 1
    ledger.admit([last])  # it does all that is left, alone
    while total is not None and not ledger.is_finished:
        left = sum(end - start for start, end in ledger.lease(last))
        before = ledger.done
        ledger.close({last: left}, patience)
        assert ledger.done == before + left
    assert total is None or ledger.done == total


@settings(max_examples=100)
@given(st.lists(st.sampled_from([1, 2, 7]), min_size=50, max_size=400), st.integers(1, 8))
def test_runs_stay_few_while_peers_come_and_go(counts: list[int], peers: int) -> None:
    """In each round the eldest peer dies, and another one comes."""
    ledger = SampleLedger(np.zeros(SampleLedger.SIZE, np.int64), 20)
    for number, count in enumerate(counts):
        members = range(number, number + peers)
        ledger.admit(members)
        ledger.close(dict.fromkeys(members, count))
        assert len(ledger.rest) <= 4 * peers + 4
    assert RUNS_MAX > 4 * 400
