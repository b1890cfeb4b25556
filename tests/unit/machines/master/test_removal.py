"""Members learn why another one is gone, as far as a message has room."""

from __future__ import annotations

import pytest

from pccl.machines.master.ballots.ballot import Expel
from pccl.machines.master.events import Announce, ConnectionClosed, ConnectionOpened, MasterEffect
from pccl.machines.master.removal import Removal
from pccl.protocol import messages as msg
from pccl.protocol.limits import DEPARTURES_MAX
from pccl.protocol.types import NS_PER_S, PeerId, RemovalCause
from tests.support.master_stage import MasterStage, told
from tests.support.scenarios import key

TWO, THREE = PeerId(2), PeerId(3)
WHY = "silent for 10.0 s"


def expel(master: MasterStage, *peers: int, why: str = WHY) -> list[MasterEffect]:
    """Remove peers, and return the effects of that."""
    gone = tuple(map(PeerId, peers))
    master.machine.removals.expel(Expel(gone, RemovalCause.SILENT, why))
    return master.do(ConnectionOpened(999, "10.0.0.9", key(9)))


def departures(effects: list[MasterEffect]) -> dict[int, tuple[msg.Departure, ...]]:
    """By connection."""
    return {where: one.departures for where, one in told(effects, msg.RosterChanged)}


@pytest.mark.parametrize(
    ("at_s", "removed_ms", "now_ms"), [(2, 2000, 5000), (0, 0, 5000), (-3, 0, 8000)]
)
def test_who_returns_learns_when(at_s: int, removed_ms: int, now_ms: int) -> None:
    """An earlier master may have removed it before this machine's clock began."""
    removal = Removal(TWO, 0, RemovalCause.SILENT, WHY, at_s * NS_PER_S)
    refused = removal.told(5 * NS_PER_S)
    assert (refused.removed_ms, refused.now_ms) == (removed_ms, now_ms)


def test_the_others_learn_cause_and_reason() -> None:
    master = MasterStage().new(3)
    gone = msg.Departure(TWO, RemovalCause.SILENT, WHY)
    assert departures(expel(master, 2)) == {1: (gone,), 3: (gone,)}


def test_a_goodbye_is_a_cause_too() -> None:
    master = MasterStage().new(3)
    gone = msg.Departure(THREE, RemovalCause.GOODBYE, "it left")
    assert departures(master.hear(3, msg.Goodbye())) == {1: (gone,), 2: (gone,)}


def test_several_that_go_together_are_told_together() -> None:
    master = MasterStage().new(4)
    both = tuple(msg.Departure(peer, RemovalCause.SILENT, WHY) for peer in (TWO, THREE))
    assert departures(expel(master, 2, 3)) == {1: both, 4: both}


def test_the_members_of_all_groups_are_told() -> None:
    master = MasterStage().new()
    master.together(0, 0, 1)
    gone = msg.Departure(TWO, RemovalCause.SILENT, WHY)
    assert departures(expel(master, 2)) == {1: (gone,), 3: (gone,)}


def test_a_newcomer_that_goes_changes_no_roster() -> None:
    master = MasterStage().new(2)
    master.register(3)
    assert departures(expel(master, 3)) == {}


def test_of_many_that_go_together_the_first_are_told() -> None:
    size = DEPARTURES_MAX + 5
    master = MasterStage().new()
    master.together(*[0] * size)
    gone = range(2, size)
    found = departures(expel(master, *gone))
    assert {where: [one.peer for one in told] for where, told in found.items()} == {
        where: list(gone)[:DEPARTURES_MAX] for where in (1, size)
    }


def test_what_a_peer_missed_it_is_not_told_again() -> None:
    """It gets the rosters, and what is known of causes is in the log of the master."""
    master = MasterStage().new(3)
    version = master.machine.membership.version
    master.do(ConnectionClosed(1, "reset"))
    expel(master, 2)
    effects = master.resume(1, 11, version)
    assert departures(effects) == {11: ()}


@pytest.mark.parametrize("name", ["", "carol"])
def test_operators_learn_the_name(name: str) -> None:
    master = MasterStage().new(1)
    master.register(2, name=name)
    announced = [one for one in expel(master, 2) if isinstance(one, Announce)]
    cause = RemovalCause.SILENT
    assert announced == [Announce("removed", TWO, name, 0, WHY, cause)]
