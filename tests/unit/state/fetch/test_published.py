"""What a reader fetches: whom it asks for the layout and the map, and what it believes."""

from __future__ import annotations

from pccl.protocol.data_type import DataType
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap, layout_digest, piece_digest
from pccl.state.fetch.maps import MapRequest
from pccl.state.fetch.published import LayoutRequest, PublishedTarget
from pccl.state.fetch.target import Present
from pccl.state.layout import Entry, StateLayout

ONE, TWO, THREE = PeerId(1), PeerId(2), PeerId(3)
LAYOUT = StateLayout([Entry("a", DataType.UINT8, 10), Entry("b", DataType.UINT8, 3)])
STALL_NS = 100


def present(now_ns: int = 0, *up: PeerId) -> Present:
    return Present(now_ns, {peer: peer in (up or (ONE, TWO, THREE)) for peer in (ONE, TWO, THREE)})


def piece_map(content: bytes) -> PieceMap:
    made = PieceMap(LAYOUT)
    for number in range(2):
        made[number] = piece_digest(content)
    return made


def target() -> PublishedTarget:
    made = PublishedTarget(piece_map(b"right").digest(may_differ=False), PeerId(9))
    made.holders, made.readers = (ONE, TWO), (THREE,)
    return made


def test_layouts_are_asked_of_one_after_the_other() -> None:
    request = LayoutRequest(layout_digest(LAYOUT), STALL_NS)
    sources = (ONE, TWO, THREE)
    assert request.next(sources, present()) == ONE
    assert request.next(sources, present(STALL_NS - 1)) is None
    assert request.next(sources, present(STALL_NS)) == TWO
    assert request.awaits(ONE)
    assert request.awaits(TWO)
    request.refused(TWO)
    assert request.next(sources, present(STALL_NS, TWO, THREE)) == THREE
    request.lost(THREE)
    assert request.next(sources, present(STALL_NS, TWO)) is None
    request.ticked()
    assert request.next(sources, present(STALL_NS, TWO)) == TWO


def test_layouts_are_asked_of_all_peers_before_the_first_is_asked_again() -> None:
    """However often the clock ticks meanwhile: else a far one that has it might never be asked."""
    request = LayoutRequest(layout_digest(LAYOUT), STALL_NS)
    asked: list[PeerId | None] = []
    for now_ns in range(8):
        request.ticked()
        asked.append(peer := request.next((ONE, TWO, THREE), present(now_ns)))
        if peer is not None:
            request.refused(peer)
    assert asked == [ONE, TWO, THREE, None] * 2
    assert request.starving_since_ns == 3


def test_a_source_that_came_later_gets_time_to_send_the_layout() -> None:
    request = LayoutRequest(layout_digest(LAYOUT), STALL_NS)
    nobody = Present(0, dict.fromkeys((ONE, TWO), False))
    assert request.next((ONE, TWO), nobody) is None
    assert request.starving_since_ns == 0
    assert request.next((ONE, TWO), present(90, ONE)) == ONE
    assert request.starving_since_ns is None
    request.refused(ONE)
    assert request.next((ONE, TWO), present(95, ONE)) is None
    request.ticked()
    assert request.next((ONE, TWO), present(96, ONE)) == ONE
    assert request.starving_since_ns == 95, "it has refused before"


def test_only_the_right_layout_counts() -> None:
    request = LayoutRequest(layout_digest(LAYOUT), STALL_NS)
    assert request.next((ONE, TWO), present()) == ONE
    other = StateLayout([Entry("a", DataType.UINT8, 11)])
    assert request.take(ONE, other.pack()) is None
    assert not request.awaits(ONE)
    assert request.next((ONE, TWO), present()) == TWO
    assert request.take(TWO, b"no layout") is None
    request.ticked()
    found = request.take(ONE, LAYOUT.pack())
    assert found is not None
    assert found.entries == LAYOUT.entries


def test_one_source_at_a_time_is_asked_for_the_map() -> None:
    fetch = target()
    assert fetch.sources() == (TWO, ONE, THREE)  # each reader begins with another member
    assert fetch.next_maps({}, present()) == [TWO]
    asked = {TWO: MapRequest(LAYOUT, 0)}
    assert fetch.next_maps(asked, present()) == []
    assert asked[TWO].look(STALL_NS, STALL_NS)
    assert fetch.next_maps(asked, present()) == [ONE]
    fetch.has_no_map(ONE)
    assert fetch.next_maps(asked, present()) == [THREE]
    fetch.has_no_map(THREE)
    assert fetch.next_maps(asked, present()) == []
    fetch.ticked(present(), looks_again=False)
    assert fetch.next_maps(asked, present()) == [ONE]


def test_all_are_asked_for_the_map_before_the_first_is_asked_again() -> None:
    """However often the clock ticks meanwhile."""
    fetch = target()
    asked: list[list[PeerId]] = []
    for _ in range(8):
        fetch.ticked(present(), looks_again=False)
        asked.append(peers := fetch.next_maps({}, present()))
        for peer in peers:
            fetch.has_no_map(peer)
    assert asked == [[TWO], [ONE], [THREE], []] * 2


def test_a_wrong_map_is_not_believed_and_its_sender_soon_not_asked() -> None:
    fetch = target()
    for _ in range(3):
        assert fetch.take_map(TWO, piece_map(b"wrong"), idle=True) is None
        fetch.ticked(present(), looks_again=False)
    assert fetch.next_maps({}, present(0, TWO)) == []
    right = piece_map(b"right")
    assert fetch.take_map(THREE, right, idle=True) is right
    assert not fetch.lacks_map
    assert fetch.next_maps({}, present()) == []
    assert fetch.take_map(ONE, right, idle=True) is None


def test_members_have_all_and_readers_what_they_announce() -> None:
    fetch = target()
    assert [fetch.offers(peer)[0] for peer in (ONE, TWO, THREE)] == [True, True, False]
    assert fetch.fetchers == (THREE, PeerId(9))
    assert fetch.has_hope(present(0, ONE), fetching=True)
    assert not fetch.has_hope(present(), fetching=True)
