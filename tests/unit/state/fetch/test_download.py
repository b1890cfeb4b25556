"""One download: what it tells the other fetchers, and what it forgets."""

from __future__ import annotations

import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import DIGEST_BYTES, Elected
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.download import (
    AnnouncePieces,
    Decision,
    Download,
    DownloadDone,
    DownloadFailed,
)
from pccl.state.fetch.pieces import Ask
from pccl.state.fetch.target import ElectedTarget, Present
from pccl.state.layout import Entry, StateLayout

OWN, SOURCE, FETCHER = PeerId(1), PeerId(2), PeerId(3)
RING = (OWN, SOURCE, FETCHER)
PIECES = 4
STALL_NS = 100
LAYOUT = StateLayout([Entry("w", DataType.UINT8, PIECES * 10)], 10)


def map_of(value: int) -> PieceMap:
    digests = PieceMap(LAYOUT)
    for number in range(PIECES):
        digests[number] = bytes([number, value]) * (DIGEST_BYTES // 2)
    return digests


class Scene:
    """A member that lacks what ``SOURCE`` has, as ``FETCHER`` does."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.links = {SOURCE: True, FETCHER: True}
        self.mine, self.theirs = map_of(1), map_of(2)
        self.download = Download(self.mine, OWN, stall_ns=STALL_NS)
        self.download.begin(self.target(), self.present)

    @property
    def present(self) -> Present:
        return Present(self.now_ns, dict(self.links))

    def target(self) -> ElectedTarget:
        digests = {kind: self.theirs.digest(may_differ=kind) for kind in (False, True)}
        behind = (OWN, FETCHER)
        elected = Elected(1, b"", digests[False], (SOURCE,), behind, behind, digests[True])
        return ElectedTarget(elected, OWN, RING, self.mine)

    def begin_again(self) -> list[Decision]:
        """Another election has the same outcome."""
        return self.download.begin(self.target(), self.present)

    def know(self, here: tuple[int, ...] = (), source: PeerId = SOURCE) -> list[Decision]:
        """The map comes; these pieces are left of an attempt before."""
        digests = bytearray(self.theirs.part(range(PIECES)))
        self.download.map_came(source, 0, PIECES, digests, self.present)
        return self.download.staged(here, self.present)

    def lose(self, peer: PeerId) -> None:
        self.links[peer] = False
        self.download.link_changed(peer, self.present, up=False)

    def arrive(self, number: int) -> None:
        self.download.arrived(SOURCE, number, self.theirs[number], self.present)

    def fails_at(self, now_ns: int) -> bool:
        self.now_ns = now_ns
        found = self.download.tick(self.present)
        return any(isinstance(one, DownloadFailed) for one in found)


def told(decisions: list[Decision]) -> list[tuple[tuple[PeerId, ...], tuple[int, ...]]]:
    return [(one.peers, one.pieces) for one in decisions if isinstance(one, AnnouncePieces)]


def test_pieces_that_are_left_of_an_attempt_before_are_announced() -> None:
    assert told(Scene().know((0, 2))) == [((FETCHER,), (0, 2))]


def test_they_are_announced_if_they_are_all() -> None:
    found = Scene().know((0, 1, 2, 3))
    assert told(found) == [((FETCHER,), (0, 1, 2, 3))]
    assert DownloadDone() in found


def test_a_fetcher_whose_link_comes_up_hears_of_them_when_all_is_here() -> None:
    scene = Scene()
    scene.links[FETCHER] = False
    assert told(scene.know((0, 1, 2, 3))) == []
    scene.links[FETCHER] = True
    found = scene.download.link_changed(FETCHER, scene.present, up=True)
    assert told(found) == [((FETCHER,), (0, 1, 2, 3))]


@pytest.mark.parametrize("begins_after", [False, True])
def test_news_of_a_fetcher_count_also_if_it_began_earlier(begins_after: bool) -> None:
    """The master's word reaches one fetcher before the other; news are sent once."""
    scene = Scene()
    scene.lose(SOURCE)
    scene.download.has(FETCHER, [1], scene.present)
    if begins_after:
        scene.begin_again()
    asks = [one for one in scene.know(source=FETCHER) if isinstance(one, Ask)]
    assert asks == [Ask(FETCHER, (1,))]


def test_pieces_that_came_before_another_election_are_announced_once() -> None:
    scene = Scene()
    scene.know()
    scene.arrive(1)
    scene.begin_again()
    assert told(scene.download.tick(scene.present)) == []
    assert told(scene.know((1,))) == [((FETCHER,), (1,))]
    assert told(scene.download.tick(scene.present)) == []


def test_who_is_done_announces_its_pieces_again_after_another_election() -> None:
    scene = Scene()
    scene.know((0, 1, 2, 3))
    assert told(scene.begin_again()) == [((FETCHER,), (0, 1, 2, 3))]


def test_another_election_has_a_stall_of_its_own_to_find_sources() -> None:
    scene = Scene()
    scene.know()
    scene.lose(SOURCE)
    scene.lose(FETCHER)
    scene.now_ns = 60
    scene.begin_again()
    assert not scene.fails_at(60 + STALL_NS - 1)
    assert scene.fails_at(60 + STALL_NS)


def test_who_knows_the_map_at_last_has_a_stall_to_find_pieces() -> None:
    scene = Scene()
    scene.lose(SOURCE)
    scene.download.refused(FETCHER, [], scene.present)
    assert not scene.fails_at(1)  # it is asked again
    scene.now_ns = 60
    scene.know(source=FETCHER)
    assert not scene.fails_at(60 + STALL_NS - 1)
    assert scene.fails_at(60 + STALL_NS)


def test_the_map_of_an_election_before_is_not_shown_for_that_of_this_one() -> None:
    scene = Scene()
    scene.know()
    assert scene.download.map is not None
    scene.begin_again()
    assert scene.download.map is None
