"""Four peers behind NATs of all kinds, and how each pair reaches each other: a table by hand.

A pair in two homes meets in a simultaneous open if both NATs keep the port of a connection for each
destination; filtering does not matter, as both dial. RFC 5128, section 3.4, would let one symmetric
NAT meet a full cone, too: here each side dials from a port at which it does not listen, so the
other one has to guess it, and the link stays relayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from pccl.protocol.types import PeerId
from pccl.runtime.engine import PeerEngine
from pccl.transports.relay import met_at, relay_of
from pccl.transports.sim.nat import (
    ADDRESS_RESTRICTED,
    FULL_CONE,
    PORT_RESTRICTED,
    SYMMETRIC,
    NatKind,
)


@dataclass(frozen=True)
class Place:
    """Where a peer is."""

    nat: NatKind | None = None
    is_shared: bool = False
    """Whether the peers of a cell that are in this place are behind one NAT."""
    is_home: bool = False
    """Whether they are in one local network, too."""
    is_barred: bool = False
    """Whether they can only dial the port of the master."""
    version: int = 0
    """The only version of IP; 0: both."""


PLACES = {
    "public": Place(),
    "full": Place(FULL_CONE),
    "address": Place(ADDRESS_RESTRICTED),
    "port": Place(PORT_RESTRICTED),
    "symmetric": Place(SYMMETRIC),
    "home": Place(PORT_RESTRICTED, is_shared=True, is_home=True),
    "carrier": Place(PORT_RESTRICTED, is_shared=True),
    "hairpin": Place(replace(PORT_RESTRICTED, hairpins=True), is_shared=True),
    "443": Place(PORT_RESTRICTED, is_barred=True),
    "v4": Place(version=4),
    "v6": Place(version=6),
}
PATHS = {"d": "direct", "b": "dialled back", "p": "punched", "r": "relayed", "-": "none"}

TABLE = [
    # The peers in the order in which they join, and the paths 0-1 0-2 0-3, 1-2 1-3, 2-3.
    # Direct: the younger dials. Dialled back: the elder does.
    ("port public public public", "bbb dd d"),
    ("public public public port", "ddd dd d"),
    ("symmetric public public symmetric", "bbr dd d"),
    ("home home public public", "dbb bb d"),
    ("home home port symmetric", "dpr pr r"),
    ("carrier carrier public public", "rbb bb d"),
    ("hairpin hairpin public public", "pbb bb d"),
    ("full full full full", "ppp pp p"),
    ("full address full address", "ppp pp p"),
    ("full port full port", "ppp pp p"),
    ("full symmetric full symmetric", "rpr rr r"),
    ("address address address address", "ppp pp p"),
    ("address port address port", "ppp pp p"),
    ("address symmetric address symmetric", "rpr rr r"),
    ("port port port port", "ppp pp p"),
    ("port symmetric port symmetric", "rpr rr r"),
    ("symmetric symmetric symmetric symmetric", "rrr rr r"),
    ("443 public public 443", "rrr dr r"),
    ("443 port symmetric public", "rrr rb b"),
    ("v4 v6 v4 v6", "rdr rd r"),
    ("v4 v6 public public", "rdd dd d"),
]


def places_of(cell: str) -> list[Place]:
    """Return where the peers are, in the order in which they join."""
    return [PLACES[name] for name in cell.split()]


def path_to(engine: PeerEngine, other: PeerId) -> str:
    """Return the letter of the path between a peer and another one."""
    link, listener = engine.links.find(other), engine._listener  # pyright: ignore[reportPrivateUsage]
    if link is None or not link.up or listener is None:
        return "-"
    connection = link.lanes[0].connection
    if relay_of(connection) is not None:
        return "r"
    if met_at(connection) is not None:
        return "p"
    has_dialled = connection.local.port != listener.address.port
    return "d" if has_dialled == (engine.machine.peer > other) else "b"


def paths_of(engines: list[PeerEngine]) -> str:
    """Return the paths of all pairs, in the form of the table; both ends of a pair agree."""
    found = dict[tuple[int, int], str]()
    for one, other in combinations(range(len(engines)), 2):
        ends = {
            path_to(engines[here], engines[there].machine.peer)
            for here, there in ((one, other), (other, one))
        }
        found[one, other] = ends.pop() if len(ends) == 1 else "-"
    rows = (
        "".join(found[one, other] for other in range(one + 1, len(engines)))
        for one in range(len(engines) - 1)
    )
    return " ".join(rows)


def widths_of(engines: list[PeerEngine], path: str) -> set[int]:
    """How many lanes the links with this path have; both ends of a pair agree."""
    found = set[int]()
    for one, other in combinations(engines, 2):
        here, there = one.links.find(other.machine.peer), other.links.find(one.machine.peer)
        if here is not None and there is not None and path_to(one, other.machine.peer) == path:
            numbers = [[lane.number for lane in link.lanes] for link in (here, there)]
            found.add(len(numbers[0]) if numbers[0] == numbers[1] else 0)
    return found
