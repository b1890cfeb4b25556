"""Whatever a router and others answer: few packets, no foreign answer counts, and an end."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.port_mapper import (
    LIFETIME_S_MIN,
    AskUpnp,
    FindRouter,
    MapperEvent,
    MapperPhase,
    MapperTick,
    MappingClosed,
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
from pccl.machines.router_path import ForwardedPort, RouterPath
from pccl.protocol.port_mapping.answers import PortGranted
from tests.support.home_router import HomeRouter

S = 1_000_000_000
PORT = 48200
HOMES = [
    RouterPath("192.168.1.7", "8.8.8.8", "192.168.1.1", "192.168.1.7"),
    RouterPath("10.0.0.7", "8.8.8.8", "10.0.0.1", "10.0.0.7"),
    RouterPath("9.9.9.9", "8.8.8.8", "9.9.9.1", "9.9.9.9"),
]
DATAGRAMS_MAX = 8
"""In one attempt: four renewals of NAT-PMP, each for the port and for the address."""


@dataclass
class Answer:
    """What the router answers to the last datagram."""

    router: HomeRouter


GRANTS = st.builds(
    PortGranted, st.text(max_size=9), st.integers(0, 65535), st.integers(0), st.just(0)
)
EVENTS = st.one_of(
    st.builds(RouterFound, st.sampled_from(HOMES)),
    st.builds(RouterMissing, st.text(max_size=9)),
    st.builds(
        RouterAnswered, st.sampled_from(["192.168.1.1", "192.168.1.66"]), st.just(5351),
        st.binary(max_size=64),
    ),
    st.just(RouterRefused()),
    st.builds(UpnpAnswered, st.none() | GRANTS, st.text(max_size=9)),
    st.just(MapperTick()),
    st.just(StartMapping(PORT)),
    st.builds(
        Answer,
        st.builds(
            HomeRouter, pcp=st.booleans(), nat_pmp=st.booleans(), result=st.sampled_from([0, 0, 2]),
            lifetime_s=st.integers(0, 3000), epoch_s=st.integers(0, 5000),
        ),
    ),
)  # fmt: skip
STEPS = st.lists(st.tuples(st.integers(0, 700 * S), EVENTS), max_size=20)


class Watch:
    """A mapper, and what must hold of its effects."""

    def __init__(self) -> None:
        self.mapper = PortMapper(lambda count: bytes(count))
        self.now_ns = 0
        self.finds = 0
        self.datagrams = 0
        """Since the last ``FindRouter``."""
        self.last = b""
        self.forwarded: ForwardedPort | None = None
        self.closed = 0

    def feed(self, event: MapperEvent) -> None:
        for effect in self.mapper.handle(event, self.now_ns):
            match effect:
                case FindRouter():
                    self.finds += 1
                    self.datagrams = 0
                case SendDatagram(host, port, data):
                    assert (host, port) in [(home.router, 5351) for home in HOMES[:2]]
                    self.datagrams += 1
                    self.last = data
                case AskUpnp(path, port, outer, lifetime_s):
                    assert path in HOMES[:2]
                    assert port == PORT
                    assert outer
                    assert lifetime_s in (0, 1200)
                case PortMapped(forwarded):
                    assert forwarded.port
                    self.forwarded = forwarded
                case PortUnmapped(forwarded):
                    assert forwarded == self.forwarded
                    self.forwarded = None
                case MappingClosed():
                    self.closed += 1
                case _:
                    pass
        assert self.mapper.forwarded == self.forwarded
        assert self.datagrams <= DATAGRAMS_MAX + 2  # and two to delete the mapping

    def run_until(self, until_ns: int) -> None:
        while self.mapper.due_ns is not None and self.mapper.due_ns <= until_ns:
            self.now_ns = max(self.now_ns, self.mapper.due_ns)
            self.feed(MapperTick())
        self.now_ns = max(self.now_ns, until_ns)


@given(steps=STEPS)
def test_few_packets_and_an_end(steps: list[tuple[int, MapperEvent | Answer]]) -> None:
    watch = Watch()
    watch.feed(StartMapping(PORT))
    for pause_ns, event in steps:
        watch.run_until(watch.now_ns + pause_ns)
        if isinstance(event, Answer):
            for data in event.router.answers(watch.last) if watch.last else ():
                for home in HOMES[:2]:
                    watch.feed(RouterAnswered(home.router, 5351, data))
        else:
            watch.feed(event)
    shortest_ns = LIFETIME_S_MIN * S // 2
    assert watch.finds <= 2 + 2 * (watch.now_ns // shortest_ns)
    watch.feed(StopMapping())
    assert watch.forwarded is None
    watch.run_until(watch.now_ns + 2 * S)
    assert (watch.closed, watch.mapper.phase) == (1, MapperPhase.CLOSED)
    watch.feed(StopMapping())
    assert watch.closed == 1


@given(
    host=st.sampled_from(["192.168.1.1", "192.168.1.66"]),
    port=st.sampled_from([5351, 5350]),
    data=st.binary(max_size=80),
    by=st.integers(1, 255),
    at=st.integers(24, 36),
)
def test_foreign_answers_change_nothing(
    host: str, port: int, data: bytes, by: int, at: int
) -> None:
    watch = Watch()
    watch.feed(StartMapping(PORT))
    watch.feed(RouterFound(HOMES[0]))
    (good,) = HomeRouter().answers(watch.last)
    bad = bytearray(good)
    bad[at] ^= by
    due_ns, sent = watch.mapper.due_ns, watch.datagrams
    is_old = data[:1] == b"\0" and struct.unpack(">H", data[2:4].rjust(2, b"\0")) == (1,)
    for answer in (bytes(bad), b"" if is_old else data):
        watch.feed(RouterAnswered(host, port, answer))
    if (host, port) != ("192.168.1.1", 5351):
        watch.feed(RouterAnswered(host, port, good))
    assert (watch.mapper.due_ns, watch.datagrams, watch.forwarded) == (due_ns, sent, None)
    watch.feed(RouterAnswered("192.168.1.1", 5351, good))
    assert watch.forwarded is not None
