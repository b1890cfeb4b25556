"""The machine of a reader: masters, sources, and what it fetches."""

from __future__ import annotations

import pytest

from pccl.machines.peer.events import (
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    DialControl,
    Send,
)
from pccl.machines.publication.reader import (
    AssembleVersion,
    DialSource,
    FetchState,
    RaiseToReader,
    ReaderEffect,
    ReaderEvent,
    ReaderMachine,
    ReaderTick,
    SetSources,
    ShowVersion,
    SourceLinked,
    StateFetched,
    VersionAssembled,
)
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.certificates import NO_CERTIFICATE
from pccl.protocol.limits import Timing
from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.protocol.types import NS_PER_S, Member, PeerId, RemovalCause

TIMING = Timing()
MEMBER = Member(PeerId(1), "h", 7)


def state(number: int) -> StateName:
    return StateName(b"layout", b"content %d" % number)


def delta(number: int, nbytes: int = 1) -> VersionDelta:
    """The delta from the version before ``number`` to it."""
    name = StateName(b"deltas", b"delta %d" % number)
    return VersionDelta(state(number - 1).content, state(number).content, name, nbytes)


def version(number: int, *deltas: int, nbytes: int = 1) -> PublishedVersion:
    chain = tuple(delta(one, nbytes) for one in deltas)
    return PublishedVersion(number, state(number), 100, None, chain)


class Stage:
    """A reader, and its clock."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.machine = ReaderMachine(TIMING, 3, 9000, "", "me", 0)

    def do(self, event: ReaderEvent) -> list[ReaderEffect]:
        return self.machine.handle(event, self.now_ns)

    def hear(self, message: msg.Message) -> list[ReaderEffect]:
        return self.do(ControlMessage(message))

    def tick(
        self, seconds: float = 0.0, *, begun: bool = True, starves: bool = False
    ) -> list[ReaderEffect]:
        self.now_ns += round(seconds * NS_PER_S)
        return self.do(ReaderTick(begun, starves))

    def learn(self, current: PublishedVersion | None, *members: Member) -> list[ReaderEffect]:
        effects = self.hear(msg.CurrentVersion(current, members))
        return [one for one in effects if not isinstance(one, SetSources | DialSource)]

    def read(self, number: int) -> None:
        """Get to a version as a whole."""
        wanted = version(number)
        assert self.learn(wanted) == [FetchState(wanted.state, 100, False, True)]
        assert self.do(StateFetched(wanted.state, True)) == [AssembleVersion(wanted, ())]
        assert self.do(VersionAssembled(wanted, True)) == [ShowVersion(wanted)]


@pytest.fixture(name="reader")
def make_reader() -> Stage:
    stage = Stage()
    hosts = ("10.0.0.7",)
    subscribe = msg.Subscribe(3, 9000, "", hosts, "me")
    assert stage.do(ControlOpened(b"", 0, hosts)) == [Send(subscribe)]
    stage.hear(msg.Subscribed(PeerId(9), 2, b"run", NO_CERTIFICATE))
    return stage


def test_it_says_what_it_waits_for(reader: Stage) -> None:
    assert reader.machine.waits_for.startswith("no version has been published by more than half")
    reader.learn(version(1))
    assert reader.machine.waits_for == "version 1 is being fetched"
    reader.do(StateFetched(state(1), True))
    reader.do(VersionAssembled(version(1), True))
    assert reader.machine.waits_for == "version 1 is still the newest"
    reader.learn(version(1))  # its sources have changed
    assert reader.machine.waits_for == "version 1 is still the newest"


def test_it_fetches_a_whole_version_first_and_then_deltas(reader: Stage) -> None:
    assert (reader.machine.peer, reader.machine.run, reader.machine.term) == (9, b"run", 2)
    reader.read(1)
    wanted = version(3, 2, 3)
    assert reader.learn(wanted) == [FetchState(delta(2).state, 1, True, True)]
    assert reader.do(StateFetched(delta(2).state, True)) == [
        FetchState(delta(3).state, 1, True, False)
    ]
    assembled = [AssembleVersion(wanted, (delta(2), delta(3)))]
    assert reader.do(StateFetched(delta(3).state, True)) == assembled
    assert reader.do(VersionAssembled(wanted, True)) == [ShowVersion(wanted)]
    assert reader.machine.held == wanted


@pytest.mark.parametrize(
    "wanted", [version(3, 3), version(2, 2, nbytes=60), version(3, 1, 2), version(2)]
)
def test_without_a_cheap_chain_it_fetches_the_whole(
    reader: Stage, wanted: PublishedVersion
) -> None:
    reader.read(1)
    assert reader.learn(wanted) == [FetchState(wanted.state, 100, False, True)]


def test_the_same_contents_need_no_fetch(reader: Stage) -> None:
    reader.read(1)
    again = PublishedVersion(8, state(1), 100)
    assert reader.learn(again) == [AssembleVersion(again, ())]
    assert reader.learn(version(1)) == []


def test_deltas_that_lead_elsewhere_are_not_fetched_again(reader: Stage) -> None:
    reader.read(1)
    wanted = version(2, 2)
    reader.learn(wanted)
    reader.do(StateFetched(delta(2).state, True))
    whole = [FetchState(wanted.state, 100, False, True)]
    assert reader.do(VersionAssembled(wanted, False)) == whole


def test_a_delta_that_is_none_is_left(reader: Stage) -> None:
    reader.read(1)
    reader.learn(version(2, 2))
    whole = [FetchState(state(2), 100, False, True)]
    assert reader.do(StateFetched(delta(2).state, False)) == whole


def test_it_goes_on_with_what_it_has_begun_while_a_source_has_it(reader: Stage) -> None:
    reader.learn(version(1))
    assert reader.learn(version(2)) == []
    assert reader.tick() == []
    assert reader.tick(starves=True) == [FetchState(state(2), 100, False, True)]
    assert reader.do(StateFetched(state(1), True)) == []  # of the one that it has left


def test_it_leaves_at_once_what_has_no_piece_yet(reader: Stage) -> None:
    reader.learn(version(1))
    reader.learn(version(2))
    assert reader.tick(begun=False) == [FetchState(state(2), 100, False, True)]


def test_a_delta_that_no_source_has_is_left_for_the_whole(reader: Stage) -> None:
    reader.read(1)
    reader.learn(version(2, 2))
    assert reader.tick(starves=True) == [FetchState(state(2), 100, False, True)]
    assert reader.tick(starves=True) == []  # there is no other way


def test_a_whole_that_is_none_waits_for_another_version(reader: Stage) -> None:
    reader.learn(version(1))
    assert reader.do(StateFetched(state(1), False)) == []
    assert reader.learn(version(2)) == [FetchState(state(2), 100, False, True)]


def test_it_dials_sources_again_after_pauses_that_double(reader: Stage) -> None:
    effects = reader.hear(msg.CurrentVersion(None, (MEMBER,)))
    assert effects == [SetSources((PeerId(1),), 0, 1), DialSource(MEMBER)]
    assert reader.tick(1) == [Send(msg.ReaderLives())]  # the dial goes on
    pauses: list[float] = []
    for _ in range(8):
        reader.do(SourceLinked(PeerId(1), up=False))
        began_ns = reader.now_ns
        while DialSource(MEMBER) not in reader.tick(0.125):
            reader.hear(msg.MasterHeartbeat())
        pauses.append((reader.now_ns - began_ns) / NS_PER_S)
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
    reader.do(SourceLinked(PeerId(1), up=True))
    assert DialSource(MEMBER) not in reader.tick(20)


def test_it_leaves_a_source_alone_that_closes_its_links_at_once(reader: Stage) -> None:
    """A member that has enough readers completes the handshake, and then closes the link."""
    reader.hear(msg.CurrentVersion(None, (MEMBER,)))
    pauses: list[float] = []
    for lived_s in (0, 0, 0, 0, 0, 0, 0, 1, 8):
        reader.do(SourceLinked(PeerId(1), up=True))
        assert DialSource(MEMBER) not in reader.tick(lived_s)
        reader.do(SourceLinked(PeerId(1), up=False))
        began_ns = reader.now_ns
        while DialSource(MEMBER) not in reader.tick(0.125):
            reader.hear(msg.MasterHeartbeat())
        pauses.append((reader.now_ns - began_ns) / NS_PER_S)
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 8, 8, 0.25]


def test_it_looks_for_another_master_and_keeps_its_sources(reader: Stage) -> None:
    reader.learn(version(1), MEMBER)
    assert reader.do(ControlClosed("lost")) == [DialControl(NS_PER_S)]
    assert "lost" in reader.machine.waits_for
    assert reader.do(StateFetched(state(1), True)) == [AssembleVersion(version(1), ())]
    reader.do(ControlOpened(b"", 0))
    reason = "the connection is open, but the master sends nothing"
    effects = reader.tick(TIMING.deadline_s)
    assert {CloseControl(reason), DialControl(NS_PER_S)} <= set(effects)


def test_a_refusal_is_final_only_if_no_master_could_help(reader: Stage) -> None:
    later = reader.hear(msg.Refused(None, "no run"))
    assert later == [CloseControl("no run"), DialControl(NS_PER_S)]
    first, closing = reader.hear(msg.Refused(None, "the token is wrong"))  # before a connection
    assert isinstance(first, RaiseToReader)
    assert first.error.reason == "the token is wrong"
    assert closing == CloseControl("the token is wrong")
    other = Stage()
    other.do(ControlOpened(b"", 0))
    expelled = other.hear(msg.Refused(RemovalCause.EXPELLED, "expelled"))
    assert [type(one) for one in expelled] == [RaiseToReader, CloseControl]


def test_what_no_master_says_to_a_reader(reader: Stage) -> None:
    with pytest.raises(RemoteProtocolError, match="unexpected Resumed"):
        reader.hear(msg.Resumed(1))
