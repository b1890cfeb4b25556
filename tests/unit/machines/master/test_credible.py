"""What a returning peer may report of itself: its own id, group and key."""

from __future__ import annotations

import pytest

from pccl.machines.master.credible import check_roster
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.types import PeerId, Roster
from tests.support.master_stage import MasterStage, closed
from tests.support.scenarios import key, roster, where

TWO = PeerId(2)
WHOLE = roster(7, 4, 1, 2, 3)
ANOTHER = roster(7, 4, 1, 2, 3, members=(where(1), where(2, 66), where(3)))
"""The same, but peer 2 has another key."""


def test_a_roster_with_the_key_that_the_peer_has_proven() -> None:
    check_roster(WHOLE, TWO, key(2), 0)
    check_roster(ANOTHER, TWO, key(66), 0)
    check_roster(ANOTHER, PeerId(3), key(3), 0)  # of another peer it may say so


@pytest.mark.parametrize(
    ("known", "proven", "reason"),
    [
        (WHOLE, key(66), "gives the peer another key"),
        (ANOTHER, key(2), "gives the peer another key"),
        (WHOLE, b"", "gives the peer another key"),
        (roster(7, 4, 1, 3), key(2), "lacks the peer or its group"),
        (roster(7, 4, 1, 2, 3, group=1), key(2), "lacks the peer or its group"),
    ],
)
def test_a_roster_that_no_master_has_sent_to_the_peer(
    known: Roster, proven: bytes, reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        check_roster(known, TWO, proven, 0)


def test_the_report_of_a_process_with_another_key_has_no_part_in_the_run() -> None:
    for proven, known in ((key(66), WHOLE), (None, ANOTHER)):
        master = MasterStage().restarted()
        master.come(1, known=(WHOLE,))
        assert closed(master.come(2, known=(known,), proven=proven)) == [2]
        master.wait(4, 1)
        assert master.machine.recovering
