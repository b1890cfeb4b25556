"""Compares the links that the master knows with the matrix. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pccl.cli.bench.statistics import percentile
from pccl.protocol.status_report import LinkSpeed
from pccl.stress.emulator.sites.matrix import SiteMatrix


@dataclass(frozen=True, slots=True)
class MeasuredRatios:
    """Measured divided by true values, over all directions of links.

    Attributes:
        after: what the peers did before.
        known: number of directions with a measured value.
        links: number of all directions.
        p10, median, p90: percentiles of the ratios; 0 without any.
        what: ``rate`` or ``rtt``.
    """

    after: str
    what: str
    known: int
    links: int
    p10: float
    median: float
    p90: float


def compare_measures(
    after: str, matrix: SiteMatrix, sites: Mapping[int, int], links: Collection[LinkSpeed]
) -> list[MeasuredRatios]:
    """Compare measures with a matrix.

    Args:
        after: what the peers did before.
        matrix: the true links, with the rates that the sites have.
        sites: id of a peer -> number of its site.
        links: the measures of the master.
    """
    rates: list[float] = []
    rtts: list[float] = []
    for link in links:
        ends = sites[int(link.peer)], sites[int(link.other)]
        there, back = matrix.links[ends], matrix.links[ends[1], ends[0]]
        ports = matrix.ports[ends[0]].up_bps, matrix.ports[ends[1]].down_bps
        limits = [rate for rate in (there.rate_bps, *ports) if rate is not None]
        true_bps = min(limits, default=there.flow_bps)
        if link.bytes_per_s and true_bps:
            rates.append(link.bytes_per_s * 8 / true_bps)
        true_ns = there.half_rtt_ns + back.half_rtt_ns
        if link.rtt_us and true_ns:
            rtts.append(link.rtt_us * 1000 / true_ns)
    return [
        _ratios(after, what, ratios, len(matrix.links))
        for what, ratios in (("rate", rates), ("rtt", rtts))
    ]


def _ratios(after: str, what: str, ratios: list[float], links: int) -> MeasuredRatios:
    if not ratios:
        return MeasuredRatios(after, what, 0, links, 0.0, 0.0, 0.0)
    found = [round(percentile(ratios, share), 3) for share in (0.1, 0.5, 0.9)]
    return MeasuredRatios(after, what, len(ratios), links, *found)
