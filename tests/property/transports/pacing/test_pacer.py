"""What the pacer promises: a limit over any time, turns for all, and no wait for short messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pccl.protocol.types import NS_PER_S
from pccl.transports.pacing.pacer import CREDIT_BYTES, Account, Pacer

rates = st.integers(64_000, 10**6) | st.integers(64_000, 10**12)
MS = 1_000_000


@dataclass
class Uplink:
    """A pacer, its connections, and what they have sent."""

    bytes_per_s: int
    connections: int
    now_ns: int = 0
    sent: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(when, which connection, how many bytes)"""

    def __post_init__(self) -> None:
        self.pacer = Pacer[int](self.bytes_per_s, self.now_ns)
        self.accounts: list[Account[int]] = [
            self.pacer.open(number, self.now_ns) for number in range(self.connections)
        ]

    def send(self, number: int, wanted: int, accepts: int | None = None) -> int:
        """Send as much as is granted, and as the network accepts; return the number of bytes."""
        room = self.pacer.room(self.accounts[number], wanted, self.now_ns)
        assert 0 <= room <= wanted
        size = room if accepts is None else min(room, accepts)
        self.pacer.spend(self.accounts[number], size)
        if size:
            self.sent.append((self.now_ns, number, size))
        return size

    def send_or_wait(self, number: int, wanted: int) -> int:
        sent = self.send(number, wanted)
        if sent < wanted:
            self.pacer.wait(self.accounts[number])
        return sent

    def serve_until(self, end_ns: int, wants: Sequence[int]) -> list[int]:
        """Give turns as they fall due. Connections want so many bytes whenever they have one, and
        wait for the next. Return whose turns they were."""
        turns: list[int] = []
        while (due_ns := self.pacer.due_ns) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            number = self.pacer.begin_turn(self.now_ns)
            assert number is not None, "a turn begins when it falls due"
            turns.append(number)
            while self.send(number, wants[number]):
                pass
            self.pacer.wait(self.accounts[number])
            self.pacer.end_turn()
        self.now_ns = max(self.now_ns, end_ns)
        return turns

    def assert_limit(self) -> None:
        """No stretch of time has more than the rate, one burst and one reserve."""
        once = (self.pacer.burst_bytes + self.pacer.reserve_bytes) * NS_PER_S
        most = 0  # how far the bytes so far exceed those that the rate allowed since the best start
        last_ns = 0
        for at_ns, _, size in self.sent:
            most = max(0, most - (at_ns - last_ns) * self.bytes_per_s) + size * NS_PER_S
            last_ns = at_ns
            assert most <= once

    def total_of(self, number: int) -> int:
        return sum(size for _, which, size in self.sent if which == number)


@given(
    rates,
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([1, 60, 1400, CREDIT_BYTES, 1 << 16, 1 << 30]),
            st.none() | st.integers(0, 1 << 20),
            st.sampled_from([0, 1, MS, 7 * MS, 100 * MS, 3 * NS_PER_S]),
            st.sampled_from(["send", "wait", "turn", "end", "leave"]),
        ),
        max_size=60,
    ),
)
def test_no_stretch_of_time_exceeds_the_limit(
    rate: int, steps: list[tuple[int, int, int | None, int, str]]
) -> None:
    uplink = Uplink(rate, 4)
    for number, wanted, accepts, passed_ns, what in steps:
        uplink.now_ns += passed_ns
        match what:
            case "send":
                uplink.send(number, wanted, accepts)
            case "wait":
                uplink.pacer.wait(uplink.accounts[number])
            case "turn":
                uplink.pacer.end_turn()
                uplink.pacer.begin_turn(uplink.now_ns)
            case "leave":
                uplink.pacer.leave(uplink.accounts[number])
            case _:
                uplink.pacer.end_turn()
    uplink.assert_limit()


@given(rates, st.integers(1, 20), st.integers(0, 5))
def test_busy_connections_take_turns_and_use_the_whole_limit(
    rate: int, busy: int, idle: int
) -> None:
    uplink = Uplink(rate, busy + idle)
    wants = [1 << 40] * (busy + idle)
    for number in range(busy):
        uplink.send_or_wait(number, wants[number])
    first = sum(size for _, _, size in uplink.sent)
    assert first == uplink.pacer.burst_bytes, "what one may send at once, the first does"
    rounds = 5
    end_ns = rounds * busy * uplink.pacer.turn_bytes * NS_PER_S // rate + 1
    assert uplink.serve_until(end_ns, wants) == list(range(busy)) * rounds
    uplink.assert_limit()


@given(
    st.integers(64_000, 10**8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6000)), min_size=20, max_size=40),
    st.integers(5, 50),
)
@settings(max_examples=30)
def test_short_messages_starve_nobody(
    rate: int, messages: list[tuple[int, int]], every_ms: int
) -> None:
    """However many connections send short messages, those with much to send have half the rate."""
    uplink = Uplink(rate, 43)
    wants = [200] * 41 + [1 << 40] * 2
    for number in (41, 42):
        uplink.send_or_wait(number, wants[number])
    before = [uplink.total_of(number) for number in (41, 42)]
    span_ns = 4 * NS_PER_S
    turns: list[int] = []
    while uplink.now_ns < span_ns:
        for number, size in messages:
            uplink.send(number, size)
        turns += uplink.serve_until(uplink.now_ns + every_ms * MS, wants)
    got = [uplink.total_of(41 + n) - before[n] for n in range(2)]
    assert abs(got[0] - got[1]) <= uplink.pacer.turn_bytes
    assert set(turns) <= {41, 42}, "those that do not wait have no turns"
    reserve = uplink.pacer.reserve_bytes
    assert sum(got) >= rate * 2 - reserve - 2 * uplink.pacer.turn_bytes
    uplink.assert_limit()


@given(st.integers(64_000, 10**9), st.integers(1, 40), st.integers(1, 32), st.integers(1, 500))
@example(64_000, 40, 32, 500)
@settings(max_examples=30)
def test_a_heartbeat_never_waits(rate: int, busy: int, beating: int, size: int) -> None:
    """A connection that sends 500 bytes every second is never held back, if thirty-two do so."""
    uplink = Uplink(rate, busy + beating)
    wants = [1 << 40] * (busy + beating)
    for number in range(busy):
        uplink.send_or_wait(number, wants[number])
    for _ in range(10):
        uplink.serve_until(uplink.now_ns + NS_PER_S, wants)
        for number in range(busy, busy + beating):
            assert uplink.send(number, size) == size
    uplink.assert_limit()


@given(st.integers(64_000, 200_000), st.integers(100, CREDIT_BYTES))
def test_a_busy_connection_gains_little_from_small_portions(rate: int, portion: int) -> None:
    """Ahead of its turns it sends its credit, and a thirty-second of the rate."""
    uplink = Uplink(rate, 2)
    wants = [portion, 1 << 40]
    for number in (1, 0):
        uplink.send_or_wait(number, wants[number])
    before = [uplink.total_of(number) for number in (0, 1)]
    for _ in range(100):
        uplink.serve_until(uplink.now_ns + 20 * MS, wants)
        while uplink.send(0, portion):
            pass
    small, large = (uplink.total_of(number) - before[number] for number in (0, 1))
    assert small - large <= CREDIT_BYTES + rate * 2 // 32 + uplink.pacer.turn_bytes
    uplink.assert_limit()
