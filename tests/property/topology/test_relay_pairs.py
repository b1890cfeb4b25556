"""Whatever peers do at a relay: few connections and bytes, no strangers, and each pair ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pccl.protocol.types import PeerId
from pccl.topology import relay_pairs
from pccl.topology.relay_pairs import (
    EndConnection,
    FindStuck,
    JoinConnections,
    RelayedWay,
    RelayPairs,
    RelayStep,
)
from pccl.transports.relay import SPLICE_BYTES

PATIENCE_NS, STALL_NS = 500, 1000
PAIRS_MAX, WAIT_MAX = 2, 2
PEERS = [PeerId(n) for n in range(1, 7)]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_pairs, "RELAYED_PAIRS_MAX", PAIRS_MAX)
    monkeypatch.setattr(relay_pairs, "RELAYED_WAIT_MAX", WAIT_MAX)


class RelayModel(RuleBasedStateMachine):
    """Carries out the steps, and knows what each connection may expect."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: set[PeerId] = set()
        self.relay = RelayPairs(PATIENCE_NS, STALL_NS, self.gone.__contains__)
        self.now_ns = self.last_number = 0
        self.ways: dict[int, RelayedWay] = {}
        """All connections that the relay has not forgotten."""
        self.open: set[int] = set()
        self.others: dict[int, int] = {}
        """Connection -> the one that it was ever joined with."""
        self.since_ns: dict[int, int] = {}
        """Connections that wait, or are stuck, and since when."""

    def carry_out(self, steps: list[RelayStep]) -> None:
        for step in steps:
            match step:
                case JoinConnections(one, other):
                    assert {one, other} <= self.open
                    assert not {one, other} & self.others.keys(), "introduced once"
                    assert self.ways[one] == self.ways[other][::-1]
                    assert not self.gone & set(self.ways[one])
                    self.others |= {one: other, other: one}
                    self.since_ns.pop(other)
                case EndConnection(number):
                    self.end(number)
                case FindStuck():
                    late = [number for number in self.since_ns if number in self.others]
                    self.carry_out(self.relay.stuck(late))

    def end(self, number: int) -> None:
        """The end of one side ends the other, too."""
        for one in (number, self.others.get(number)):
            if one in self.open:
                self.close(one)

    def close(self, number: int) -> None:
        self.open.remove(number)
        for one in self.relay.ended(number):
            assert one not in self.open
            del self.ways[one]
            self.since_ns.pop(one, None)

    @rule(way=st.tuples(st.sampled_from(PEERS), st.sampled_from(PEERS)))
    def come(self, way: RelayedWay) -> None:
        self.arrive(*way)

    def arrive(self, source: PeerId, target: PeerId) -> None:
        self.last_number += 1
        number = self.last_number
        is_refused = bool(self.relay.refusal(source, target))
        steps = self.relay.came(number, source, target, self.now_ns)
        assert (steps is None) is is_refused
        if steps is not None:
            self.ways[number] = source, target
            self.open.add(number)
            if not any(isinstance(step, JoinConnections) for step in steps):
                self.since_ns[number] = self.now_ns
            self.carry_out(steps)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        self.arrive(*self.ways[number][::-1])

    @rule(passed_ns=st.sampled_from([1, 100, PATIENCE_NS, STALL_NS]))
    def wait(self, passed_ns: int) -> None:
        until_ns = self.now_ns + passed_ns
        while (due_ns := self.relay.due_ns) is not None and due_ns <= until_ns:
            self.now_ns = max(self.now_ns, due_ns)
            self.carry_out(self.relay.due(self.now_ns))
        self.now_ns = until_ns

    @precondition(lambda self: self.open)
    @rule(data=st.data(), takes_rest=st.booleans())
    def lose(self, data: st.DataObject, takes_rest: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.open)))
        if takes_rest or number not in self.others:
            self.end(number)
        else:
            self.close(number)
            if number in self.ways:
                self.since_ns[number] = self.now_ns

    @rule(peer=st.sampled_from(PEERS[:3]))
    def leave(self, peer: PeerId) -> None:
        self.gone.add(peer)
        self.carry_out(self.relay.left(peer))

    @invariant()
    def is_bounded(self) -> None:
        assert self.relay.pairs <= PAIRS_MAX
        joined = [number for number in self.ways if number in self.others]
        assert len(joined) * SPLICE_BYTES <= 2 * PAIRS_MAX * SPLICE_BYTES
        waiting = Counter(way[0] for number, way in self.ways.items() if number not in self.others)
        assert max(waiting.values(), default=0) <= WAIT_MAX
        assert waiting.total() <= 16 * WAIT_MAX

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert not any(self.gone & set(self.ways[number]) for number in self.open)
        for number, since_ns in self.since_ns.items():
            bound_ns = 2 * STALL_NS if number in self.others else PATIENCE_NS
            assert self.now_ns - since_ns <= bound_ns
        if not self.open:
            assert (self.relay.pairs, self.ways) == (0, {})

    def teardown(self) -> None:
        self.carry_out(self.relay.close())
        assert (self.relay.pairs, self.relay.due_ns, self.ways) == (0, None, {})


test_whatever_peers_do = RelayModel.TestCase
