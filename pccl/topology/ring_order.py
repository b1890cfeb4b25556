"""Finds an order of a group's members in which all neighbours in the ring have links.

Such an order is a Hamiltonian cycle in the graph of working links. Finding it is hard in general
(Karp, "Reducibility among combinatorial problems", 1972), and easy if few links are broken. If each
of n members has links to n/2 other members or more, a cycle always exists (Dirac 1952). So the
search is bounded, and it tries the present order first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice

from pccl.protocol.types import PeerId

Pair = frozenset[PeerId]

_STEPS_MAX = 20_000
"""Limit of steps for one search over all its sets: some tens of milliseconds."""

_SETS_MAX = 500
"""How many sets of members the search tries to leave out, the smallest first."""

PAIRS_NAMED_MAX = 3
"""How many broken links one reason names."""


def apart(pair: Pair, broken: Mapping[Pair, str]) -> str:
    """Return the text that the two peers of ``pair`` have no link, and why."""
    one, other = sorted(pair)
    return f"peers {one}, {other} have no link ({broken[pair]})"


def lacking(left_out: Iterable[PeerId], broken: Mapping[Pair, str]) -> str:
    """Return a text that names a broken link of each peer left out, up to ``PAIRS_NAMED_MAX``."""
    theirs = (min((p for p in broken if peer in p), key=sorted) for peer in left_out)
    return "; ".join(apart(pair, broken) for pair in list(dict.fromkeys(theirs))[:PAIRS_NAMED_MAX])


def arrange(
    ring: Sequence[PeerId], broken: Collection[Pair], silent: Collection[PeerId] = ()
) -> tuple[list[PeerId], list[PeerId]]:
    """Find an order in which all neighbours have links.

    Args:
        ring: the members in their present order.
        broken: pairs without a link.
        silent: members that may be dead.

    Returns:
        The new order, and the members left out because no order includes them: as few as
        possible, first those with most broken links, then silent ones, then the youngest.
    """
    steps = iter(range(_STEPS_MAX))
    ranked = sorted(ring, key=lambda peer: (_faults(peer, broken), peer in silent, peer))
    for left_out in islice(_sets_to_leave_out(ranked, broken), _SETS_MAX):
        members = [peer for peer in ring if peer not in left_out]
        order = _cycle(members, broken, steps)
        if order is not None:
            return order, [peer for peer in ring if peer in left_out]
    kept: list[PeerId] = []  # members that all have links to each other
    for peer in ranked:
        if all(Pair((peer, other)) not in broken for other in kept):
            kept.append(peer)
    return [p for p in ring if p in kept], [p for p in ring if p not in kept]


def broken_neighbours(ring: Sequence[PeerId], broken: Collection[Pair]) -> list[Pair]:
    """Return the neighbours in a ring that have no link."""
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
    """Return a ring of all ``members``; None if none exists, or none is found within ``steps``."""
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
    """Return the possible next members, the one with the fewest exits first (Warnsdorff's rule)."""
    free = [peer for peer in friends[path[-1]] if peer not in path]
    return sorted(free, key=lambda peer: sum(p not in path for p in friends[peer]))


def _reachable(start: PeerId, friends: dict[PeerId, list[PeerId]]) -> set[PeerId]:
    found, waiting = {start}, [start]
    while waiting:
        new = [peer for peer in friends[waiting.pop()] if peer not in found]
        found.update(new)
        waiting += new
    return found
