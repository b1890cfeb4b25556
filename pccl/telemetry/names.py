"""Names of peers, for people.

Machines know peers by their ids, and so do their texts: ``peer 3``, ``peers 2, 3``. A text gets the
names in one place, just before a person reads it: ``peer 3 (alice)``, ``peers 2 (bob), 3 (alice)``.
A peer that joined after another master continued the run has a long id: ``peer alice``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pccl.protocol.limits import TERM_GAP
from pccl.protocol.types import NAME_BYTES_MAX, Member, PeerId

_KEPT_MAX = 4096
"""Names that one process remembers. It forgets the oldest; peers that are gone keep theirs."""

_PEERS = re.compile(r"\bpeers? (\d+(?:, \d+)*)\b(?!\.\d)")  # not: this peer 3.0 s ago
_NUMBER = re.compile(r"\d+")


def name_flaw(name: str) -> str:
    """Return what is wrong with the name of a peer; empty if it is valid."""
    if not name or name != name.strip():
        return "a name must not be empty, or begin or end with white space"
    if not name.isprintable() or "\N{REPLACEMENT CHARACTER}" in name:
        return "a name must consist of printable characters"
    if len(name.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        return f"a name must not be longer than {NAME_BYTES_MAX} bytes"
    return ""


def with_name(peer: int, name: str) -> str:
    """Return ``3 (alice)``; without a name the id; with a long id the name."""
    return f"{peer} ({name})" if name and not is_long(peer) else name or str(peer)


def is_long(peer: int) -> bool:
    """Whether an id is too long for people: ids skip millions when another master continues."""
    return peer > TERM_GAP


class Names:
    """The names of the peers of a run, present and former ones."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def learn(self, members: Iterable[Member]) -> None:
        """Remember the names of these peers."""
        for member in members:
            self.note(member.peer, member.name)

    def note(self, peer: PeerId, name: str) -> None:
        """Remember the name of a peer; an empty one says nothing."""
        if name and self._names.get(peer) != name:
            self._names.pop(peer, None)
            self._names[peer] = name
            if len(self._names) > _KEPT_MAX:
                del self._names[next(iter(self._names))]

    def of(self, peer: PeerId | int) -> str:
        """Return the name of a peer; empty if it is unknown."""
        return self._names.get(peer, "")

    def explain(self, text: str) -> str:
        """Put the names of peers beside their ids in a text for people."""
        if "peer" not in text or not self._names:
            return text
        return _PEERS.sub(self._named, text)

    def _named(self, found: re.Match[str]) -> str:
        return _NUMBER.sub(self._with_name, found[0])

    def _with_name(self, number: re.Match[str]) -> str:
        return with_name(int(number[0]), self._names.get(int(number[0]), ""))
