"""Which master a peer dials next, and when people are told that it looks for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.peer.contact import MasterTurns
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.checksum import DamagedData
from pccl.protocol.handshake.exchange import AnotherRun, HandshakeRefused
from pccl.protocol.types import RemovalCause

FIRST, SECOND, THIRD = (msg.MasterAddress(f"master{n}", 48000 + n) for n in (1, 2, 3))
ALL = (FIRST, SECOND, THIRD)
SILENCE = errors.LinkError(reason="connection refused")
CUT = errors.LinkError(reason="connection reset by peer")


def attempts(turns: MasterTurns, count: int) -> list[msg.MasterAddress]:
    """Whose turn it is, attempt by attempt; all fail."""
    found: list[msg.MasterAddress] = []
    for _ in range(count):
        found.append(turns.turn)
        assert not turns.failed(SILENCE, registered=True, cut_off=False)
    return found


def test_the_masters_are_tried_in_order_and_then_again() -> None:
    assert attempts(MasterTurns(ALL), 5) == [FIRST, SECOND, THIRD, FIRST, SECOND]


@pytest.mark.parametrize(
    ("last", "order"),
    [
        (FIRST, [FIRST, SECOND, THIRD, FIRST]),
        (SECOND, [SECOND, FIRST, THIRD, SECOND]),
        (THIRD, [THIRD, FIRST, SECOND, THIRD]),
    ],
)
def test_the_one_that_has_known_the_peer_last_comes_first(
    last: msg.MasterAddress, order: list[msg.MasterAddress]
) -> None:
    turns = MasterTurns(ALL)
    attempts(turns, 2)
    turns.follow(last, ())
    assert attempts(turns, 4) == order
    attempts(turns, 1)
    turns.lost()
    assert attempts(turns, 4) == order


def test_a_greeting_that_was_cut_off_is_repeated_once() -> None:
    """The master lives, as far as anyone knows: a bit that flips on the way there closes it too."""
    turns = MasterTurns(ALL)
    found: list[msg.MasterAddress] = []
    for _ in range(5):
        found.append(turns.turn)
        turns.failed(CUT, registered=True, cut_off=True)
    assert found == [FIRST, FIRST, SECOND, SECOND, THIRD]


def test_a_master_says_where_others_are() -> None:
    turns = MasterTurns((FIRST,))
    turns.follow(FIRST, (SECOND, FIRST, SECOND))
    assert turns.masters == [FIRST, SECOND]
    assert attempts(turns, 3) == [FIRST, SECOND, FIRST]


def test_one_damaged_greeting_is_no_reason_to_leave_a_master() -> None:
    turns = MasterTurns((FIRST, SECOND))
    damage = DamagedData(reason="damaged")
    found: list[msg.MasterAddress] = []
    for error in (damage, damage, SILENCE, damage, SILENCE):
        found.append(turns.turn)
        turns.failed(error, registered=False, cut_off=False)
    assert found == [FIRST, FIRST, SECOND, FIRST, FIRST]


@pytest.mark.parametrize(
    ("error", "registered", "is_final"),
    [
        (HandshakeRefused(reason="another token"), False, True),
        (HandshakeRefused(reason="another token"), True, False),
        (AnotherRun(reason="another run"), False, True),
        (AnotherRun(reason="another run"), True, True),
        (SILENCE, False, False),
    ],
)
@pytest.mark.parametrize("masters", [1, 2, 3])
def test_what_can_be_mended_is_told_when_every_master_has_had_its_turn(
    error: errors.PCCLError, registered: bool, is_final: bool, masters: int
) -> None:
    turns = MasterTurns(ALL[:masters])
    told = [turns.failed(error, registered=registered, cut_off=False) for _ in range(masters)]
    assert told == [False] * (masters - 1) + [is_final]


@pytest.mark.parametrize(
    ("masters", "registered", "asked"),
    [
        (1, False, [False, False]),
        (1, True, [False, False]),
        (2, False, [True, True]),  # the run of a standby may be coming to it
        (2, True, [True, False]),
    ],
)
def test_after_a_refusal_another_master_is_asked(
    masters: int, registered: bool, asked: list[bool]
) -> None:
    turns, refusal = MasterTurns(ALL[:masters]), msg.Refused(None, "not here")
    assert [turns.refused(refusal, registered=registered) for _ in asked] == asked


def test_a_removal_is_final() -> None:
    turns, refusal = MasterTurns(ALL), msg.Refused(RemovalCause.GOODBYE, "gone")
    assert not turns.refused(refusal, registered=True)
    assert turns.turn == FIRST


@given(
    st.lists(st.sampled_from(["silent", "damaged", "cut off", "refused"]), min_size=6, max_size=30)
)
def test_every_master_has_its_turn(endings: list[str]) -> None:
    """Whatever they come to; two greetings in a row that were damaged or cut off count as one."""
    turns = MasterTurns(ALL)
    found: list[msg.MasterAddress] = []
    for ending in endings:
        found.append(turns.turn)
        match ending:
            case "silent":
                turns.failed(SILENCE, registered=False, cut_off=False)
            case "damaged":
                turns.failed(DamagedData(reason="damaged"), registered=False, cut_off=False)
            case "cut off":
                turns.failed(CUT, registered=False, cut_off=True)
            case _:
                turns.refused(msg.Refused(None, "not here"), registered=False)
    for place in range(len(found) - 5):
        assert set(found[place : place + 6]) == set(ALL)
