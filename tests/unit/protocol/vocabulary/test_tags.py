"""Tags of subsets: only some members of a view take part."""

from __future__ import annotations

import pytest

from pccl.checks import TAG_MAX
from pccl.protocol.operation import Subset, name_tag
from pccl.protocol.types import SYNC_TAG, OperationId, PeerId
from pccl.protocol.vocabulary.tags import hash_of, is_of_subset, shown_tag, tag_text

PEERS = tuple(map(PeerId, (7, 9, 12)))


@pytest.mark.parametrize("tag", [0, 5, TAG_MAX])
def test_a_subset_has_tags_of_its_own(tag: int) -> None:
    made = Subset(PEERS, tag).operation_tag
    assert TAG_MAX < made < SYNC_TAG
    assert is_of_subset(made)
    assert shown_tag(made) == tag % (1 << 20)
    assert made == Subset(PEERS, tag).operation_tag
    others = (
        Subset(PEERS[::-1], tag),
        Subset(PEERS[:2], tag),
        Subset(PEERS, tag, 1),
        Subset(PEERS, tag, hash_of(PEERS)),
        Subset(PEERS, tag ^ 1 << 40),
    )
    assert len({made, *(other.operation_tag for other in others)}) == 1 + len(others)


def test_other_tags_are_those_of_all_members() -> None:
    for tag in (0, 5, TAG_MAX, SYNC_TAG):
        assert not is_of_subset(tag)
        assert shown_tag(tag) == tag
        assert tag_text(tag) == name_tag(tag, None) == str(tag)


def test_all_pairs_of_a_large_group_have_different_tags() -> None:
    peers = [PeerId(peer) for peer in range(1, 65)]
    pairs = [(one, other) for one in peers for other in peers if one != other]
    assert len({Subset(pair, 0, 1).operation_tag for pair in pairs}) == len(pairs)


def test_a_subset_is_named_by_its_members() -> None:
    assert str(Subset(PEERS[::-1], 5)) == "5 of peers 7, 9, 12"
    many = Subset(tuple(map(PeerId, range(1, 20))), 5)
    assert str(many) == "5 of peers 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"


def test_an_operation_of_a_subset_has_a_text_of_its_own() -> None:
    subset = Subset(PEERS, 5)
    text = str(OperationId(1, 0, 2, subset.operation_tag, 3))
    assert text == f"t1/g0/v2/tag{tag_text(subset.operation_tag)}#3"
    assert text.startswith("t1/g0/v2/tag5~")


def test_the_hash_of_members_depends_on_their_order() -> None:
    assert hash_of(PEERS) != hash_of(PEERS[::-1])
    assert 1 < hash_of(()) < 1 << 32
