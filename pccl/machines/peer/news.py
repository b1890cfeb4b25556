"""The latest events of one peer: lost members, failures, connection losses.

Pure and bounded. The news outlives the machine of one membership. So a peer that was evicted and
has rejoined can still see why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pccl.machines.peer.events import (
    ControlClosed,
    ControlMessage,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    RaiseCall,
)
from pccl.protocol import messages as msg
from pccl.protocol.errors import PCCLError
from pccl.protocol.limits import NEWS_KEPT_MAX
from pccl.protocol.operation import name_peers
from pccl.protocol.types import PeerId


@dataclass(frozen=True, slots=True)
class NewsItem:
    """One event, as text."""

    at_ns: int
    text: str


class PeerNews:
    """The latest news of one peer."""

    def __init__(self) -> None:
        self._items: deque[NewsItem] = deque(maxlen=NEWS_KEPT_MAX)
        self._members: tuple[PeerId, ...] = ()

    @property
    def items(self) -> tuple[NewsItem, ...]:
        """The news items, newest first."""
        return tuple(reversed(self._items))

    def note(self, event: PeerEvent, effects: Sequence[PeerEffect], now_ns: int) -> None:
        """Add the news in an event of a machine and in its effects."""
        texts: list[str] = []
        match event:
            case ControlMessage(msg.RosterChanged(roster) | msg.Admitted(roster=roster)):
                gone = sorted(set(self._members) - set(roster.ring))
                self._members = roster.ring
                if gone and isinstance(event.message, msg.RosterChanged):
                    texts.append(f"{name_peers(gone)} left the run or failed")
            case ControlMessage(msg.Refused(reason=reason)):
                texts.append(f"the master refused this peer: {reason}")
            case ControlClosed(reason):
                texts.append(f"no connection to the master: {reason}")
            case LinkChanged(peer, reason) if reason is not None:
                texts.append(f"the link to peer {peer} is down: {reason}")
            case _:
                pass
        for effect in effects:
            match effect:
                case RaiseCall(_, PCCLError() as error):
                    texts.append(f"{type(error).__name__}: {error.reason}")
                case _:
                    pass
        if texts:
            self._items += [NewsItem(now_ns, text) for text in texts]
