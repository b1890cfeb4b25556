"""What one peer knows of the run's membership, what its caller may know, and its links.

State only. Rosters arrive whenever somebody joins or is lost; the caller sees one when a joint call
of his returns, and it is the one that the answer names, so that all callers see the same at the
same call.
"""

from __future__ import annotations

import enum

from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.operation import name_peers
from pccl.protocol.types import Member, PeerId, RemovalCause, Roster


class Standing(enum.Enum):
    """What this process is to the run."""

    OUTSIDE = "outside"
    JOINING = "joining"
    """Not yet registered."""
    PENDING = "pending"
    MEMBER = "member"
    LOST = "lost"
    """No longer a member; the reason is raised once."""
    CLOSED = "closed"


class KnownMembership:
    """Rosters and links of one peer."""

    def __init__(self) -> None:
        self.seen: Roster | None = None
        """Membership as the caller may know it."""
        self._rosters: dict[int, Roster] = {}
        """By version: those that the caller may still be shown, and the newest."""
        self._elders: tuple[Member, ...] = ()
        self._links: dict[PeerId, str | None] = {}
        """Peer -> None if the link is up, otherwise why not."""
        self._links_wanted: tuple[Member, ...] = ()

    @property
    def newest(self) -> Roster | None:
        """The newest roster that has arrived (callers may not know it yet)."""
        return next(reversed(self._rosters.values()), None)

    def learn(self, roster: Roster) -> bool:
        """A roster has arrived; return False if it is not news."""
        newest = self.newest
        if newest is not None and roster.version <= newest.version:
            return False
        self._rosters[roster.version] = roster
        return True

    def learn_elders(self, elders: tuple[Member, ...]) -> None:
        """The older peers of the own group have changed."""
        self._elders = elders

    def see(self, version: int) -> None:
        """Let the caller see the roster ``version`` (or the oldest newer one that is known)."""
        if self.seen is not None and version <= self.seen.version:
            return
        for known in [v for v in self._rosters if v < version]:
            if len(self._rosters) > 1:
                del self._rosters[known]
        self.seen = next(iter(self._rosters.values()))

    # -- links ---------------------------------------------------------------------------------

    def want_links(self, own: PeerId) -> tuple[Member, ...] | None:
        """The peers to keep links to, in order of id; None if that has not changed."""
        newest = self.newest
        wanted = {member.peer: member for member in self._elders}
        wanted.update({member.peer: member for member in (newest.members if newest else ())})
        wanted.pop(own, None)
        peers = tuple(wanted[peer] for peer in sorted(wanted))
        if peers == self._links_wanted:
            return None
        self._links_wanted = peers
        self._links = {peer: why for peer, why in self._links.items() if peer in wanted}
        return peers

    def link_changed(self, peer: PeerId, why: str | None) -> bool:
        """A link is up (None) or down; return False if it was before."""
        if self._links.get(peer, "") == why:
            return False
        if why is None or any(member.peer == peer for member in self._links_wanted):
            self._links[peer] = why
        else:
            self._links.pop(peer, None)  # a newcomer that never became a member
        return True

    def link_reports(self) -> list[msg.LinkReport]:
        """What the master has to know of the own links, all of it."""
        return [msg.LinkReport(peer, why is None, why or "") for peer, why in self._links.items()]

    def drop_links(self) -> None:
        """This peer is no longer a part of the run and needs nobody."""
        self._links.clear()
        self._links_wanted = ()


def loss_error(seen: Roster, newest: Roster) -> errors.CollectiveAborted:
    """What a reduce raises whose caller has not noticed yet that members were lost."""
    gone = sorted(set(seen.ring) - set(newest.ring))
    what = f"the run lost {name_peers(gone)}" if gone else "the run went on to another view"
    size = len(newest.members)
    return errors.CollectiveAborted(
        reason=f"{what} before this call; the world size is now {size}; call again"
    )


def refusal_error(member: bool, cause: RemovalCause | None, reason: str) -> errors.MembershipError:
    """What this process is told when the master wants nothing of it (any more)."""
    if not member:
        return errors.NotAdmitted(reason=f"refused by the master: {reason}")
    if cause is None:
        text = f"the master of this run is gone; another one answered: {reason}"
        return errors.MasterLost(reason=text)
    text = f"the run went on without this peer: {reason}; connect() again to rejoin"
    return errors.Evicted(reason=text)


def master_lost_error(silence_s: float, reason: str) -> errors.MasterLost:
    """What this process is told when no master came back within the deadline."""
    return errors.MasterLost(
        reason=f"no word from the master for {silence_s:.1f} s ({reason}); buffers are intact; "
        "connect() again once it is back"
    )
