"""Final messages (outcomes, answers), kept until everybody concerned has acknowledged them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from pccl.protocol.types import PeerId

_Key = TypeVar("_Key", bound=Hashable)
_Message = TypeVar("_Message")


class Kept(Generic[_Key, _Message]):
    """What is owed to whom, in the order in which it was decided."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[_Message, dict[PeerId, None]]] = {}
        """Key -> the message, and who has not acknowledged it."""
        self._counts: Counter[PeerId] = Counter()

    def __contains__(self, key: _Key) -> bool:
        return key in self._kept

    def keep(self, key: _Key, message: _Message, peers: list[PeerId]) -> None:
        """Keep ``message`` for these peers."""
        if peers:
            self._kept[key] = (message, dict.fromkeys(peers))
            self._counts.update(peers)

    def oldest(self) -> _Message | None:
        """What was decided first of all that somebody has not acknowledged."""
        return next((message for message, _ in self._kept.values()), None)

    def owed(self, key: _Key, peer: PeerId) -> _Message | None:
        """The message of that key, if it is kept for ``peer``."""
        kept = self._kept.get(key)
        return kept[0] if kept is not None and peer in kept[1] else None

    def owed_to(self, peer: PeerId) -> list[_Message]:
        """Everything that ``peer`` has not acknowledged."""
        return [message for message, peers in self._kept.values() if peer in peers]

    def count_owed_to(self, peer: PeerId) -> int:
        """How much that is."""
        return self._counts[peer]

    def everybody_owed(self) -> Iterator[list[PeerId]]:
        """Who has not acknowledged, message by message."""
        return (list(peers) for _, peers in self._kept.values())

    def acknowledge(self, key: _Key, peer: PeerId) -> None:
        """``peer`` has it; a second acknowledgement changes nothing."""
        kept = self._kept.get(key)
        if kept is not None and peer in kept[1]:
            del kept[1][peer]
            self._counts[peer] -= 1
            if not kept[1]:
                del self._kept[key]

    def forget(self, peer: PeerId) -> None:
        """``peer`` is gone: nothing is owed to it."""
        for key in list(self._kept):
            self.acknowledge(key, peer)
        del self._counts[peer]
