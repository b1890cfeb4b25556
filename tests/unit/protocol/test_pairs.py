"""Tags of pairs: only two members of a view take part."""

from __future__ import annotations

import pytest

from pccl.checks import TAG_MAX
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.pairs import PAIR_TAG_MAX, members_of, pair_of, pair_tag, tag_text
from pccl.protocol.types import (
    SYNC_TAG,
    OperationId,
    PeerId,
)

RING = tuple(map(PeerId, (7, 9, 12)))


@pytest.mark.parametrize("ranks", [(0, 1), (2, 0), (PEERS_MAX - 1, PEERS_MAX - 2)])
@pytest.mark.parametrize("tag", [0, 5, PAIR_TAG_MAX])
def test_a_pair_is_read_from_its_tag(ranks: tuple[int, int], tag: int) -> None:
    of_pair = pair_tag(*ranks, tag)
    assert TAG_MAX < of_pair < SYNC_TAG
    assert pair_of(of_pair) == ranks
    assert tag_text(of_pair) == f"{tag} from rank {ranks[0]} to rank {ranks[1]}"


def test_other_tags_have_no_pair() -> None:
    for tag in (0, TAG_MAX, SYNC_TAG):
        assert pair_of(tag) is None
        assert members_of(tag, RING) == RING
        assert tag_text(tag) == str(tag)


def test_the_members_of_a_pair_come_in_ring_order() -> None:
    assert members_of(pair_tag(2, 0, 5), RING) == members_of(pair_tag(0, 2, 5), RING) == (7, 12)
    assert members_of(pair_tag(1, 1, 5), RING) == ()
    assert members_of(pair_tag(0, 3, 5), RING) == ()


def test_an_operation_of_a_pair_names_it() -> None:
    assert (
        str(OperationId(1, 0, 2, pair_tag(2, 0, 5), 3)) == "t1/g0/v2/tag5 from rank 2 to rank 0#3"
    )
