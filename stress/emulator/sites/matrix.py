"""The matrix of a network: named sites, the links between them, and the ports of sites.

A file is TOML::

    source = "where the figures come from"
    sites = ["Oregon", "Tokyo", "home"]    # the order of their numbers
    link = "rtt=40ms"                      # of pairs that the file does not name

    [links.Oregon]
    Tokyo = "rate=523mbit,rtt=96ms"        # both directions

    [links.Tokyo]
    Oregon = "rate=400mbit,rtt=96ms"       # now of this direction only

    [ports]
    home = "up=20mbit,down=200mbit"        # for all links of the site together

A link has the form of :class:`LinkSpec`, except for ``window`` and ``corrupt``: between sites the
windows are those of the kernel. ``flow`` limits one connection, as a window does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from pccl.stress.emulator.spec import RATE_BPS_MIN, LinkSpec

SITES_MIN, SITES_MAX = 2, 250
"""A site has an address of one /24 network."""

MACHINE_LINK = LinkSpec.parse("rtt=400us")
"""The link between two machines at one place; no rate limits it."""

BUILT_IN = Path(__file__).parent

_KEYS = ("source", "sites", "link", "links", "ports")


@dataclass(frozen=True, slots=True)
class SitePort:
    """What all connections of a site share, in bits per second; None: no limit.

    Attributes:
        up_bps: rate at which the site sends.
        down_bps: rate at which it receives.
    """

    up_bps: int | None = None
    down_bps: int | None = None

    @staticmethod
    def parse(text: str) -> SitePort:
        """Parse a port such as ``up=20mbit,down=200mbit``.

        Raises:
            ValueError: the text is not a port; the message says what is allowed.
        """
        rates: dict[str, int | None] = {}
        for part in text.split(",") if text.strip() else ():
            name, _, value = part.strip().partition("=")
            if name not in ("up", "down") or name in rates:
                raise ValueError(f"{part.strip()!r}: write up=20mbit, down=200mbit, or both")
            try:
                rates[name] = LinkSpec.parse(f"rate={value}").rate_bps
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return SitePort(rates.get("up"), rates.get("down"))


@dataclass(frozen=True, slots=True)
class SiteMatrix:
    """A network of sites. Numbers of sites are indices of ``sites``.

    Attributes:
        name: name of the file, without its ending.
        sites: names of the sites.
        links: (number of the sender, number of the receiver) -> their link, for all pairs. Only
            the direction from sender to receiver counts: its rates, and half of its round trip.
        ports: port of each site.
        source: where the figures come from.
        places: number of the place of each site; the sites of a place share one port. Empty: each
            site has its own.
    """

    name: str
    sites: tuple[str, ...]
    links: Mapping[tuple[int, int], LinkSpec]
    ports: tuple[SitePort, ...]
    source: str = ""
    places: tuple[int, ...] = ()

    @staticmethod
    def load(name: str) -> SiteMatrix:
        """Load a matrix of this package by its name, or a file by its path.

        Raises:
            ValueError: there is no such matrix, or the file is not one; the message says why.
        """
        known = sorted(path.stem for path in BUILT_IN.glob("*.toml"))
        path = BUILT_IN / f"{name}.toml" if name in known else Path(name)
        try:
            return SiteMatrix.parse(path.stem, path.read_text("utf-8"))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"{name}: {reason}; name a file, or {', '.join(known)}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @staticmethod
    def parse(name: str, text: str) -> SiteMatrix:
        """Parse the text of a file.

        Raises:
            ValueError: the text is not a matrix; the message says where and why.
        """
        table = tomllib.loads(text)
        for key in table:
            if key not in _KEYS:
                raise ValueError(f"{key!r} is no part of a matrix; it has {', '.join(_KEYS)}")
        sites = _sites(table.get("sites"))
        default = _link("link", table["link"]) if "link" in table else None
        links = _links(table.get("links", {}), sites, default)
        ports = [SitePort()] * len(sites)
        for site, port in _table("ports", table.get("ports", {})).items():
            try:
                ports[_number(site, sites, "ports")] = SitePort.parse(str(port))
            except ValueError as error:
                raise ValueError(f"ports: {site}: {error}") from None
        return SiteMatrix(name, sites, links, tuple(ports), str(table.get("source", "")))

    def scaled(self, divisor: float) -> SiteMatrix:
        """Return this matrix with all rates divided by ``divisor``. Round trips stay.

        Raises:
            ValueError: a rate would be too low.
        """

        def scale(rate_bps: int | None) -> int | None:
            if rate_bps is None:
                return None
            if rate_bps < RATE_BPS_MIN * divisor:
                raise ValueError(f"rates of {self.name} / {divisor:g} would be below 1 kbit/s")
            return round(rate_bps / divisor)

        return replace(
            self,
            links={
                pair: replace(link, rate_bps=scale(link.rate_bps), flow_bps=scale(link.flow_bps))
                for pair, link in self.links.items()
            },
            ports=tuple(SitePort(scale(port.up_bps), scale(port.down_bps)) for port in self.ports),
        )

    def chosen(self, scale: float, first: int | None, machines: int) -> SiteMatrix:
        """Return the matrix that options of a command choose.

        Raises:
            ValueError: there would be too many sites, or a rate would be too low.
        """
        part = (self if first is None else self.first(first)).scaled(scale)
        if len(part.sites) * machines > SITES_MAX:
            raise ValueError(f"{len(part.sites)} x {machines} sites; the most are {SITES_MAX}")
        return part.with_machines(machines) if machines > 1 else part

    def with_machines(self, count: int) -> SiteMatrix:
        """Return a matrix with ``count`` sites in place of each, which share its port.

        Inside a place each pair of them has a link of its own, ``MACHINE_LINK``.
        """
        places = tuple(place for place in range(len(self.sites)) for _ in range(count))
        links = {
            (one, other): self.links.get((places[one], places[other]), MACHINE_LINK)
            for one, other in permutations(range(len(places)), 2)
        }
        names = tuple(f"{name}-{n + 1}" for name in self.sites for n in range(count))
        ports = tuple(self.ports[place] for place in places)
        return replace(self, sites=names, links=links, ports=ports, places=places)

    def first(self, count: int) -> SiteMatrix:
        """Return the matrix of the first ``count`` sites."""
        links = {pair: link for pair, link in self.links.items() if max(pair) < count}
        return replace(self, sites=self.sites[:count], links=links, ports=self.ports[:count])


def _sites(value: Any) -> tuple[str, ...]:
    names: list[Any] = value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
    if not names or not all(isinstance(one, str) and one for one in names):
        raise ValueError('sites must be a list of names, such as sites = ["Oregon", "Tokyo"]')
    sites: tuple[str, ...] = tuple(names)
    if len(set(sites)) < len(sites):
        twice = next(site for site in sites if sites.count(site) > 1)
        raise ValueError(f"sites: {twice!r} is there twice")
    if not SITES_MIN <= len(sites) <= SITES_MAX:
        raise ValueError(f"sites: {len(sites)} sites; a matrix has {SITES_MIN} to {SITES_MAX}")
    return sites


def _links(
    value: Any, sites: tuple[str, ...], default: LinkSpec | None
) -> dict[tuple[int, int], LinkSpec]:
    given: dict[tuple[int, int], LinkSpec] = {}
    for source, row in _table("links", value).items():
        for target, text in _table(f"links.{source}", row).items():
            what = f"links.{source}.{target}"
            pair = _number(source, sites, what), _number(target, sites, what)
            if pair[0] == pair[1]:
                raise ValueError(f"{what}: a site has no link to itself")
            given[pair] = _link(what, text)
    links: dict[tuple[int, int], LinkSpec] = {}
    for pair in permutations(range(len(sites)), 2):
        link = given.get(pair) or given.get((pair[1], pair[0])) or default
        if link is None:
            missing = f"{sites[pair[0]]} and {sites[pair[1]]}"
            raise ValueError(f"links: none between {missing}; add it, or a default: link = ...")
        links[pair] = link
    return links


def _link(what: str, value: Any) -> LinkSpec:
    try:
        link = LinkSpec.parse(str(value))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if link.window_bytes is not None or link.corrupt:
        raise ValueError(f"{what}: a link between sites has rate, rtt, flow and jitter only")
    return link


def _table(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a table, not {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _number(site: str, sites: tuple[str, ...], what: str) -> int:
    if site not in sites:
        raise ValueError(f"{what}: {site!r} is not one of the sites")
    return sites.index(site)
