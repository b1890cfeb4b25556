"""Names of peers: which are allowed, and where they stand in texts for people."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.types import Member, PeerId
from pccl.telemetry import names
from pccl.telemetry.names import Names, name_flaw

SPACE = "a name must not be empty, or begin or end with white space"
PRINTABLE = "a name must consist of printable characters"
LONG = "a name must not be longer than 64 bytes"
ALLOWED = st.text(
    st.characters(
        blacklist_categories=["C", "Z"], blacklist_characters="\N{REPLACEMENT CHARACTER}"
    ),
    min_size=1,
    max_size=16,
)
"""At most four bytes for each character."""


def known(**peers: str) -> Names:
    """Names of peers: ``p3="carol"``."""
    found = Names()
    for peer, name in peers.items():
        found.note(PeerId(int(peer[1:])), name)
    return found


# -- which are allowed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        ("alice", ""),
        ("gpu-07:4121", ""),
        ("rack 3, left", ""),
        ("Zo\u00eb \u5f20\u4f1f \U0001f680", ""),
        ("", SPACE),
        (" ", SPACE),
        (" alice", SPACE),
        ("alice\t", SPACE),
        ("alice\n", SPACE),
        ("alice\N{IDEOGRAPHIC SPACE}", SPACE),
        ("al\nice", PRINTABLE),
        ("al\x1b[31mice", PRINTABLE),
        ("al\0ice", PRINTABLE),
        ("al\x7fice", PRINTABLE),
        ("al\x85ice", PRINTABLE),
        ("al\N{NO-BREAK SPACE}ice", PRINTABLE),
        ("al\N{LINE SEPARATOR}ice", PRINTABLE),
        ("al\N{RIGHT-TO-LEFT OVERRIDE}ice", PRINTABLE),
        ("al\N{LEFT-TO-RIGHT ISOLATE}ice", PRINTABLE),
        ("al\N{ZERO WIDTH SPACE}ice", PRINTABLE),
        ("al\N{ZERO WIDTH NO-BREAK SPACE}ice", PRINTABLE),
        ("al\N{SOFT HYPHEN}ice", PRINTABLE),
        ("al\N{REPLACEMENT CHARACTER}ice", PRINTABLE),
        ("al\ue000ice", PRINTABLE),
        ("n" * 64, ""),
        ("n" * 65, LONG),
        ("\u00eb" * 32, ""),
        ("\u00eb" * 32 + "n", LONG),
        ("\U0001f680" * 16, ""),
        ("\U0001f680" * 17, LONG),
    ],
)
def test_which_names_are_allowed(name: str, flaw: str) -> None:
    assert name_flaw(name) == flaw


@given(st.text())
def test_an_allowed_name_can_be_shown_in_a_line_of_its_own(name: str) -> None:
    hidden = any(unicodedata.category(one)[0] in "CZ" and one != " " for one in name)
    if name_flaw(name) == "":
        assert not hidden
        assert name == name.strip() != ""
        assert len(name.encode()) <= 64
        assert name.splitlines() == [name]
    elif name and name == name.strip() and len(name.encode(errors="replace")) <= 64:
        assert hidden or "\N{REPLACEMENT CHARACTER}" in name


@given(ALLOWED)
def test_letters_of_every_script_are_allowed(name: str) -> None:
    assert name_flaw(name) == ""


# -- where they stand ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("", ""),
        ("peer 3 left", "peer 3 (carol) left"),
        ("peer 3", "peer 3 (carol)"),
        ("waits for peer 3.", "waits for peer 3 (carol)."),
        ("peers 1, 3", "peers 1 (alice), 3 (carol)"),
        ("peers 1, 2, 3 and 4 more", "peers 1 (alice), 2, 3 (carol) and 4 more"),
        ("peer 3 (in no call)", "peer 3 (carol) (in no call)"),
        ("(peer 1: refused)", "(peer 1 (alice): refused)"),
        ("peer 2 left", "peer 2 left"),
        ("peer 13, peer 31, peer 12", "peer 13, peer 31, peer 12"),
        ("peer 1, 3 steps behind", "peer 1 (alice), 3 (carol) steps behind"),
        ("peerless 3, superpeer 3, peer3, Peer 3", "peerless 3, superpeer 3, peer3, Peer 3"),
        ("peer 3rd, peer 3_a", "peer 3rd, peer 3_a"),
        ("step 3, tag 1, rank 3", "step 3, tag 1, rank 3"),
        ("peer -3, peer  3", "peer -3, peer  3"),
        (f"peer {10**30}", f"peer {10**30}"),
    ],
)
def test_where_names_stand(text: str, explained: str) -> None:
    assert known(p1="alice", p3="carol").explain(text) == explained


def test_without_names_a_text_stays() -> None:
    assert Names().explain("peer 3 left") == "peer 3 left"


@pytest.mark.parametrize("name", ["\\1", "\\g<0>", "peer 1", "a) (b", "3"])
def test_a_name_is_no_pattern(name: str) -> None:
    assert known(p3=name, p1="alice").explain("peer 3 left") == f"peer 3 ({name}) left"


@given(st.text(), st.dictionaries(st.integers(0, 40), ALLOWED, max_size=9))
def test_an_explanation_only_adds(text: str, peers: dict[int, str]) -> None:
    found = Names()
    for peer, name in peers.items():
        found.note(PeerId(peer), name)
    explained = found.explain(text)
    if re.search(r"peers? \d", text) is None:
        assert explained == text


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True),
    st.dictionaries(st.integers(0, 40), ALLOWED, max_size=40),
)
def test_every_known_peer_of_a_list_gets_its_name_once(
    ids: list[int], peers: dict[int, str]
) -> None:
    found = Names()
    for peer, name in peers.items():
        found.note(PeerId(peer), name)
    word = "peer" if len(ids) == 1 else "peers"
    parts = [f"{one} ({peers[one]})" if one in peers else str(one) for one in ids]
    explained = found.explain(f"it waits for {word} {', '.join(map(str, ids))}: go")
    assert explained == f"it waits for {word} {', '.join(parts)}: go"


# -- what is remembered -------------------------------------------------------------------------


def test_names_of_lost_peers_are_remembered() -> None:
    found = Names()
    found.learn([Member(PeerId(1), "h", 1, 0, "alice"), Member(PeerId(2), "h", 1)])
    found.learn([Member(PeerId(3), "h", 1, 0, "carol")])
    assert [found.of(PeerId(peer)) for peer in (1, 2, 3)] == ["alice", "", "carol"]


def test_the_newest_name_counts_and_none_says_nothing() -> None:
    found = known(p1="alice")
    found.note(PeerId(1), "anna")
    found.note(PeerId(1), "")
    assert found.of(1) == "anna"


def test_the_oldest_names_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_KEPT_MAX", 3)
    found = Names()
    for peer in (1, 2, 3, 1, 4, 5):
        found.note(PeerId(peer), f"n{peer}")
    assert [peer for peer in range(1, 6) if found.of(peer)] == [3, 4, 5]


def test_a_peer_that_was_renamed_is_as_new_as_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_KEPT_MAX", 2)
    found = known(p1="alice", p2="bob")
    found.note(PeerId(1), "anna")
    found.note(PeerId(3), "carol")
    assert [found.of(peer) for peer in (1, 2, 3)] == ["anna", "", "carol"]


def test_a_half_character_is_not_allowed() -> None:
    """It comes from an environment variable that is no UTF-8."""
    assert name_flaw("al\udce4ice") == PRINTABLE
