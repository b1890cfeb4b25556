"""When packets between sites arrive; at 8 Mbit/s a byte takes a microsecond."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pccl.stress.emulator.sites.matrix import SiteMatrix, SitePort
from pccl.stress.emulator.sites.packets import OUTSIDE, QUEUE_NS, ConnectionQueues, PacketNetwork
from pccl.stress.emulator.spec import LinkSpec

US = 1_000
MS = 1_000_000


def network(link: str, **ports: str) -> PacketNetwork[str]:
    sites = ("a", "b", "c")
    spec = LinkSpec.parse(link)
    links = {(i, j): spec for i in range(3) for j in range(3) if i != j}
    given = tuple(SitePort.parse(ports.get(site, "")) for site in sites)
    return PacketNetwork(SiteMatrix("test", sites, links, given), Random(0))


def arrivals(net: PacketNetwork[str]) -> list[tuple[int, int, str]]:
    """Let time pass; return when, in microseconds, which packet arrived at which site."""
    found: list[tuple[int, int, str]] = []
    while (due_ns := net.next_event_ns()) is not None:
        found += [(due_ns // US, target, packet) for target, packet in net.advance(due_ns)]
    return found


def test_a_packet_takes_its_time_and_half_a_round_trip() -> None:
    net = network("rate=8mbit,rtt=10ms")
    net.offer(0, 0, 1, "f", 1000, "one")
    net.offer(0, 0, 1, "g", 500, "two")
    assert arrivals(net) == [(6000, 1, "one"), (6500, 1, "two")]
    assert (net.carried_bytes, net.dropped) == (1500, 0)


def test_pairs_and_directions_do_not_share() -> None:
    net = network("rate=8mbit")
    for source, target in ((0, 1), (1, 0), (0, 2)):
        net.offer(0, source, target, "f", 1000, f"{source}{target}")
    assert arrivals(net) == [(1000, 1, "01"), (1000, 0, "10"), (1000, 2, "02")]


def test_each_connection_has_its_own_limit() -> None:
    net = network("flow=8mbit,rtt=2ms")
    net.offer(0, 0, 1, "f", 1000, "f1")
    net.offer(0, 0, 1, "f", 1000, "f2")
    net.offer(0, 0, 1, "g", 1000, "g1")
    assert arrivals(net) == [(2000, 1, "f1"), (2000, 1, "g1"), (3000, 1, "f2")]


def test_machines_at_one_place_share_its_port() -> None:
    """What they send each other does not pass it."""
    links = {(0, 1): LinkSpec.parse("rate=80mbit"), (1, 0): LinkSpec.parse("rate=80mbit")}
    ports = (SitePort.parse("up=8mbit"), SitePort())
    matrix = SiteMatrix("test", ("home", "far"), links, ports).with_machines(2)
    assert matrix.sites == ("home-1", "home-2", "far-1", "far-2")
    net = PacketNetwork[str](matrix, Random(0))
    net.offer(0, 0, 2, "f", 1000, "from 1")
    net.offer(0, 1, 3, "g", 1000, "from 2")
    net.offer(0, 0, 1, "h", 1000, "inside")
    assert arrivals(net) == [(200, 1, "inside"), (1100, 2, "from 1"), (2100, 3, "from 2")]


def test_queues_of_ended_connections_are_removed_and_no_others() -> None:
    queues = ConnectionQueues(8_000_000, QUEUE_NS)
    for number in range(401):
        now_ns = number * MS
        if number % 50 == 0:  # the work of 60 ms
            assert queues.leave_ns(now_ns, "lasting", 60_000) == (60 + number // 50 * 60) * MS
        assert queues.leave_ns(now_ns, number, 500) == now_ns + 500 * US
        assert len(queues) <= 64
    for number in range(200):  # all at one time
        assert queues.leave_ns(500 * MS, f"{number} of many", 500) == 500_500 * US
    assert len(queues) > 200
    for number in range(1000):
        queues.leave_ns((1000 + number) * MS, f"{number} of the last", 500)
    assert len(queues) <= 64


def test_a_port_is_one_queue_for_all_that_a_site_sends() -> None:
    """Control to the outside waits behind data, as in the router of a home."""
    net = network("rate=80mbit,rtt=10ms", a="up=8mbit")
    net.offer(0, 0, 1, "f", 1000, "data")
    net.offer(0, 0, OUTSIDE, "c", 100, "control")
    net.offer(0, 0, 2, "g", 1000, "other")
    net.offer(0, 1, 0, "h", 1000, "down")
    assert arrivals(net) == [
        (1100, OUTSIDE, "control"), (5100, 0, "down"), (6100, 1, "data"), (7200, 2, "other")
    ]  # fmt: skip


def test_a_port_is_one_queue_for_all_that_a_site_receives() -> None:
    net = network("rtt=10ms", a="down=8mbit")
    net.offer(0, 1, 0, "f", 1000, "b")
    net.offer(1 * US, 2, 0, "g", 1000, "c")
    net.offer(2 * US, OUTSIDE, 0, "c", 1000, "first")
    assert arrivals(net) == [(1002, 0, "first"), (6000, 0, "b"), (7000, 0, "c")]


def test_the_outside_has_no_limits() -> None:
    net = network("rate=8mbit,rtt=10ms")
    net.offer(5, 0, OUTSIDE, "f", 1000, "up")
    net.offer(5, OUTSIDE, 0, "f", 1000, "down")
    assert net.advance(5) == [(OUTSIDE, "up"), (0, "down")]


def test_a_packet_to_no_site_is_gone() -> None:
    net = network("rtt=10ms")
    net.offer(0, 0, 7, "f", 1000, "lost")
    net.offer(0, 0, 0, "f", 1000, "to itself")
    assert net.next_event_ns() is None


def test_a_queue_drops_what_would_wait_too_long() -> None:
    net = network("rate=8mbit,rtt=1ms")
    for number in range(120):
        net.offer(0, 0, 1, "f", 1000, str(number))
    found = arrivals(net)
    # The last one that enters finds exactly the time of a full queue before it.
    assert [packet for _, _, packet in found] == [str(n) for n in range(QUEUE_NS // MS + 1)]
    assert net.dropped == 120 - len(found)


def test_the_queue_of_a_long_link_holds_a_round_trip() -> None:
    net = network("rate=8mbit,rtt=300ms")
    for number in range(400):
        net.offer(0, 0, 1, "f", 1000, str(number))
    assert len(arrivals(net)) == 301


PACKETS_MAX = 80
PACKETS = st.lists(
    st.tuples(
        st.integers(0, 3000),  # microseconds after the one before
        st.integers(0, 2),
        st.integers(-1, 2),
        st.integers(0, 1),  # which connection
        st.integers(40, 9000),
    ),
    max_size=PACKETS_MAX,
)
RATES = st.none() | st.integers(1_000_000, 500_000_000)


@given(PACKETS, RATES, RATES, RATES, RATES, st.floats(0, 0.1), st.sampled_from([0.0, 0.02]))
def test_order_and_rates_are_kept(
    packets: list[tuple[int, int, int, int, int]],
    rate_bps: int | None,
    flow_bps: int | None,
    up_bps: int | None,
    down_bps: int | None,
    rtt_s: float,
    jitter_s: float,
) -> None:
    """In each span between two arrivals, no limit lets more than its rate pass."""
    spec = LinkSpec(rate_bps=rate_bps, flow_bps=flow_bps, rtt_s=rtt_s, jitter_s=jitter_s)
    links = {(i, j): spec for i in range(3) for j in range(3) if i != j}
    ports = (SitePort(up_bps, down_bps),) * 3
    matrix = SiteMatrix("test", ("a", "b", "c"), links, ports)
    net = PacketNetwork[tuple[int, int, int, int, int]](matrix, Random(1))
    now_ns = 0
    found: list[tuple[int, tuple[int, int, int, int, int]]] = []

    def pass_until(end_ns: int | None) -> None:
        while (due_ns := net.next_event_ns()) is not None and (end_ns is None or due_ns <= end_ns):
            found.extend((due_ns, packet) for _, packet in net.advance(due_ns))

    offered: list[tuple[int, int, int, int, int]] = []
    for number, (pause_us, source, target, flow, nbytes) in enumerate(packets):
        now_ns += pause_us * US
        pass_until(now_ns)
        if source != target:
            offered.append((number, source, target, flow, nbytes))
            net.offer(now_ns, source, target, (source, target, flow), nbytes, offered[-1])
    pass_until(None)
    assert len(found) + net.dropped == len(offered)
    ways = {packet[1:4] for _, packet in found}
    for way in ways:
        numbers = [packet[0] for _, packet in found if packet[1:4] == way]
        assert numbers == sorted(numbers), "packets of one connection stay in order"
    for site in range(3):
        check([one for one in found if one[1][2] == site], down_bps)
        if not jitter_s and down_bps is None:  # jitter bunches what a port or link has spaced out
            for other in range(3):
                pair = [one for one in found if one[1][1:3] == (other, site)]
                check(pair, rate_bps)
                for flow in range(2):
                    check([one for one in pair if one[1][3] == flow], flow_bps)
        # The delays of two links are equal here, so they keep the spaces of the port before them.
        if not jitter_s and rate_bps is flow_bps is down_bps is None:
            check([one for one in found if one[1][1] == site and one[1][2] != OUTSIDE], up_bps)


def check(found: list[tuple[int, tuple[int, int, int, int, int]]], rate_bps: int | None) -> None:
    if rate_bps is None:
        return
    # A queue rounds the time of each packet up to a nanosecond. So earlier packets delay the first
    # one, and what the limit before has spaced out comes closer together.
    for first in range(len(found)):
        total = 0
        for at_ns, packet in found[first + 1 :]:
            total += packet[4]
            assert total * 8 * 1_000_000_000 <= rate_bps * (at_ns - found[first][0] + PACKETS_MAX)
