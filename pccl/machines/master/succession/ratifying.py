"""``Ratifying``: a registrar that moves its run only with the consent that this needs.

Where nobody else can coordinate the run, that is nobody's. Otherwise it is a majority's
(``majority``): what moves the run is held back until it is there, and a final that
another master could contradict until a majority has stored it (``proposals``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from pccl.machines.master.events import Forget, MasterEvent, Remember
from pccl.machines.master.membership import RegisteredPeer
from pccl.machines.master.registrar import Registrar
from pccl.machines.master.succession.majority import HELD_BACK, Majority
from pccl.machines.master.succession.vouched import Vouched
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected
from pccl.protocol.types import PeerId, RemovalCause
from pccl.topology.link_measures import Choose


class Ratifying(Registrar):
    """What a master is to the peers of its run, however many masters there are.

    Args:
        timing: deadlines.
        run: the run's id, 16 bytes.
        term: number of this incarnation.
        random_bytes: source of resume tokens; must be unpredictable outside simulation.
        now_ns: the present.
        incumbent: id of this master.
        standbys: where other masters of the run listen.
        choose: finds out which algorithms are the quickest in a ring.
        sole: whether nobody else can coordinate the run.
        tests_addresses: whether newcomers are dialled, to find out if they can be.
    """

    def __init__(
        self,
        timing: Timing,
        run: bytes,
        term: int,
        random_bytes: Callable[[int], bytes],
        now_ns: int,
        incumbent: bytes,
        standbys: tuple[msg.MasterAddress, ...],
        choose: Choose,
        sole: bool,
        *,
        tests_addresses: bool = False,
    ) -> None:
        super().__init__(
            timing,
            run,
            term,
            random_bytes,
            now_ns,
            incumbent,
            standbys,
            choose,
            tests_addresses=tests_addresses,
        )
        self._sole: bool = sole
        self._majority = Majority()
        self._acknowledged: dict[PeerId, bytes] = {}
        """Members of the newest roster that had consent, and the digests of their resume tokens."""
        self._has_members = self._is_forgotten = False

    @property
    @abstractmethod
    def recovering(self) -> bool:
        """Whether it waits for members to return."""

    def vouched(self) -> Vouched:
        """The members, for another master, and for this one when it is started again.

        Those that were removed are among them as long as no majority has acknowledged that: it may
        go on with them.
        """
        now = self.membership.digests()
        before = {} if self._sole else self._acknowledged
        return Vouched(self.membership.version, {**before, **now})

    def _propose(
        self,
        final: msg.OperationEnded | msg.RoundClosed,
        expected: Expected = NOTHING_EXPECTED,
        *,
        sends: bool = True,
    ) -> None:
        """Let a majority store a final that another master could contradict, before it is told.

        A sole master tells it at once. Without ``sends``, members get it when they are resumed.
        """
        if not self._sole:
            self._majority.proposals.add(final, expected)
            for peer in self.membership.members() if sends else ():
                self._send_proposals(peer)

    def _send_proposals(self, peer: RegisteredPeer) -> None:
        for proposed in self._majority.proposals.after(peer.sent_place):
            super()._send(peer, proposed)
            peer.sent_place = proposed.place

    @property
    def _has_consent(self) -> bool:
        """Whether the run may move as its membership is."""
        return self._sole or self._majority.consents(self.membership)

    def _ratified(self) -> int:
        return self.membership.version if self._sole else self._majority.ratified

    def _take(self, event: MasterEvent) -> None:
        super()._take(event)
        if not self._sole and not self.recovering and self._has_consent:
            if self._majority.ratified != self.membership.version:
                self._acknowledged = self.membership.digests()
            for peer, message in self._majority.settle(self.membership):
                known = self.membership.peers.get(peer)
                if known is not None:
                    super()._send(known, message)
        self._note_end()

    def _note_end(self) -> None:
        """If nobody is a member any more, there is nothing to take up after a restart.

        Where another master may have them, only if they have said goodbye.
        """
        has_members = bool(self.membership.members())
        if self.recovering or has_members == self._has_members:
            return
        if has_members and self._is_forgotten:
            self._is_forgotten = False
            self._effects.append(Remember(self.run, self.term, self.incumbent))
        elif not has_members and self._has_consent:
            self._is_forgotten = True
            self._effects.append(Forget())
        self._has_members = has_members

    def _send(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        if isinstance(message, msg.Admitted):  # before any roster, so that it knows both
            self._send_proposals(peer)
        if isinstance(message, HELD_BACK) and not self._has_consent:
            self._majority.hold(peer.id, message)
        else:
            super()._send(peer, message)
        if isinstance(message, msg.Resumed):
            peer.sent_place = peer.stored_place
            if peer.admitted:
                self._send_proposals(peer)

    def _dismiss(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        if cause is RemovalCause.GOODBYE:
            self._majority.leave(peer.id)
        super()._dismiss(peer, cause, reason)

    def _note_masters(self, newcomers: list[RegisteredPeer]) -> None:
        """These newcomers become members now: from now on it counts if they know another master."""
        if self._sole and any(peer.masters > 1 for peer in newcomers):
            self._sole = False
            self._acknowledged = self.membership.digests()
            self._majority.settle(self.membership)
