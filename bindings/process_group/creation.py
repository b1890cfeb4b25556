"""Makes a process group when torch asks for one."""

from __future__ import annotations

from typing import Any

from pccl.bindings.process_group.group import Options, RunGroup
from pccl.bindings.process_group.rendezvous import found_run, joined
from pccl.bindings.process_group.team import Team


def create(asked: Any, options: Any) -> RunGroup:
    """Return a process group.

    Args:
        asked: torch's ``_DistributedBackendOptions``: store, rank, size, timeout, name and, unless
            it is the default group, the ranks of its members in the default group.
        options: ``pg_options``.

    Raises:
        TypeError: ``options`` are not ours.
        RuntimeError: the default group has another backend.
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"pg_options must be pccl.torch.Options, not {type(options).__name__}")
    ranks: list[int] = list(asked.global_ranks_in_group)
    one = joined()
    if one is None and ranks:
        raise RuntimeError('a group with the backend "pccl" needs a default group with it')
    if one is None or not one.peers:
        one = found_run(asked.store, asked.group_rank, asked.group_size, asked.timeout)
    team = Team(one.comm, [one.peers[rank] for rank in ranks] or one.peers)
    leave = one.group_ended if not ranks else lambda: None
    made = RunGroup(team, asked.group_id, asked.timeout, options, leave)
    made.is_apart = one.is_apart
    return made
