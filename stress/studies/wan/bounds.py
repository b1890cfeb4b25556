"""The shortest times of an all-reduce that a matrix allows, from first principles.

They count bytes only: no round trips, headers or processors. Links of pairs are independent, and
both directions of a link are, too. For N members and tensors of S bytes:

* A ring moves 2 (N-1)/N S over each of its links, in all steps together.
* A mesh gives member i the share s_i of the tensor. Member i sends the share of j to each j, and
  then its own result to each j: s_i + s_j over each link. A place of k members with one port, which
  own s of the tensor together, sends and receives k (1 - s) + (N - k) s.
* In two levels, the members of a place collect segments in turn. A link between places of k and l
  members carries s_i / l + s_j / k, and of M ports each carries (1 - s) + (M - 1) s.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl.stress.emulator.sites.matrix import SiteMatrix

EXHAUSTIVE_MAX = 18
"""Largest number of members for the search of the best ring: it looks at all subsets of them."""


@dataclass(frozen=True, slots=True)
class WanBounds:
    """Seconds per byte of the tensors; None: unknown here.

    Attributes:
        ring: of a ring in the order of the file.
        best_ring: of the ring whose slowest link is the fastest, by exhaustive search.
        mesh: of a mesh with equal shares.
        weighted: of a mesh with the best shares, by a linear program (needs SciPy).
        shares: those shares.
        two_levels: of a mesh with equal shares in two levels; None: no place has several members.
    """

    ring: float
    best_ring: float | None
    mesh: float
    weighted: float | None
    shares: tuple[float, ...]
    two_levels: float | None


@dataclass(frozen=True, slots=True)
class WanRates:
    """The rates of a matrix in bytes per second; infinite without a limit.

    Attributes:
        pairs: row: sender, column: receiver; shape (N, N).
        up: what each member can send, shape (N,); members of one place share it.
        down: what each member can receive, the same.
        together: whether both are at one place, shape (N, N).
    """

    pairs: np.ndarray[Any, np.dtype[np.float64]]
    up: np.ndarray[Any, np.dtype[np.float64]]
    down: np.ndarray[Any, np.dtype[np.float64]]
    together: np.ndarray[Any, np.dtype[np.bool_]]

    @staticmethod
    def of(matrix: SiteMatrix, lanes: int = 1) -> WanRates:
        """Return the rates between the sites, with a number of connections for each pair."""
        size = len(matrix.sites)
        pairs = np.full((size, size), np.inf)
        for pair, link in matrix.links.items():
            flow_bps = None if link.flow_bps is None else lanes * link.flow_bps
            pairs[pair] = min(_rate(link.rate_bps), _rate(flow_bps))
        up = np.array([_rate(port.up_bps) for port in matrix.ports])
        down = np.array([_rate(port.down_bps) for port in matrix.ports])
        places = np.array(matrix.places or range(size))
        return WanRates(pairs, up, down, places[:, None] == places[None, :])

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.up)


def bounds_of(rates: WanRates) -> WanBounds:
    """Return the bounds for a matrix of at least 2 members."""
    size = rates.size
    steps = 2 * (size - 1) / size
    hops = np.minimum(rates.pairs, np.minimum(rates.up[:, None], rates.down[None, :]))
    in_order = min(float(hops[rank, (rank + 1) % size]) for rank in range(size))
    best = _best_ring(hops)
    shares = [1 / size] * size
    weighted = _weighted(rates)
    return WanBounds(
        ring=steps / in_order,
        best_ring=steps / best if best is not None else None,
        mesh=mesh_bound(rates, shares),
        weighted=None if weighted is None else mesh_bound(rates, weighted),
        shares=() if weighted is None else weighted,
        two_levels=_two_levels(rates) if rates.together.sum() > size else None,
    )


def mesh_bound(rates: WanRates, shares: Sequence[float]) -> float:
    """Return the seconds per byte of a mesh with these shares."""
    own = np.array(shares)
    over_pairs = (own[:, None] + own[None, :]) / rates.pairs
    np.fill_diagonal(over_pairs, 0.0)
    members, owned = rates.together.sum(0), rates.together @ own
    over_ports = members * (1 - owned) + (rates.size - members) * owned
    ports = np.minimum(rates.up, rates.down)
    return max(float(over_pairs.max()), float((over_ports / ports).max()))


def _two_levels(rates: WanRates) -> float:
    members, share = rates.together.sum(0), 1 / rates.size
    over_pairs = share * (1 / members[:, None] + 1 / members[None, :]) / rates.pairs
    places = float((1 / members).sum())
    over_ports = 1 - members * share + (places - 1) * members * share
    ports = np.minimum(rates.up, rates.down)
    return max(float(over_pairs[~rates.together].max()), float((over_ports / ports).max()))


def _best_ring(hops: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    """Return the largest rate that all links of some ring have; None: too many members."""
    size = len(hops)
    if size > EXHAUSTIVE_MAX:
        return None
    apart = ~np.eye(size, dtype=bool)
    rates = sorted(set(hops[apart].tolist()))
    low, high = 0, len(rates)  # a ring has rates[low], because it is the slowest of all
    while high - low > 1:
        middle = (low + high) // 2
        if _has_ring((hops >= rates[middle]) & apart):
            low = middle
        else:
            high = middle
    return float(rates[low])


def _has_ring(usable: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether a ring through all members uses only usable links (Held and Karp)."""
    size = len(usable)
    into = [sum(1 << source for source in np.flatnonzero(usable[:, node])) for node in range(size)]
    # Subset of members -> where paths from member 0 through exactly these members may end; in bits.
    ends = [0] * (1 << size)
    ends[1] = 1
    for subset in range(3, 1 << size, 2):
        found = 0
        for node in range(1, size):
            if subset >> node & 1 and ends[subset ^ 1 << node] & into[node]:
                found |= 1 << node
        ends[subset] = found
    return bool(ends[-1] & into[0])


def _weighted(rates: WanRates) -> tuple[float, ...] | None:
    """Return the shares of the quickest mesh; None without SciPy."""
    if importlib.util.find_spec("scipy") is None:
        return None
    optimize: Any = importlib.import_module("scipy.optimize")  # it has no types
    size = rates.size
    scale = 1 / mesh_bound(rates, [1 / size] * size)  # so that the numbers are near 1
    rows: list[list[float]] = []  # of shares and time: left side <= right side
    limits: list[float] = []
    for source, target in np.argwhere(np.isfinite(rates.pairs)):
        row = [0.0] * (size + 1)
        row[source] = row[target] = scale / float(rates.pairs[source, target])
        row[size] = -1.0
        rows.append(row)
        limits.append(0.0)
    for node, port in enumerate(np.minimum(rates.up, rates.down)):
        if np.isfinite(port):
            row = [0.0] * (size + 1)
            near = rates.together[node]
            for member in np.flatnonzero(near):
                row[member] = (size - 2 * near.sum()) * scale / float(port)
            row[size] = -1.0
            rows.append(row)
            limits.append(-near.sum() * scale / float(port))
    total = [[1.0] * size + [0.0]]
    found = optimize.linprog([0.0] * size + [1.0], rows, limits, total, [1.0])
    assert found.success, found.message
    return tuple(max(0.0, float(share)) for share in found.x[:size])


def _rate(rate_bps: int | None) -> float:
    return np.inf if rate_bps is None else rate_bps / 8
