"""How two peers are connected, why that is not better, and what would improve it: in words."""

from __future__ import annotations

from typing import NamedTuple

from pccl.protocol.link_messages import LinkPath
from pccl.protocol.status_report import LinkSpeed
from pccl.protocol.types import PeerId


class PathWords(NamedTuple):
    """The path of one link, in words; ids of peers without names.

    Attributes:
        path: how the two peers are connected.
        why: why the path is not better; empty: it cannot be better.
        remedy: what would improve it; empty: nothing.
    """

    path: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.path}{why}; {self.remedy}" if self.remedy else f"{self.path}{why}"


_OPEN_A_PORT = "open a port of one of them, or switch on port mapping: docs/two-machines.md"


def path_in_words(link: LinkSpeed) -> PathWords:
    """Return the path of a link, why it is not better, and what would improve it."""
    ends = sorted(((link.peer, link.peer_dialable), (link.other, link.other_dialable)))
    (elder, elder_dialable), (younger, younger_dialable) = ends
    match link.path, elder_dialable, younger_dialable:
        case None, _, _:
            return PathWords("no link")
        case LinkPath.DIRECT, _, _:
            return PathWords("direct")
        case LinkPath.MAPPED, _, _:
            return PathWords("mapped")
        case LinkPath.DIALLED_BACK, False, _:
            why = f"peer {elder} cannot be dialled, so it has dialled peer {younger}"
            remedy = f"open a port of peer {elder}: then peers that cannot be dialled reach it, too"
            return PathWords("dialled back", why, remedy)
        case LinkPath.DIALLED_BACK, _, _:
            why = f"peer {elder} has dialled, before a dial of peer {younger} has succeeded"
            return PathWords("dialled back", why)
        case LinkPath.PUNCHED, False, False:
            why = f"neither peer {elder} nor peer {younger} can be dialled"
            return PathWords("punched", why)
        case LinkPath.PUNCHED, _, _:
            why = f"no other dial between peer {elder} and peer {younger} has succeeded"
            return PathWords("punched", why)
        case _, False, False:
            why = f"neither peer {elder} nor peer {younger} can be dialled"
            why = f"{why}, and simultaneous open has not succeeded"
            return PathWords(_relayed(link), why, _OPEN_A_PORT)
        case _, True, _:
            return _not_reached(link, elder, younger)
        case _, _, True:
            return _not_reached(link, younger, elder)
        case _:
            why = f"no dial between peer {elder} and peer {younger} has succeeded"
            return PathWords(_relayed(link), f"{why}, and no simultaneous open", _OPEN_A_PORT)


def _relayed(link: LinkSpeed) -> str:
    return f"relayed by peer {link.relay}" if link.relay else "relayed by the master"


def _not_reached(link: LinkSpeed, dialable: PeerId, other: PeerId) -> PathWords:
    """Return the words for a relayed link to a peer that others can dial."""
    why = f"others can dial peer {dialable}, but peer {other} has not reached it"
    remedy = f"check the firewalls between them, and run pccl doctor at peer {other}"
    return PathWords(_relayed(link), why, remedy)
