"""Final messages (outcomes, answers), kept until everybody concerned has acknowledged them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from pccl.protocol.limits import RECOVERED_OWED_MAX
from pccl.protocol.types import PeerId

_Key = TypeVar("_Key", bound=Hashable)
_Message = TypeVar("_Message")


class _KeptFinal(Protocol):
    @property
    def sequence(self) -> int:
        """Its place among everything that the run has decided."""
        ...


_AnyFinal = TypeVar("_AnyFinal", bound=_KeptFinal)


def affordable(
    finals: Mapping[_Key, _AnyFinal],
    told: Iterable[Collection[int]],
    concerned: Callable[[_AnyFinal], int],
) -> list[tuple[_Key, _AnyFinal]]:
    """Of the finals that returning members report, in their order, those that can be kept.

    All of them, unless somebody has made many up. What most members have goes before what few have.

    Args:
        finals: by key.
        told: of each member that came back, the places of those that it has.
        concerned: how many members must have one.
    """
    having = Counter(sequence for sequences in told for sequence in sequences)
    lacking = {key: max(0, concerned(f) - having[f.sequence]) for key, f in finals.items()}
    if sum(lacking.values()) <= RECOVERED_OWED_MAX:
        return list(finals.items())
    chosen: set[_Key] = set()
    owed = 0
    for key in sorted(finals, key=lacking.__getitem__):
        owed += lacking[key]
        if owed > RECOVERED_OWED_MAX:
            break
        chosen.add(key)
    return [(key, final) for key, final in finals.items() if key in chosen]


class Kept(Generic[_Key, _Message]):
    """What is owed to whom, in the order in which it was decided."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[_Message, dict[PeerId, None]]] = {}
        """Key -> the message, and who has not acknowledged it."""
        self._counts: Counter[PeerId] = Counter()

    def __contains__(self, key: _Key) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[_Message]:
        return iter([message for message, _ in self._kept.values()])

    def keep(self, key: _Key, message: _Message, peers: list[PeerId]) -> None:
        """Keep ``message`` for these peers, to whom it is not owed yet."""
        if peers:
            _, owed = self._kept.setdefault(key, (message, {}))
            owed.update(dict.fromkeys(peers))
            self._counts.update(peers)

    def get(self, key: _Key) -> _Message | None:
        """The message of that key, if somebody lacks it."""
        kept = self._kept.get(key)
        return kept[0] if kept is not None else None

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
