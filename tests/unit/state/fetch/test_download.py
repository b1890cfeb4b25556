"""One download: what it tells the other fetchers, and what it forgets."""

from __future__ import annotations

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import DIGEST_BYTES, Elected
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.download import AnnouncePieces, Decision, Download, DownloadDone
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

    def know(self, here: tuple[int, ...]) -> list[Decision]:
        """The map comes; these pieces are left of an attempt before."""
        digests = bytearray(self.theirs.part(range(PIECES)))
        self.download.map_came(SOURCE, 0, PIECES, digests, self.present)
        return self.download.staged(here, self.present)


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
