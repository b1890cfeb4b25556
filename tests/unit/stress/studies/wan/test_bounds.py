"""Bounds of plans against figures computed elsewhere, brute force, and by hand."""

from itertools import permutations
from random import Random

import pytest

from pccl.stress.emulator.sites.matrix import SiteMatrix, SitePort
from pccl.stress.emulator.spec import LinkSpec
from pccl.stress.studies.wan.bounds import WanRates, bounds_of, mesh_bound

GB = 1_000_000_000


@pytest.mark.parametrize(
    ("name", "best_ring_s", "mesh_s", "weighted_s"),
    [("aws10", 26.9, 4.91, 4.12), ("gcp12", 81.5, 17.5, 12.8)],
)
def test_published_matrices(
    name: str, best_ring_s: float, mesh_s: float, weighted_s: float
) -> None:
    bounds = bounds_of(WanRates.of(SiteMatrix.load(name)))
    assert bounds.best_ring is not None
    assert bounds.weighted is not None
    found = [bounds.best_ring * GB, bounds.mesh * GB, bounds.weighted * GB]
    assert found == pytest.approx([best_ring_s, mesh_s, weighted_s], rel=0.005)
    assert bounds.ring > bounds.best_ring
    assert sum(bounds.shares) == pytest.approx(1)


def test_one_slow_uplink() -> None:
    """Nothing exact is quicker than the tensor over that uplink; equal shares take twice that."""
    bounds = bounds_of(WanRates.of(network(12, [], [SitePort(20_000_000, 200_000_000)])))
    assert bounds.weighted == pytest.approx(8 / 20_000_000)
    assert bounds.mesh == bounds.ring == bounds.best_ring
    assert bounds.mesh == pytest.approx(2 * 11 / 12 * 8 / 20_000_000)
    assert bounds.shares[0] == pytest.approx(0, abs=1e-9)


def test_machines_behind_one_port() -> None:
    """Each of three machines sends to three others a sixth of the tensor, twice; in two levels the
    place sends the sums of one half, and the results of the other half."""
    homes = network(2, [], [SitePort(8_000_000, 8_000_000)] * 2)
    bounds = bounds_of(WanRates.of(homes.with_machines(3)))
    assert bounds.mesh == pytest.approx(3 / 1_000_000)
    assert bounds.weighted == pytest.approx(3 / 1_000_000)
    assert bounds.two_levels == pytest.approx(1 / 1_000_000)
    assert bounds_of(WanRates.of(homes)).two_levels is None
    # Of two pairs of machines, each link between them carries a quarter instead of a half.
    pairs = network(2, [8_000_000] * 2, []).with_machines(2)
    assert bounds_of(WanRates.of(pairs)).mesh == pytest.approx(1 / 2 / 1_000_000)
    assert bounds_of(WanRates.of(pairs)).two_levels == pytest.approx(1 / 4 / 1_000_000)


def test_connections_multiply_a_limit_of_one() -> None:
    matrix = SiteMatrix.load("gcp12")
    one, four = bounds_of(WanRates.of(matrix)), bounds_of(WanRates.of(matrix, lanes=4))
    assert four.mesh == pytest.approx(one.mesh / 4)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_ring_and_the_best_shares_of_few_members(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(2, 6)
    ports = [SitePort(draw(chance), draw(chance)) for _ in range(size)]
    matrix = network(size, [chance.randint(1, 9) * 1_000_000 for _ in range(size * size)], ports)
    rates = WanRates.of(matrix)
    bounds = bounds_of(rates)
    rings = ([0, *order] for order in permutations(range(1, size)))
    steps = 2 * (size - 1) / size
    times = [
        steps * max(hop_s(rates, a, b) for a, b in zip(ring, [*ring[1:], 0], strict=True))
        for ring in rings
    ]
    assert bounds.best_ring == pytest.approx(min(times))
    assert bounds.ring == pytest.approx(times[0])
    assert bounds.weighted is not None
    assert bounds.weighted <= bounds.mesh * (1 + 1e-9)
    for _ in range(300):  # no other shares are better
        parts = [chance.expovariate(1) for _ in range(size)]
        shares = [part / sum(parts) for part in parts]
        assert mesh_bound(rates, shares) >= bounds.weighted * (1 - 1e-9)


def draw(chance: Random) -> int | None:
    return chance.choice([None, chance.randint(1, 20) * 1_000_000])


def network(size: int, rates: list[int], ports: list[SitePort]) -> SiteMatrix:
    pairs = list(permutations(range(size), 2))
    specs = [LinkSpec(rate_bps=rate) for rate in rates] or [LinkSpec()] * len(pairs)
    ports = [*ports, *[SitePort()] * (size - len(ports))]
    names = tuple(map(str, range(size)))
    return SiteMatrix("test", names, dict(zip(pairs, specs, strict=False)), tuple(ports))


def hop_s(rates: WanRates, source: int, target: int) -> float:
    return 1 / min(
        float(rates.pairs[source, target]), float(rates.up[source]), float(rates.down[target])
    )
