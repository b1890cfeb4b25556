"""The shares of a mesh: how much of a tensor each member owns, so that the slowest link is fast.

In a mesh, the link from member i to member j carries j's part of i's contribution and i's part of
the result. If member i owns the share s[i] of a tensor of one byte, the mesh takes the time T with

    s[i] + s[j] <= T * c[i, j]              for each pair; c is the slower one of its directions
    1 + (N - 2) * s[i] <= T * p[i]          for each member; p is what its port carries
    s[0] + ... + s[N-1] = 1,  s[i] >= 0

because contributions and results travel at the same time. With u = s / T this is a linear program
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
from itertools import combinations

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import SHARE_UNITS
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


def best_shares(speeds: Sequence[Sequence[float]], ports: Sequence[float]) -> tuple[int, ...]:
    """Return the shares with which a mesh is fastest, in units of 1 / ``SHARE_UNITS``.

    Args:
        speeds: by the ranks of the ends, in bytes per second; positive. The diagonal does not
            count.
        ports: by rank: what it can send, and receive, over all its links together; at least 3.

    Returns:
        By rank; their sum is ``SHARE_UNITS``. A rank may own nothing.
    """
    size, pair_speeds = len(ports), np.array(speeds)
    slower = np.minimum(pair_speeds, pair_speeds.T)
    pairs = list(combinations(range(size), 2))
    conditions = np.zeros((len(pairs) + size, size))
    limits = np.empty(len(pairs) + size)
    for row, (one, other) in enumerate(pairs):
        conditions[row, one] = conditions[row, other] = 1
        limits[row] = slower[one, other]
    conditions[len(pairs) :] = 1 + (size - 2) * np.eye(size)
    links = np.where(np.eye(size, dtype=bool), 0, slower).sum(1)
    limits[len(pairs) :] = np.minimum(ports, links)  # it carries no more than its links
    fastest = _largest_sum(conditions, limits)
    found = fastest / fastest.sum()
    # Whether the whole tensor can be owned in this time, with ever lower bounds of a share.
    time_s = mesh_s_per_byte(found.tolist(), speeds, ports) * (1 + _SLACK)
    limits[: len(pairs)] *= time_s
    conditions[len(pairs) :] = np.eye(size)
    of_ports = (np.array(ports) * time_s - 1) / (size - 2)
    low, high = 1 / size, float(found.max())
    for _ in range(_BALANCING_STEPS if size <= _LARGE_GROUP else _LARGE_GROUPS_STEPS):
        bound = (low + high) / 2
        limits[len(pairs) :] = np.clip(of_ports, 0, bound)
        owned = _largest_sum(conditions, limits)
        if owned.sum() >= 1:
            found, high = owned / owned.sum(), bound
        else:
            low = bound
    return in_units(found)


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
