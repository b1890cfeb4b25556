"""Groups over links between regions, in virtual time: plans, and how long reduces take with them.

Rates are divided and tensors small; ratios are those of the published matrices. Expected times are
those of one gigabyte over these links, computed elsewhere, not by the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from random import Random

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceCall
from pccl.protocol.data_type import DataType
from pccl.protocol.types import (
    UNQUANTIZED,
    Algorithm,
    AlgorithmTable,
    Descriptor,
    Quantization,
    ReduceOp,
    RoundKind,
    WireFormat,
)
from pccl.protocol.vocabulary.mesh_plan import MeshPlan
from pccl.runtime.collective.operand import borrow
from pccl.runtime.requests import ReduceRequest, RunRequest
from pccl.stress.emulator.sites.matrix import SiteMatrix, SitePort
from pccl.stress.emulator.spec import LinkSpec
from pccl.topology.cost_model import AssumedLinks, mesh_cost
from tests.support.virtual_runs import VirtualRun

SCALE = 200
COUNT = 3 << 19
"""Float32 values: 6 MiB, in segments of 128 KiB."""
GB = 1e9 / (4 * COUNT * SCALE)
"""What one of our seconds is of a gigabyte over the real links."""
NETWORK = {"latency_ns": 1_000_000, "ragged": False, "bytes_per_s": None, "window_bytes": 64 << 20}


class Regions:
    """A run whose peers stand at the sites of a matrix."""

    def __init__(
        self,
        matrix: str | SiteMatrix,
        first: int | None = None,
        *,
        segment_bytes: int | None = None,
    ) -> None:
        self.matrix = SiteMatrix.load(matrix) if isinstance(matrix, str) else matrix
        self.size = first or len(self.matrix.sites)
        self.run = VirtualRun(
            [0] * self.size, NETWORK, limit_s=20_000, lanes=1, segment_bytes=segment_bytes
        )
        self.rates: dict[tuple[int, int], int] = {}
        """Of each pair of sites, in bytes per second."""
        for one in range(self.size):
            for other in range(one + 1, self.size):
                self.set_rate(one, other, 1)

    def set_rate(self, one: int, other: int, share: float) -> None:
        """Give a link this share of its rate."""
        link = self.matrix.links[one, other]
        rate_bps = link.rate_bps or link.flow_bps
        assert rate_bps is not None
        rate = self.rates[one, other] = int(share * rate_bps / 8 / SCALE)
        self.run.network.set_link(
            self.run.hosts[one].name,
            self.run.hosts[other].name,
            latency_ns=round(link.rtt_s * 1e9 / 2),
            bytes_per_s=rate,
        )

    def bound_s(self, shares: Sequence[int]) -> float:
        """Return how long the slowest link takes for what it carries of a tensor."""
        whole = sum(shares)
        return max(
            4 * COUNT * (shares[one] + shares[other]) / whole / rate
            for (one, other), rate in self.rates.items()
        )

    def predicted_s(self, shares: Sequence[int]) -> float:
        """Return the planner's prediction by what the master knows."""
        known = self.run.master.machine.membership
        uplinks = {peer: known.uplink(peer) for peer in known.order(0)}
        links = AssumedLinks(known.measures, uplinks)
        return mesh_cost(known.order(0), links, MeshPlan(tuple(shares))).time_s(4 * COUNT)

    @property
    def plan(self) -> AlgorithmTable:
        return self.run.master.machine.membership.roster(0).algorithms

    async def reduce(
        self,
        algorithm: Algorithm = Algorithm.AUTO,
        quantization: Quantization = UNQUANTIZED,
        count: int = COUNT,
    ) -> float:
        """Reduce once; return the time."""
        began_s = self.run.loop.time()
        given = [np.full(count, rank + 1, np.float32) for rank in range(self.size)]
        what = Descriptor(
            DataType.FLOAT,
            ReduceOp.SUM,
            count,
            algorithm=algorithm,
            forced=algorithm is not Algorithm.AUTO,
            quantization=quantization,
        )
        await self.run.all(
            [
                engine.reduce(ReduceRequest(borrow(own), ReduceCall(0, 7, what)))
                for engine, own in zip(self.run.engines, given, strict=True)
            ]
        )
        assert len({own.tobytes() for own in given}) == 1
        if not quantization.active:
            assert (given[0] == self.size * (self.size + 1) / 2).all()
        return self.run.loop.time() - began_s

    async def optimize(self) -> None:
        await self._round(RoundKind.OPTIMIZE_TOPOLOGY)

    async def update(self) -> None:
        await self._round(RoundKind.UPDATE_TOPOLOGY)

    async def _round(self, kind: RoundKind) -> None:
        request = RunRequest(kind)
        await self.run.all([engine.round(request) for engine in self.run.engines])


@pytest.mark.parametrize(
    ("name", "best_ring_s", "mesh_s", "optimum_s"),
    [("aws10", 26.9, 4.91, 4.12), ("gcp12", 81.3, 17.5, 12.8)],
)
def test_a_planned_mesh_is_near_the_optimum(
    name: str, best_ring_s: float, mesh_s: float, optimum_s: float
) -> None:
    """Times of one gigabyte; those of the best ring and the optimum are published."""
    regions = Regions(name)

    async def main() -> None:
        await regions.run.start()
        await regions.reduce(Algorithm.MESH)  # new links begin with small windows
        equal_s = await regions.reduce(Algorithm.MESH) * GB
        assert equal_s == pytest.approx(mesh_s, rel=0.12)
        await regions.optimize()
        assert regions.plan.beyond is Algorithm.MESH
        planned_s = await regions.reduce() * GB
        assert optimum_s < planned_s < 1.15 * optimum_s
        assert best_ring_s > 4.5 * planned_s
        assert equal_s > 1.1 * planned_s
        present = regions.plan
        for _ in range(2):
            await regions.optimize()
            assert regions.plan is present
        int8 = Quantization(WireFormat.INT8, 32)
        coded_s = await regions.reduce(quantization=int8) * GB
        assert coded_s < 0.35 * planned_s
        await regions.run.close()

    regions.run.run_test(main())


TWO_CONTINENTS = """
sites = ["a1", "a2", "a3", "a4", "b1", "b2", "b3", "b4"]
link = "rate=200mbit,rtt=100ms"
[links.a1]
a2 = "rate=10gbit,rtt=500us"
a3 = "rate=10gbit,rtt=500us"
a4 = "rate=10gbit,rtt=500us"
[links.a2]
a3 = "rate=10gbit,rtt=500us"
a4 = "rate=10gbit,rtt=500us"
[links.a3]
a4 = "rate=10gbit,rtt=500us"
[links.b1]
b2 = "rate=10gbit,rtt=500us"
b3 = "rate=10gbit,rtt=500us"
b4 = "rate=10gbit,rtt=500us"
[links.b2]
b3 = "rate=10gbit,rtt=500us"
b4 = "rate=10gbit,rtt=500us"
[links.b3]
b4 = "rate=10gbit,rtt=500us"
"""


def test_two_sites_add_up_inside_first() -> None:
    """Across, each of 16 links carries a 16th of the tensor; in a mesh without sites, a quarter."""
    regions = Regions(SiteMatrix.parse("two", TWO_CONTINENTS))

    async def main() -> None:
        await regions.run.start()
        assert regions.plan.mesh.sites == (0, 0, 0, 0, 1, 1, 1, 1)
        await regions.reduce()
        took_s = min([await regions.reduce() for _ in range(3)])
        across_s = 4 * COUNT / 16 / (200e6 / 8 / SCALE)
        assert across_s + 0.1 < took_s < 1.2 * (across_s + 0.1)
        int8 = Quantization(WireFormat.INT8, 32)
        assert await regions.reduce(quantization=int8) < 0.4 * took_s
        await regions.run.close()

    regions.run.run_test(main())


def two_continents() -> SiteMatrix:
    """Three machines in each of six regions of AWS; the ids go round the regions."""
    aws = SiteMatrix.load("aws10")
    regions = [
        aws.sites.index(name)
        for name in ("Virginia", "Ohio", "Oregon", "London", "Frankfurt", "Ireland")
    ]
    at = regions * 3
    inside = LinkSpec.parse("rate=10gbit,rtt=400us")
    links = {
        (one, other): aws.links.get((at[one], at[other]), inside)
        for one, other in permutations(range(len(at)), 2)
    }
    names = tuple(f"{aws.sites[place]}-{number}" for number, place in enumerate(at))
    return SiteMatrix("two-continents", names, links, (SitePort(),) * len(at))


def test_eighteen_peers_on_two_continents() -> None:
    """Of 1.073 GB; bounds are those of bytes alone, the best ring by exhaustive search."""
    # Short segments, because a large tensor has many of them.
    regions = Regions(two_continents(), segment_bytes=16 << 10)

    async def main() -> None:
        await regions.run.start()
        assert regions.plan.mesh.sites == (0, 1, 2, 3, 4, 5) * 3
        await regions.reduce(Algorithm.MESH)
        took_s = await regions.reduce(Algorithm.MESH)
        # The slowest link has 404 Mbit/s; of an 18th it carries a third each way, twice.
        across_s = 4 * COUNT / 18 * 2 / 3 / (404e6 / 8 / SCALE)
        assert across_s < took_s < 1.1 * (across_s + 4 * 0.072)
        ring_s = 2 * 17 / 18 * 4 * COUNT / (1.1e9 / 8 / SCALE)
        assert ring_s > 12 * took_s
        await regions.run.close()

    regions.run.run_test(main())


def test_shares_come_without_a_call() -> None:
    """Only ``update_topology`` is called, as by the wrappers."""
    regions = Regions("aws10", 6)

    async def main() -> None:
        await regions.run.start()
        await regions.update()
        assert regions.plan.mesh.shares == ()
        equal_s = await regions.reduce()
        assert equal_s == pytest.approx(regions.bound_s([1] * 6), rel=0.05)
        await regions.update()
        planned, planned_at_s = regions.plan, regions.run.loop.time()
        planned_s = await regions.reduce()
        gain = regions.bound_s([1] * 6) / regions.bound_s(planned.mesh.shares)
        assert gain > 1.25
        assert equal_s / planned_s == pytest.approx(gain, rel=0.05)

        regions.set_rate(0, 1, 0.1)
        degraded_s = 0.0
        while regions.plan is planned:
            degraded_s = await regions.reduce()
            await regions.update()
        assert 60 <= regions.run.loop.time() - planned_at_s < 60 + degraded_s
        gain = regions.bound_s(planned.mesh.shares) / regions.bound_s(regions.plan.mesh.shares)
        assert degraded_s / await regions.reduce() == pytest.approx(gain, rel=0.2)
        await regions.run.close()

    regions.run.run_test(main())


@pytest.mark.parametrize("pair", [(0, 1), (2, 5), (3, 4)])
def test_a_link_that_degrades_is_planned_around(pair: tuple[int, int]) -> None:
    """The next plan gains what was predicted, though the ends of the link now own little."""
    regions = Regions("aws10", 6)

    async def main() -> None:
        await regions.run.start()
        await regions.reduce()
        await regions.optimize()
        before = regions.plan.mesh.shares
        regions.set_rate(*pair, 0.1)
        degraded_s = await regions.reduce()
        await regions.optimize()
        await regions.reduce()
        await regions.optimize()
        after = regions.plan.mesh.shares
        assert after[pair[0]] + after[pair[1]] < 0.5 * (before[pair[0]] + before[pair[1]])
        after_s = await regions.reduce()
        gain = regions.bound_s(before) / regions.bound_s(after)
        assert gain > 3.5
        assert degraded_s / after_s == pytest.approx(gain, rel=0.2)
        assert regions.predicted_s(before) == pytest.approx(degraded_s, rel=0.1)
        assert regions.predicted_s(after) == pytest.approx(after_s, rel=0.2)
        await regions.run.close()

    regions.run.run_test(main())


def test_noise_does_not_change_the_plan() -> None:
    """Ten minutes in which each link's rate changes by up to 10 % every 20 seconds."""
    regions = Regions("aws10", 5)
    draw = Random(4)
    plans: list[AlgorithmTable] = []

    async def main() -> None:
        await regions.run.start()
        await regions.reduce(Algorithm.MESH)
        while regions.run.loop.time() < 600:
            for one in range(regions.size):
                for other in range(one + 1, regions.size):
                    regions.set_rate(one, other, draw.uniform(0.9, 1.1))
            await regions.reduce(count=COUNT // 4)
            await regions.run.sleep(20)
            await regions.optimize()
            plans.append(regions.plan)
        await regions.run.close()

    regions.run.run_test(main())
    assert len(plans) > 20
    assert all(plan is plans[0] for plan in plans)
