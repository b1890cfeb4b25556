"""Measures of links beside the matrix."""

from pccl.protocol.status_report import LinkSpeed
from pccl.protocol.types import PeerId
from pccl.stress.emulator.sites.matrix import SiteMatrix
from pccl.stress.studies.wan.measures import MeasuredRatios, compare_measures

MATRIX = SiteMatrix.parse(
    "test",
    """
    sites = ["a", "b", "c"]
    link = "rate=80mbit,rtt=20ms"
    [links.b]
    c = "flow=8mbit,rtt=10ms"
    [ports]
    a = "up=8mbit,down=40mbit"
    """,
)
SITES = {5: 0, 6: 1, 7: 2}


def speed(peer: int, other: int, rtt_us: int, bytes_per_s: int) -> LinkSpeed:
    return LinkSpeed(PeerId(peer), PeerId(other), rtt_us, bytes_per_s)


def test_each_measure_is_divided_by_the_smallest_limit_of_its_way() -> None:
    links = [
        speed(5, 6, 20_000, 1_000_000),  # the port up
        speed(6, 5, 22_000, 10_000_000),  # the port down: twice too much
        speed(6, 7, 10_000, 500_000),  # one connection: half
        speed(7, 5, 0, 0),  # unknown
    ]
    assert compare_measures("mesh", MATRIX, SITES, links) == [
        MeasuredRatios("mesh", "rate", 3, 6, 0.5, 1.0, 2.0),
        MeasuredRatios("mesh", "rtt", 3, 6, 1.0, 1.0, 1.1),
    ]


def test_nothing_is_known_at_the_start() -> None:
    found = compare_measures("start", MATRIX, SITES, [])
    assert [(each.known, each.median) for each in found] == [(0, 0.0), (0, 0.0)]
