"""Process groups of members in this process, and threads that call them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

from pccl.bindings.process_group.group import Options, RunGroup
from pccl.bindings.process_group.team import Team
from pccl.bindings.process_group.untyped import dist
from tests.integration.conftest import Run, results_of
from tests.support.patience import LIMIT_S


def options(kind: str, **values: Any) -> Any:
    """torch's options of a collective, of one that is waited for."""
    made = getattr(dist.distributed_c10d, kind)()
    made.asyncOp = False
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Crew:
    """The process groups of some members of a run, one of each."""

    def __init__(self, run: Run, ranks: list[int], name: str, options: Options) -> None:
        self.run = run
        members = [run.members[rank] for rank in ranks]
        peers = [member.peer_id for member in members]
        limit = timedelta(seconds=LIMIT_S)
        self.groups = [
            RunGroup(Team(member, peers), name, limit, options, lambda: None) for member in members
        ]

    def each(self, call: Callable[[int, RunGroup], Any]) -> list[Any]:
        """Let all ranks make a call, and return what it returns."""
        started = [self.run.start(call, rank, group) for rank, group in enumerate(self.groups)]
        return results_of(started)


@pytest.fixture
def crew_of(run_of: Callable[..., Run]) -> Callable[..., Crew]:
    """Makes the process groups of a run of some members, which a test leaves as they were."""

    def make(
        size: int,
        ranks: list[int] | None = None,
        *,
        name: str = "g",
        options: Options = Options(),  # noqa: B008
    ) -> Crew:
        return Crew(run_of(size), list(range(size)) if ranks is None else ranks, name, options)

    return make


@pytest.fixture
def losing_crew(new_run: Callable[..., Run]) -> Callable[..., Crew]:
    """The same, for tests that lose members."""

    def make(size: int, *, options: Options = Options()) -> Crew:  # noqa: B008
        return Crew(new_run(size), list(range(size)), "g", options)

    return make
