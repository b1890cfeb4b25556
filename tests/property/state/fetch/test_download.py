"""A download in any world: peers die, come back, stall, lie and refuse, in any order.

It ends with everything if and only if every piece can be had from a peer that lives, and what it
asks for meanwhile stays within bounds.
"""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.data_type import DataType
from pccl.protocol.shared_state import DIGEST_BYTES, Elected
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.fetch.download import (
    AnnouncePieces,
    AskMap,
    Decision,
    Download,
    DownloadDone,
    DownloadFailed,
    KeepPiece,
    PiecesComplete,
    StagePieces,
)
from pccl.state.fetch.pieces import Ask
from pccl.state.fetch.published import Target
from pccl.state.fetch.source import OUTSTANDING_MAX, STRIKES_MAX, WINDOW_MAX_BYTES
from pccl.state.fetch.target import ElectedTarget, Present, ShownTarget
from pccl.state.layout import Entry, StateLayout

OWN = PeerId(1)
PEERS = tuple(PeerId(number) for number in (2, 3, 4))
PIECE_BYTES = 1000
PIECES = 12
SHARED = 9
"""Pieces that must be equal; the others may differ."""
STALL_NS = 1_000_000_000
LAYOUT = StateLayout(
    [
        Entry("w", DataType.UINT8, SHARED * PIECE_BYTES - 1),
        Entry("own", DataType.UINT8, (PIECES - SHARED) * PIECE_BYTES, may_differ=True),
    ],
    PIECE_BYTES,
)


def digest_of(number: int, value: int) -> bytes:
    return bytes([number, value]) * (DIGEST_BYTES // 2)


def map_of(value: int, same: int = 0) -> PieceMap:
    """Of contents that are everywhere the same in the first ``same`` pieces."""
    digests = PieceMap(LAYOUT)
    for number in range(PIECES):
        digests[number] = digest_of(number, 0 if number < same else value)
    return digests


class World:
    """Peers that hold ``theirs``, all of it or some pieces, and what the download says to them."""

    def __init__(self, rng: Random, target: str) -> None:
        self.rng = rng
        self.now_ns = 0
        self.mine, self.theirs = map_of(1, same=3), map_of(2, same=3)
        self.up = dict.fromkeys(PEERS, True)
        self.holds = {peer: set(range(PIECES)) for peer in PEERS}
        self.wrong = dict.fromkeys(PEERS, 0)
        """Pieces and maps of each peer that were not right."""
        self.map_asks: set[PeerId] = set()
        self.asks: list[tuple[PeerId, int]] = []
        self.kept: list[int] = []
        self.done = self.failed = 0
        self.target: Target = ShownTarget(self.mine)
        self.partial: set[PeerId] = set()
        if target == "elected":
            self.partial = {peer for peer in PEERS[1:] if rng.random() < 0.5}
            sources = tuple(peer for peer in PEERS if peer not in self.partial)
            for peer in self.partial:
                self.holds[peer] = set(rng.sample(range(PIECES), rng.randrange(PIECES)))
            behind = (OWN, *sorted(self.partial))
            self.target = ElectedTarget(
                Elected(
                    revision=1,
                    layout=b"",
                    content=self.theirs.digest(may_differ=False),
                    sources=sources,
                    behind=behind,
                    outdated=behind,
                    extra=self.theirs.digest(may_differ=True),
                    extra_sources=sources,
                ),
                OWN,
                (OWN, *PEERS),
                self.mine,
            )
        self.wanted = {n for n in range(3, PIECES) if target == "elected" or n < SHARED}
        self.download = Download(self.mine, OWN, stall_ns=STALL_NS)
        self.carry_out(self.download.begin(self.target, self.present))
        for peer in self.partial:
            self.carry_out(self.download.has(peer, sorted(self.holds[peer]), self.present))

    @property
    def present(self) -> Present:
        return Present(self.now_ns, dict(self.up))

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case AskMap(peer):
                    assert self.up[peer]
                    self.map_asks.add(peer)
                case Ask(source, pieces):
                    assert self.up[source]
                    assert set(pieces) <= self.wanted - set(self.kept)
                    self.asks += [(source, piece) for piece in pieces]
                case StagePieces(pieces, digests):
                    assert set(pieces) == self.wanted
                    assert all(digests[n] == self.theirs[n] for n in pieces)
                    self.carry_out(self.download.staged([], self.present))
                case KeepPiece(piece, digest):
                    assert digest == self.theirs[piece]
                    assert piece not in self.kept
                    self.kept.append(piece)
                case AnnouncePieces(peers, pieces):
                    assert set(peers) <= set(PEERS)
                    assert set(pieces) <= set(self.kept)
                case DownloadDone():
                    assert set(self.kept) == self.wanted
                    self.done += 1
                case DownloadFailed():
                    assert set(self.kept) != self.wanted
                    self.failed += 1
                case PiecesComplete():
                    assert set(self.kept) == self.wanted
        self.check_bounds()

    def check_bounds(self) -> None:
        fetch = self.download.pieces
        if fetch is None:
            return
        asked = [piece for peer in PEERS for piece in fetch.outstanding(peer)]
        assert all(asked.count(piece) <= 2 for piece in asked)
        assert {piece for piece in asked if fetch.wants(piece)} == set(asked)
        for view in fetch.sources():
            assert view.outstanding_bytes <= WINDOW_MAX_BYTES
            assert len(fetch.outstanding(view.peer)) <= OUTSTANDING_MAX

    # -- what happens ------------------------------------------------------------------------------

    def pass_time(self, duration_ns: int) -> None:
        self.now_ns += duration_ns
        self.carry_out(self.download.tick(self.present))

    def set_link(self, peer: PeerId, *, up: bool) -> None:
        if self.up[peer] == up:
            return
        self.up[peer] = up
        self.map_asks.discard(peer)
        self.asks = [ask for ask in self.asks if ask[0] != peer]
        self.carry_out(self.download.link_changed(peer, self.present, up=up))
        if up and peer in self.partial:
            self.carry_out(self.download.has(peer, sorted(self.holds[peer]), self.present))

    def lose_lane(self, peer: PeerId) -> None:
        self.map_asks.discard(peer)
        self.asks = [ask for ask in self.asks if ask[0] != peer]
        self.carry_out(self.download.lane_lost(peer, self.present))

    def give_map(self, peer: PeerId, *, right: bool = True) -> None:
        if peer not in self.map_asks:
            return
        self.map_asks.discard(peer)
        if peer in self.partial:
            self.carry_out(self.download.refused(peer, [], self.present))
            return
        self.wrong[peer] += not right
        digests = (self.theirs if right else map_of(7)).part(range(PIECES))
        told = bytearray(digests)
        self.carry_out(self.download.map_came(peer, 0, PIECES, told, self.present))

    def give_piece(self, place: int, *, right: bool = True) -> None:
        if not self.asks:
            return
        peer, piece = self.asks.pop(place % len(self.asks))
        if not self.download.wants(piece) or not self.download.expects(peer, piece):
            return
        if piece not in self.holds[peer]:
            self.carry_out(self.download.refused(peer, [piece], self.present))
            return
        self.wrong[peer] += not right
        self.download.progressed(peer, LAYOUT.piece(piece).length, self.now_ns)
        digest = self.theirs[piece] if right else digest_of(piece, 9)
        self.carry_out(self.download.arrived(peer, piece, digest, self.present))

    def step(self, *, lies: bool) -> None:
        """Anything."""
        rng, peer = self.rng, self.rng.choice(PEERS)
        match rng.randrange(7):
            case 0:
                self.set_link(peer, up=not self.up[peer])
            case 1:
                self.lose_lane(peer)
            case 2:
                self.pass_time(rng.choice((1, STALL_NS // 4, 2 * STALL_NS)))
            case 3:
                self.give_map(peer, right=not lies or rng.random() < 0.7)
            case _:
                self.give_piece(rng.randrange(100), right=not lies or rng.random() < 0.8)

    def settle(self) -> None:
        """From now on all that live answer."""
        for _ in range(60):
            for peer in PEERS:
                self.give_map(peer)
            for place in range(len(self.asks)):
                self.give_piece(place)
            self.pass_time(STALL_NS // 4)


SEEDS = st.integers(0, (1 << 32) - 1)


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.sampled_from(["elected", "shown"]), st.booleans())
def test_it_ends_with_everything_if_all_of_it_can_be_had(
    seed: int, target: str, lies: bool
) -> None:
    rng = Random(seed)
    world = World(rng, target)
    for _ in range(rng.randrange(60)):
        world.step(lies=lies and target == "elected")
    dead = rng.sample(PEERS, rng.randrange(len(PEERS) + 1))
    for peer in PEERS:
        world.set_link(peer, up=peer not in dead)
    before = set(world.kept)
    trusted = [p for p in PEERS if p not in dead and world.wrong[p] < STRIKES_MAX]
    knows_map = world.download.map is not None or any(p not in world.partial for p in trusted)
    held = before.union(*(world.holds[peer] for peer in trusted))
    world.settle()
    assert world.done <= 1
    assert world.failed <= 1
    if knows_map and world.wanted <= held:
        assert world.done == 1
        assert world.download.complete
    if not world.wanted <= before.union(*(world.holds[p] for p in PEERS if p not in dead)):
        assert world.done == 0
        assert world.failed == 1


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_a_source_that_lives_and_says_nothing_ends_a_prefetch_and_no_sync(seed: int) -> None:
    rng = Random(seed)
    for target in ("elected", "shown"):
        world = World(rng, target)
        for peer in PEERS:
            world.give_map(peer)
        if world.download.pieces is None or world.download.complete:
            continue
        for _ in range(rng.randrange(3)):
            world.give_piece(rng.randrange(9))
        for _ in range(40):
            world.pass_time(STALL_NS // 4)
        if target == "shown":
            assert world.failed == 1
        else:
            assert world.failed == 0
        assert world.done == 0
