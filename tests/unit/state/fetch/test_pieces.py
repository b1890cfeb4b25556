"""Which piece is asked of which source: each rule by name, then whole transfers in a model network.

Sizes and times are in round numbers so that what must come out is arithmetic: the smallest window
is 4 MiB, four pieces of 1 MiB.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.types import NS_PER_MS, NS_PER_S, PeerId
from pccl.state.fetch.pieces import Ask, PieceFetch
from pccl.state.fetch.slots import SlotSet, ones
from pccl.state.fetch.source import Source
from tests.unit.state.fetch.fetch_model import MIB, Judge, Network, Uplink

STALL_NS = 5 * NS_PER_S
A, B, C, D = (PeerId(number) for number in (1, 2, 3, 4))


def fetch_of(count: int, rank: int = 0, fetchers: int = 1, nbytes: int = MIB) -> PieceFetch:
    return PieceFetch(dict.fromkeys(range(count), nbytes), rank, fetchers, 0, stall_ns=STALL_NS)


def asked(asks: Iterable[Ask]) -> dict[PeerId, list[int]]:
    found: dict[PeerId, list[int]] = {}
    for ask in asks:
        found.setdefault(ask.source, []).extend(ask.pieces)
    return found


def view(fetch: PieceFetch, source: PeerId) -> Source:
    return next(each for each in fetch.sources() if each.peer == source)


def run_at(fetch: PieceFetch, source: PeerId, rate: int, begin_s: int, seconds: int) -> None:
    """Bytes come from a source at a rate, told four times a second."""
    for quarter in range(1, seconds * 4 + 1):
        now_ns = begin_s * NS_PER_S + quarter * 250 * NS_PER_MS
        fetch.progressed(source, rate // 4, now_ns)


# -- a source, its window, its rate -------------------------------------------


def test_nothing_to_fetch() -> None:
    fetch = fetch_of(0)
    assert fetch.complete
    assert not fetch.starved
    assert fetch.add_source(A, 0) == fetch.tick(NS_PER_S) == []


def test_first_window() -> None:
    fetch = fetch_of(10)
    assert fetch.add_source(A, 0) == [Ask(A, (0, 1, 2, 3))]
    assert fetch.add_source(B, 0) == [Ask(B, (4, 5, 6, 7))]
    assert fetch.outstanding(B) == (4, 5, 6, 7)
    assert fetch.arrived(A, 0, 1, sound=True) == [Ask(A, (8,))]
    assert fetch.arrived(A, 1, 2, sound=True) == [Ask(A, (9,))]
    assert fetch.arrived(A, 2, 3, sound=True) == []
    assert fetch.missing == 7
    assert not fetch.wants(2)
    assert fetch.wants(3)
    assert not fetch.wants(10)
    assert not fetch.complete


def test_begins_at_its_share() -> None:
    assert fetch_of(9, rank=0, fetchers=3).add_source(A, 0) == [Ask(A, (0, 1, 2, 3))]
    assert fetch_of(9, rank=1, fetchers=3).add_source(A, 0) == [Ask(A, (3, 4, 5, 6))]
    assert fetch_of(9, rank=2, fetchers=3).add_source(A, 0) == [Ask(A, (6, 7, 8, 0))]


def test_small_pieces_are_asked_for_together() -> None:
    fetch = fetch_of(200, nbytes=100)
    asks = fetch.add_source(A, 0)
    assert [len(ask.pieces) for ask in asks] == [64, 64, 64, 8]
    assert [piece for ask in asks for piece in ask.pieces] == list(range(200))


def test_tiny_pieces_are_limited_by_number_and_refilled_in_bulk() -> None:
    fetch = fetch_of(5000, nbytes=1)
    assert len(asked(fetch.add_source(A, 0))[A]) == 4096
    for piece in range(63):
        assert fetch.arrived(A, piece, 1, sound=True) == []
    assert fetch.arrived(A, 63, 1, sound=True) == [Ask(A, tuple(range(4096, 4096 + 64)))]


def test_window_follows_the_rate() -> None:
    fetch = fetch_of(300)
    fetch.add_source(A, 0)
    run_at(fetch, A, 10 * MIB, 0, 1)
    assert view(fetch, A).rate == 10 * MIB
    assert asked(fetch.arrived(A, 0, NS_PER_S, sound=True)) == {A: list(range(4, 11))}
    run_at(fetch, A, 1000 * MIB, 1, 20)
    fetch.arrived(A, 1, 22 * NS_PER_S, sound=True)
    assert view(fetch, A).outstanding_bytes == 64 * MIB


def test_idle_time_is_not_in_the_rate() -> None:
    fetch = fetch_of(1)
    fetch.add_source(A, 0, [])
    fetch.add_source(A, 50 * NS_PER_S, [0])
    fetch.progressed(A, MIB // 2, 50 * NS_PER_S + 500 * NS_PER_MS)
    assert view(fetch, A).rate == MIB


def test_an_old_rate_fades() -> None:
    fetch = fetch_of(10)
    fetch.add_source(A, 0)
    run_at(fetch, A, 8 * MIB, 0, 1)
    fetch.tick(2 * NS_PER_S)  # a second without a byte: half
    assert view(fetch, A).rate == 4 * MIB


def test_report() -> None:
    fetch = fetch_of(10)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    fetch.arrived(A, 0, 1, sound=True)
    fetch.arrived(B, 4, 1, sound=False)
    fetch.lose_source(A, 2)
    first, second = fetch.sources()
    assert (first.peer, first.live, first.got_bytes, first.strikes) == (A, False, MIB, 0)
    assert (second.peer, second.live, second.got_bytes, second.strikes) == (B, True, 0, 1)
    assert (first.rate, first.outstanding_bytes) == (None, 0)
    assert (second.rate, second.outstanding_bytes) == (None, 4 * MIB)


# -- who has what -------------------------------------------------------------


def test_a_partial_source_is_asked_for_what_it_has() -> None:
    fetch = fetch_of(20)
    assert fetch.add_source(A, 0, [7, 3, 99]) == [Ask(A, (3, 7))]
    assert fetch.starved
    assert fetch.add_source(A, 1, [8]) == [Ask(A, (8,))]
    assert fetch.add_source(A, 2) == [Ask(A, (0,))]
    assert not fetch.starved


def test_rare_pieces_are_asked_of_those_that_have_everything() -> None:
    fetch = fetch_of(8)
    fetch.add_source(B, 0, [0, 1, 2, 3, 4, 5])
    assert fetch.outstanding(B) == (0, 1, 2, 3)
    assert asked(fetch.add_source(A, 0)) == {A: [6, 7, 4, 5]}


def test_what_a_lost_partial_source_had_is_rare_again() -> None:
    fetch = fetch_of(20)
    fetch.add_source(B, 0, range(10))
    assert fetch.lose_source(B, 1) == []
    assert fetch.starved
    assert fetch.add_source(A, 2) == [Ask(A, (0, 1, 2, 3))]


def test_a_stalled_partial_source_makes_nothing_common() -> None:
    fetch = fetch_of(8)
    fetch.add_source(B, 0, range(6))
    fetch.tick(STALL_NS)
    assert asked(fetch.add_source(A, STALL_NS)) == {A: [0, 1, 2, 3]}
    fetch = fetch_of(8)
    fetch.add_source(B, 0, range(6))
    fetch.tick(STALL_NS)
    fetch.progressed(B, 1, STALL_NS)
    assert asked(fetch.add_source(A, STALL_NS)) == {A: [6, 7, 4, 5]}


def test_what_a_partial_source_has_got_meanwhile_is_asked_of_it() -> None:
    fetch = fetch_of(12)
    fetch.add_source(A, 0)
    assert fetch.outstanding(A) == (0, 1, 2, 3)
    assert fetch.add_source(B, 0, range(4)) == []
    assert asked(fetch.ask_again(A, 1)) == {A: [4, 5, 6, 7], B: [0, 1, 2, 3]}


def test_a_refused_piece_is_asked_of_others() -> None:
    fetch = fetch_of(6)
    fetch.add_source(A, 0)
    assert fetch.refuse(A, [1, 5], 1) == [Ask(A, (4,))]
    assert fetch.starved
    assert fetch.arrived(A, 1, 1, sound=True) == []
    assert fetch.wants(1)
    for piece in (0, 2, 3, 4):
        assert fetch.arrived(A, piece, 2, sound=True) == []
    assert fetch.add_source(B, 3) == [Ask(B, (1, 5))]
    assert fetch.add_source(A, 4, [5]) == []
    assert fetch.lose_source(B, 5) == [Ask(A, (5,))]
    assert fetch.add_source(A, 6) == [Ask(A, (1,))]


def test_a_lost_source_gives_its_pieces_back_and_may_return() -> None:
    fetch = fetch_of(6)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    assert fetch.outstanding(B) == (4, 5)
    assert fetch.lose_source(A, 1) == [Ask(B, (0, 1))]
    assert fetch.outstanding(A) == ()
    assert fetch.arrived(A, 2, 2, sound=True) == []
    assert fetch.wants(2)
    assert fetch.add_source(A, 3, [3, 4]) == [Ask(A, (3,))]


def test_a_lost_lane_is_asked_again() -> None:
    fetch = fetch_of(9)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    fetch.arrived(B, 4, 1, sound=True)
    fetch.arrived(B, 5, 1, sound=True)
    assert fetch.outstanding(B) == (6, 7, 8)
    assert fetch.ask_again(A, 2) == [Ask(A, (0, 1, 2, 3))]
    assert fetch.arrived(A, 0, 3, sound=True) == []
    fetch = fetch_of(4)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    assert asked(fetch.ask_again(A, 1)) == {A: [0, 1, 2, 3]}


def test_what_was_not_asked_changes_nothing() -> None:
    fetch = fetch_of(10)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    for source, piece, sound in ((A, 4, True), (A, 9, True), (A, 77, True), (C, 0, True)):
        assert fetch.arrived(source, piece, 1, sound=sound) == []
        assert fetch.arrived(source, piece, 1, sound=not sound) == []
    assert fetch.missing == 10
    assert not view(fetch, A).strikes
    fetch.arrived(A, 0, 1, sound=True)
    assert fetch.arrived(A, 0, 1, sound=True) == []
    assert fetch.arrived(A, 0, 1, sound=False) == []
    assert not view(fetch, A).strikes
    fetch.progressed(C, MIB, 1)
    assert fetch.lose_source(C, 1) == fetch.refuse(C, [1], 1) == fetch.ask_again(C, 1) == []
    assert fetch.outstanding(C) == ()


# -- wrong pieces -------------------------------------------------------------


def test_a_liar_is_left_alone() -> None:
    fetch = fetch_of(10)
    fetch.add_source(A, 0)
    fetch.arrived(A, 0, 0, sound=True)
    fetch.add_source(B, 0)
    assert fetch.outstanding(A) == (1, 2, 3, 4)
    assert fetch.outstanding(B) == (5, 6, 7, 8)
    assert fetch.arrived(A, 1, 1, sound=False) == []
    assert fetch.outstanding(A) == ()
    assert not fetch.wants(0)
    assert fetch.arrived(B, 5, 1, sound=True) == [Ask(B, (1,))]
    assert fetch.arrived(B, 6, 1, sound=True) == [Ask(B, (2,))]
    assert fetch.tick(2) == []
    fetch.arrived(A, 1, 2, sound=False)
    assert view(fetch, A).strikes == 1


def test_the_last_that_a_liar_owed_may_be_right() -> None:
    fetch = fetch_of(4)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0, [0, 1, 2])
    for piece in (0, 1, 2):
        fetch.arrived(A, piece, 1, sound=False)
    assert fetch.starved
    fetch.arrived(A, 3, 2, sound=True)
    assert not fetch.starved


def test_a_piece_that_was_right_counts_from_a_liar_too() -> None:
    fetch = fetch_of(8)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    fetch.arrived(A, 0, 1, sound=False)
    fetch.arrived(A, 1, 1, sound=True)
    assert not fetch.wants(1)


def test_a_liar_is_asked_for_what_nobody_else_has_until_the_third_strike() -> None:
    fetch = fetch_of(3)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0, [1])
    assert fetch.outstanding(A) == (0, 1, 2)
    assert asked(fetch.arrived(A, 0, 1, sound=False)) == {B: [1], A: [0]}
    assert fetch.outstanding(A) == (2, 0)
    assert asked(fetch.arrived(A, 2, 2, sound=False)) == {A: [2]}
    assert not fetch.starved
    assert fetch.arrived(A, 0, 3, sound=False) == []
    assert fetch.starved
    assert view(fetch, A).strikes == 3
    fetch.lose_source(A, 4)
    assert fetch.add_source(A, 5) == []
    assert fetch.starved


# -- stalls -------------------------------------------------------------------


def test_a_stalled_source_is_passed_over() -> None:
    fetch = fetch_of(9)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    fetch.progressed(B, 1, STALL_NS - 1)
    assert fetch.tick(STALL_NS - 1) == []
    assert fetch.tick(STALL_NS) == []  # B is full
    assert fetch.outstanding(A) == (0, 1, 2, 3)
    assert fetch.arrived(B, 4, STALL_NS, sound=True) == [Ask(B, (0,))]
    assert fetch.outstanding(A) == (1, 2, 3)
    # Whoever is first counts; A has sent what was asked of both, and has two pieces left to send.
    assert fetch.arrived(A, 0, STALL_NS + 1, sound=True) == [Ask(B, (8,))]
    assert not fetch.wants(0)
    assert fetch.outstanding(B) == (5, 6, 7, 8)
    assert fetch.outstanding(A) == (1, 2, 3)


def test_a_source_that_wakes_gets_one_piece_then_all() -> None:
    fetch = fetch_of(20)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    fetch.progressed(B, 1, STALL_NS)
    fetch.tick(STALL_NS)
    for piece in (4, 5, 6, 7):
        fetch.arrived(B, piece, STALL_NS, sound=True)
    assert fetch.outstanding(B) == (0, 1, 2, 3)
    assert fetch.outstanding(A) == ()
    assert fetch.tick(STALL_NS + 1) == []
    fetch.progressed(A, 1, STALL_NS + 2)
    assert fetch.tick(STALL_NS + 3) == [Ask(A, (8,))]
    assert fetch.arrived(A, 8, STALL_NS + 4, sound=True) == [Ask(A, (9, 10, 11, 12))]


def test_the_only_source_goes_on_after_a_stall() -> None:
    fetch = fetch_of(6)
    fetch.add_source(A, 0)
    assert fetch.tick(STALL_NS) == []
    assert fetch.outstanding(A) == (0, 1, 2, 3)
    assert not fetch.starved
    for piece in (0, 1, 2):
        assert fetch.arrived(A, piece, 2 * STALL_NS, sound=True) == []
    assert fetch.arrived(A, 3, 2 * STALL_NS, sound=True) == [Ask(A, (4, 5))]


def test_all_stall_at_once() -> None:
    fetch = fetch_of(20)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    for now_ns in (STALL_NS, 2 * STALL_NS, 3 * STALL_NS):
        assert fetch.tick(now_ns) == []
    assert fetch.outstanding(A) + fetch.outstanding(B) == tuple(range(8))


def test_stalled_ones_take_turns_if_there_is_nobody_better() -> None:
    fetch = fetch_of(1)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    assert fetch.tick(STALL_NS) == [Ask(B, (0,))]
    assert fetch.tick(STALL_NS + 1) == []
    assert fetch.tick(2 * STALL_NS) == [Ask(A, (0,))]
    assert fetch.tick(3 * STALL_NS) == [Ask(B, (0,))]
    fetch.arrived(A, 0, 3 * STALL_NS, sound=True)
    assert fetch.complete


# -- the end ------------------------------------------------------------------


def known_rates(count: int, fast: int, slow: int) -> PieceFetch:
    """A is fast, B slow, as of 1 s; nothing has been completed."""
    fetch = fetch_of(count)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    run_at(fetch, A, fast, 0, 1)
    run_at(fetch, B, slow, 0, 1)
    return fetch


def finish(fetch: PieceFetch, source: PeerId, pieces: Iterable[int], now_ns: int) -> list[Ask]:
    return [ask for piece in pieces for ask in fetch.arrived(source, piece, now_ns, sound=True)]


def test_the_end_game_asks_the_fast_one_for_the_last_of_the_slow_one() -> None:
    fetch = known_rates(8, 8 * MIB, MIB)
    now_ns = NS_PER_S
    finish(fetch, A, (0, 1, 2, 3), now_ns)
    # B has begun with 1 MiB of its 4 and needs 3 s. A needs 1/8 s for each: for the last 1/8 s
    # against 3 s, then 2/8 against 2 s, then 3/8 against 1 s; and 4/8 s against 0 s.
    assert fetch.tick(now_ns) == [Ask(A, (7, 6, 5))]
    assert fetch.outstanding(B) == (4, 5, 6, 7)
    assert fetch.tick(now_ns) == []
    assert fetch.arrived(A, 7, now_ns, sound=True) == []
    assert fetch.outstanding(B) == (4, 5, 6)
    assert fetch.arrived(B, 7, now_ns, sound=True) == []


def test_no_end_game_without_gain() -> None:
    fetch = known_rates(8, 3 * MIB, 2 * MIB)
    finish(fetch, A, (0, 1, 2, 3), NS_PER_S)
    # B has begun with a piece, and has 3 MiB to send: 1.5 s; A needs 1/3 s for one, 2/3 for two.
    # Twice that is less than the 1.5 s until the last, but not than the 1 s until the one before.
    assert fetch.tick(NS_PER_S) == [Ask(A, (7,))]
    fetch = known_rates(8, 2 * MIB, 3 * MIB)
    finish(fetch, A, (0, 1, 2, 3), NS_PER_S)
    assert fetch.tick(NS_PER_S) == []


def test_a_piece_is_asked_of_two_at_most() -> None:
    fetch = known_rates(8, 8 * MIB, MIB)
    finish(fetch, A, (0, 1, 2, 3), NS_PER_S)
    assert asked(fetch.tick(NS_PER_S)) == {A: [7, 6, 5]}
    fetch.add_source(C, NS_PER_S)
    assert asked(fetch.tick(NS_PER_S)) == {}


def test_a_new_source_helps_with_one_piece_until_its_rate_is_known() -> None:
    fetch = known_rates(8, 8 * MIB, MIB // 2)
    finish(fetch, A, (0, 1, 2, 3), NS_PER_S)
    assert fetch.lose_source(A, NS_PER_S) == []
    fetch.add_source(C, NS_PER_S)
    assert fetch.tick(NS_PER_S) == [Ask(C, (7,))]
    assert fetch.tick(NS_PER_S) == []


def test_who_has_sent_nothing_for_a_second_counts_as_slow() -> None:
    fetch = fetch_of(8)
    fetch.add_source(A, 0)
    fetch.add_source(B, 0)
    run_at(fetch, A, 8 * MIB, 0, 1)
    finish(fetch, A, (0, 1, 2, 3), NS_PER_S - 1)
    assert fetch.tick(NS_PER_S - 1) == []
    assert fetch.tick(NS_PER_S) == [Ask(A, (7, 6, 5, 4))]


@pytest.mark.parametrize("left", [4, 22])
def test_a_slow_source_gets_nothing_that_others_do_sooner(left: int) -> None:
    fetch = known_rates(12 + left, 8 * MIB, MIB)
    now_ns = NS_PER_S
    fetch.tick(now_ns)
    assert fetch.outstanding(A) == (0, 1, 2, 3, 8, 9, 10, 11)
    # B owes 3 more, and would have a fourth after 4 s. A owes 8 and can do 24 more within 4 s.
    assert fetch.arrived(B, 4, now_ns, sound=True) == []
    assert asked(finish(fetch, A, (0, 1, 2, 3), now_ns)) == {A: [12, 13, 14, 15]}


@pytest.mark.parametrize("left", [26, 88])
def test_a_slow_source_does_its_share_while_much_is_left(left: int) -> None:
    fetch = known_rates(12 + left, 8 * MIB, MIB)
    fetch.tick(NS_PER_S)
    assert fetch.arrived(B, 4, NS_PER_S, sound=True) == [Ask(B, (12,))]


def test_equals_do_not_leave_the_last_piece_to_each_other() -> None:
    fetch = fetch_of(4)
    for piece, source in enumerate((A, B, C, D)):
        fetch.add_source(source, 0, [piece])
        run_at(fetch, source, MIB, 0, 1)
    finish(fetch, A, [0], NS_PER_S)
    finish(fetch, B, [1], NS_PER_S)
    finish(fetch, C, [2], NS_PER_S)
    for source in (A, B, C):
        assert fetch.add_source(source, NS_PER_S, [3]) == []
    assert fetch.tick(NS_PER_S) == []
    assert fetch.lose_source(D, NS_PER_S) == [Ask(A, (3,))]


def test_what_only_a_slow_source_has_is_asked_of_it() -> None:
    fetch = fetch_of(20)
    fetch.add_source(A, 0, range(8))
    fetch.add_source(B, 0, range(4, 20))
    run_at(fetch, A, 50 * MIB, 0, 1)
    run_at(fetch, B, MIB, 0, 1)
    fetch.tick(NS_PER_S)
    assert fetch.arrived(B, 4, NS_PER_S, sound=True) == [Ask(B, (8,))]


# -- any sequence of events ---------------------------------------------------

KINDS = st.sampled_from(
    ["all", "some", "lose", "refuse", "progress", "sound", "sound", "sound", "wrong", "again",
     "unasked", "tick", "tick"]
)  # fmt: skip
EVENTS = st.lists(
    st.tuples(KINDS, st.sampled_from([A, B, C, D]), st.integers(0, 1 << 16), st.integers(0, 3)),
    min_size=20,
    max_size=80,
)
SIZES = st.lists(st.sampled_from([1, 1000, MIB // 3, MIB, MIB]), min_size=8, max_size=60)


def apply(judge: Judge, event: tuple[str, PeerId, int, int], now_ns: int, *, strict: bool) -> None:
    kind, source, number, _ = event
    count = len(judge.sizes)
    chance = random.Random(number)
    some = chance.sample(range(count + 1), min(count, 1 + number % 12))
    outstanding = judge.outstanding(source)
    owed = list(judge.known[source].owed) if source in judge.known else []
    match kind:
        case "all":
            judge.add_source(source, now_ns)
        case "some":
            judge.add_source(source, now_ns, some)
        case "lose":
            judge.lose_source(source, now_ns)
        case "refuse":
            judge.refuse(source, [*some[:3], *outstanding[: number % 3]], now_ns)
        case "progress" if not strict:
            judge.progressed(source, number * 64, now_ns)
        case "sound" | "wrong" if owed:
            piece = owed[number % len(owed)]
            judge.arrived(source, piece, now_ns, sound=kind == "sound")
        case "again":
            judge.ask_again(source, now_ns)
        case "unasked" if some and some[0] not in owed:
            judge.arrived(source, some[0], now_ns, sound=number % 2 == 0)
        case "tick":
            judge.tick(now_ns)
        case _:
            pass


def heal(judge: Judge, now_ns: int, deaf: frozenset[PeerId]) -> None:
    """From now on all are honest, but some say nothing; what the others have must come."""
    reachable = {
        piece
        for piece in judge.missing
        if any(known.askable and known.holds(piece) and source not in deaf
               for source, known in judge.known.items())
    }  # fmt: skip
    for _ in range(4 * len(reachable) + 4):
        if not reachable & judge.missing:
            return
        now_ns += judge.stall_ns
        for source in judge.known:
            if source not in deaf:
                for piece in judge.outstanding(source):
                    judge.arrived(source, piece, now_ns, sound=True)
        judge.tick(now_ns)
    assert not reachable & judge.missing


@settings(max_examples=150)
@given(SIZES, EVENTS, st.frozensets(st.sampled_from([A, B, C, D])), st.integers(0, 2))
def test_whoever_has_room_is_asked(
    sizes: list[int], events: list[tuple[str, PeerId, int, int]], deaf: frozenset[PeerId], rank: int
) -> None:
    """Times are so short that no rate is known."""
    judge = Judge(dict(enumerate(sizes)), 3 * NS_PER_MS, strict=True, rank=rank)
    now_ns = 0
    for event in events:
        now_ns += event[3] * NS_PER_MS
        apply(judge, event, now_ns, strict=True)
    heal(judge, now_ns, deaf)


@settings(max_examples=100)
@given(SIZES, EVENTS, st.frozensets(st.sampled_from([A, B, C, D])))
def test_invariants_with_rates(
    sizes: list[int], events: list[tuple[str, PeerId, int, int]], deaf: frozenset[PeerId]
) -> None:
    judge = Judge(dict(enumerate(sizes)), 2 * NS_PER_S, strict=False)
    now_ns = 0
    for event in events:
        now_ns += event[3] * NS_PER_S // 4
        apply(judge, event, now_ns, strict=False)
    heal(judge, now_ns, deaf)


@given(st.sets(st.integers(0, 2999)), st.sets(st.integers(0, 2999)), st.sets(st.integers(0, 2999)))
def test_sets_of_slots(first: set[int], second: set[int], alive: set[int]) -> None:
    sets = [SlotSet(3000), SlotSet(3000, full=True), SlotSet(3000)]
    for slot in first:
        sets[0].add(slot)
    for slot in set(range(3000)) - second:
        sets[1].discard(slot)
    for slot in alive:
        sets[2].add(slot)
    assert sets[0].first() == min(first, default=None)
    assert sets[0].first_shared(sets[1], sets[2]) == min(first & second, default=None)
    assert {slot for slot in range(3000) if slot in sets[0]} == first
    assert list(ones(sets[0].summary)) == sorted({slot // 1024 for slot in first})
    assert second & alive <= {slot for slot in range(3000) if slot in sets[1]} <= second


# -- whole transfers ----------------------------------------------------------


def network(
    count: int, rates: Iterable[float], *, stall_ns: int = STALL_NS, nbytes: int = MIB
) -> Network:
    """One member fetches; sources 1, 2, … have everything; rates in MiB/s."""
    net = Network(dict.fromkeys(range(count), nbytes), stall_ns=stall_ns)
    net.fetcher(100)
    for number, rate in enumerate(rates, 1):
        net.source(number, Uplink(int(rate * MIB)))
    return net


@pytest.mark.parametrize(
    "rates", [(10,), (10, 10, 10), (10, 1), (1, 0.1), (40, 4, 4, 4), (100, 1), (30, 10, 3, 1)]
)
def test_the_rates_of_all_sources_add_up(rates: tuple[float, ...]) -> None:
    net = network(200, rates)
    assert net.run() <= 1.3 * 200 / sum(rates)
    assert net.extra_bytes <= 4 * MIB


def test_many_sources() -> None:
    net = network(400, [2] * 20)
    assert net.run() <= 1.3 * 400 / 40
    assert net.extra_bytes <= 4 * MIB


def test_a_source_that_slows_down_is_helped() -> None:
    net = network(100, (10, 10))
    net.run_for(4.0)
    net.uplinks[B].rate = MIB // 10
    # After 4 s, 0.05 of them for the first requests, 21 MiB are left: 2.1 s for A alone. B owes a
    # second's worth, and it takes a second or two until its measured rate tells.
    assert net.run() <= 4 + 2.1 + 2
    assert net.extra_bytes <= 10 * MIB


def test_two_that_fetch_serve_each_other() -> None:
    net = Network(dict.fromkeys(range(100), MIB))
    net.fetcher(100, 0, 2)
    net.fetcher(101, 1, 2)
    net.source(1, Uplink(10 * MIB))
    for peer in (100, 101):
        net.serves_others(peer, Uplink(10 * MIB))
    assert net.run() <= 1.3 * 100 / 10
    assert net.uplinks[A].sent_bytes <= 1.3 * 100 * MIB


def test_six_that_fetch_serve_each_other() -> None:
    net = Network(dict.fromkeys(range(300), MIB))
    for rank in range(6):
        net.fetcher(100 + rank, rank, 6)
    net.source(1, Uplink(10 * MIB))
    for rank in range(6):
        net.serves_others(100 + rank, Uplink(10 * MIB))
    assert net.run() <= 1.3 * 300 / 10
    assert net.uplinks[A].sent_bytes <= 1.3 * 300 * MIB


def test_a_liar_costs_a_window() -> None:
    net = network(200, (10, 10))
    net.source(3, Uplink(10 * MIB, lies=lambda piece: True))
    assert net.run() <= 1.3 * 200 / 20
    assert net.extra_bytes <= 10 * MIB
    fetch = net.fetchers[PeerId(100)]
    assert [each.strikes > 0 for each in fetch.sources()] == [False, False, True]
    assert fetch.sources()[2].strikes * MIB == net.uplinks[C].sent_bytes


def test_one_wrong_piece_late_costs_a_window() -> None:
    net = network(200, (10, 10))
    net.source(3, Uplink(10 * MIB, lies=lambda piece: piece > 90))
    assert net.run() <= 1.3 * (90 / 30 + 110 / 20)
    assert net.extra_bytes <= 11 * MIB


def test_a_source_that_dies_costs_what_it_owed() -> None:
    net = network(200, (10, 10))
    net.source(3, Uplink(10 * MIB, dies_s=3.0))
    assert net.run() <= 1.3 * (3 + 110 / 20)
    assert net.extra_bytes <= MIB  # of the piece that it was sending


def test_a_source_that_stalls_costs_what_it_owed() -> None:
    net = network(200, (10, 10), stall_ns=NS_PER_S)
    net.source(3, Uplink(10 * MIB, silent_s=(2.0, 600.0)))
    assert net.run() <= 1.3 * (2 + 140 / 20)
    assert net.extra_bytes <= 10 * MIB


def test_a_source_that_wakes_takes_part_again() -> None:
    net = network(400, (10,), stall_ns=NS_PER_S)
    net.source(2, Uplink(10 * MIB, silent_s=(2.0, 5.0)))
    # 40 MiB until 2 s, 30 until 5 s, then 20 in each second.
    assert net.run() <= 1.3 * (5 + 330 / 20)
    assert net.uplinks[B].sent_bytes >= 150 * MIB


def test_everybody_falls_silent_for_a_while() -> None:
    net = network(100, (), stall_ns=NS_PER_S)
    for number in (1, 2):
        net.source(number, Uplink(10 * MIB, silent_s=(2.0, 8.0)))
    assert net.run() <= 1.3 * (6 + 100 / 20)
    assert net.extra_bytes <= 20 * MIB


def test_the_same_events_give_the_same_transfer() -> None:
    def once() -> list[int]:
        net = network(150, (10, 3, 1))
        net.source(4, Uplink(10 * MIB, dies_s=1.5))
        net.source(5, Uplink(7 * MIB, lies=lambda piece: piece % 3 == 0))
        net.run()
        return net.got[PeerId(100)]

    assert once() == once()
    assert sorted(once()) == list(range(150))


def test_a_full_source_is_asked_for_the_own_share_first_and_then_for_little() -> None:
    sizes = dict.fromkeys(range(8), MIB)
    fetch = PieceFetch(sizes, 1, 4, 0, stall_ns=NS_PER_S, most=2 * MIB)
    member, reader = PeerId(1), PeerId(2)
    assert fetch.add_source(member, 0) == [Ask(member, (2, 3))]
    assert fetch.arrived(member, 2, 1, sound=True) == []  # nothing of the others' shares yet
    assert fetch.arrived(member, 3, 2, sound=True) == [Ask(member, (4,))]
    assert fetch.add_source(reader, 3, [4, 5, 6]) == [Ask(reader, (5, 6))]
    assert fetch.others_asked(5, member) == (reader,)
    assert fetch.others_asked(5, reader) == fetch.others_asked(7, reader) == ()
