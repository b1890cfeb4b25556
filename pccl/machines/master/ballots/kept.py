"""Finals (outcomes and answers), kept until every member concerned has acknowledged them."""

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
        """The place of the final among all decisions of the run."""
        ...


_AnyFinal = TypeVar("_AnyFinal", bound=_KeptFinal)


def affordable(
    finals: Mapping[_Key, _AnyFinal],
    told: Iterable[Collection[int]],
    concerned: Callable[[_AnyFinal], int],
) -> list[tuple[_Key, _AnyFinal]]:
    """Return the reported finals that the master can keep, in their order.

    The master can keep all unless a peer invents many. Finals that few members lack are preferred.

    Args:
        finals: the reported finals by key.
        told: for each returning member: the places of the finals that it has.
        concerned: returns how many members must have a final.
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
    """Messages that some members have not acknowledged, in the order of their decision."""

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[_Message, dict[PeerId, None]]] = {}
        """Key -> the message, and the members that have not acknowledged it."""
        self._counts: Counter[PeerId] = Counter()

    def __contains__(self, key: _Key) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[_Message]:
        return iter([message for message, _ in self._kept.values()])

    def keep(self, key: _Key, message: _Message, peers: list[PeerId]) -> None:
        """Keep ``message`` for ``peers``; it must not be kept for any of them yet."""
        if peers:
            _, owed = self._kept.setdefault(key, (message, {}))
            owed.update(dict.fromkeys(peers))
            for peer in peers:
                self._counts[peer] += 1

    def get(self, key: _Key) -> _Message | None:
        """Return the message of a key; None if no member lacks it."""
        kept = self._kept.get(key)
        return kept[0] if kept is not None else None

    def oldest(self) -> _Message | None:
        """Return the oldest message that a member has not acknowledged; None if there is none."""
        return next((message for message, _ in self._kept.values()), None)

    def owed(self, key: _Key, peer: PeerId) -> _Message | None:
        """Return the message of a key, if it is kept for ``peer``."""
        kept = self._kept.get(key)
        return kept[0] if kept is not None and peer in kept[1] else None

    def owed_to(self, peer: PeerId) -> list[_Message]:
        """Return the messages that ``peer`` has not acknowledged."""
        return [message for message, peers in self._kept.values() if peer in peers]

    def count_owed_to(self, peer: PeerId) -> int:
        """Return how many messages ``peer`` has not acknowledged."""
        return self._counts[peer]

    def everybody_owed(self) -> Iterator[list[PeerId]]:
        """Yield, for each message, the members that have not acknowledged it."""
        return (list(peers) for _, peers in self._kept.values())

    def acknowledge(self, keys: Iterable[_Key], peer: PeerId) -> list[_Key]:
        """Record that ``peer`` has these messages; a second acknowledgement changes nothing.

        Returns:
            The keys of the messages that no peer lacks now.
        """
        settled: list[_Key] = []
        for key in keys:
            kept = self._kept.get(key)
            if kept is not None and peer in kept[1]:
                del kept[1][peer]
                self._counts[peer] -= 1
                if not kept[1]:
                    del self._kept[key]
                    settled.append(key)
        return settled

    def forget(self, peer: PeerId) -> list[_Key]:
        """Drop everything that is kept for ``peer``, which was removed.

        Returns:
            The keys of the messages that no peer lacks now.
        """
        settled = self.acknowledge(list(self._kept), peer)
        del self._counts[peer]
        return settled
