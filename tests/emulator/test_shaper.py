"""When bytes leave and arrive, computed by hand: 8 Mbit/s are a byte per microsecond."""

from random import Random

import pytest

from pccl.stress.emulator.shaper import Direction, ShapedFlow, Shaper
from pccl.stress.emulator.spec import LinkSpec

US = 1_000
MS = 1_000_000
NO_CHANCE = Random(0)


def shaper(text: str) -> Shaper:
    return Shaper(LinkSpec.parse(text), NO_CHANCE)


def arrivals(
    link: Shaper, flow: ShapedFlow, until_ns: int, deliver: bool = True
) -> list[tuple[int, int]]:
    """Let time pass; return when, in microseconds, how many bytes of a flow arrived."""
    seen: list[tuple[int, int]] = []
    while (due_ns := link.next_event_ns()) is not None and due_ns <= until_ns:
        before = flow.arrived_bytes
        link.advance(due_ns)
        if flow.arrived_bytes > before:
            seen.append((due_ns // US, flow.arrived_bytes - before))
            if deliver:
                link.deliver(flow, flow.arrived_bytes, due_ns)
    return seen


def test_bytes_take_their_time_and_the_delay() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow = link.add(0)
    link.offer(flow, 1000, 0)
    assert arrivals(link, flow, 100 * MS) == [(1000 + 5000, 1000)]


def test_a_stream_is_cut_into_chunks_of_a_packet_at_least() -> None:
    link = shaper("rate=8mbit")  # 1 ms of it are 1000 bytes, less than a packet
    flow = link.add(0)
    link.offer(flow, 4000, 0)
    assert arrivals(link, flow, 100 * MS) == [(1460, 1460), (2920, 1460), (4000, 1080)]


def test_a_fast_link_sends_chunks_of_a_millisecond() -> None:
    link = shaper("rate=80mbit")  # 10 bytes per microsecond
    flow = link.add(0)
    link.offer(flow, 25_000, 0)
    assert arrivals(link, flow, 100 * MS) == [(1000, 10_000), (2000, 10_000), (2500, 5_000)]


def test_an_odd_rate_rounds_up() -> None:
    link = shaper("rate=3mbit")  # a byte takes 2666.67 ns
    flow = link.add(0)
    link.offer(flow, 1, 0)
    link.advance(2666)
    assert link.next_event_ns() == 2667


def test_an_idle_link_saves_nothing_up() -> None:
    link = shaper("rate=8mbit")
    flow = link.add(0)
    link.offer(flow, 1000, 0)
    assert arrivals(link, flow, 50 * MS) == [(1000, 1000)]
    link.offer(flow, 1000, 50 * MS)
    link.offer(flow, 460, 50 * MS)  # in one chunk with what waits before it
    link.offer(flow, 40, 50 * MS)
    assert arrivals(link, flow, 100 * MS) == [(50_000 + 1460, 1460), (50_000 + 1500, 40)]


def test_a_new_connection_waits_for_its_dial() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow = link.add(0, ready_ns=10 * MS)
    link.offer(flow, 1000, 0)
    assert arrivals(link, flow, 100 * MS) == [(10_000 + 1000 + 5000, 1000)]


def test_two_flows_share_chunk_by_chunk() -> None:
    link = shaper("rate=80mbit")
    one, two = link.add(0), link.add(0)
    link.offer(one, 40_000, 0)
    link.offer(two, 40_000, 0)
    link.advance(4 * MS)
    assert (one.arrived_bytes, two.arrived_bytes) == (20_000, 20_000)
    link.advance(8 * MS)
    assert (one.arrived_bytes, two.arrived_bytes) == (40_000, 40_000)


def test_a_newcomer_is_owed_nothing_for_the_past() -> None:
    link = shaper("rate=80mbit")
    one, two = link.add(0), link.add(0)
    link.offer(one, 60_000, 0)
    link.advance(3 * MS)  # 4 chunks of the first have begun
    link.offer(two, 40_000, 3 * MS)
    link.advance(7 * MS)
    assert (one.arrived_bytes, two.arrived_bytes) == (50_000, 20_000)


def test_a_capped_flow_has_its_cap_and_leaves_the_rest() -> None:
    narrow = shaper("rate=80mbit,flow=20mbit")
    flow = narrow.add(0)
    narrow.offer(flow, 25_000, 0)
    assert arrivals(narrow, flow, 100 * MS)[-1] == (10_000, 2_500)  # 2.5 bytes per microsecond
    flows = [narrow.add(100 * MS) for _ in range(2)]
    for one in flows:
        narrow.offer(one, 25_000, 100 * MS)
    narrow.advance(105 * MS)
    # Chunks of 2500 bytes, 250 us of the link and 1 ms of the cap each: nobody waits for long.
    assert [one.arrived_bytes for one in flows] == [12_500, 10_000]


def test_capped_flows_fill_the_link_and_no_more() -> None:
    link = shaper("rate=40mbit,flow=20mbit,window=1mib")
    flows = [link.add(0) for _ in range(4)]
    arrived = [0, 0, 0, 0]
    for now_ms in range(101):
        link.advance(now_ms * MS)
        for number, flow in enumerate(flows):
            if flow.arrived_bytes:
                arrived[number] += flow.arrived_bytes
                link.deliver(flow, flow.arrived_bytes, now_ms * MS)
            if room_bytes := link.room_bytes(flow):
                link.offer(flow, room_bytes, now_ms * MS)
    # A chunk of 2500 bytes begins every half millisecond and takes one, at its flow's cap: those
    # that began at 0, 0.5, .. 99 ms have arrived.
    assert sum(arrived) == 199 * 2500
    assert max(arrived) - min(arrived) <= 2500


def test_window_is_what_is_not_acknowledged() -> None:
    link = shaper("rate=8mbit,rtt=10ms,window=2kib")
    flow = link.add(0)
    assert link.room_bytes(flow) == 2048
    link.offer(flow, 2048, 0)
    assert link.room_bytes(flow) == 0
    link.advance(7 * MS)  # 1460 bytes arrived at 6.46 ms, the rest comes at 7.048
    assert flow.arrived_bytes == 1460
    assert link.room_bytes(flow) == 0
    link.deliver(flow, 1460, 7 * MS)
    link.advance(12 * MS - 1)
    assert link.room_bytes(flow) == 0
    link.advance(12 * MS)  # the acknowledgement is back
    assert link.room_bytes(flow) == 1460


def test_what_the_receiver_does_not_take_stays_in_the_window() -> None:
    link = shaper("rate=8mbit,window=2kib")
    flow = link.add(0)
    link.offer(flow, 2048, 0)
    link.advance(1000 * MS)
    assert (flow.arrived_bytes, flow.flight_bytes, link.room_bytes(flow)) == (2048, 2048, 0)


def test_the_queue_is_shared_by_those_who_wait() -> None:
    link = shaper("rate=80mbit,window=1mib")  # 20 ms of it are 200,000 bytes
    one, two = link.add(0), link.add(0)
    assert link.room_bytes(one) == 200_000
    link.offer(one, 200_000, 0)
    assert link.room_bytes(one) == 0
    link.offer(two, 1000, 0)
    assert link.room_bytes(two) == 99_000


def test_the_end_comes_after_all_bytes() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow = link.add(0)
    link.offer(flow, 2000, 0)
    link.finish(flow, 0)
    link.advance(7 * MS - 1)
    assert (flow.arrived_bytes, flow.has_ended) == (1460, False)
    link.advance(7 * MS)
    assert (flow.arrived_bytes, flow.has_ended) == (2000, True)


def test_an_end_alone_takes_the_delay() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow = link.add(0)
    link.finish(flow, 3 * MS)
    link.advance(3 * MS)
    assert link.next_event_ns() == 8 * MS
    link.advance(8 * MS)
    assert flow.has_ended


def test_jitter_is_between_nothing_and_its_bound() -> None:
    link = Shaper(LinkSpec.parse("rtt=10ms,jitter=4ms"), Random(7))
    seen: list[int] = []
    for number in range(200):
        at_ns = number * 100 * MS
        flow = link.add(at_ns)
        link.offer(flow, 1, at_ns)
        link.advance(at_ns)
        due_ns = link.next_event_ns()
        assert due_ns is not None
        seen.append(due_ns - at_ns)
        link.remove(flow)
    assert min(seen) >= 5 * MS
    assert max(seen) <= 9 * MS
    assert min(seen) < 5.2 * MS
    assert max(seen) > 8.8 * MS


@pytest.mark.parametrize(("portion", "percent"), [(1, 100), (100, 10), (1448, 10), (65_536, 10)])
def test_a_share_of_packets_has_a_flipped_bit(portion: int, percent: int) -> None:
    link = Shaper(LinkSpec.parse(f"corrupt={percent}%"), Random(7))
    total = 1448 * 100_000 // percent
    found: list[int] = []
    sizes = [*[portion] * (total // portion), total % portion]
    for number, bits in enumerate(map(link.flips, sizes)):
        for bit in bits:
            assert 0 <= bit < 8 * portion
            found.append(8 * portion * number + bit)
    assert 900 <= len(found) <= 1100
    assert len({bit % 8 for bit in found}) == 8
    assert max(found) > 0.99 * 8 * total


def test_a_link_that_is_mended_flips_nothing() -> None:
    link = Shaper(LinkSpec.parse("corrupt=100%"), Random(7))
    assert link.flips(1 << 20)
    link.change(LinkSpec(), 0)
    assert link.flips(1 << 20) == []


def test_a_shorter_delay_overtakes_nothing() -> None:
    link = shaper("rate=8mbit,rtt=100ms")
    flow = link.add(0)
    link.offer(flow, 1000, 0)
    link.advance(1 * MS)
    link.change(LinkSpec.parse("rate=8mbit,rtt=2ms"), 1 * MS)
    link.offer(flow, 1000, 1 * MS)
    assert arrivals(link, flow, 1000 * MS) == [(1000 + 50_000, 2000)]


def test_a_new_rate_holds_for_what_has_not_begun() -> None:
    link = shaper("rate=8mbit")
    flow = link.add(0)
    link.offer(flow, 2920, 0)
    link.change(LinkSpec.parse("rate=80mbit"), 100 * US)
    assert arrivals(link, flow, 100 * MS) == [(1460, 1460), (1460 + 146, 1460)]


def test_what_is_held_goes_on_where_it_was() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow, other = link.add(0), link.add(0)
    link.offer(flow, 2920, 0)
    link.hold(flow, 1 * MS)  # the first chunk is being sent
    link.hold(flow, 2 * MS)  # changes nothing
    link.offer(other, 500, 3 * MS)
    link.advance(500 * MS)
    assert (flow.arrived_bytes, other.arrived_bytes) == (0, 500)
    link.release(flow, 501 * MS)
    assert arrivals(link, flow, 1000 * MS) == [
        (6_460 + 500_000, 1460),
        (501_000 + 1460 + 5000, 1460),
    ]


def test_what_is_lost_is_sent_again_before_all_else() -> None:
    link = shaper("rate=8mbit,rtt=10ms")
    flow = link.add(0)
    link.offer(flow, 1460, 0)
    link.finish(flow, 0)
    link.advance(3 * MS)  # all of it and the end are on their way
    link.hold(flow, 3 * MS)
    link.lose(flow)
    assert (flow.queued_bytes, flow.flight_bytes) == (1460, 1460)
    link.release(flow, 100 * MS)
    link.advance(106 * MS + 460 * US - 1)
    assert (flow.arrived_bytes, flow.has_ended) == (0, False)
    link.advance(106 * MS + 460 * US)
    assert (flow.arrived_bytes, flow.has_ended) == (1460, True)


def test_no_room_is_won_while_acknowledgements_are_held() -> None:
    link = shaper("rate=8mbit,rtt=10ms,window=1kib")
    flow = link.add(0)
    link.offer(flow, 1024, 0)
    link.advance(7 * MS)
    link.deliver(flow, 1024, 7 * MS)
    link.hold_acks(flow, 8 * MS)
    link.advance(500 * MS)
    assert link.room_bytes(flow) == 0
    link.release_acks(flow, 500 * MS)  # 4 of its 5 ms were left
    link.advance(504 * MS - 1)
    assert link.room_bytes(flow) == 0
    link.advance(504 * MS)
    assert link.room_bytes(flow) == 1024


def test_a_removed_flow_leaves_the_link_to_the_others() -> None:
    link = shaper("rate=8mbit")
    one, two = link.add(0), link.add(0)
    link.offer(one, 10_000, 0)
    link.remove(one)
    link.offer(two, 1000, 0)
    assert arrivals(link, two, 100 * MS) == [(1000, 1000)]
    assert link.next_event_ns() is None


def test_overhead_is_taken_off_the_delay_and_not_below_nothing() -> None:
    for overhead_ns, arrival_ns in ((1 * MS, 4 * MS), (9 * MS, 0)):
        link = Shaper(LinkSpec.parse("rtt=10ms"), NO_CHANCE, overhead_ns)
        flow = link.add(0)
        link.offer(flow, 1, 0)
        link.advance(0)
        assert (link.next_event_ns() or 0) == arrival_ns


@pytest.mark.parametrize("direction", list(Direction))
def test_directions_are_two(direction: Direction) -> None:
    assert direction.reverse is not direction
    assert direction.reverse.reverse is direction
