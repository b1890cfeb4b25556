"""Files of sites, links and ports: what they say, and what is wrong with others."""

from pathlib import Path

import pytest

from pccl.stress.emulator.sites.matrix import SiteMatrix, SitePort
from pccl.stress.emulator.spec import LinkSpec

THREE = """
source = "a test"
sites = ["a", "b", "c"]
link = "rtt=40ms"
[links.a]
b = "rate=10mbit,rtt=20ms"
[links.b]
a = "flow=5mbit,rtt=30ms"
[ports]
c = "up=2mbit,down=20mbit"
"""


def test_a_file_gives_each_direction_its_link() -> None:
    matrix = SiteMatrix.parse("three", THREE)
    assert (matrix.name, matrix.sites, matrix.source) == ("three", ("a", "b", "c"), "a test")
    assert str(matrix.links[0, 1]) == "rate=10mbit,rtt=20ms"
    assert str(matrix.links[1, 0]) == "rtt=30ms,flow=5mbit"
    assert {pair for pair, link in matrix.links.items() if link == LinkSpec(rtt_s=0.04)} == {
        (0, 2), (2, 0), (1, 2), (2, 1)
    }  # fmt: skip
    assert matrix.ports == (SitePort(), SitePort(), SitePort(2_000_000, 20_000_000))


def test_one_direction_stands_for_both() -> None:
    text = THREE.replace("[links.b]", "[links.c]").replace("flow=5mbit,rtt=30ms", "rate=1mbit")
    matrix = SiteMatrix.parse("three", text)
    assert matrix.links[0, 1] == matrix.links[1, 0]
    assert matrix.links[0, 2] == matrix.links[2, 0] == LinkSpec(rate_bps=1_000_000)


def test_scaling_divides_rates_and_keeps_round_trips() -> None:
    matrix = SiteMatrix.parse("three", THREE).scaled(4)
    assert str(matrix.links[0, 1]) == "rate=2500kbit,rtt=20ms"
    assert str(matrix.links[1, 0]) == "rtt=30ms,flow=1250kbit"
    assert matrix.ports[2] == SitePort(500_000, 5_000_000)
    assert matrix.links[0, 2] == LinkSpec(rtt_s=0.04)
    with pytest.raises(ValueError, match="below 1 kbit/s"):
        matrix.scaled(1e6)


def test_the_first_sites_are_a_matrix() -> None:
    matrix = SiteMatrix.parse("three", THREE).first(2)
    assert (matrix.sites, set(matrix.links), len(matrix.ports)) == (("a", "b"), {(0, 1), (1, 0)}, 2)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('source = "a test"', "colour = 1", "'colour' is no part of a matrix"),
        ('["a", "b", "c"]', '"a"', "must be a list of names"),
        ('["a", "b", "c"]', '["a", 2]', "must be a list of names"),
        ('["a", "b", "c"]', '["a", "b", "a"]', "'a' is there twice"),
        ('["a", "b", "c"]', '["a"]', "1 sites; a matrix has 2 to 250"),
        ('link = "rtt=40ms"', "", "none between a and c; add it"),
        ('link = "rtt=40ms"', 'link = "rtt=40"', "link: rtt=40 is not understood"),
        ("[links.a]\nb", "[links.a]\nd", "links.a.d: 'd' is not one of the sites"),
        ("[links.a]\nb", "[links.a]\na", "links.a.a: a site has no link to itself"),
        ("rate=10mbit", "window=1mib", "links.a.b: a link between sites has rate, rtt, flow"),
        ("[links.a]\nb =", "[links]\na =", "links.a must be a table"),
        ("[ports]\nc", "[ports]\nd", "'d' is not one of the sites"),
        ("up=2mbit,down", "left=2mbit,down", "ports: c: 'left=2mbit': write up=20mbit"),
        ("up=2mbit", "up=2", "ports: c: up: rate=2 is not understood"),
        ("up=2mbit,down", "up=2mbit,up", "ports: c: 'up=20mbit': write"),
        ("[ports]", "[ports", "Expected"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, error: str) -> None:
    assert old in THREE
    with pytest.raises(ValueError, match=r".") as caught:
        SiteMatrix.parse("three", THREE.replace(old, new))
    assert error in str(caught.value)


def test_a_name_that_is_none_shows_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file.*aws10, gcp12, home8"):
        SiteMatrix.load("aws11")
    path = tmp_path / "mine.toml"
    path.write_text(THREE)
    assert SiteMatrix.load(str(path)).name == "mine"
    path.write_text("sites = 3")
    with pytest.raises(ValueError, match=r"mine\.toml: sites must be"):
        SiteMatrix.load(str(path))


def test_the_matrices_of_the_package() -> None:
    aws, gcp, homes = (SiteMatrix.load(name) for name in ("aws10", "gcp12", "home8"))
    assert (len(aws.sites), len(gcp.sites), len(homes.sites)) == (10, 12, 8)
    at = {name: gcp.sites.index(name) for name in gcp.sites}
    assert str(gcp.links[at["NL"], at["London"]]) == "rtt=9.6ms,flow=2083mbit"
    assert str(aws.links[0, 1]) == "rate=790mbit,rtt=67ms"
    assert all(link.rate_bps and link.rtt_s for link in aws.links.values())
    assert all(link.flow_bps and not link.rate_bps for link in gcp.links.values())
    assert all(port.up_bps and port.down_bps for port in homes.ports)
    assert all(0.015 <= link.rtt_s <= 0.12 for link in homes.links.values())


def test_the_machines_of_a_place() -> None:
    homes = SiteMatrix.load("home8")
    chosen = homes.chosen(10, 3, 2)
    assert chosen.sites == ("rented-1", "rented-2", "berlin-1", "berlin-2", "lyon-1", "lyon-2")
    assert chosen.places == (0, 0, 1, 1, 2, 2)
    assert str(chosen.links[0, 1]) == "rtt=400us"
    assert chosen.links[1, 2] == chosen.links[0, 3] == homes.links[0, 1]
    assert chosen.ports[2] == chosen.ports[3] == SitePort(5_000_000, 50_000_000)
    assert homes.chosen(1, None, 1) == homes
    with pytest.raises(ValueError, match="8 x 32 sites; the most are 250"):
        homes.chosen(1, None, 32)
