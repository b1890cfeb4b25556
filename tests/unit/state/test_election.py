"""Whose shared state counts: each rule by hand, and all of them against a simple twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.shared_state import (
    Conflict,
    Differ,
    Elected,
    Expected,
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
    Unavailable,
    Verdict,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.state.election import elect, has_valid
from tests.unit.state import election_twin

POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR
RECEIVE = SharedStateSyncStrategy.RECEIVE_ONLY
SEND = SharedStateSyncStrategy.SEND_ONLY

OURS = Lineage(b"this run", OperationId(1, 0, 3, 9, 7))
OLD = Lineage(b"an old run", OperationId(1, 0, 3, 9, 7))
FIRST = Expected()
AT_5 = Expected(5, OURS)

BASE = Offer(
    SyncPurpose.SYNC, POPULAR, ResumePolicy.NEVER, revision=0, lineage=None, stale=False,
    unchanged=False, layout=b"L", content=b"a", extra=b"e",
)  # fmt: skip
AT = replace(BASE, revision=5, lineage=OURS)
"""Valid in a group that expects revision 5."""


def offer(content: bytes = b"a", revision: int = 0) -> Offer:
    return replace(BASE, content=content, revision=revision)


def vote(*offers: Offer, expected: Expected = FIRST, commits: int = 0) -> Verdict:
    """Of peers 11, 12, and so on, in this order."""
    peers = [(PeerId(11 + rank), offer) for rank, offer in enumerate(offers)]
    return elect(peers, expected, commits)


def elected(*offers: Offer, expected: Expected = FIRST, commits: int = 0) -> Elected:
    verdict = vote(*offers, expected=expected, commits=commits)
    assert isinstance(verdict, Elected), verdict
    return verdict


def reason(*offers: Offer, expected: Expected = FIRST) -> str:
    verdict = vote(*offers, expected=expected)
    assert isinstance(verdict, Unavailable), verdict
    return verdict.reason


def differ(what: str, *sets: tuple[int, ...], losers: tuple[int, ...] = ()) -> Differ:
    return Differ(
        tuple(tuple(map(PeerId, s)) for s in sets), tuple(map(PeerId, losers)), Conflict(what)
    )


# -- all the same ----------------------------------------------------------------------------


def test_one_alone_is_its_own_source() -> None:
    assert vote(offer(b"x", 3)) == Elected(
        3, b"L", b"x", sources=(PeerId(11),), behind=(), outdated=(),
        extra=b"e", extra_sources=(PeerId(11),),
    )  # fmt: skip


def test_revision_0_everywhere_is_fine() -> None:
    verdict = elected(offer(), offer(), offer())
    assert (verdict.revision, verdict.sources) == (0, (11, 12, 13))
    assert (verdict.behind, verdict.outdated) == ((), ())


# -- rule 1: layout --------------------------------------------------------------------------

WHAT_LAYOUT = "the tensors' names, dtypes or lengths"


def test_who_has_other_tensors_than_the_majority_fails() -> None:
    odd = replace(BASE, layout=b"M")
    assert vote(odd, BASE, BASE, replace(BASE, layout=b"N"), BASE) == differ(
        WHAT_LAYOUT, (12, 13, 15), (11,), (14,), losers=(11, 14)
    )
    ring = [odd, replace(BASE, layout=b"N"), *[BASE] * 4, odd]
    assert vote(*ring) == differ(
        WHAT_LAYOUT, (13, 14, 15, 16), (11, 17), (12,), losers=(11, 12, 17)
    )


def test_half_is_no_majority_of_layouts() -> None:
    odd, third = replace(BASE, layout=b"M"), replace(BASE, layout=b"N")
    assert vote(odd, BASE) == differ(WHAT_LAYOUT, (11,), (12,))
    assert vote(odd, third, BASE, BASE) == differ(WHAT_LAYOUT, (13, 14), (11,), (12,))


def test_layouts_count_before_revisions_strategies_and_purposes() -> None:
    odd = replace(AT, layout=b"M", strategy=SEND)
    assert vote(odd, *[replace(AT, strategy=RECEIVE)] * 2, expected=AT_5) == differ(
        WHAT_LAYOUT, (12, 13), (11,), losers=(11,)
    )
    looks = [replace(o, purpose=SyncPurpose.VERIFY) for o in (replace(BASE, layout=b"M"), BASE)]
    assert vote(*looks) == differ(WHAT_LAYOUT, (11,), (12,))


def test_newcomers_do_not_outvote_the_layout_of_those_who_have_synchronized() -> None:
    odd = replace(BASE, layout=b"M")
    assert vote(odd, AT, odd, expected=AT_5) == differ(
        WHAT_LAYOUT, (12,), (11, 13), losers=(11, 13)
    )
    torn = [replace(AT, layout=b"M"), AT]
    assert vote(odd, *torn, expected=AT_5) == differ(WHAT_LAYOUT, (11, 12), (13,))
    behind = replace(AT, stale=True)
    assert vote(odd, behind, odd, expected=AT_5) == differ(
        WHAT_LAYOUT, (11, 13), (12,), losers=(12,)
    )


# -- rule 2: verifying -----------------------------------------------------------------------


def look(content: bytes = b"a", revision: int = 0) -> Offer:
    return replace(offer(content, revision), purpose=SyncPurpose.VERIFY)


def test_equal_contents_are_verified_whatever_their_revisions() -> None:
    stale = replace(look(), stale=True, lineage=OLD, extra=b"f")
    assert vote(look(revision=9), look(revision=5), stale, expected=AT_5) == Elected(
        5, b"L", b"a", sources=(PeerId(11), PeerId(12), PeerId(13)), behind=(), outdated=()
    )


def test_nobody_is_right_in_a_verification() -> None:
    looks = [look(b"z"), look(b"y"), look(), look(), look(), look(b"z"), look()]
    assert vote(*looks, expected=AT_5) == differ(
        "contents that must be equal", (13, 14, 15, 17), (11, 16), (12,)
    )


# -- rule 3: revision ------------------------------------------------------------------------


@pytest.mark.parametrize("newcomers_first", [True, False])
def test_a_first_synchronization_resumes_at_the_highest_revision(newcomers_first: bool) -> None:
    """In release 1.0.0 of PCCL, 0 was valid too if it voted first."""
    fresh, resumed = [offer(b"new"), offer(b"new")], replace(offer(b"old", 7), lineage=OLD)
    if newcomers_first:
        verdict = elected(*fresh, resumed)
        assert (verdict.sources, verdict.behind) == ((13,), (11, 12))
    else:
        verdict = elected(resumed, *fresh)
        assert (verdict.sources, verdict.behind) == ((11,), (12, 13))
    assert (verdict.revision, verdict.content) == (7, b"old")
    assert verdict.outdated == verdict.behind


def test_lineages_play_no_part_in_a_first_synchronization() -> None:
    verdict = elected(offer(b"a", 4), replace(offer(b"a", 4), lineage=OLD))
    assert (verdict.sources, verdict.outdated) == ((11, 12), ())


def test_the_highest_revision_does_not_decide_if_it_is_stale_or_only_receives() -> None:
    stale = replace(offer(b"s", 9), stale=True)
    verdict = elected(stale, offer(b"a", 4), offer(b"b", 3), replace(stale, revision=4))
    assert (verdict.revision, verdict.content, verdict.outdated) == (4, b"a", (11, 13, 14))
    receiver = replace(offer(b"r", 9), strategy=RECEIVE)
    same = replace(offer(b"a", 4), strategy=RECEIVE)
    verdict = elected(receiver, replace(offer(b"a", 4), strategy=SEND), same)
    assert (verdict.revision, verdict.behind, verdict.outdated) == (4, (11,), (11,))


def test_a_revision_counts_only_with_its_lineage() -> None:
    foreign = replace(AT, content=b"x", lineage=OLD)
    verdict = elected(foreign, foreign, AT, replace(AT, content=b"x", lineage=None), expected=AT_5)
    assert (verdict.content, verdict.sources) == (b"a", (13,))
    assert verdict.behind == verdict.outdated == (11, 12, 14)


def test_nobody_fails_for_a_revision() -> None:
    ahead, late = replace(AT, revision=6), replace(AT, content=b"x", revision=2)
    verdict = elected(ahead, late, AT, expected=AT_5)
    assert (verdict.revision, verdict.content) == (5, b"a")
    assert (verdict.sources, verdict.behind) == ((11, 13), (12,))
    assert verdict.outdated == (11, 12)


def test_what_lacks_something_committed_is_outdated() -> None:
    stale = replace(AT, content=b"s", stale=True)
    verdict = elected(stale, stale, AT, expected=AT_5)
    assert (verdict.content, verdict.outdated) == (b"a", (11, 12))


# -- rule 4: nothing to go on with -----------------------------------------------------------


def test_a_forgotten_push_revision_is_told() -> None:
    forgot = replace(AT, revision=4)
    late = replace(AT, revision=1, lineage=OLD)
    assert reason(forgot, late, forgot, expected=AT_5) == (
        "no member offers contents with revision 5: call push_revision() (or set the revision) "
        "before each synchronization. Members have: peers 11, 13: revision 4; peer 12: revision 1 "
        "of another lineage"
    )


def test_whose_revision_is_useless_anyhow_has_not_forgotten_to_push() -> None:
    checkpoint = "load a checkpoint of that revision, or continue from the highest revision on off"
    for useless in (
        replace(AT, revision=4, lineage=OLD, stale=True),
        replace(AT, revision=4, lineage=OLD),
        replace(AT, revision=3),
        replace(AT, revision=6),
        replace(AT, revision=3, stale=True),
        replace(AT, revision=6, stale=True),
    ):
        assert checkpoint in reason(useless, expected=AT_5)
    receiver = replace(AT, revision=4, strategy=RECEIVE)
    sender = replace(BASE, strategy=SEND)
    assert checkpoint in reason(sender, receiver, expected=AT_5)


def test_a_lost_revision_is_not_replaced_unasked() -> None:
    stale = replace(AT, stale=True)
    assert reason(offer(revision=3), stale, replace(stale, content=b"b"), expected=AT_5) == (
        "no member offers contents with revision 5: load a checkpoint of that revision, or "
        'continue from the highest revision on offer (resume="highest"). Members have: peer 11: rev'
        "ision 3 of another lineage; peers 12, 13: revision 5 without a result that was committed "
        "since"
    )


@pytest.mark.parametrize("resume", ResumePolicy)
@pytest.mark.parametrize("revision", [4, 5])
def test_what_all_lack_nobody_misses(revision: int, resume: ResumePolicy) -> None:
    """All have left the same call: what was before it is what all have."""
    stale = replace(AT, revision=revision, stale=True, resume=resume)
    newcomer = replace(offer(b"x", 1), resume=resume)
    assert vote(newcomer, stale, stale, expected=AT_5) == Elected(
        revision, b"L", b"a", sources=(PeerId(12), PeerId(13)), behind=(PeerId(11),),
        outdated=(PeerId(11),), extra=b"e", extra_sources=(PeerId(12), PeerId(13)),
    )  # fmt: skip


def test_what_all_lack_that_are_allowed_to_be_further() -> None:
    stale = replace(AT, revision=6, stale=True, resume=ResumePolicy.ADVANCED)
    newcomer = replace(offer(b"x", 1), resume=ResumePolicy.ADVANCED)
    offers = (newcomer, newcomer, newcomer, stale)
    assert elected(*offers, expected=AT_5, commits=1).outdated == (11, 12, 13)
    assert elected(*offers, expected=AT_5).outdated == (14,)  # out of reach


def test_not_all_lack_the_same() -> None:
    stale = replace(AT, stale=True)
    assert reason(stale, replace(stale, content=b"b"), expected=AT_5)
    assert reason(stale, replace(stale, revision=4), expected=AT_5)
    # It may be the one that has taken the result.
    for other in (replace(AT, revision=4), replace(AT, revision=6)):
        assert reason(stale, other, expected=AT_5)
    sender, receiver = replace(stale, strategy=SEND), replace(AT, strategy=RECEIVE)
    assert reason(sender, receiver, expected=AT_5)
    assert elected(sender, replace(receiver, stale=True), expected=AT_5).revision == 5
    assert reason(replace(sender, lineage=OLD), replace(receiver, stale=True), expected=AT_5)


def test_a_lost_revision_is_replaced_by_the_highest() -> None:
    offers = [
        replace(AT, revision=3, content=b"c"),
        replace(AT, revision=4, lineage=OLD, content=b"b"),
        replace(AT, stale=True, content=b"s"),
        replace(AT, revision=4, lineage=None, content=b"b", extra=b"f"),
    ]
    verdict = vote(*(replace(o, resume=ResumePolicy.HIGHEST) for o in offers), expected=AT_5)
    assert verdict == Elected(
        4, b"L", b"b", sources=(PeerId(12), PeerId(14)), behind=(PeerId(11), PeerId(13)),
        outdated=(PeerId(11), PeerId(13)), extra=b"e", extra_sources=(PeerId(12),),
    )  # fmt: skip


def test_a_beginning_is_not_gone_on_with_where_there_was_more() -> None:
    fresh = [replace(o, resume=ResumePolicy.ADVANCED) for o in (offer(b"x"), offer(b"y"))]
    assert reason(*fresh, expected=AT_5) == (
        "no member offers contents with revision 5: let a peer join that has this revision, or a "
        "checkpoint of any revision above 0; or start a new master, which expects no revision. "
        "Members have: peers 11, 12: revision 0 of another lineage"
    )
    holder = replace(AT, resume=ResumePolicy.ADVANCED, content=b"h")
    verdict = elected(*fresh, holder, expected=AT_5)
    assert (verdict.revision, verdict.content, verdict.outdated) == (5, b"h", (11, 12))


@pytest.mark.parametrize("stale", [False, True])
def test_what_is_more_than_a_beginning_is_gone_on_with(stale: bool) -> None:
    """Also what lacks something that was committed since."""
    before = replace(AT, revision=1, lineage=OLD, content=b"b", stale=stale)
    offers = [replace(o, resume=ResumePolicy.ADVANCED) for o in (offer(b"x"), before)]
    verdict = elected(*offers, expected=AT_5)
    assert (verdict.revision, verdict.content, verdict.outdated) == (1, b"b", (11,))


@pytest.mark.parametrize("expected", [FIRST, Expected(1, OURS)])
def test_a_beginning_counts_where_there_was_no_more(expected: Expected) -> None:
    verdict = elected(replace(offer(b"x"), resume=ResumePolicy.ADVANCED), expected=expected)
    assert (verdict.revision, verdict.content) == (0, b"x")


def test_advanced_goes_on_with_who_has_got_further_in_the_same_line() -> None:
    """Most have missed a call that the others have made since the last synchronization."""
    there = replace(AT, resume=ResumePolicy.ADVANCED)
    further = replace(there, revision=6, content=b"f")
    elsewhere = replace(there, revision=9, lineage=OLD, content=b"x")
    stale = replace(there, revision=7, stale=True, content=b"s")
    verdict = elected(there, there, further, elsewhere, stale, expected=AT_5, commits=1)
    assert (verdict.revision, verdict.content) == (6, b"f")
    assert verdict.outdated == (11, 12, 14, 15)


def test_one_liar_with_a_huge_revision_does_not_replace_the_model_of_five() -> None:
    there = replace(AT, revision=8, resume=ResumePolicy.ADVANCED)
    liar = replace(there, revision=1 << 40, content=b"x")
    verdict = elected(liar, *[there] * 5, expected=AT_5, commits=3)
    assert (verdict.revision, verdict.content) == (8, b"a")
    assert (verdict.behind, verdict.outdated) == ((11,), (11,))


def test_one_liar_does_not_replace_the_model_where_the_master_has_seen_nothing() -> None:
    """As a master that was started again: more than half have got further, and are believed."""
    there = replace(AT, revision=8, resume=ResumePolicy.ADVANCED)
    liar = replace(there, revision=9, content=b"x")
    verdict = elected(liar, there, there, expected=AT_5)
    assert (verdict.revision, verdict.content, verdict.outdated) == (8, b"a", (11,))


def test_further_than_the_master_has_seen_takes_more_than_half() -> None:
    there = replace(AT, resume=ResumePolicy.ADVANCED)
    further = replace(there, revision=6, content=b"f")
    verdict = elected(further, further, there, there, expected=AT_5)
    assert (verdict.revision, verdict.content) == (5, b"a")
    verdict = elected(further, further, further, there, there, expected=AT_5)
    assert (verdict.revision, verdict.content) == (6, b"f")


def test_among_what_survivors_bring_one_liar_does_not_count_first() -> None:
    """Nobody has the expected revision: what somebody can have reached comes first."""
    before = replace(AT, revision=4, resume=ResumePolicy.ADVANCED, content=b"b")
    liar = replace(before, revision=1 << 40, lineage=OLD, content=b"x")
    verdict = elected(liar, before, expected=AT_5)
    assert (verdict.revision, verdict.content) == (4, b"b")
    assert elected(liar, expected=AT_5).revision == 1 << 40


def test_a_beginning_does_not_win_over_what_members_of_another_run_bring() -> None:
    """The run had only begun, and its only member is gone."""
    begun = Expected(1, AT_5.lineage)
    newcomer = replace(AT, revision=0, lineage=None, resume=ResumePolicy.ADVANCED, content=b"n")
    trained = replace(newcomer, revision=9, lineage=OLD, content=b"t")
    verdict = elected(newcomer, trained, expected=begun)
    assert (verdict.revision, verdict.content, verdict.outdated) == (9, b"t", (11,))
    assert elected(newcomer, expected=begun).revision == 0


def test_highest_changes_nothing_while_the_revision_is_there() -> None:
    ahead, there = replace(AT, revision=9, content=b"x"), AT
    offers = [replace(o, resume=ResumePolicy.HIGHEST) for o in (ahead, ahead, there)]
    verdict = elected(*offers, expected=AT_5)
    assert (verdict.revision, verdict.content, verdict.outdated) == (5, b"a", (11, 12))


def test_a_revision_that_only_a_receiver_has_is_lost() -> None:
    receiver = replace(AT, strategy=RECEIVE)
    sender = replace(BASE, strategy=SEND, revision=3, content=b"b")
    assert reason(receiver, sender, expected=AT_5).endswith(
        "Members have: peer 11: revision 5 (RECEIVE_ONLY); peer 12: revision 3 of another lineage"
    )
    verdict = elected(
        *(replace(o, resume=ResumePolicy.HIGHEST) for o in (receiver, sender)), expected=AT_5
    )
    assert (verdict.revision, verdict.sources) == (3, (12,))
    assert verdict.behind == verdict.outdated == (11,)


@pytest.mark.parametrize(("expected", "lack"), [
    (FIRST, "all results that the group has committed: load a checkpoint, or"),
    (AT_5, "revision 5: load a checkpoint of that revision, or"),
])  # fmt: skip
def test_stale_contents_count_only_if_there_are_no_others(expected: Expected, lack: str) -> None:
    stale = [replace(offer(b"x", 2), stale=True), replace(offer(b"y", 3), stale=True)]
    assert reason(*stale, expected=expected).startswith(f"no member offers contents with {lack} c")
    verdict = elected(*(replace(o, resume=ResumePolicy.HIGHEST) for o in stale), expected=expected)
    assert (verdict.revision, verdict.content, verdict.sources) == (3, b"y", (12,))
    assert verdict.outdated == (11,)


def test_what_there_is_in_words() -> None:
    stale = replace(offer(revision=2), stale=True)
    foreign, receiver = replace(stale, lineage=OLD), replace(stale, strategy=RECEIVE)
    there = "revision 2 without a result that was committed since"
    assert reason(stale, foreign).endswith(f"Members have: peers 11, 12: {there}")
    there = there.replace("2", "2 of another lineage")
    assert reason(replace(foreign, strategy=SEND), receiver, expected=AT_5).endswith(
        f"Members have: peer 11: {there}; peer 12: {there} (RECEIVE_ONLY)"
    )


@pytest.mark.parametrize("resume", ResumePolicy)
def test_somebody_has_to_send(resume: ResumePolicy) -> None:
    receiver = replace(AT, strategy=RECEIVE, resume=resume)
    assert reason(receiver, receiver, expected=AT_5) == (
        "no member offers contents, because all of them are RECEIVE_ONLY; make at least one of "
        "them SEND_ONLY"
    )


# -- rule 5: election ------------------------------------------------------------------------


def test_most_votes_win() -> None:
    verdict = elected(offer(b"z"), offer(b"b"), offer(b"a"), offer(b"b"))
    assert (verdict.content, verdict.sources, verdict.behind) == (b"b", (12, 14), (11, 13))


def test_of_equals_the_first_in_the_ring_wins() -> None:
    assert elected(offer(b"z"), offer(b"a"), offer(b"a"), offer(b"z")).content == b"z"
    assert elected(offer(b"a"), offer(b"z"), offer(b"z"), offer(b"a")).content == b"a"


def test_of_equals_the_first_valid_holder_counts() -> None:
    late = replace(AT, content=b"x", revision=4)
    x, y = replace(AT, content=b"x"), replace(AT, content=b"y")
    assert elected(late, y, x, y, expected=AT_5).content == b"y"
    assert elected(late, x, y, y, expected=AT_5).content == b"x"


def test_votes_of_outdated_members_count_for_what_somebody_valid_has() -> None:
    late_x, late_z = replace(AT, content=b"x", revision=4), replace(AT, content=b"z", revision=4)
    y, x = replace(AT, content=b"y"), replace(AT, content=b"x")
    verdict = elected(y, x, late_x, late_z, late_z, late_z, expected=AT_5)
    assert (verdict.content, verdict.sources) == (b"x", (12, 13))
    assert (verdict.behind, verdict.outdated) == ((11, 14, 15, 16), (13, 14, 15, 16))


def test_receivers_have_no_vote_and_are_no_sources() -> None:
    receiver = replace(offer(b"x"), strategy=RECEIVE)
    sender = replace(offer(b"a"), strategy=SEND)
    verdict = elected(receiver, receiver, sender, replace(sender, strategy=RECEIVE))
    assert (verdict.content, verdict.sources, verdict.behind) == (b"a", (13,), (11, 12))


# -- rule 6: SEND_ONLY -----------------------------------------------------------------------

WHAT_SENT = "contents of SEND_ONLY members"


def sends(content: bytes, revision: int = 5) -> Offer:
    return replace(AT, strategy=SEND, content=content, revision=revision)


RECEIVES = replace(BASE, strategy=RECEIVE, content=b"r")


def test_a_sender_that_conflicts_with_most_senders_fails() -> None:
    verdict = vote(sends(b"x"), RECEIVES, sends(b"a"), sends(b"a"), expected=AT_5)
    assert verdict == differ(WHAT_SENT, (13, 14), (11,), losers=(11,))


def test_without_a_majority_of_senders_all_fail() -> None:
    verdict = vote(sends(b"x"), RECEIVES, RECEIVES, sends(b"a"), expected=AT_5)
    assert verdict == differ(WHAT_SENT, (11,), (14,))
    verdict = vote(sends(b"x"), sends(b"y"), sends(b"z"), sends(b"z"), expected=AT_5)
    assert verdict == differ(WHAT_SENT, (13, 14), (11,), (12,))


def test_most_senders_are_no_majority_if_the_elected_contents_are_others() -> None:
    verdict = vote(sends(b"x", 4), sends(b"x", 4), sends(b"a"), RECEIVES, expected=AT_5)
    assert verdict == differ(WHAT_SENT, (13,), (11, 12))


def test_an_outdated_sender_with_the_elected_contents_is_fine() -> None:
    verdict = elected(sends(b"a", 4), sends(b"a"), RECEIVES, expected=AT_5)
    assert (verdict.revision, verdict.sources) == (5, (11, 12))
    assert (verdict.behind, verdict.outdated) == ((13,), (13,))


# -- rule 7: what members may hold differently -----------------------------------------------


def test_extra_contents_are_those_of_the_first_valid_source() -> None:
    late = replace(AT, revision=4)
    verdict = elected(
        replace(AT, content=b"x", extra=b"g"),
        late,
        replace(AT, extra=b"f"),
        AT,
        replace(late, extra=b"f"),
        expected=AT_5,
    )
    assert (verdict.content, verdict.behind, verdict.outdated) == (b"a", (11,), (12, 15))
    assert (verdict.extra, verdict.extra_sources) == (b"f", (13, 15))


def test_valid_members_may_differ_in_extra_contents() -> None:
    verdict = elected(AT, replace(AT, extra=b"f"), expected=AT_5)
    assert (verdict.behind, verdict.outdated) == ((), ())
    assert (verdict.extra, verdict.extra_sources) == (b"e", (11,))


# -- rule 8: unchanged -----------------------------------------------------------------------


def test_contents_that_should_not_have_changed() -> None:
    drifted = replace(AT, content=b"x", unchanged=True)
    third = replace(AT, content=b"y")
    assert vote(drifted, third, AT, AT, drifted, AT, expected=AT_5) == differ(
        "contents that a member expected to be unchanged", (13, 14, 16), (11, 15), (12,)
    )


def test_who_need_not_receive_anything_is_right_to_expect_that() -> None:
    sure = replace(AT, unchanged=True)
    verdict = elected(sure, sure, replace(AT, content=b"x"), expected=AT_5)
    assert (verdict.sources, verdict.behind) == ((11, 12), (13,))


def test_senders_conflict_before_anybody_has_changed() -> None:
    changed = replace(RECEIVES, unchanged=True)
    verdict = vote(sends(b"x"), sends(b"a"), changed, expected=AT_5)
    assert verdict == differ(WHAT_SENT, (11,), (12,))


# -- all rules -------------------------------------------------------------------------------


@st.composite
def elections(
    draw: st.DrawFn, purpose: SyncPurpose = SyncPurpose.SYNC
) -> tuple[list[tuple[PeerId, Offer]], Expected, int]:
    """Few members, and few values of everything: collisions are what matters."""
    expected = Expected(draw(st.sampled_from((0, 2, 2))), draw(st.sampled_from((OURS, None))))
    resume = draw(st.sampled_from(ResumePolicy))
    strategies = draw(st.sampled_from(((POPULAR,), (SEND, RECEIVE), (SEND, SEND, RECEIVE))))
    layouts = draw(st.sampled_from((b"L", b"L", b"L", b"L", b"L", b"LLM", b"LMN")))
    contents = draw(st.sampled_from((b"ab", b"abc", b"aab")))
    unchanged = draw(st.sampled_from(((False,), (False, False, True))))
    one = st.builds(
        Offer,
        st.just(purpose),
        st.sampled_from(strategies),
        st.just(resume),
        revision=st.sampled_from((2, 2, 1, 3, 0)),
        lineage=st.sampled_from((expected.lineage, expected.lineage, OLD, None)),
        stale=st.sampled_from((False, False, False, True)),
        unchanged=st.sampled_from(unchanged),
        layout=st.sampled_from([bytes([each]) for each in layouts]),
        content=st.sampled_from([bytes([each]) for each in contents]),
        extra=st.sampled_from((b"e", b"f")),
    )
    offers = draw(st.lists(one, min_size=1, max_size=7))
    peers = draw(st.permutations(range(1, len(offers) + 1)))
    named = [(PeerId(peer), each) for peer, each in zip(peers, offers, strict=True)]
    return named, expected, draw(st.sampled_from((0, 0, 1, 2)))


Case = tuple[Sequence[tuple[PeerId, Offer]], Expected, int]


@settings(max_examples=1000)
@given(elections())
def test_a_simple_twin_comes_to_the_same_verdict(case: Case) -> None:
    verdict = elect(*case)
    twin = election_twin.elect(*case)
    assert (None if isinstance(verdict, Unavailable) else verdict) == twin
    assert elect(*case) == verdict


@settings(max_examples=200)
@given(elections(SyncPurpose.VERIFY))
def test_a_simple_twin_verifies_the_same(case: Case) -> None:
    assert elect(*case) == election_twin.elect(*case)


@settings(max_examples=300)
@given(elections())
def test_the_elected_contents_have_a_valid_holder_and_nobody_is_forgotten(case: Case) -> None:
    verdict = elect(*case)
    if not isinstance(verdict, Elected):
        return
    offers = dict(case[0])
    valid = [
        peer
        for peer in verdict.sources
        if peer not in verdict.outdated and offers[peer].revision == verdict.revision
    ]
    assert valid
    for peer in valid:
        assert (offers[peer].content, offers[peer].revision) == (verdict.content, verdict.revision)
        assert offers[peer].strategy is not RECEIVE
    holders = {peer for peer, each in offers.items() if each.content == verdict.content}
    assert set(verdict.sources) == {p for p in holders if offers[p].strategy is not RECEIVE}
    assert holders.isdisjoint(verdict.behind)
    assert holders.union(verdict.behind) == set(offers)
    assert not any(offers[p].strategy is SEND or offers[p].unchanged for p in verdict.behind)
    assert {offers[peer].extra for peer in verdict.extra_sources} == {verdict.extra}
    ring = list(offers)
    for chosen in (verdict.sources, verdict.behind, verdict.outdated, verdict.extra_sources):
        assert list(chosen) == [peer for peer in ring if peer in chosen]


def has_synchronized(offer: Offer, expected: Expected) -> bool:
    """With the group, the last time it did."""
    return expected.revision > 0 and offer.lineage == expected.lineage and not offer.stale


@settings(max_examples=300)
@given(elections(), st.sampled_from(SyncPurpose))
def test_who_fails_is_a_minority_and_the_others_get_on(case: Case, purpose: SyncPurpose) -> None:
    offers = [(peer, replace(each, purpose=purpose)) for peer, each in case[0]]
    _, expected, commits = case
    verdict = elect(offers, expected, commits)
    reasons: list[str] = []
    while isinstance(verdict, Differ):
        assert verdict.what not in reasons
        reasons.append(verdict.what)
        concerned = [peer for peers in verdict.sets for peer in peers]
        assert sorted(concerned) == sorted(set(concerned))
        assert len(verdict.sets) > 1
        if not verdict.losers:
            break
        assert set(verdict.losers) == set(concerned) - set(verdict.sets[0])
        belong = [peer for peer, each in offers if has_synchronized(each, expected)]
        voters = belong if belong and verdict.what == WHAT_LAYOUT else concerned
        assert 2 * len(set(verdict.losers).intersection(voters)) < len(voters)
        offers = [(peer, each) for peer, each in offers if peer not in verdict.losers]
        verdict = elect(offers, expected, commits)


@settings(max_examples=200)
@given(elections(), st.permutations(range(1, 8)))
def test_names_play_no_part(case: Case, others: list[int]) -> None:
    """Only the order of the ring does."""
    name = {peer: PeerId(100 + other) for (peer, _), other in zip(case[0], others, strict=False)}

    def renamed(peers: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
        return tuple(name[peer] for peer in peers)

    verdict = elect(*case)
    again = elect([(name[peer], each) for peer, each in case[0]], *case[1:])
    match verdict:
        case Elected():
            assert again == replace(
                verdict,
                sources=renamed(verdict.sources),
                behind=renamed(verdict.behind),
                outdated=renamed(verdict.outdated),
                extra_sources=renamed(verdict.extra_sources),
            )
        case Differ():
            sets = tuple(renamed(peers) for peers in verdict.sets)
            assert again == Differ(sets, renamed(verdict.losers), verdict.what)
        case Unavailable():
            assert isinstance(again, Unavailable)


# -- without all members -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offers", "valid"),
    [
        pytest.param((AT,), True, id="one has it"),
        pytest.param((offer(revision=9), AT), True, id="one of them has it"),
        pytest.param((offer(revision=5), offer(revision=9)), False, id="newcomers"),
        pytest.param((replace(AT, lineage=OLD),), False, id="of another lineage"),
        pytest.param((replace(AT, revision=4),), False, id="of before"),
        pytest.param((replace(AT, stale=True),) * 2, False, id="all of them lack a result"),
        pytest.param((replace(AT, strategy=RECEIVE), offer()), False, id="only received"),
        pytest.param((replace(AT, revision=6),), False, id="further"),
        pytest.param(
            (replace(AT, revision=6, resume=ResumePolicy.ADVANCED),), True, id="further, allowed"
        ),
        pytest.param(
            (replace(offer(revision=9), resume=ResumePolicy.HIGHEST),), False, id="the highest"
        ),
    ],
)
def test_members_elect_without_others_only_what_is_expected(
    offers: tuple[Offer, ...], valid: bool
) -> None:
    """The others may hold it, so none of the exceptions for a lost revision applies."""
    named = [(PeerId(11 + rank), one) for rank, one in enumerate(offers)]
    assert has_valid(named, AT_5, 1) is valid


def test_members_of_a_group_that_has_not_synchronized_elect_what_they_have() -> None:
    assert has_valid([(PeerId(11), offer(revision=3))], FIRST, 0)
    assert not has_valid([(PeerId(11), replace(BASE, strategy=RECEIVE))], FIRST, 0)
