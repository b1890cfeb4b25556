"""The shares of a mesh: how much of a tensor each member owns, so that the slowest link is fast.

In a mesh, the link from member i to member j carries j's part of i's contribution and i's part of
the result. If member i owns the share s[i] of a tensor of one byte, the mesh takes the time T with

    s[i] + s[j] <= T * c[i, j]              for each pair; c is the slower one of its directions
    1 + (N - 2) * s[i] <= T * p[i]          for each member; p is what its port carries
    s[0] + ... + s[N-1] = 1,  s[i] >= 0

because contributions and results travel at the same time. With sites (``mesh_s_per_byte``) other
sums of shares stand on the left. With u = s / T this is a linear program
whose start, u = 0, is feasible: the sum of all u, which is 1/T, becomes as large as possible.

Many shares are equally fast if one port is the limit, and the program finds extreme ones. So the
largest share is made smaller, as long as the time stays within ``_SLACK`` of the shortest. Then
noise in the measures does not move much either.

The simplex method solves it (Dantzig 1951). It needs about as many pivots as there are members, but
members can report speeds for which it needs many more, or runs in a circle. So the pivots are
limited: after each one, what is found is feasible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pccl.protocol.vocabulary.mesh_plan import SHARE_UNITS
from pccl.topology.cost_model import mesh_s_per_byte

_PIVOTS_MAX = 4
"""Limit of pivots for each member. Then what is found so far counts."""

_SLACK = 0.02
_BALANCING_STEPS, _LARGE_GROUPS_STEPS = 6, 1
_LARGE_GROUP = 24
"""Larger groups get fewer steps. So a group of 64, with its 2080 conditions, keeps the master busy
for about 0.2 s, and for at most 0.7 s whatever its members report."""

_TOLERANCE = 1e-9

Matrix = npt.NDArray[np.float64]


def best_shares(
    speeds: Sequence[Sequence[float]], ports: Sequence[float], sites: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the shares with which a mesh is fastest, in units of 1 / ``SHARE_UNITS``.

    Args:
        speeds: by the ranks of the ends, in bytes per second; positive. The diagonal does not
            count.
        ports: by rank: what it can send, and receive, over all its links together; at least 3.
        sites: by rank, the site of the member; empty: each member is its own site.

    Returns:
        By rank; their sum is ``SHARE_UNITS``. A rank may own nothing.
    """
    size, pair_speeds = len(ports), np.array(speeds, dtype=np.float64)
    slower = np.where(np.eye(size, dtype=bool), 0, np.minimum(pair_speeds, pair_speeds.T))
    links, own = np.triu_indices(size, 1), np.eye(size)
    conditions = _loads(np.array(sites or range(size)))
    limits = np.concatenate([slower[links], np.minimum(ports, slower.sum(1))])
    fastest = _largest_sum(conditions, limits)
    found = fastest / fastest.sum()
    # Whether the whole tensor can be owned in this time, with ever lower bounds of a share.
    limits *= mesh_s_per_byte(found.tolist(), speeds, ports, sites) * (1 + _SLACK)
    conditions = np.concatenate([conditions, own])
    low, high = 1 / size, float(found.max())
    for _ in range(_BALANCING_STEPS if size <= _LARGE_GROUP else _LARGE_GROUPS_STEPS):
        bound = (low + high) / 2
        owned = _largest_sum(conditions, np.concatenate([limits, np.full(size, bound)]))
        if owned.sum() >= 1:
            found, high = owned / owned.sum(), bound
        else:
            low = bound
    return in_units(found)


def _loads(sites: npt.NDArray[np.int64]) -> Matrix:
    """Return what each pair of ranks, and then each port, carries, by the shares of the ranks.

    The same as in ``mesh_s_per_byte``; the whole is the sum of all shares.
    """
    size = len(sites)
    own, near = np.eye(size), np.equal.outer(sites, sites)
    members = near.sum(1)
    elsewhere = np.where(near, 0, 1 / members[:, None])
    """By rank: what it collects for its site."""
    one, other = np.triu_indices(size, 1)
    across = own[one] / members[other, None] + own[other] / members[one, None]
    inside = own[one] + own[other] + 2 * elsewhere[one]
    pairs = np.where(near[one, other, None], inside, across)
    ports = elsewhere + (len(np.unique(sites)) - 1) * own
    return np.concatenate([pairs, ports])


def in_units(parts: Sequence[float] | Matrix) -> tuple[int, ...]:
    """Return parts in units of 1 / ``SHARE_UNITS`` of their sum, which stays exact."""
    exact = np.asarray(parts, dtype=np.float64)
    exact = exact * (SHARE_UNITS / exact.sum())
    floors = np.floor(exact).astype(int)
    missing = SHARE_UNITS - int(floors.sum())
    largest = np.argsort(floors - exact, kind="stable")[:missing]
    floors[largest] += 1
    return tuple(map(int, floors))


def _largest_sum(conditions: Matrix, limits: Matrix) -> Matrix:
    """Return x >= 0 with the largest sum for which ``conditions @ x <= limits``; limits >= 0."""
    rows, size = conditions.shape
    # The columns are the variables that are 0 now, the rows the others; the last row is the sum.
    table = np.zeros((rows + 1, size + 1))
    scale = limits.max()
    table[:rows, :size], table[:rows, size] = conditions, limits / scale
    table[rows, :size] = -1
    variables = np.arange(size + rows, dtype=np.int64)
    free, basic = variables[:size], variables[size:]
    for _ in range(_PIVOTS_MAX * size):
        column = int(np.argmin(table[rows, :size]))
        if table[rows, column] >= -_TOLERANCE:
            break
        grows = np.flatnonzero(table[:rows, column] > _TOLERANCE)
        ratios = np.maximum(table[grows, size], 0) / table[grows, column]
        ties = grows[ratios <= ratios.min() * (1 + _TOLERANCE)]
        row = int(ties[np.argmin(basic[ties])])
        _pivot(table, row, column)
        free[column], basic[row] = basic[row], free[column]
    found = np.zeros(size)
    for at in np.flatnonzero(basic < size):
        found[basic[at]] = table[at, size]
    scaled: Matrix = np.maximum(found, 0) * scale
    return scaled


def _pivot(table: Matrix, row: int, column: int) -> None:
    """Exchange the variable of a row with that of a column."""
    pivot = table[row, column]
    pivots = table[:, column].copy()
    table[row] /= pivot
    others = np.arange(len(table)) != row
    table[others] -= np.outer(pivots[others], table[row])
    table[:, column] = -pivots / pivot
    table[row, column] = 1 / pivot
