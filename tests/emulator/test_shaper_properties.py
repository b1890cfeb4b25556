"""What holds for every link, whatever is sent over it: a random sender against plain arithmetic."""

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pccl.stress.emulator.shaper import ShapedFlow, Shaper
from pccl.stress.emulator.spec import LinkSpec

MS = 1_000_000
NS_PER_S = 1_000_000_000

SPECS = st.builds(
    LinkSpec,
    rate_bps=st.none() | st.integers(100_000, 2_000_000_000),
    rtt_s=st.floats(0, 0.3),
    flow_bps=st.none() | st.integers(100_000, 2_000_000_000),
    jitter_s=st.sampled_from([0.0, 0.001, 0.05]),
    window_bytes=st.none() | st.integers(1024, 4 << 20),
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "wait", "take", "hold", "release", "lose"]),
        st.integers(0, 2),  # which flow
        st.integers(1, 200_000),  # bytes, or microseconds
    ),
    max_size=60,
)


@dataclass
class Sender:
    """One flow as its two ends see it."""

    flow: ShapedFlow
    offered_bytes: int = 0
    taken_bytes: int = 0
    is_held: bool = False
    arrivals: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """When how many bytes arrived, by the time at which the shaper was asked."""


class Bench:
    """A link under a random workload; time passes from event to event."""

    def __init__(self, spec: LinkSpec, seed: int) -> None:
        self.spec = spec
        self.now_ns = 0
        self.link = Shaper(spec, Random(seed))
        self.senders = [Sender(self.link.add(0)) for _ in range(3)]

    def run(self, actions: list[tuple[str, int, int]]) -> None:
        for what, number, size in actions:
            sender = self.senders[number]
            if what == "offer":
                count = min(size, self.link.room_bytes(sender.flow))
                if count:
                    self.link.offer(sender.flow, count, self.now_ns)
                    sender.offered_bytes += count
            elif what == "wait":
                self.pass_until(self.now_ns + size * 1000)
            elif what == "take":
                self.take(sender, size)
            elif what == "hold":
                sender.is_held = True
                self.link.hold(sender.flow, self.now_ns)
            elif what == "release":
                sender.is_held = False
                self.link.release(sender.flow, self.now_ns)
            elif sender.is_held:
                self.link.lose(sender.flow)
            self.note()
            self.check()

    def take(self, sender: Sender, size: int) -> None:
        count = min(size, sender.flow.arrived_bytes)
        if count:
            self.link.deliver(sender.flow, count, self.now_ns)
            sender.taken_bytes += count

    def pass_until(self, end_ns: int) -> None:
        while (due_ns := self.link.next_event_ns()) is not None and due_ns <= end_ns:
            assert due_ns >= self.now_ns
            self.pass_to(due_ns)
        self.pass_to(end_ns)

    def pass_to(self, at_ns: int) -> None:
        self.link.advance(at_ns)
        self.now_ns = at_ns
        self.note()
        self.check()

    def note(self) -> None:
        """Other calls than ``advance`` bring the link up to the present, too."""
        for sender in self.senders:
            known = sum(count for _, count in sender.arrivals)
            new = sender.taken_bytes + sender.flow.arrived_bytes - known
            if new:
                sender.arrivals.append((self.now_ns, new))

    def finish(self) -> None:
        """Everybody takes everything until nothing moves any more."""
        for sender in self.senders:
            self.link.release(sender.flow, self.now_ns)
            self.link.finish(sender.flow, self.now_ns)
        while not all(sender.flow.has_ended for sender in self.senders):
            due_ns = self.link.next_event_ns()
            assert due_ns is not None, "bytes wait, and nothing will happen"
            self.pass_to(max(due_ns, self.now_ns))
            for sender in self.senders:
                self.take(sender, sender.flow.arrived_bytes)

    def check(self) -> None:
        for sender in self.senders:
            flow = sender.flow
            assert 0 <= flow.flight_bytes <= self.spec.flight_max_bytes
            unacknowledged = sender.offered_bytes - sender.taken_bytes
            assert unacknowledged <= flow.flight_bytes <= sender.offered_bytes


def within(arrivals: list[tuple[int, int]], bps: int, slack_bytes: int) -> bool:
    """Whether, between any two arrivals, no more came than the rate allows."""
    for first in range(len(arrivals)):
        total = 0
        for at_ns, count in arrivals[first:]:
            total += count
            lasted_ns = at_ns - arrivals[first][0]
            if (total - slack_bytes) * 8 * NS_PER_S > bps * lasted_ns:
                return False
    return True


@given(SPECS, ACTIONS, st.integers(0, 9))
def test_nothing_is_lost_and_the_window_is_kept(
    spec: LinkSpec, actions: list[tuple[str, int, int]], seed: int
) -> None:
    bench = Bench(spec, seed)
    bench.run(actions)
    bench.finish()
    for sender in bench.senders:
        assert sender.taken_bytes == sender.offered_bytes
        assert sum(count for _, count in sender.arrivals) == sender.offered_bytes


@given(
    rate_bps=st.integers(100_000, 2_000_000_000),
    flow_bps=st.none() | st.integers(100_000, 2_000_000_000),
    rtt_s=st.floats(0, 0.1),
    actions=ACTIONS,
)
def test_no_rate_is_ever_exceeded(
    rate_bps: int, flow_bps: int | None, rtt_s: float, actions: list[tuple[str, int, int]]
) -> None:
    """Without jitter and without losses, which send twice, the way out shows the rate."""
    bench = Bench(LinkSpec(rate_bps=rate_bps, rtt_s=rtt_s, flow_bps=flow_bps), 0)
    bench.run([action for action in actions if action[0] in ("offer", "wait", "take")])
    bench.finish()
    chunk_bytes = 64 << 10  # the first one of a span was sent before it
    together = sorted(one for sender in bench.senders for one in sender.arrivals)
    # A capped flow's chunk is out only when the cap allows, up to a chunk per flow after its turn.
    assert within(together, rate_bps, 3 * chunk_bytes if flow_bps else chunk_bytes)
    for sender in bench.senders:
        assert within(sender.arrivals, min(rate_bps, flow_bps or rate_bps), chunk_bytes)


@given(SPECS, ACTIONS)
def test_one_seed_is_one_run(spec: LinkSpec, actions: list[tuple[str, int, int]]) -> None:
    benches = [Bench(spec, 3), Bench(spec, 3)]
    for bench in benches:
        bench.run(actions)
        bench.finish()
    first, second = benches
    assert [s.arrivals for s in first.senders] == [s.arrivals for s in second.senders]


@given(
    count=st.integers(2, 6),
    rate_mbit=st.integers(1, 1000),
    cap_percent=st.none() | st.integers(10, 200),
)
def test_greedy_flows_have_equal_shares_of_a_full_link(
    count: int, rate_mbit: int, cap_percent: int | None
) -> None:
    rate_bps = rate_mbit * 1_000_000
    flow_bps = None if cap_percent is None else rate_bps * cap_percent // 100
    link = Shaper(LinkSpec(rate_bps=rate_bps, flow_bps=flow_bps), Random(0))
    flows = [link.add(0) for _ in range(count)]
    taken = [0] * count
    end_ns = 200 * MS
    now_ns = 0
    while now_ns < end_ns:
        for flow in flows:
            if room_bytes := link.room_bytes(flow):
                link.offer(flow, room_bytes, now_ns)
        now_ns = min(end_ns, max(now_ns + MS, link.next_event_ns() or 0))
        link.advance(now_ns)
        for number, flow in enumerate(flows):
            taken[number] += flow.arrived_bytes
            if flow.arrived_bytes:
                link.deliver(flow, flow.arrived_bytes, now_ns)
    chunk_bytes = max(1460, min(64 << 10, min(rate_bps, flow_bps or rate_bps) // 8000))
    whole_bps = min(rate_bps, count * (flow_bps or rate_bps))
    expected_bytes = whole_bps * end_ns / 8 / NS_PER_S
    assert abs(sum(taken) - expected_bytes) <= (count + 1) * chunk_bytes
    assert max(taken) - min(taken) <= 2 * chunk_bytes
