"""The part of a member: which versions it publishes."""

from __future__ import annotations

from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.membership import PeerIdentity, Standing
from pccl.protocol.publication.versions import AnnounceVersions, PublishedVersion


class VersionAnnouncer:
    """Announces to each master which versions this peer publishes."""

    def __init__(self, out: PeerOutbox, own: PeerIdentity) -> None:
        self._versions: tuple[PublishedVersion, ...] = ()
        self._out = out
        self._own = own

    def announce(self, versions: tuple[PublishedVersion, ...]) -> None:
        """Publish ``versions``, and no others. A newcomer announces them after its admission."""
        self._versions = versions
        self.repeat()

    def repeat(self) -> None:
        """Announce the versions to a master that may not know them."""
        if self._versions and self._own.standing is Standing.MEMBER:
            self._out.send(AnnounceVersions(self._versions))
