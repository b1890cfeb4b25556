"""Which process may read the memory of this one, where Linux's security module Yama asks for it.

At Yama's ptrace scope 1, a process may read the memory of its descendants, and of processes that
named it or one of its ancestors. Each process can name one (prctl(2), PR_SET_PTRACER). So this
process names an ancestor that it has in common with the reader, if there is one: the processes that
one ``pccl launch`` started then read each other's memory. Otherwise it names its first reader.
"""

from __future__ import annotations

from collections.abc import Sequence

SCOPE_RESTRICTED = 1
"""The ptrace scope at which naming a process helps. Below it, reading needs no name; above it, a
name does not help."""

ANYONE = -1
"""Stands for every process of the same user."""

INIT = 1
"""The first process. It is not named, because all processes descend from it."""


def process_to_name(
    scope: int | None,
    own: Sequence[int],
    reader: Sequence[int],
    named: int | None,
    *,
    anyone: bool = False,
) -> int | None:
    """Return the process to name, so that ``reader`` can read; None: name no other one.

    Args:
        scope: Yama's ptrace scope; None: the system has no Yama.
        own: id of this process, of its parent, and so on.
        reader: the same of the reader, as the reader says.
        named: the process that this one has named before.
        anyone: whether to let every process of the same user read.
    """
    if scope != SCOPE_RESTRICTED or not reader or reader[0] in own:
        return None
    if anyone:
        return None if named == ANYONE else ANYONE
    if named in reader:
        return None
    if named is not None and named not in own:
        return None  # another reader, which must keep its permission
    start = own.index(named) if named is not None else 1
    shared = next((pid for pid in own[start:] if pid in reader and pid != INIT), None)
    if shared is not None:
        return shared
    return reader[0] if named is None else None
