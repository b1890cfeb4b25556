"""The events of one peer: what happens to it in the run, as its program and its operators see it.

An event is a frozen dataclass; the stream adds the time. ``to_json`` gives its form in files and on
the wire, which ``SCHEMA`` versions: a new minor version may add kinds and fields, and a reader
ignores those that it does not know. A new major version may change the meaning of old ones.

Peers are named by their ids, with their names beside them; a name is empty if it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias, get_args

SCHEMA = (1, 3)
"""Major and minor version of the events' form in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """This peer has become a member.

    Attributes:
        peer_id: its id, new after each join.
        name: its name.
        run: id of the run, in hexadecimal digits.
        rank: its place in the ring of its group.
        world_size: members of the group now.
        rejoined: whether it was a member before.
        away_s: seconds since its loss, or 0.
    """

    peer_id: int
    name: str
    run: str
    rank: int
    world_size: int
    rejoined: bool
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipLost:
    """This peer is no longer a member: the master removed it, or it gave the master up.

    Attributes:
        cause: a ``RemovalCause`` by name, ``MASTER_LOST``, ``CLOSED``, ``INTERNAL_ERROR`` (a bug in
            the library), or the name of another error.
        reason: why, in words.
    """

    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJoined:
    """Another peer has become a member of the group.

    Attributes:
        peer_id: its id.
        name: its name.
        host: host at which other peers reach it.
        world_size: members of the group now.
    """

    peer_id: int
    name: str
    host: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost:
    """Another member of the group has left, or was removed.

    Attributes:
        peer_id: its id.
        name: its name.
        cause: a ``RemovalCause`` by name. Empty, with the reason, if unknown to this peer.
        reason: why, in words.
        world_size: members of the group now.
    """

    peer_id: int
    name: str
    cause: str
    reason: str
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterDisconnected:
    """This peer has lost the master, and dials again.

    Attributes:
        reason: why, in words.
        gives_up_s: seconds after which it loses its membership.
    """

    reason: str
    gives_up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterReconnected:
    """A master has taken this peer back.

    Attributes:
        away_s: seconds since the connection was lost.
        term: number of the master's incarnation.
    """

    away_s: float
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A call of this peer still waits for other members. Reported again after growing pauses.

    Attributes:
        call: the call, as the program knows it.
        waits_for: the members, what each does, and how far behind it is.
        waited_s: seconds since all others have made the call.
        others: number of other calls that wait for the same members.
    """

    call: str
    waits_for: str
    waited_s: int
    others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEnded:
    """A call that was reported as ``Waiting`` has returned or raised.

    Attributes:
        call: the call, as the program knows it.
        waited_s: seconds that it waited.
    """

    call: str
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """The last connection to another peer was lost; both sides dial again.

    It is reported after a second, or when the link is back. The end of a peer is no ``LinkLost``.

    Attributes:
        peer_id: its id.
        name: its name.
        reason: why, in words.
    """

    peer_id: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRestored:
    """A link that was reported as ``LinkLost`` works again.

    Attributes:
        peer_id: its id.
        name: its name.
        away_s: seconds since it was lost.
    """

    peer_id: int
    name: str
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LargePacketsLost:
    """Large packets vanish on the link to another peer, which now avoids them.

    Attributes:
        peer_id: id of the other peer.
        name: its name.
        segment_bytes: the largest TCP segment that passes.
    """

    peer_id: int
    name: str
    segment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContributionFlagged:
    """The guard of an average does not trust a contribution.

    Attributes:
        tag: tag of the reduce.
        peer_id: id of the contributor.
        name: its name.
        norm: L2 norm; None: not finite.
        limit: largest trusted norm; None: not finite.
        excluded: whether it counted as weight 0.
    """

    tag: int
    peer_id: int
    name: str
    norm: float | None
    limit: float | None
    excluded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """This peer cannot store the pieces of shared state that it has to fetch.

    Attributes:
        reason: the error of the system, with the place.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressUnreachable:
    """No peer can dial this peer, which dials them instead.

    Attributes:
        reason: which address failed how, and what to do.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortForwarded:
    """The router forwards a port to this peer. Reported again if the port or the address changes.

    Attributes:
        port: the router's port.
        host: the router's own address on the other side; empty: unknown.
        by: how the router was asked: ``PCP``, ``NAT-PMP`` or ``UPnP``.
        public: whether everyone can dial that address; if not, another router lies before it.
    """

    port: int
    host: str
    by: str
    public: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PortNotForwarded:
    """The router forwards no port to this peer (any more).

    Attributes:
        port: the port forwarded until now; 0: none.
        reason: why, in words.
    """

    port: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanged:
    """What a master has done with a peer. Only masters report it.

    Attributes:
        what: ``registered``, ``admitted``, ``moved``, ``removed`` or ``undialable``.
        peer_id: its id.
        name: its name.
        group: its peer group.
        cause: a ``RemovalCause`` by name, if it was removed; otherwise empty.
        reason: why, in words.
    """

    what: str
    peer_id: int
    name: str
    group: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A joint call of this peer has returned or raised, or one of its attempts has failed.

    Attributes:
        call: name of the call.
        tag: tag of a collective; None for other calls.
        outcome: ``ok``, or the name of the error that the call raised.
        reason: the error; empty if the call has returned.
        seconds: seconds since the call was made, all attempts included.
        waited_s: seconds of this attempt before all members had made the call. For a call that
            moves no tensors: the whole attempt.
        moved_s: seconds of this attempt from then to its end.
        attempts: attempts so far, this one included.
        tx_bytes: bytes sent for it.
        rx_bytes: bytes received for it.
    """

    call: str
    tag: int | None
    outcome: str
    reason: str
    seconds: float
    waited_s: float
    moved_s: float
    attempts: int
    tx_bytes: int
    rx_bytes: int


PeerReport: TypeAlias = (
    Joined
    | MembershipLost
    | MemberJoined
    | MemberLost
    | MasterDisconnected
    | MasterReconnected
    | Waiting
    | WaitingEnded
    | LinkLost
    | LinkRestored
    | LargePacketsLost
    | ContributionFlagged
    | NoRoom
    | AddressUnreachable
    | PortForwarded
    | PortNotForwarded
    | RunChanged
    | CallEnded
)
"""Every event of a peer."""

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(PeerReport)}


def to_json(event: PeerReport) -> dict[str, Any]:
    """Return the fields of an event, its kind as ``event``, and the version as ``schema``."""
    version = ".".join(map(str, SCHEMA))
    return {"schema": version, "event": type(event).__name__, **asdict(event)}


def from_json(values: Mapping[str, Any]) -> PeerReport | None:
    """Return the event in the output of ``to_json``; None for a kind that is not known here.

    It ignores unknown fields, so it reads all minor versions of its own major version.

    Raises:
        ValueError: the values are no event, lack a field, or have another major version.
    """
    major = str(values.get("schema", "")).partition(".")[0]
    if major != str(SCHEMA[0]):
        raise ValueError(f"events of schema {major or 'unknown'} cannot be read by {SCHEMA[0]}")
    kind = _KINDS.get(str(values.get("event")))
    if kind is None:
        return None
    names = [field.name for field in fields(kind)]
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"a {kind.__name__} lacks {', '.join(missing)}")
    event: PeerReport = kind(**{name: values[name] for name in names})
    return event
