"""What members of an exchange say about their blocks: the master names a pair that disagrees."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.master.ballots.claimed_blocks import ClaimedBlocks
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.operation import BlockLengths
from pccl.protocol.types import Collective, Descriptor, OperationId, PeerId

OPERATION = OperationId(1, 0, 2, 7, 3)
RING = (PeerId(4), PeerId(5), PeerId(9), PeerId(11))
EXCHANGE = Descriptor.direct(Collective.ALL_TO_ALL, DataType.FLOAT)
ROWS = st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=4, max_size=4)


@given(ROWS, st.integers(0, 3), st.integers(0, 3), st.randoms(use_true_random=True))
def test_the_pair_that_disagrees_is_named_as_soon_as_both_have_asked(
    rows: list[list[int]], giver: int, taker: int, rng: random.Random
) -> None:
    columns = list(zip(*rows, strict=True))
    said = [BlockLengths(tuple(row), columns[rank]) for rank, row in enumerate(rows)]
    ranks = rng.sample(range(4), 4)
    claims = ClaimedBlocks(OPERATION, RING)
    assert [claims.note(RING[rank], EXCHANGE, said[rank]) for rank in ranks] == [""] * 4
    wrong = list(rows[giver])
    wrong[taker] += 1
    said[giver] = BlockLengths(tuple(wrong), said[giver].takes)
    claims = ClaimedBlocks(OPERATION, RING)
    for number, rank in enumerate(ranks):
        differ = claims.note(RING[rank], EXCHANGE, said[rank])
        assert bool(differ) == ({giver, taker} <= set(ranks[: number + 1]))
        if differ:
            gives, expects = wrong[taker], rows[giver][taker]
            assert differ == (
                f"peer {RING[giver]} gives {gives} elements to peer {RING[taker]}, "
                f"which expects {expects}"
            )
            return


@pytest.mark.parametrize(
    "blocks", [None, BlockLengths((), ()), BlockLengths((1,) * 3, (1,) * 4)]
)  # fmt: skip
def test_an_exchange_needs_a_block_for_each_member(blocks: BlockLengths | None) -> None:
    with pytest.raises(RemoteProtocolError, match="has 4 blocks"):
        ClaimedBlocks(OPERATION, RING).note(RING[0], EXCHANGE, blocks)


@pytest.mark.parametrize("blocks", [BlockLengths((), ()), BlockLengths((1,) * 4, (1,) * 4)])
def test_no_other_collective_has_blocks(blocks: BlockLengths) -> None:
    claims = ClaimedBlocks(OPERATION, RING)
    assert claims.note(RING[1], Descriptor.barrier(), None) == ""
    with pytest.raises(RemoteProtocolError, match="exchanges no blocks"):
        claims.note(RING[0], Descriptor.barrier(), blocks)
