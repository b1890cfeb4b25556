"""``RoundMaster``: the joint decisions of all members of a run, admission among them.

A round closes when every member has made the call; the answer is the same for all.
``MasterMachine`` builds operations on it.
"""

from __future__ import annotations

from abc import abstractmethod

from pccl.machines.master.ballots.kept import Kept
from pccl.machines.master.membership import RegisteredPeer
from pccl.machines.master.succession.restart import Restartable
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import SEATED_AT_ONCE_MAX
from pccl.protocol.types import PeerId, RoundId, RoundKind


class RoundMaster(Restartable):
    """A master, apart from operations.

    Args: see ``Restartable``.
    """

    def _forget_run(self) -> None:
        """Know of no round."""
        self._rounds: dict[RoundKind, dict[PeerId, None]] = {kind: {} for kind in RoundKind}
        """Who has made the call that the present round of each kind waits for."""
        self._round_counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._answers: Kept[RoundId, msg.RoundClosed] = Kept()
        self._sequence = 0
        """Place of what was decided last."""

    # -- what operations have to do with it -------------------------------------------------------

    @abstractmethod
    def _busy_views(self) -> set[tuple[int, int]]:
        """The views with undecided operations: (group, number)."""

    @abstractmethod
    def _groups_with_many_numbers(self) -> set[int]:
        """The groups whose newest view has seen so many tags that a new one should begin."""

    @abstractmethod
    def _forget_numbers(self) -> None:
        """Nothing is counted any more in views that are closed."""

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # -- rounds --------------------------------------------------------------------------------

    def _on_round_request(self, peer: RegisteredPeer, round_id: RoundId) -> None:
        present = self._round_counts[round_id.kind]
        if not peer.admitted or round_id.n > present:
            raise RemoteProtocolError(reason=f"{round_id} is not open")
        if round_id.n < present:
            answer = self._answers.owed(round_id, peer.id)
            if answer is None:
                raise RemoteProtocolError(reason=f"{round_id} was acknowledged")
            self._send(peer, answer)
            return
        self._rounds[round_id.kind][peer.id] = None
        self._close_round_if_complete(round_id.kind)

    def _close_round_if_complete(self, kind: RoundKind) -> None:
        requested = self._rounds[kind]
        members = self.membership.members()
        if not requested or any(peer.id not in requested for peer in members):
            return
        newcomers = self.membership.admissible()
        if kind is RoundKind.UPDATE_TOPOLOGY:
            self.membership.updates = self._round_counts[kind] + 1
            self._admit(newcomers)
        elif kind is RoundKind.OPTIMIZE_TOPOLOGY:
            self._renew_outdated()
        self._answer_round(kind, members, pending=bool(newcomers))
        if kind is RoundKind.UPDATE_TOPOLOGY:
            for peer in newcomers:
                self._send(peer, self._admission(peer))

    def _answer_round(
        self, kind: RoundKind, members: list[RegisteredPeer], *, pending: bool, lockstep: str = ""
    ) -> None:
        round_id = RoundId(kind, self._round_counts[kind])
        self._round_counts[kind] += 1
        self._rounds[kind] = {}
        version, sequence = self.membership.version, self._next_sequence()
        answer = msg.RoundClosed(round_id, version, pending, lockstep, sequence)
        self._answers.keep(round_id, answer, [peer.id for peer in members])
        if lockstep:
            self._propose(answer)
        for peer in members:
            self._send(peer, answer)

    def _admit(self, newcomers: list[RegisteredPeer]) -> None:
        renew = self._groups_with_many_numbers()
        if not newcomers and not renew:
            return
        informed = self.membership.members()
        self._note_masters(newcomers)
        self.membership.admit(newcomers, renew, self._busy_views())
        self._forget_numbers()
        self._tell_rosters(informed)
        for peer in newcomers:
            self._announce("admitted", peer, f"world size {len(self.membership.members())}")

    def _renew_outdated(self) -> None:
        """Put views in the place of those that would do otherwise if they were opened now.

        Not of one that somebody has asked for an operation in: he does not know of the round's end
        (his caller has left it), or works on without the caller.
        """
        busy = {group for group, _ in self._busy_views()}
        renewed = sorted(self.membership.outdated() - busy)
        for group in renewed:
            self.membership.reorder(group, self.membership.order(group))
        if renewed:
            self._forget_numbers()
            self._tell_rosters(self.membership.members())

    def _admit_into_empty_run(self, *, at_tick: bool = False) -> None:
        if self.membership.members() or not self._has_consent:
            return
        if len(self.membership.peers) > SEATED_AT_ONCE_MAX and not at_tick:
            return
        # Nobody is left who could call: the rounds that were open have no scope any more.
        for kind in RoundKind:
            self._rounds[kind] = {}
        newcomers = self.membership.admissible()
        self._admit(newcomers)
        for peer in newcomers:
            self._send(peer, self._admission(peer))

    def _admission(self, peer: RegisteredPeer) -> msg.Admitted:
        counts = tuple(msg.RoundCount(kind, n) for kind, n in self._round_counts.items())
        return msg.Admitted(self.membership.roster(peer.group), counts, self._ratified())
