"""Which connections a relay joins, refuses and ends; see also the tests of ``Relay``."""

from __future__ import annotations

from pccl.protocol.limits import RELAYED_PAIRS_MAX, RELAYED_WAIT_MAX
from pccl.protocol.types import NOBODY, PeerId
from pccl.topology.relay_pairs import EndConnection, FindStuck, JoinConnections, RelayPairs

ONE, TWO, THREE, FOUR = (PeerId(n) for n in range(1, 5))
PATIENCE_NS, STALL_NS = 500, 1000


def new_relay() -> RelayPairs:
    return RelayPairs(PATIENCE_NS, STALL_NS, lambda peer: False)


def state_of(relay: RelayPairs) -> tuple[int, int | None]:
    return relay.pairs, relay.due_ns


def joined(relay: RelayPairs) -> None:
    assert relay.came(1, ONE, TWO, 0) == []
    assert relay.came(2, TWO, ONE, 10) == [JoinConnections(2, 1)]


def test_the_second_of_two_is_joined_with_the_first() -> None:
    relay = new_relay()
    assert relay.due_ns is None
    joined(relay)
    assert state_of(relay) == (1, 10 + STALL_NS)
    assert relay.came(3, THREE, ONE, 20) == [], "that one did not name it"
    assert state_of(relay) == (1, 20 + PATIENCE_NS)


def test_a_connection_waits_only_so_long() -> None:
    relay = new_relay()
    relay.came(1, ONE, TWO, 0)
    relay.came(2, ONE, THREE, 10)
    assert relay.due(PATIENCE_NS - 1) == []
    assert relay.due(PATIENCE_NS) == [EndConnection(1)]
    assert relay.due_ns == 10 + PATIENCE_NS
    assert relay.ended(1) == (1,)
    assert relay.came(3, TWO, ONE, PATIENCE_NS) == [], "it waits in its turn"


def test_a_newer_connection_that_waits_replaces_an_older_one() -> None:
    relay = new_relay()
    relay.came(1, ONE, TWO, 0)
    assert relay.came(2, ONE, TWO, 400) == [EndConnection(1)]
    assert relay.due_ns == 400 + PATIENCE_NS
    assert relay.ended(1) == (1,)
    assert relay.came(3, TWO, ONE, 500) == [JoinConnections(3, 2)]


def test_a_newer_pair_replaces_an_older_one() -> None:
    relay = new_relay()
    joined(relay)
    assert relay.came(3, ONE, TWO, 20) == [], "one alone replaces nothing"
    assert relay.came(4, TWO, ONE, 30) == [EndConnection(2, at_once=True), JoinConnections(4, 3)]
    assert [relay.ended(number) for number in (2, 1)] == [(), (1, 2)]
    assert relay.pairs == 1


def test_a_pair_counts_until_both_have_ended() -> None:
    relay = new_relay()
    joined(relay)
    assert (relay.ended(1), relay.pairs) == ((), 1)
    assert relay.stuck([1]) == [EndConnection(1, at_once=True)], "the other takes none of the rest"
    assert (relay.ended(2), relay.pairs) == ((2, 1), 0)
    assert relay.ended(2) == (2,)


def test_pairs_are_looked_at_while_there_are_any() -> None:
    relay = new_relay()
    joined(relay)
    assert relay.due(10 + STALL_NS) == [FindStuck()]
    assert relay.due_ns == 10 + 2 * STALL_NS
    assert relay.stuck([7]) == []
    assert relay.stuck([1, 2]) == [EndConnection(2, at_once=True)], "both end"
    assert relay.due(10 + 2 * STALL_NS) == [FindStuck()]
    assert relay.due_ns is None


def test_of_a_peer_that_has_left_nothing_stays_and_nothing_comes() -> None:
    gone: list[PeerId] = []
    relay = RelayPairs(PATIENCE_NS, STALL_NS, lambda peer: peer in gone)
    joined(relay)
    relay.came(3, THREE, TWO, 20)
    relay.came(4, TWO, FOUR, 20)
    relay.came(5, THREE, FOUR, 20)
    gone.append(TWO)
    assert relay.left(TWO) == [EndConnection(2, at_once=True), EndConnection(3), EndConnection(4)]
    assert relay.pairs == 0
    assert relay.refusal(ONE, TWO) == relay.refusal(TWO, ONE) == "peer 2 has left the run"
    assert relay.came(6, TWO, ONE, 30) is None, "its handshake took longer"


def test_limits() -> None:
    relay = new_relay()
    assert relay.refusal(ONE, ONE) == "a relay connects two different peers"
    for n in range(RELAYED_WAIT_MAX):
        assert relay.came(n, ONE, PeerId(100 + n), 0) == []
    wait = "too many connections wait at this relay"
    assert (relay.refusal(ONE, TWO), relay.refusal(TWO, ONE)) == (wait, "")
    assert relay.came(99, ONE, TWO, 0) is None
    assert relay.came(99, PeerId(100), ONE, 0) == [JoinConnections(99, 0)]
    relay = new_relay()
    for n in range(RELAYED_PAIRS_MAX):
        relay.came(2 * n, PeerId(100 + n), PeerId(500 + n), 0)
        relay.came(2 * n + 1, PeerId(500 + n), PeerId(100 + n), 0)
    assert relay.pairs == RELAYED_PAIRS_MAX
    assert relay.refusal(ONE, TWO) == "this relay is full: it forwards for too many others"
    assert relay.refusal(PeerId(100), PeerId(500)) == "", "it replaces an older one"


def test_a_relay_that_closes_ends_all() -> None:
    relay = new_relay()
    joined(relay)
    relay.came(3, THREE, TWO, 20)
    assert relay.close() == [EndConnection(3), EndConnection(2), EndConnection(1)]
    assert (relay.pairs, relay.due_ns, relay.close()) == (0, None, [])


def test_a_peer_that_names_no_other_may_ask_for_its_address_until_it_leaves() -> None:
    relay = RelayPairs(PATIENCE_NS, STALL_NS, lambda peer: peer == TWO)
    assert relay.refusal(ONE, NOBODY) == ""
    assert relay.refusal(TWO, NOBODY) == "peer 2 has left the run"
