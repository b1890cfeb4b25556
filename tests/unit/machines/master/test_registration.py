"""The names with which peers register: good ones go into the roster, others are refused."""

from __future__ import annotations

import pytest

from pccl.machines.master.events import Announce, CloseConnection, ConnectionOpened, SendTo
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId
from tests.support.master_stage import RUN, MasterStage, closed, told
from tests.support.scenarios import key

BAD = {
    " alice": "a name must not be empty, or begin or end with white space",
    "al\nice": "a name must consist of printable characters",
    "al\N{RIGHT-TO-LEFT OVERRIDE}ice": "a name must consist of printable characters",
    "n" * 65: "a name must not be longer than 64 bytes",
}


@pytest.mark.parametrize(("name", "reason"), BAD.items())
def test_a_bad_name_is_refused_with_the_reason(name: str, reason: str) -> None:
    master = MasterStage().new(1)
    effects = master.register(2, name=name)
    assert effects == [SendTo(2, msg.Refused(None, reason)), CloseConnection(2, reason)]
    assert list(master.machine.membership.peers) == [1]


def test_names_are_in_the_roster_and_in_what_operators_learn() -> None:
    master = MasterStage().new()
    (registered, _) = [one for one in master.register(1, name="alice") if isinstance(one, Announce)]
    assert registered == Announce("registered", PeerId(1), "alice", 0, "from 10.0.0.1:4001")
    master.register(2, name="bob")
    ((_, plan),) = told(master.register(3), msg.LinkPlan)
    assert [member.name for member in plan.elders] == ["alice", "bob"]


def test_two_peers_may_have_one_name() -> None:
    """Names are for people; ids tell peers apart."""
    master = MasterStage().new()
    master.register(1, name="alice")
    master.register(2, name="alice")
    assert [peer.member.name for peer in master.machine.membership.peers.values()] == ["alice"] * 2


@pytest.mark.parametrize(("name", "reason"), BAD.items())
def test_a_peer_that_returns_with_a_bad_name_is_turned_away(name: str, reason: str) -> None:
    master = MasterStage()
    master.restarted()
    header = msg.Return(
        peer=PeerId(1), run=RUN, term=1,
        registration=msg.Register(0, "", 1, name=name),
        roster_version=1, rounds=(), incumbent=b"",
    )  # fmt: skip
    master.do(ConnectionOpened(1, "10.0.0.1", key(1)))
    effects = master.hear(1, header)
    assert closed(effects) == [1]
    assert effects == [CloseConnection(1, reason)]
