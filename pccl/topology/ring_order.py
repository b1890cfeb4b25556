"""In which order the members of a group form a ring in which neighbours can talk to each other.

That is a Hamiltonian cycle in the graph of working links. To find one is hard in general (Karp,
"Reducibility among combinatorial problems", 1972), and easy where few links are broken: with n
members of which each can talk to n/2 others or more there always is one (Dirac 1952). So the search
is bounded, and begins with what is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice

from pccl.protocol.types import PeerId

Pair = frozenset[PeerId]

_STEPS_MAX = 20_000
"""Of one search, all cycles that are tried taken together: some tens of milliseconds."""

_SETS_MAX = 500
"""Sets of members that are tried to be left out, the smallest first."""

_NAMED_MAX = 3
"""Links in one reason."""


def apart(pair: Pair, broken: Mapping[Pair, str]) -> str:
    """That two cannot talk, and why, for people."""
    one, other = sorted(pair)
    return f"peers {one} and {other} cannot talk to each other ({broken[pair]})"


def lacking(left_out: Iterable[PeerId], broken: Mapping[Pair, str]) -> str:
    """Of each who is left out a link that it lacks, for people; of many only of the first few."""
    theirs = (min((p for p in broken if peer in p), key=sorted) for peer in left_out)
    return "; ".join(apart(pair, broken) for pair in list(dict.fromkeys(theirs))[:_NAMED_MAX])


def arrange(
    ring: Sequence[PeerId], broken: Collection[Pair], silent: Collection[PeerId] = ()
) -> tuple[list[PeerId], list[PeerId]]:
    """Find an order without neighbours that cannot talk to each other.

    Args:
        ring: the members in their present order.
        broken: pairs that cannot talk.
        silent: members that may be dead.

    Returns:
        The new order, and who is left out because there is none with them: as few as possible, and
        of as many those with the most broken links, then the silent ones, then the youngest.
    """
    steps = iter(range(_STEPS_MAX))
    ranked = sorted(ring, key=lambda peer: (_faults(peer, broken), peer in silent, peer))
    for left_out in islice(_sets_to_leave_out(ranked, broken), _SETS_MAX):
        members = [peer for peer in ring if peer not in left_out]
        order = _cycle(members, broken, steps)
        if order is not None:
            return order, [peer for peer in ring if peer in left_out]
    kept: list[PeerId] = []  # everybody who can talk to everybody else among them
    for peer in ranked:
        if all(Pair((peer, other)) not in broken for other in kept):
            kept.append(peer)
    return [p for p in ring if p in kept], [p for p in ring if p not in kept]


def broken_neighbours(ring: Sequence[PeerId], broken: Collection[Pair]) -> list[Pair]:
    """The neighbours in a ring that cannot talk to each other."""
    if len(ring) < 2:
        return []
    pairs = [Pair((ring[rank - 1], peer)) for rank, peer in enumerate(ring)]
    return [pair for pair in dict.fromkeys(pairs) if pair in broken]


def _sets_to_leave_out(
    ranked: Sequence[PeerId], broken: Collection[Pair]
) -> Iterator[tuple[PeerId, ...]]:
    suspects = [peer for peer in reversed(ranked) if _faults(peer, broken)]
    for size in range(len(suspects) + 1):
        yield from combinations(suspects, size)


def _faults(peer: PeerId, broken: Collection[Pair]) -> int:
    return sum(peer in pair for pair in broken)


def _cycle(
    members: list[PeerId], broken: Collection[Pair], steps: Iterator[int]
) -> list[PeerId] | None:
    """A ring of all ``members``; None if there is none, or none is found in so many ``steps``."""
    if not broken_neighbours(members, broken):
        return members
    friends = {
        peer: [p for p in members if p != peer and Pair((p, peer)) not in broken]
        for peer in members
    }
    if len(members) < 3 or any(len(known) < 2 for known in friends.values()):
        return None
    if len(_reachable(members[0], friends)) < len(members):
        return None
    path = [members[0]]
    choices = [_next_first(path, friends)]
    while choices and next(steps, None) is not None:
        if not choices[-1]:
            choices.pop()
            path.pop()
            continue
        path.append(choices[-1].pop(0))
        if len(path) < len(members):
            choices.append(_next_first(path, friends))
        elif path[0] in friends[path[-1]]:
            return path
        else:
            path.pop()
    return None


def _next_first(path: list[PeerId], friends: dict[PeerId, list[PeerId]]) -> list[PeerId]:
    """Who may follow: who has the fewest ways on comes first (Warnsdorff's rule)."""
    free = [peer for peer in friends[path[-1]] if peer not in path]
    return sorted(free, key=lambda peer: sum(p not in path for p in friends[peer]))


def _reachable(start: PeerId, friends: dict[PeerId, list[PeerId]]) -> set[PeerId]:
    found, waiting = {start}, [start]
    while waiting:
        new = [peer for peer in friends[waiting.pop()] if peer not in found]
        found.update(new)
        waiting += new
    return found
