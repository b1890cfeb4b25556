"""What is taken from whom: sizes by type and by what is known of the sender, and an allowance."""

from __future__ import annotations

import heapq
import struct
import typing
from typing import Any

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.checksum import seal
from pccl.protocol.codec import BYTES_MAX, StreamDecoder, encode
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.allowance import (
    CHARGED,
    PEERS_BYTES_MAX,
    REPORTS,
    Allowance,
    SharedAllowance,
    Trust,
    masters_bytes_max,
)
from pccl.protocol.limits import (
    ACKNOWLEDGED_BATCH_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    EVIDENCE_BYTES_MAX,
    FLOWS_MAX,
    LINKS_BATCH_MAX,
    NEWCOMER_BYTES_MAX,
    PADDING_BYTES_MAX,
    PROGRESS_BATCH_MAX,
    STORE_VALUE_BYTES_MAX,
)
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import OperationId, PeerId, RoundId, RoundKind

FROM_PEERS: tuple[type[Any], ...] = typing.get_args(msg.PeerMessage)
FROM_MASTERS: tuple[type[Any], ...] = typing.get_args(msg.MasterMessage)
LAST = (1 << 64) - 1
U32 = (1 << 32) - 1
OPERATION = OperationId(LAST, LAST, LAST, LAST, LAST)


def test_what_a_stranger_may_send() -> None:
    allowed = {kind.__name__: PEERS_BYTES_MAX[Trust.STRANGER].get(kind, 0) for kind in FROM_PEERS}
    assert {name for name, size in allowed.items() if size} == {
        *("Register", "Resume", "Return", "StatusRequest", "RunQuery", "Goodbye"),
        *("Damaged", "EvidenceRequest", "AddressQuery", "Subscribe"),
    }
    assert allowed.pop("AddressQuery") < PADDING_BYTES_MAX + 512
    assert max(allowed.values()) < 1024


def test_a_newcomer_sends_little() -> None:
    sizes = [PEERS_BYTES_MAX[Trust.NEWCOMER].get(kind, 0) for kind in FROM_PEERS]
    assert max(sizes) == NEWCOMER_BYTES_MAX == 4096
    links = (MeasuredLink(PeerId(LAST), LinkMeasure(LAST, LAST)),) * LINKS_BATCH_MAX
    assert len(encode(msg.LinksMeasured(links))) < NEWCOMER_BYTES_MAX


@pytest.mark.parametrize("kind", REPORTS)
def test_only_a_returning_peer_reports(kind: type[Any]) -> None:
    allowed = [PEERS_BYTES_MAX[trust].get(kind, 0) for trust in Trust]
    assert allowed == [0, 0, BYTES_MAX[kind], BYTES_MAX[kind], 0, 0]


def test_a_reader_says_only_that_it_lives() -> None:
    allowed = {kind.__name__ for kind in FROM_PEERS if PEERS_BYTES_MAX[Trust.READER].get(kind)}
    assert allowed == {"ReaderLives", "Damaged"}
    others = [trust for trust in Trust if PEERS_BYTES_MAX[trust].get(msg.ReaderLives)]
    assert others == [Trust.READER]


def test_what_a_run_that_goes_on_needs_not_is_charged() -> None:
    assert [trust in CHARGED for trust in Trust] == [True, True, True, False, False, True]


def test_nothing_that_a_member_sends_is_larger_than_a_heartbeat() -> None:
    """Apart from evidence and the store: strings of bytes, which take less time to decode."""
    sizes = {kind: PEERS_BYTES_MAX[Trust.MEMBER].get(kind, 0) for kind in FROM_PEERS}
    assert sizes.pop(msg.EvidenceReply) < 2 * EVIDENCE_BYTES_MAX
    assert sizes.pop(msg.StoreRequest) < 3 * STORE_VALUE_BYTES_MAX
    assert max(sizes.values()) == sizes[msg.Heartbeat] == 40 << 10


def test_the_fullest_heartbeat_of_a_peer_fits() -> None:
    flow = msg.Flow(PeerId(LAST), U32, U32)
    progress = msg.Progress(OPERATION, U32, U32, LAST)
    heartbeat = msg.Heartbeat(
        (
            msg.Progress(OPERATION, U32, U32, LAST, (flow,) * FLOWS_MAX),
            *(progress,) * (PROGRESS_BATCH_MAX - 1),
        ),
        (OPERATION,) * ACKNOWLEDGED_BATCH_MAX,
        (RoundId(RoundKind.UPDATE_TOPOLOGY, LAST),) * ACKNOWLEDGED_BATCH_MAX,
        blocked=True,
        roster_version=LAST,
        term=U32,
    )
    assert len(encode(heartbeat)) < BYTES_MAX[msg.Heartbeat]


@pytest.mark.parametrize("trust", Trust)
def test_nobody_takes_the_other_sides_part(trust: Trust) -> None:
    assert not any(PEERS_BYTES_MAX[trust].get(kind, 0) for kind in FROM_MASTERS)
    assert not any(masters_bytes_max(kind) for kind in FROM_PEERS)
    assert all(masters_bytes_max(kind) for kind in FROM_MASTERS)


# -- before a message is read ----------------------------------------------------------------------


def begin(length: int, code: int) -> bytes:
    """The prefix of a message of which nothing else has come."""
    return seal(struct.pack("<IQ", code << 24 | length, 0))


@pytest.mark.parametrize(
    ("trust", "beginning", "says"),
    [
        (Trust.STRANGER, begin(527, 1), "Register has 527 bytes; at most 526"),
        (Trust.STRANGER, begin(100, 4), "Heartbeat has 100 bytes; the sender may send none now"),
        (Trust.NEWCOMER, begin(4097, 4), "Heartbeat has 4097 bytes; at most 4096"),
        (Trust.MEMBER, begin(40961, 4), "Heartbeat has 40961 bytes; at most 40960"),
        (Trust.MEMBER, begin(1 << 20, 17), "KnownRoster has 1048576 bytes; the sender may send"),
        (Trust.MEMBER, begin(99, 69), "RosterChanged has 99 bytes; the sender may send none now"),
        (Trust.MEMBER, begin(99, 63), "unknown message code 63"),
    ],
)
def test_a_message_is_refused_by_its_prefix(trust: Trust, beginning: bytes, says: str) -> None:
    decoder = StreamDecoder(lambda kind: PEERS_BYTES_MAX[trust].get(kind, 0))
    assert list(decoder.feed(beginning[:-1])) == []
    with pytest.raises(RemoteProtocolError, match=says):
        list(decoder.feed(beginning[-1:]))


def test_what_a_message_changes_holds_for_the_next_one() -> None:
    trust = Trust.STRANGER
    decoder = StreamDecoder(lambda kind: PEERS_BYTES_MAX[trust].get(kind, 0))
    wire = encode(msg.Register(0, "", 1)) + encode(msg.Heartbeat())
    found = decoder.feed(wire)
    assert next(found) == msg.Register(0, "", 1)
    trust = Trust.NEWCOMER
    assert list(found) == [msg.Heartbeat()]


@pytest.mark.parametrize("kind", [*FROM_PEERS, *FROM_MASTERS])
def test_every_type_has_a_limit(kind: type[Any]) -> None:
    assert 1 <= BYTES_MAX[kind] <= CONTROL_MESSAGE_BYTES_MAX


# -- allowance -------------------------------------------------------------------------------------


def test_an_allowance_grows_with_the_time_up_to_a_burst() -> None:
    second = 10**9
    allowance = Allowance(1000, 500, 0)
    assert allowance.spend(500, 0) == 0
    assert allowance.spend(100, 0) == second // 10
    assert allowance.spend(100, 0) == second // 5
    assert allowance.spend(0, second // 5) == 0
    assert allowance.spend(1500, 100 * second) == second, "no more than the burst was saved"


SECOND = 10**9
TURN = 100
"""Bytes that one connection sends before it is held back, with a rate of 1000 a second."""


def test_one_source_has_the_whole_allowance_if_no_other_needs_it() -> None:
    shared, alone = SharedAllowance(1000, 500, 0), Allowance(1000, 500, 0)
    for cost, now_ns in ((500, 0), (100, 0), (100, 7), (0, SECOND), (1500, 100 * SECOND)):
        assert shared.spend("a", cost, now_ns) == alone.spend(cost, now_ns)


def test_a_crowd_from_many_sources_within_the_allowance_waits_for_nothing() -> None:
    shared = SharedAllowance(1000, 500, 0)
    assert not any(shared.spend(f"host {n}", 1, 0) for n in range(400))
    assert shared.spend("a crowd behind one address", 100, 0) == 0


def flood(shared: SharedAllowance, connections: dict[str, str], until_ns: int) -> dict[str, int]:
    """Connections (of a source each) that send as much as they may; give what each source sent."""
    sent = dict.fromkeys(connections.values(), 0)
    due = [(0, name) for name in connections]
    while due[0][0] < until_ns:
        now_ns, name = heapq.heappop(due)
        source = connections[name]
        sent[source] += TURN
        heapq.heappush(due, (now_ns + max(1, shared.spend(source, TURN, now_ns)), name))
    return sent


@pytest.mark.parametrize("connections", [1, 30])
def test_one_sources_load_does_not_hold_back_another_source(connections: int) -> None:
    shared = SharedAllowance(1000, 500, 0)
    flood(shared, {f"{n}": "flooder" for n in range(connections)}, 10 * SECOND)
    assert shared.spend("flooder", TURN, 10 * SECOND) > 0
    assert [shared.spend("honest", 20, (10 + n) * SECOND) for n in range(5)] == [0] * 5


@pytest.mark.parametrize("sources", [1, 2, 7, 50])
def test_all_sources_together_stay_within_the_allowance_and_have_equal_parts(sources: int) -> None:
    shared = SharedAllowance(1000, 500, 0)
    connections = {f"{n}": f"source {n % sources}" for n in range(100)}
    sent = flood(shared, connections, 200 * SECOND)
    total = sum(sent.values())
    bursts = 2 * 500  # of the total, and of the accounts together
    assert total < 200 * 1000 + bursts + len(connections) * TURN
    assert total > 200 * 1000 * 0.9
    assert max(sent.values()) - min(sent.values()) < 0.1 * total / sources + 10 * TURN


def test_accounts_are_bounded_and_forgotten_when_they_are_settled() -> None:
    shared = SharedAllowance(1000, 500, 0, sources_max=3)
    for n in range(100):
        shared.spend(f"source {n}", TURN, 0)
    assert len(shared) == 4  # and the one that is shared by all others
    assert shared.spend("another", TURN, 0) > 0
    assert shared.spend("source 1", 0, 0) < shared.spend("another", 0, 0)
    shared.spend("", 0, 1000 * SECOND)
    assert len(shared) == 1


def test_time_in_small_steps_settles_as_much_as_in_a_large_one() -> None:
    small, large = SharedAllowance(1000, 500, 0), SharedAllowance(1000, 500, 0)
    for shared in (small, large):
        for n in range(7):
            shared.spend(f"{n}", 1000 + n, 0)
    for now_ns in range(0, 10_000, 3):
        small.spend("0", 0, now_ns)
    assert small.spend("0", 0, 10_000) == large.spend("0", 0, 10_000)
