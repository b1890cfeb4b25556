"""The part of the master: which version counts, and what readers are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pccl.machines.master.events import CloseConnection, ConnectionClosed, ConnectionOpened, SendTo
from pccl.protocol import messages as msg
from pccl.protocol.limits import HOLDERS_TOLD_MAX
from pccl.protocol.publication.versions import PublishedVersion, StateName, VersionDelta
from pccl.protocol.types import PeerId
from tests.support.master_stage import SECOND, MasterStage
from tests.support.scenarios import key, roster

READER = 80


def version(number: int, content: bytes = b"c", deltas: int = 0) -> PublishedVersion:
    state = StateName(b"layout", content)
    delta = VersionDelta(b"before", content, StateName(b"dl", b"dc"), 5)
    return PublishedVersion(number, state, 100, None, (delta,) * deltas)


def publish(master: MasterStage, peer: int, *versions: PublishedVersion) -> list[object]:
    """A member publishes. Return what is sent then, and at the next tick."""
    return [*master.hear(peer, msg.AnnounceVersions(versions)), *master.wait(0.25)]


def subscribe(master: MasterStage, reader: int = READER, group: int = 0) -> list[msg.Message]:
    master.do(ConnectionOpened(reader, f"10.0.1.{reader % 256}", key(reader)))
    return sent(master.hear(reader, msg.Subscribe(group, 9000)), reader)


def sent(effects: Sequence[object], connection: int = READER) -> list[msg.Message]:
    return [
        effect.message
        for effect in effects
        if isinstance(effect, SendTo) and effect.connection == connection
    ]


def numbers(messages: list[msg.Message]) -> list[int | None]:
    told = [one for one in messages if isinstance(one, msg.CurrentVersion)]
    return [None if one.version is None else one.version.number for one in told]


@pytest.fixture(name="master")
def make_master() -> MasterStage:
    return MasterStage().new(3)


def test_a_reader_gets_an_id_and_is_no_member(master: MasterStage) -> None:
    first, then = subscribe(master)
    assert isinstance(first, msg.Subscribed)
    assert (first.peer, first.run) == (PeerId(4), master.machine.run)
    assert then == msg.CurrentVersion(None, (), (), 0, 1)
    assert len(master.machine.membership.peers) == 3
    assert not master.machine.membership.pending()


def test_a_version_counts_with_more_than_half(master: MasterStage) -> None:
    subscribe(master)
    assert numbers(sent(publish(master, 1, version(5)))) == []
    (told,) = sent(publish(master, 2, version(5)))
    assert isinstance(told, msg.CurrentVersion)
    assert told.version == version(5)
    assert [member.peer for member in told.holders] == [1, 2]
    (told,) = sent(publish(master, 3, version(5)))
    assert isinstance(told, msg.CurrentVersion)
    assert len(told.holders) == 3


@pytest.mark.parametrize(
    "other",
    [
        version(5, b"x"),
        version(6),
        replace(version(5), state=StateName(b"another", b"c")),
        replace(version(5), nbytes=1),
    ],
)
def test_members_must_agree_on_all_of_it(master: MasterStage, other: PublishedVersion) -> None:
    subscribe(master)
    publish(master, 1, version(5))
    assert sent(publish(master, 2, other)) == []
    assert master.machine.publications.current(0) is None


def test_one_member_cannot_give_a_version_another_size(master: MasterStage) -> None:
    """Readers would find that the layout does not fit, and take the version for nonsense."""
    publish(master, 1, replace(version(5), nbytes=1))
    publish(master, 2, version(5))
    publish(master, 3, version(5))
    assert master.machine.publications.current(0) == version(5)


def test_members_that_are_a_version_apart_agree_on_the_older(master: MasterStage) -> None:
    subscribe(master)
    publish(master, 1, version(5), version(4))
    assert numbers(sent(publish(master, 2, version(4)))) == [4]
    assert numbers(sent(publish(master, 3, version(5), version(4)))) == [5]


def test_the_most_common_deltas_are_told(master: MasterStage) -> None:
    publish(master, 1, version(5, deltas=0))
    publish(master, 2, version(5, deltas=1))
    publish(master, 3, version(5, deltas=1))
    assert master.machine.publications.current(0) == version(5, deltas=1)


def test_a_version_stays_when_its_members_leave(master: MasterStage) -> None:
    subscribe(master)
    publish(master, 1, version(5))
    publish(master, 2, version(5))
    publish(master, 3, version(4))
    master.hear(1, msg.Goodbye())
    told = sent(master.wait(1))
    current = [one for one in told if isinstance(one, msg.CurrentVersion)]
    assert current[-1].version == version(5)
    assert [member.peer for member in current[-1].holders] == [2]


def test_only_members_publish(master: MasterStage) -> None:
    subscribe(master)
    effects = master.hear(READER, msg.AnnounceVersions((version(9),)))
    assert sent(effects) == []  # the codec refuses it before
    assert master.machine.publications.current(0) is None


def test_what_one_process_sends_causes_no_message_to_each_reader(master: MasterStage) -> None:
    readers = range(100, 150)
    for reader in readers:
        master.do(ConnectionOpened(reader, "10.0.1.1", key(reader)))
        effects = master.hear(reader, msg.Subscribe(0, 9000))
        assert len(effects) == len(sent(effects, reader)) == 2
    for number in range(1, 4):
        for peer in (1, 2, 3):
            assert master.hear(peer, msg.AnnounceVersions((version(number),))) == []
    effects = master.wait(0.25)
    assert [numbers(sent(effects, reader)) for reader in readers] == [[3]] * 50


def test_readers_are_told_a_few_members_and_older_readers(master: MasterStage) -> None:
    master = MasterStage().new(7)
    for peer in range(1, 8):
        publish(master, peer, version(1))
    told: list[msg.Message] = []
    for reader in range(100, 140):
        told = subscribe(master, reader)
    last = told[-1]
    assert isinstance(last, msg.CurrentVersion)
    assert len(last.holders) == HOLDERS_TOLD_MAX
    mine = 7 + 40
    assert [mine - one.peer for one in last.readers] == [1, 2, 3, 4, 5, 6, 8, 16, 32]
    assert (last.rank, last.count) == (39, 40)


def test_a_silent_reader_is_forgotten_and_one_that_lives_is_not(master: MasterStage) -> None:
    subscribe(master)
    subscribe(master, READER + 1)
    closed: list[object] = []
    for _ in range(25):
        for peer in (1, 2, 3):
            master.hear(peer, msg.Heartbeat())
        master.hear(READER + 1, msg.ReaderLives())
        closed += [one for one in master.wait(1) if isinstance(one, CloseConnection)]
    assert closed == [CloseConnection(READER, "the reader is silent")]
    assert master.machine.publications.is_reader(READER + 1)
    master.do(ConnectionClosed(READER + 1, "gone"))
    assert not master.machine.publications.is_reader(READER + 1)


def test_a_master_without_a_run_refuses() -> None:
    master = MasterStage().restarted()
    (refusal,) = subscribe(master)
    assert isinstance(refusal, msg.Refused)
    assert refusal.reason.startswith("this master coordinates no run: ")


def test_what_members_announce_when_their_run_is_taken_up_is_kept() -> None:
    """They say it as soon as the master knows them, before its next tick."""
    master = MasterStage().blank()
    subscribe(master)
    known = (roster(7, 4, 1, 2),)
    for peer in (1, 2):
        master.come(peer, known=known)
    for peer in (1, 2):
        publish(master, peer, version(5))
    master.wait(0.25)
    assert not master.machine.publications.is_reader(READER), "it subscribes again"
    assert numbers(subscribe(master, READER + 1)) == [5]


def test_groups_publish_apart(master: MasterStage) -> None:
    publish(master, 1, version(5))
    publish(master, 2, version(5))
    assert numbers(subscribe(master, group=1)) == [None]
    assert SECOND > 0
