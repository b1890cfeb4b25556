"""When the router is asked for a port, in which protocol, and what becomes of its answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pccl.machines.port_mapper import (
    LIFETIME_S,
    RETRY_S,
    AskUpnp,
    FindRouter,
    MapperEffect,
    MapperEvent,
    MapperTick,
    MappingClosed,
    NotMapped,
    PortMapped,
    PortMapper,
    PortUnmapped,
    RouterAnswered,
    RouterFound,
    RouterMissing,
    RouterRefused,
    SendDatagram,
    StartMapping,
    StopMapping,
    UpnpAnswered,
)
from pccl.machines.router_path import ForwardedPort, MappingProtocol, RouterPath
from pccl.protocol.port_mapping.answers import PortGranted
from tests.support.home_router import HomeRouter

MS, S = 1_000_000, 1_000_000_000
PORT = 48200
HOME = RouterPath("192.168.1.7", "8.8.8.8", "192.168.1.1", "192.168.1.7")
UPNP_MISSING = UpnpAnswered(None, "not installed")


class World:
    """A mapper, the time, and a router that answers at once; None: the router is silent."""

    def __init__(self, router: HomeRouter | None, path: RouterPath = HOME) -> None:
        self.router = router
        self.path = path
        self.upnp = UPNP_MISSING
        """What UPnP answers; a later answer comes from the test."""
        self.now_ns = 0
        self.mapper = PortMapper(lambda count: bytes(count))
        self.told: list[MapperEffect] = []
        """Effects other than questions."""
        self.sent: list[tuple[int, bytes]] = []
        """Datagrams, and when they were sent, in ms."""
        self.asked: list[AskUpnp] = []
        self.booted_s = -1000
        """When the router was started."""

    def feed(self, event: MapperEvent) -> None:
        events = deque([event])
        while events:
            for effect in self.mapper.handle(events.popleft(), self.now_ns):
                events.extend(self._carry_out(effect))

    def _carry_out(self, effect: MapperEffect) -> Iterator[MapperEvent]:
        """Carry out an effect; yield what comes of it."""
        match effect:
            case FindRouter():
                yield RouterFound(self.path)
            case SendDatagram(host, port, data):
                assert (host, port) == (self.path.router, 5351)
                self.sent.append((self.now_ns // MS, data))
                if self.router is not None:
                    self.router.epoch_s = self.now_ns // S - self.booted_s
                    for answer in self.router.answers(data):
                        yield RouterAnswered(host, port, answer)
            case AskUpnp():
                self.asked.append(effect)
                yield self.upnp
            case _:
                self.told.append(effect)

    def start(self) -> None:
        self.feed(StartMapping(PORT))

    def run_until(self, seconds: float) -> None:
        """Let time pass, with all ticks that are due."""
        until_ns = round(seconds * S)
        while self.mapper.due_ns is not None and self.mapper.due_ns <= until_ns:
            self.now_ns = max(self.now_ns, self.mapper.due_ns)
            self.feed(MapperTick())
        self.now_ns = until_ns

    def take(self) -> list[MapperEffect]:
        told, self.told = self.told, []
        return told

    def take_sent(self) -> list[tuple[int, int]]:
        """When datagrams were sent in ms, and the protocol version of each."""
        sent, self.sent = self.sent, []
        return [(at_ms, data[0]) for at_ms, data in sent]


def forwarded(
    by: MappingProtocol = MappingProtocol.PCP, host: str = "8.8.4.4", port: int = PORT
) -> ForwardedPort:
    return ForwardedPort(by, host, port)


# -- the first port ------------------------------------------------------------------------------


def test_pcp_comes_first() -> None:
    world = World(HomeRouter())
    world.start()
    assert world.take() == [PortMapped(forwarded())]
    assert world.take_sent() == [(0, 2)]
    assert (world.mapper.forwarded, world.mapper.reason) == (forwarded(), "")
    world.start()
    assert world.take_sent() == [], "only the first start counts"


def test_a_router_that_names_nat_pmp_is_asked_so_at_once() -> None:
    world = World(HomeRouter(pcp=False))
    world.start()
    assert world.take() == [PortMapped(forwarded(MappingProtocol.NAT_PMP))]
    assert world.take_sent() == [(0, 2), (0, 0), (0, 0)]


def test_another_port_than_the_wanted_one() -> None:
    world = World(HomeRouter(taken=(PORT,)))
    world.start()
    assert world.take() == [PortMapped(forwarded(port=PORT + 1))]


def test_a_silent_router_costs_few_packets() -> None:
    world = World(None)
    world.start()
    world.run_until(60)
    silent = "PCP: no answer; NAT-PMP: no answer; UPnP: not installed"
    assert world.take() == [NotMapped(silent, True)]
    assert world.take_sent() == [
        (0, 2), (250, 2),
        (750, 0), (750, 0), (1000, 0), (1000, 0),
    ]  # fmt: skip
    assert world.mapper.due_ns == (1500 * MS) + RETRY_S * S
    world.run_until(RETRY_S + 60)
    assert world.take() == [], "the reason is the same"
    assert len(world.take_sent()) == 6


def test_a_router_where_nothing_listens_leaves_upnp() -> None:
    world = World(None)
    world.start()
    world.feed(RouterRefused())
    unknown = "the router does not know it"
    assert world.take() == [
        NotMapped(f"PCP: {unknown}; NAT-PMP: {unknown}; UPnP: not installed", True)
    ]
    assert world.asked == [AskUpnp(HOME, PORT, PORT, LIFETIME_S, 3.0)]


def test_upnp_comes_last() -> None:
    world = World(None)
    world.upnp = UpnpAnswered(PortGranted("8.8.4.4", PORT, LIFETIME_S, 0))
    world.start()
    world.run_until(2)
    assert world.take() == [PortMapped(forwarded(MappingProtocol.UPNP))]
    world.run_until(LIFETIME_S / 2 + 2)
    assert len(world.asked) == 2
    assert world.take() == []


def test_a_refusal_is_told_in_words() -> None:
    world = World(HomeRouter(result=2))
    world.start()
    denied = "it allows this machine no ports (not authorized)"
    assert world.take() == [
        NotMapped(f"PCP: {denied}; NAT-PMP: {denied}; UPnP: not installed", True)
    ]


def test_a_port_without_the_address_of_the_router() -> None:
    class Mute(HomeRouter):
        def answers(self, data: bytes) -> Iterator[bytes]:
            return iter(()) if len(data) == 2 else super().answers(data)

    world = World(Mute(pcp=False))
    world.start()
    assert world.take() == []
    world.run_until(2)
    assert world.take() == [PortMapped(forwarded(MappingProtocol.NAT_PMP, host=""))]
    assert world.take_sent() == [(0, 2), (0, 0), (0, 0), (250, 0)]


@pytest.mark.parametrize("router", [HomeRouter(lifetime_s=59), HomeRouter(lifetime_s=0)])
def test_a_port_for_less_than_a_minute_is_none(router: HomeRouter) -> None:
    world = World(router)
    world.start()
    (told,) = world.take()
    assert isinstance(told, NotMapped)
    assert told.reason.startswith("PCP: the router grants no usable port; NAT-PMP: the router gr")


# -- without a question --------------------------------------------------------------------------


def test_nobody_is_asked_for_a_port_that_nobody_needs() -> None:
    world = World(HomeRouter(), replace(HOME, own="9.9.9.9"))
    world.start()
    assert world.take() == [NotMapped("9.9.9.9 is not a private address", False)]
    assert world.take_sent() == []
    world.path = HOME
    world.run_until(RETRY_S + 1)
    assert world.take() == [PortMapped(forwarded())], "the machine has moved"


def test_no_way_to_the_master() -> None:
    mapper = PortMapper(lambda count: bytes(count))
    assert mapper.handle(StartMapping(PORT), 0) == [FindRouter()]
    assert mapper.handle(RouterMissing("no such name"), 0) == [NotMapped("no such name", False)]
    assert (mapper.due_ns, mapper.reason, mapper.was_asked) == (RETRY_S * S, "no such name", False)


# -- renewal -------------------------------------------------------------------------------------


def test_a_mapping_is_renewed_after_half_of_its_lifetime() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    world.run_until(3000)
    assert world.take() == []
    assert world.take_sent() == [(1000 * at_s, 2) for at_s in (0, 600, 1200, 1800, 2400, 3000)]
    assert len({bytes(data) for data in router.received}) == 1, "the nonce stays"


def test_a_shorter_lifetime_is_renewed_earlier() -> None:
    world = World(HomeRouter(lifetime_s=100))
    world.start()
    world.run_until(120)
    assert [at_ms for at_ms, _ in world.take_sent()] == [0, 50_000, 100_000]


def test_a_router_that_ends_to_answer_is_asked_until_the_mapping_has_expired() -> None:
    world = World(HomeRouter())
    world.start()
    world.take()
    world.take_sent()
    world.router = None
    world.run_until(1250)
    (told, failed) = world.take()
    assert told == PortUnmapped(
        forwarded(),
        "the router did not renew it (PCP: no answer)",
    )
    assert isinstance(failed, NotMapped)
    sent = world.take_sent()
    assert [at_ms for at_ms, _ in sent[:5]] == [600_000, 600_250, 600_750, 601_750, 901_875]
    assert len(sent) <= 45
    assert (world.mapper.forwarded, world.mapper.was_asked) == (None, True)


def test_a_router_that_answers_again_keeps_the_mapping() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    world.router = None
    world.run_until(700)
    world.router = router
    world.run_until(1500)
    assert world.take() == []
    assert world.mapper.forwarded == forwarded()


def test_another_port_or_address_is_told() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    router.host = "9.9.9.10"
    world.run_until(601)
    assert world.take() == [PortMapped(forwarded(host="9.9.9.10"))]
    router.ports, router.taken = {}, (PORT,)
    world.run_until(1201)
    assert world.take() == [PortMapped(forwarded(host="9.9.9.10", port=PORT + 1))]
    world.run_until(1801)
    assert router.received[-1][42:44] == (PORT + 1).to_bytes(2), "the port that it has"


def test_a_restarted_router_is_told() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    router.ports, world.booted_s = {}, 590
    world.run_until(601)
    assert world.take() == [PortMapped(forwarded())]
    assert router.ports == {PORT: PORT}
    world.run_until(1801)
    assert world.take() == []


def test_a_restarted_router_that_refuses_has_no_mapping_any_more() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    router.result, world.booted_s = 7, 590
    world.run_until(601)
    (lost, failed) = world.take()
    network = "it has no connection to the internet (network failure)"
    assert lost == PortUnmapped(forwarded(), f"the router was restarted (PCP: {network})")
    assert isinstance(failed, NotMapped)


def test_a_refused_renewal_is_repeated_while_the_mapping_lives() -> None:
    router = HomeRouter()
    world = World(router)
    world.start()
    world.take()
    router.result = 8
    world.run_until(601)
    assert world.take() == []
    assert world.mapper.due_ns == 900 * S
    router.result = 0
    world.run_until(901)
    assert world.take() == []
    assert world.mapper.due_ns == 1500 * S


def test_a_machine_that_moves_asks_the_new_router() -> None:
    world = World(HomeRouter())
    world.start()
    world.take()
    world.path = replace(HOME, router="10.0.0.1", own="10.0.0.7", own_inside="10.0.0.7")
    world.run_until(601)
    moved = "this machine is in another network now"
    assert world.take() == [PortUnmapped(forwarded(), moved), PortMapped(forwarded())]
    world.path = replace(world.path, own="9.9.9.9")
    world.run_until(1202)
    public = "9.9.9.9 is not a private address"
    assert world.take() == [PortUnmapped(forwarded(), public), NotMapped(public, False)]


def test_a_failed_look_up_ends_no_mapping_that_lives() -> None:
    mapper = PortMapper(lambda count: bytes(count))
    router = HomeRouter()
    mapper.handle(StartMapping(PORT), 0)
    (sent,) = mapper.handle(RouterFound(HOME), 0)
    assert isinstance(sent, SendDatagram)
    (answer,) = router.answers(sent.data)
    mapper.handle(RouterAnswered("192.168.1.1", 5351, answer), 0)
    assert mapper.handle(MapperTick(), 600 * S) == [FindRouter()]
    assert mapper.handle(RouterMissing("no such name"), 600 * S) == []
    assert (mapper.due_ns, mapper.forwarded) == (630 * S, forwarded())
    assert mapper.handle(MapperTick(), 1200 * S) == [
        PortUnmapped(forwarded(), "the router did not renew it (no such name)"),
        FindRouter(),
    ]


# -- answers of others ---------------------------------------------------------------------------


def test_foreign_answers_change_nothing() -> None:
    world = World(None)
    world.start()
    ((_, request),) = world.sent
    (good,) = HomeRouter().answers(request)
    (other,) = HomeRouter().answers(request[:24] + b"\1" + request[25:])
    before = world.mapper.due_ns
    for event in (
        RouterAnswered("192.168.1.66", 5351, good),  # another machine of the network
        RouterAnswered("192.168.1.1", 5350, good),
        RouterAnswered("192.168.1.1", 5351, good[:59]),
        RouterAnswered("192.168.1.1", 5351, other),  # the request of another process
        RouterFound(HOME),
        UpnpAnswered(PortGranted("8.8.4.4", 1, 9999, 0)),
        MapperTick(),
    ):
        world.feed(event)
    assert (world.take(), world.mapper.due_ns, world.mapper.forwarded) == ([], before, None)
    world.feed(RouterAnswered("192.168.1.1", 5351, good))
    assert world.take() == [PortMapped(forwarded())]
    world.feed(RouterAnswered("192.168.1.1", 5351, good))
    assert world.take() == []


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pcp", [True, False])
def test_the_end_deletes_the_mapping(pcp: bool) -> None:
    router = HomeRouter(pcp=pcp)
    world = World(router)
    world.start()
    (mapped,) = world.take()
    assert isinstance(mapped, PortMapped)
    world.feed(StopMapping())
    assert world.take() == [PortUnmapped(mapped.forwarded, "this peer is closed"), MappingClosed()]
    assert router.ports == {}
    count = len(router.received)
    world.feed(StopMapping())
    world.run_until(4000)
    assert (world.take(), len(router.received), world.mapper.due_ns) == ([], count, None)


def test_a_silent_router_delays_the_end_little() -> None:
    world = World(HomeRouter())
    world.start()
    world.take()
    world.take_sent()
    world.router = None
    world.feed(StopMapping())
    assert world.take() == [PortUnmapped(forwarded(), "this peer is closed")]
    world.run_until(0.74)
    assert world.take() == []
    world.run_until(0.75)
    assert world.take() == [MappingClosed()]
    assert [at_ms for at_ms, _ in world.take_sent()] == [0, 250]


def test_an_answer_on_the_way_is_deleted_too() -> None:
    world = World(None)
    world.start()
    ((_, request),) = world.sent
    router = HomeRouter()
    tuple(router.answers(request))
    assert router.ports == {PORT: PORT}
    world.router = router
    world.feed(StopMapping())
    assert world.take() == [MappingClosed()]
    assert router.ports == {}


def test_the_end_in_upnp() -> None:
    world = World(None)
    world.upnp = UpnpAnswered(PortGranted("8.8.4.4", PORT, LIFETIME_S, 0))
    world.start()
    world.run_until(2)
    world.take()
    world.upnp = UpnpAnswered(None)
    world.feed(StopMapping())
    assert world.asked[-1] == AskUpnp(HOME, PORT, PORT, 0, 1.0)
    closed = PortUnmapped(forwarded(MappingProtocol.UPNP), "this peer is closed")
    assert world.take() == [closed, MappingClosed()]


def test_a_late_renewal_is_no_answer_to_the_deletion() -> None:
    world = World(None)
    granted = PortGranted("8.8.4.4", PORT, LIFETIME_S, 0)
    world.upnp = UpnpAnswered(granted)
    world.start()
    world.run_until(2)
    world.take()
    world.upnp = UpnpAnswered(granted, "", LIFETIME_S)
    world.feed(StopMapping())
    closed = PortUnmapped(forwarded(MappingProtocol.UPNP), "this peer is closed")
    assert world.take() == [closed], "it waits for the deletion"
    world.feed(UpnpAnswered(None))
    assert world.take() == [MappingClosed()]


def test_the_end_without_a_mapping() -> None:
    mapper = PortMapper(lambda count: bytes(count))
    assert mapper.handle(StopMapping(), 0) == [MappingClosed()]
    assert mapper.handle(StartMapping(PORT), 0) == []
    mapper = PortMapper(lambda count: bytes(count))
    mapper.handle(StartMapping(PORT), 0)
    assert mapper.handle(StopMapping(), 0) == [MappingClosed()]
    assert mapper.handle(RouterFound(HOME), 0) == []
