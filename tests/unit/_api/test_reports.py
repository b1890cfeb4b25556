"""What a status of a peer shows of itself."""

from __future__ import annotations

import pytest

from pccl._api.reports import MasterContact, MemberInfo, Status
from pccl.protocol.limits import TERM_GAP

LONG = TERM_GAP + 7_000_003


@pytest.mark.parametrize(
    ("peer", "name", "shown"),
    [(2, "bob", "2 (bob)"), (LONG, "bob", "bob"), (2, "", "2"), (LONG, "", str(LONG))],
)
def test_a_peer_has_the_name_that_all_others_show(peer: int, name: str, shown: str) -> None:
    members = (MemberInfo(1, 0, "10.0.0.1", 1, "alice"), MemberInfo(peer, 1, "10.0.0.2", 2, name))
    master = MasterContact("10.0.0.9:1", True, 0.25)
    status = Status(peer, (), "member", 1, 1, members, master, (), (), ())
    assert repr(status) == (
        f"<Status: peer {shown}, member, members: 2, links: 0, open calls: 0, "
        "master 10.0.0.9:1 (silent for 0.2 s)>"
    )
