"""What the reports of returning members show, and what they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.master.connections import Caller
from pccl.machines.master.succession.recovery import Recovery
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import Timing
from pccl.protocol.types import PeerId, Roster
from tests.support.master_stage import MASTER, NEXT, OTHER_RUN, RUN
from tests.support.scenarios import key, roster, where

TERM_TWO = 1 << 32
"""Rosters of the second term have higher numbers."""


def come(
    recovery: Recovery,
    peer: int,
    *known: Roster,
    run: bytes = RUN,
    ratified: int = 0,
    connection: int = 0,
    proven: bytes | None = None,
) -> list[int]:
    """A peer returns and reports; the connections that are closed for it."""
    connection = connection or peer
    group = known[0].group if known else 0
    registration = msg.Register(group, "", 4000 + peer, 1, 2)
    newest = max((one.version for one in known), default=0)
    header = msg.Return(PeerId(peer), run, 1, registration, newest, (), MASTER, ratified)
    caller = Caller(f"10.0.0.{peer}", proven or key(peer), 0)
    closed = recovery.begins(connection, caller, header, 0)
    report = recovery.report_on(connection)
    assert report is not None
    for one in known:
        recovery.take(report, msg.KnownRoster(one, MASTER))
    recovery.take(report, msg.Reported())
    return closed


def test_a_goodbye_counts_in_its_own_run_only() -> None:
    """Peer 2 of one run has left; peer 2 of the next one is somebody else, and is missing."""
    recovery = Recovery(Timing(), None, NEXT, 0)
    come(recovery, 1, roster(2, 1, 1, 2), run=OTHER_RUN)
    come(recovery, 2, roster(2, 1, 1, 2), run=OTHER_RUN)
    recovery.leave(1)
    recovery.leave(2)
    recovery.learn(RUN, NOT_TOLD, 0)  # its master has said so
    come(recovery, 3, roster(7, 1, 1, 2, 3))
    assert recovery.result().left == set()
    (basis,) = recovery.bases()
    assert basis.size == 3


def test_goodbyes_make_the_majority_smaller() -> None:
    recovery = Recovery(Timing(), None, NEXT, 0)
    for peer in (1, 2, 3, 4):
        come(recovery, peer, roster(7, 1, 1, 2, 3, 4, 5))
    for peer in (3, 4):
        recovery.leave(peer)
    assert recovery.has_majority()


def test_members_that_a_majority_has_left_behind_are_none_though_the_others_are_gone() -> None:
    """They knew rosters of the first master; under this one a majority went on without them."""
    recovery = Recovery(Timing(), RUN, NEXT, 0, ratified=TERM_TWO + 4)
    for peer in (1, 3):
        come(recovery, peer, roster(2, 1, 1, 2, 3, 4, 5), roster(4, 1, 1, 3, 4), ratified=2)
    assert recovery.bases() == []
    assert not recovery.has_majority()


def test_a_group_that_has_lost_all_members_is_none_though_one_of_them_is_back() -> None:
    """Peer 3 of group 0 was removed, peer 1 has left: there was nobody to tell in their group."""
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    before = replace(roster(4, 1, 1, 3), global_world_size=4, peer_groups=2)
    now = replace(roster(5, 1, 4, 6), group=1)
    for peer, newest in ((3, before), (4, now), (6, now)):
        come(recovery, peer, newest, ratified=5 if peer == 4 else 0)
    result = recovery.result()
    assert list(result.members) == [PeerId(4), PeerId(6)]
    assert [report.peer for report in result.returned] == [PeerId(4), PeerId(6)]
    everybody = {PeerId(peer) for peer in (1, 3, 4, 6)}
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    for peer, newest in ((3, before), (4, now)):  # nobody knows that a majority had the newest
        come(recovery, peer, newest, ratified=4)
    assert set(recovery.result().members) == everybody
    still = replace(now, global_world_size=4, peer_groups=2)
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    for peer, newest in ((3, before), (4, still)):  # group 0 has not heard of it
        come(recovery, peer, newest, ratified=5)
    assert set(recovery.result().members) == everybody


def test_nor_if_another_one_tells_of_it() -> None:
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    for peer in (1, 3):
        come(recovery, peer, roster(2, 1, 1, 2, 3, 4, 5), roster(4, 1, 1, 3, 4), ratified=2)
    assert recovery.has_majority() is False  # two of five, though they are two of three later
    come(recovery, 7, roster(TERM_TWO + 5, 1, 2, 7), ratified=TERM_TWO + 4)
    assert recovery.bases() == []


# -- two processes with one id ---------------------------------------------------------------------

ALL = roster(7, 1, 1, 2, 3)
IMPOSTOR = key(66)


def refused(recovery: Recovery, peer: int, *known: Roster, proven: bytes | None = None) -> str:
    """Why a process may not return as this peer."""
    with pytest.raises(RemoteProtocolError) as caught:
        come(recovery, peer, *known, connection=100 + peer, proven=proven)
    return caught.value.reason


def test_the_key_that_another_member_names_is_that_of_the_peer() -> None:
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    come(recovery, 3, connection=93, proven=IMPOSTOR)
    come(recovery, 1, ALL)
    assert come(recovery, 3, ALL, connection=13) == [93]
    assert recovery.report_on(93) is None
    come(recovery, 2, ALL)
    returned = recovery.result().returned
    assert {int(report.peer): report.key for report in returned} == {n: key(n) for n in (1, 2, 3)}


def test_while_no_other_member_names_a_key_the_first_process_stays() -> None:
    words = "another process has returned as peer 3"
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    come(recovery, 3, connection=93, proven=IMPOSTOR)
    assert refused(recovery, 3, ALL) == words
    come(recovery, 1)  # its report names nobody
    assert refused(recovery, 3, ALL) == words
    assert recovery.report_on(93) is not None


def test_no_process_names_itself() -> None:
    """The first one says who has returned, by its key; its own roster changes nothing of that."""
    words = "another process has returned as peer 3"
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    come(recovery, 3, ALL)
    members = (where(1), where(2), where(3, 66))
    own = roster(8, 2, 1, 2, 3, members=members)
    assert refused(recovery, 3, own, proven=IMPOSTOR) == words
    come(recovery, 1, ALL)
    assert refused(recovery, 3, own, proven=IMPOSTOR) == words
    assert come(recovery, 3, ALL, connection=13) == [3], "its own process may come again"


def test_a_process_that_the_master_has_not_named_names_nobody() -> None:
    recovery = Recovery(Timing(), RUN, NEXT, 0)
    recovery.learn(RUN, Vouched(7, {PeerId(1): key(1)}), 0)
    come(recovery, 3, connection=93, proven=IMPOSTOR)
    come(recovery, 2, ALL)
    assert refused(recovery, 3, ALL) == "another process has returned as peer 3"
    come(recovery, 1, ALL)
    assert come(recovery, 3, ALL, connection=13) == [93]
    assert refused(recovery, 1, ALL, proven=IMPOSTOR) == "another process has returned as peer 1"
