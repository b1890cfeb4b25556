"""Shares are whole, and never slower than equal ones, whatever the speeds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.limits import BYTES_PER_S_MAX
from pccl.protocol.vocabulary.mesh_plan import MESH_MEMBERS_MAX, SHARE_UNITS
from pccl.topology.cost_model import mesh_s_per_byte
from pccl.topology.shares import best_shares

SPEEDS = st.sampled_from([1, 200_000, 2_000_000, 125_000_000, BYTES_PER_S_MAX]) | st.integers(
    1, 10**10
)
UNIT = 1 / SHARE_UNITS


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 12), st.data())
def test_shares_are_whole_and_fast(size: int, data: st.DataObject) -> None:
    rows = st.lists(SPEEDS, min_size=size, max_size=size)
    speeds = data.draw(st.lists(rows, min_size=size, max_size=size))
    ports = data.draw(rows)
    sites = data.draw(st.just(()) | st.lists(st.integers(0, 3), min_size=size, max_size=size))
    shares = best_shares(speeds, ports, sites)
    assert len(shares) == size
    assert min(shares) >= 0
    assert sum(shares) == SHARE_UNITS
    equal = mesh_s_per_byte([1] * size, speeds, ports, sites)
    # A unit of a slow link may weigh more than all the rest.
    slowest = min(*(speed for row in speeds for speed in row), *ports)
    rounding = 2 * size * UNIT / slowest
    assert mesh_s_per_byte(shares, speeds, ports, sites) <= 1.025 * equal + rounding


@pytest.mark.parametrize("seed", range(3))
def test_many_members_with_extreme_links(seed: int) -> None:
    draw = random.Random(seed)
    size = MESH_MEMBERS_MAX
    speeds = [[float(draw.choice((2e5, 2e6, 1.25e8))) for _ in range(size)] for _ in range(size)]
    shares = best_shares(speeds, [1.25e8] * size)
    assert sum(shares) == SHARE_UNITS
    equal = mesh_s_per_byte([1] * size, speeds, [1.25e8] * size)
    assert mesh_s_per_byte(shares, speeds, [1.25e8] * size) <= 1.025 * equal
