"""The path of a link in words: each case."""

from __future__ import annotations

import pytest

from pccl.inquiry import LinkPath, LinkSpeed
from pccl.protocol.types import PeerId
from pccl.telemetry.link_paths import PathWords, path_in_words

OPEN = "open a port of one of them, or switch on port mapping: docs/two-machines.md"
NEITHER = "neither peer 3 nor peer 5 can be dialled"


def words(
    path: LinkPath | None,
    elder: bool | None = None,
    younger: bool | None = None,
    relay: int | None = None,
) -> PathWords:
    """The words for a link of 3 and 5, which are the same from both sides."""
    by = None if relay is None else PeerId(relay)
    here, there = PeerId(3), PeerId(5)
    said = path_in_words(LinkSpeed(here, there, 0, 0, by, path, elder, younger))
    assert path_in_words(LinkSpeed(there, here, 0, 0, by, path, younger, elder)) == said
    return said


@pytest.mark.parametrize("dialable", [None, False, True])
@pytest.mark.parametrize(
    ("path", "said"),
    [(None, "no link"), (LinkPath.DIRECT, "direct"), (LinkPath.MAPPED, "mapped")],
)
def test_these_need_no_explanation(path: LinkPath | None, said: str, dialable: bool | None) -> None:
    assert words(path, dialable, dialable) == (said, "", "")


def test_the_elder_has_dialled() -> None:
    assert words(LinkPath.DIALLED_BACK, False, True) == (
        "dialled back",
        "peer 3 cannot be dialled, so it has dialled peer 5",
        "open a port of peer 3: then peers that cannot be dialled reach it, too",
    )
    why = "peer 3 has dialled, before a dial of peer 5 has succeeded"
    assert words(LinkPath.DIALLED_BACK, None, True) == ("dialled back", why, "")
    assert words(LinkPath.DIALLED_BACK, True, True) == ("dialled back", why, "")


def test_both_have_dialled() -> None:
    assert words(LinkPath.PUNCHED, False, False) == ("punched", NEITHER, "")
    why = "no other dial between peer 3 and peer 5 has succeeded"
    assert words(LinkPath.PUNCHED, False, True) == ("punched", why, "")
    assert words(LinkPath.PUNCHED) == ("punched", why, "")


@pytest.mark.parametrize(
    ("relay", "said"), [(4, "relayed by peer 4"), (0, "relayed by the master")]
)
def test_a_relay_forwards(relay: int, said: str) -> None:
    why = f"{NEITHER}, and simultaneous open has not succeeded"
    assert words(LinkPath.RELAYED, False, False, relay) == (said, why, OPEN)
    why = "no dial between peer 3 and peer 5 has succeeded, and no simultaneous open"
    for elder, younger in ((None, False), (False, None), (None, None)):
        assert words(LinkPath.RELAYED, elder, younger, relay) == (said, why, OPEN)


@pytest.mark.parametrize(
    ("elder", "younger", "there", "here"),
    [
        (True, False, 3, 5),
        (True, None, 3, 5),
        (True, True, 3, 5),
        (False, True, 5, 3),
        (None, True, 5, 3),
    ],
)
def test_a_relay_forwards_although_others_can_dial_one(
    elder: bool | None, younger: bool | None, there: int, here: int
) -> None:
    assert words(LinkPath.RELAYED, elder, younger, 4) == (
        "relayed by peer 4",
        f"others can dial peer {there}, but peer {here} has not reached it",
        f"check the firewalls between them, and run pccl doctor at peer {here}",
    )


def test_a_peer_that_names_no_relay_harms_nobody() -> None:
    assert words(LinkPath.RELAYED).path == "relayed by the master"


def test_one_line_has_all_of_it() -> None:
    assert str(PathWords("direct")) == "direct"
    assert str(PathWords("dialled back", "why so")) == "dialled back: why so"
    assert str(words(LinkPath.PUNCHED, False, False)) == f"punched: {NEITHER}"
