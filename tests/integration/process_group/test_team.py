"""The live ranks of a process group, while members are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pccl
from pccl.bindings.process_group.group import RunGroup
from pccl.bindings.process_group.team import RankLost, Team
from pccl.errors import CollectiveAborted
from tests.integration.conftest import Run
from tests.integration.process_group.conftest import Crew, options


def test_another_thread_sees_a_loss_during_a_look(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring may change between two readings, so a look is one reading."""
    run = new_run(3)
    peers = [member.peer_id for member in run.members]
    last = run.members[2]
    team = Team(last, peers)
    assert team.look().ranks == (0, 1, 2)
    run.members[0].close()
    read = last.members

    def members() -> tuple[pccl.MemberInfo, ...]:
        found = read()
        if len(found) == 3:
            with pytest.raises(CollectiveAborted):  # after this, the ring is another one
                last.all_reduce(np.ones(1))
        return found

    def aborted() -> None:
        with pytest.raises(CollectiveAborted):
            run.members[1].all_reduce(np.ones(1))

    monkeypatch.setattr(last, "members", members)
    monkeypatch.setattr(team, "_live", None)  # or the look finds nothing new
    other = run.start(aborted)
    assert team.look().ranks == (0, 1, 2)
    other.result()
    assert len(read()) == 2
    live = team.look()
    assert (live.ranks, live.place(1), live.place(2), live.successor(0)) == ((1, 2), 0, 1, 0)
    assert [one.peer_id for one in live.calls.members()] == peers[1:]


def test_the_last_rank_does_not_receive_from_lost_ones(
    losing_crew: Callable[..., Crew],
) -> None:
    """Alone, a collective ends at once, but not one that needs a lost rank."""
    crew = losing_crew(2)
    crew.each(lambda rank, group: group.barrier().wait())
    crew.run.members[0].close()
    group: RunGroup = crew.groups[1]
    tensor = torch.tensor([5.0])
    group.allreduce([tensor], options("AllreduceOptions")).wait()
    calls: list[Callable[[], Any]] = [
        lambda: group.broadcast([tensor], options("BroadcastOptions", rootRank=0)),
        lambda: group.reduce([tensor], options("ReduceOptions", rootRank=0)),
        lambda: group.recv([tensor], 0, 0),
        lambda: group.send([tensor], 0, 0),
    ]
    for call in calls:
        with pytest.raises(RankLost, match="rank 0 was lost"):
            call().wait()
    group.broadcast([tensor], options("BroadcastOptions", rootRank=1)).wait()
    group.barrier().wait()
    assert tensor.item() == 5.0
