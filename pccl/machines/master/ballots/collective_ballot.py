"""The master's ballot over a collective, from its first request to its commit or abort.

After a loss, ``repair`` continues with the data that the remaining members have.

Members send data of a small reduction before its start (``eager``). A member can complete the
result only if all members have made the same request. So a done report proves the start, even while
another member's request has not reached the master.

With a quorum, the operation may continue without late members. The master then names the
participants. Each participant posts its buffers for these, and requests again. So all participants
have posted before the start. Late members get the names, and later the outcome.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pccl.machines.master.ballots.ballot import Abort, Ballot, Decision, Stall, Start
from pccl.machines.master.ballots.claimed_blocks import ClaimedBlocks
from pccl.machines.master.ballots.flows import flows_of
from pccl.machines.master.ballots.norms import NormHistory, judge
from pccl.machines.master.lockstep import Wait
from pccl.machines.repair import RingRepair, Tell
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.guards.contributions import FlaggedContribution
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.messages import MasterMessage, OperationNarrowed, OperationStarted
from pccl.protocol.operation import (
    BlockLengths,
    Eager,
    Phase,
    Subset,
    is_kept_for_late,
    name_peers,
    name_tag,
    of_ranks,
    to_ranks,
)
from pccl.protocol.types import (
    QUORUM_MIN,
    AbortCause,
    Algorithm,
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    Quorum,
)
from pccl.topology.ring_order import Pair, broken_neighbours


class CollectiveBallot(Ballot):
    """What the master knows about one undecided collective.

    Args: see ``Ballot``; the norms of earlier rounds, for the guard of a weighted average; and
    ``among``, if the operation has only some members of the view.
    """

    def __init__(
        self,
        operation: OperationId,
        members: tuple[PeerId, ...],
        opener: PeerId,
        now_ns: int,
        history: NormHistory | None = None,
        among: Subset | None = None,
        *,
        inherited: bool = False,
    ) -> None:
        super().__init__(operation, members, opener, now_ns, inherited=inherited)
        self.among = among
        self.repair: RingRepair | None = None
        """The repair; None before a member is lost while data moves."""
        self._what = ""
        self._descriptors: dict[PeerId, Descriptor] = {}
        self._weights: dict[PeerId, float] = {}
        """Member -> its weight in a weighted average; also of lost members."""
        self._blocks = ClaimedBlocks(operation, members)
        self._norms: dict[PeerId, float | None] = {}
        """Member -> norm of its contribution, if it is guarded; None: not finite."""
        self._history = history
        self._flagged: tuple[FlaggedContribution, ...] = ()
        self._is_judged = False
        """Whether this master's guard has judged the contributions."""
        self._eager: dict[PeerId, Eager] = {}
        """The members that send before the start."""
        self._requested_ns: dict[PeerId, int] = {}
        self._posted: set[PeerId] = set()
        """The participants that have posted their buffers, if the operation is narrowed."""
        self._wait: tuple[tuple[Phase, int, int, bool], Wait] | None = None
        """The last ``Wait``, and its origin: phase, number of requests, number of survivors, and
        whether the operation is narrowed."""
        self._untold = False
        """Whether members that do not wait for the start have yet to receive it."""

    @property
    def outlives_view(self) -> bool:
        """Whether the repair after a loss has begun."""
        return self.repair is not None

    @property
    def quorum(self) -> Quorum | None:
        """The quorum in the requests so far; None: the operation waits for all members."""
        asked = next(iter(self._descriptors.values()), None)
        return asked.quorum if asked is not None else None

    @property
    def lags_ns(self) -> list[int | None]:
        """Each member's delay after the quorum; None: the member was left out."""
        return self._lags_of(self._requested_ns.values())

    def _has_asked(self, peer: PeerId) -> bool:
        return peer in (self._posted if self._is_narrowed else self._descriptors)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of all participants in ring order, for a weighted average.

        The guard sets that of an excluded member to 0. Some weights may be unknown if an earlier
        master started the operation. Then all members have received all weights already.
        """
        if not self._weights:
            return ()
        out = {self.participants[one.rank] for one in self._flagged if one.excluded}
        known = [peer for peer in self.participants if peer in self._weights]
        return tuple(0.0 if peer in out else self._weights[peer] for peer in known)

    @property
    def kept_digest(self) -> bytes:
        """The content digest of a committed result that participants keep for late members.

        It is empty, too, if late members would not learn with which weights it was computed.
        """
        asked = next(iter(self._descriptors.values()), None)
        if not self.left_out or asked is None or not is_kept_for_late(asked):
            return b""
        unknown = asked.weighted and len(self.weights) < len(self.participants)
        if unknown or (asked.guard is not None and self._inherited):
            return b""
        return next(iter(self._digests.values()), b"")

    @property
    def trusted_norms(self) -> tuple[float, ...]:
        """The norms of a guarded average that count for later rounds.

        If an earlier master judged the contributions, this one does not know which it flagged.
        """
        if not self._is_judged:
            return ()
        flagged = {self.participants[one.rank] for one in self._flagged}
        return tuple(
            norm
            for peer in self.participants
            if (norm := self._norms.get(peer)) is not None
            and self._weights[peer]
            and peer not in flagged
        )

    def request(
        self,
        peer: PeerId,
        descriptor: Descriptor,
        now_ns: int,
        *,
        eager: Eager = Eager.NOTHING,
        weight: float = 0.0,
        norm: float | None = 0.0,
        participants: bytes = b"",
        blocks: BlockLengths | None = None,
    ) -> Decision | None:
        """Record a member's request. The same request of the same member changes nothing.

        Args:
            peer: the member.
            descriptor: what the member requests.
            now_ns: current time.
            eager: what the member sends before the start.
            weight: the weight of its contribution to a weighted average.
            norm: the norm of that contribution; None: it is not finite.
            participants: the ranks for which the member has posted its buffers; empty: all.
            blocks: the lengths of the member's blocks in an exchange.

        Raises:
            RemoteProtocolError: a member cannot have posted for ``participants``, or its root or
                its blocks do not fit its view.
        """
        if self.phase.ended:
            return None
        if peer not in self._descriptors:
            if descriptor.root >= len(self.members):
                raise RemoteProtocolError(reason=f"{self.operation} has no rank {descriptor.root}")
            is_send = descriptor.collective is Collective.SEND_RECV
            if (is_send and len(self.members) != 2) or (self.among and descriptor.quorum):
                raise RemoteProtocolError(reason=f"{self.operation} can't be {descriptor}")
            differ = self._blocks.note(peer, descriptor, blocks)
            decision = self._first_request(peer, descriptor, now_ns, eager, weight, norm)
            if decision is None and differ:
                reason = f"{self.what}: {differ}"
                decision = self._end(Abort(AbortCause.DESCRIPTOR_MISMATCH, reason))
            if decision is not None:
                return decision
        if participants or self._is_narrowed:
            return self._narrowed_request(peer, participants)
        is_whole = len(self._descriptors) == len(self.members)
        return self._start() if is_whole and self.phase is Phase.REQUESTED else None

    def _first_request(
        self,
        peer: PeerId,
        descriptor: Descriptor,
        now_ns: int,
        eager: Eager,
        weight: float,
        norm: float | None,
    ) -> Decision | None:
        first = next(iter(self._descriptors.values()), None)
        self._descriptors[peer] = descriptor
        if descriptor.weighted:
            self._weights[peer] = weight
        if descriptor.weighted and descriptor.guard is not None:
            self._norms[peer] = norm
        if eager and _may_be_eager(descriptor, len(self.members)):
            self._eager[peer] = eager
        self.latest, self.latest_ns = peer, now_ns
        self._requested_ns[peer] = now_ns
        self.progress_ns = now_ns
        if first is not None and descriptor != first:
            return self._end(Abort(AbortCause.DESCRIPTOR_MISMATCH, self._who_asked_what()))
        if self.phase is not Phase.REQUESTED:
            self._untold |= eager is Eager.SEGMENTS  # its request came after the start
        return None

    # -- without all members ---------------------------------------------------------------------

    def go_on(self) -> Decision | None:
        """Continue without the members that have not requested the operation."""
        if self._is_narrowed or self.phase is not Phase.REQUESTED:
            return None
        self._leave_out(self.waiting_for())
        return self._narrow(self.concerned)

    def _narrow(self, whom: Sequence[PeerId]) -> Tell:
        ranks = to_ranks(self.participants, self.members)
        return Tell(tuple(whom), OperationNarrowed(self.operation, ranks))

    def _narrowed_request(self, peer: PeerId, ranks: bytes) -> Decision | None:
        """Record for whom a member has posted its buffers; start when all participants have."""
        if not ranks:
            return self._narrow([peer]) if peer not in self._posted else None
        posted = of_ranks(ranks, self.members)
        if posted is None or peer not in posted or len(posted) < QUORUM_MIN:
            raise RemoteProtocolError(reason=f"the peer posted {self.operation} for other peers")
        news: Decision | None = None
        if not self._is_narrowed and self.phase is Phase.REQUESTED and self._inherited:
            # An earlier master has decided this, and another participant may have started.
            self._leave_out([member for member in self.members if member not in posted])
            news = self._narrow([member for member in self.concerned if member != peer])
        if posted != self.participants:
            return self._end(Abort(AbortCause.MEMBER_LOST, "masters chose other participants"))
        self._posted.add(peer)
        if self.phase is Phase.REQUESTED and self._posted.issuperset(self.survivors):
            return self._start()
        return news

    # -- from the start to the outcome -------------------------------------------------------------

    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """Record that a member holds the complete result."""
        if self.phase is Phase.REQUESTED and (self._inherited or self._is_ahead(peer)):
            # All members have requested it, so it has started; some may not have received that.
            self._digests[peer] = digest
            self.progress_ns = now_ns
            return self._start()
        if self.phase is not Phase.STARTED or peer in self._digests:
            return None
        if not self._inherited and peer not in self._descriptors:
            return None
        self._digests[peer] = digest
        self.progress_ns = now_ns
        outcome = self._outcome_if_complete()
        if outcome is None and self.repair is not None:
            return self.repair.is_done(peer)
        return outcome

    @property
    def follows_ring(self) -> bool:
        """Whether data goes from each member to the next one, by the requests so far."""
        return all(asked.follows_ring for asked in self._descriptors.values())

    @property
    def is_repairable(self) -> bool:
        """Whether the rest can continue with its data after a loss, by the requests so far."""
        return all(asked.is_repairable for asked in self._descriptors.values())

    @property
    def what(self) -> str:
        """The call, as its callers know it."""
        if self._descriptors and not self._what:  # the master needs it at every tick
            asked = next(iter(self._descriptors.values()))
            self._what = f"{self._tag} ({asked})"
        return self._what or self._tag

    @property
    def _tag(self) -> str:
        return f"tag {name_tag(self.operation.tag, self.among)}"

    @property
    def count(self) -> int:
        """Number of elements of each member's tensor."""
        return next((asked.count for asked in self._descriptors.values()), 0)

    @property
    def tensor_bytes(self) -> int:
        """Size of each member's tensor in bytes."""
        return next((asked.tensor_bytes for asked in self._descriptors.values()), 0)

    def wait(self) -> Wait:
        """Return the operation as a cached ``Wait``, because the master needs it at every tick."""
        known = self.phase, len(self._descriptors), len(self.survivors), self._is_narrowed
        if self._wait is None or self._wait[0] != known:
            self._wait = known, super().wait()
        return self._wait[1]

    def started(self) -> OperationStarted:
        """Return the start message for a member that missed it."""
        return OperationStarted(self.operation, self.weights, self._flagged)

    def wait_for_start(self) -> list[PeerId]:
        """Return the members that do nothing before they receive the start."""
        return [peer for peer in self.survivors if self._eager.get(peer) is not Eager.SEGMENTS]

    def take_untold(self) -> list[PeerId]:
        """Return, once, the members that did not wait for the start and have not received it.

        Such a member needs the start only if the operation takes long: after the start, it suspects
        a lane that delivers nothing.
        """
        if not self._untold or self.phase is not Phase.STARTED:
            return []
        self._untold = False
        return [peer for peer in self.survivors if self._eager.get(peer) is Eager.SEGMENTS]

    def lose(self, peers: Sequence[PeerId], reason: str, now_ns: int) -> Decision | None:
        """Drop lost members. Then commit if the rest has the result, else repair or abort.

        Before the start, there is no result to complete. Only an unquantized operation along the
        ring can be repaired. If one member alone gets the result, it is lost with that member,
        unless it was done.
        """
        owner = self._only_owner
        loses_result = owner in peers and owner not in self._digests
        self._drop(peers, reason)
        if self.phase is not Phase.STARTED or not self.survivors or loses_result:
            return self._give_up()
        if not any(peer in self.participants for peer in peers):
            return None  # the operation continues without them
        outcome = self._outcome_if_complete()
        if outcome is not None:
            return outcome
        if not self.is_repairable:
            return self._give_up()
        self.progress_ns = now_ns
        self.repair = RingRepair(self.operation, self.participants, self.survivors, self._digests)
        return self.repair.begin()

    @property
    def _only_owner(self) -> PeerId | None:
        """The only member that gets a result, by the requests so far; None: others get one too."""
        asked = next(iter(self._descriptors.values()), None)
        if asked is not None and asked.collective is Collective.SEND_RECV:
            return self.members[1]
        gives = asked is not None and asked.collective in (Collective.GATHER, Collective.REDUCE)
        return self.members[asked.root] if asked is not None and gives else None

    def holdings(self, peer: PeerId, lost_count: int, *, complete: bool) -> Decision | None:
        """Record whether a member behind a gap can continue; ignore answers from before a loss."""
        if self.phase is not Phase.STARTED or self.repair is None:
            return None
        if not self.repair.waits_for(peer, lost_count):
            return None
        return self.repair.agrees(peer) if complete else self._give_up()

    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """Yield what a member may have missed while its connection was lost."""
        if peer in self.left_out:
            yield self._narrow([peer]).message
        if peer not in self.survivors:
            return
        if self._is_narrowed and self.phase is Phase.REQUESTED and peer not in self._posted:
            yield self._narrow([peer]).message
        if self.phase is Phase.STARTED:
            yield self.started()
            if self.repair is not None:
                yield from self.repair.owed_to(peer)

    def separated(self, broken: Collection[Pair]) -> list[Pair]:
        """Return the pairs of members that need a link for this operation, but have none."""
        if self.follows_ring:
            return broken_neighbours(self.survivors, broken)
        asked = next(iter(self._descriptors.values()))
        present, root = set(self.survivors), None
        if asked.algorithm is Algorithm.STAR:
            root = self.participants[0]
        elif asked.collective in (Collective.GATHER, Collective.SCATTER):
            root = self.members[asked.root]
        apart = [pair for pair in broken if pair <= present and (root is None or root in pair)]
        return sorted(apart, key=sorted)

    @property
    def needs_each_link(self) -> bool:
        """Whether no algorithm can do without a link that members lack."""
        return self._keeps_ring or any(
            asked.quantization.is_gathered or asked.is_direct
            for asked in self._descriptors.values()
        )

    @property
    def _keeps_ring(self) -> bool:
        """Whether data follows a ring of some members, whose order the master can't change."""
        return self.among is not None and self.follows_ring

    @property
    def way_out(self) -> str:
        """What callers can do if a link is down, unless another algorithm would help."""
        if self._keeps_ring:
            return "the ring of this subgroup needs that link; name its ranks in another order"
        if any(asked.is_direct for asked in self._descriptors.values()):
            return "this collective needs that link; use all_reduce or broadcast, which do not"
        if self.needs_each_link:
            return "a sparse reduce needs links between all members, so use another format"
        if any(asked.forced for asked in self._descriptors.values()):
            return 'omit algorithm, or use "ring"'
        return ""

    def stall(self, since_ns: int) -> Stall | None:
        """Return where the data is stuck: at a receiver that lacks what a member could send to it.

        In a ring each member receives from its predecessor, in a mesh from all members. A member
        that waits for its own inputs has nothing to send. So once nothing moves any more, the links
        with a backlog are stuck, and the largest backlog counts.

        Reports from before ``since_ns`` prove nothing. A silent member may be the cause, and its
        neighbours are not charged for that: the master judges silence separately.
        """
        found: Stall | None = None
        flows = flows_of(self.survivors, self._progress, follows_ring=self.follows_ring)
        for upstream, peer, ready, received in flows:
            silent = any(self._reported_ns.get(end, -1) < since_ns for end in (peer, upstream))
            if peer in self._digests or silent:
                continue
            seen = Stall(upstream, peer, ready, received)
            if seen.backlog > (0 if found is None else found.backlog):
                found = seen
        return found

    def look(self, timing: Timing, now_ns: int) -> Decision | None:
        """Return None, because a collective has no deadline of its own."""
        return None

    # -- decisions -----------------------------------------------------------------------------

    def _start(self) -> Start:
        self.phase = Phase.STARTED
        self._untold = Eager.SEGMENTS in self._eager.values()
        asked = next(iter(self._descriptors.values()), None)
        knows_norms = all(peer in self._norms for peer in self.participants)
        if asked is not None and asked.guard is not None and knows_norms:
            past = self._history.past(self.operation, asked) if self._history is not None else ()
            norms = [self._norms[peer] for peer in self.participants]
            self._flagged = judge(asked.guard, self.weights, norms, past)
            self._is_judged = True
        return Start(self.weights, self._flagged)

    def _is_ahead(self, peer: PeerId) -> bool:
        """Whether a member may be done before the requests of other members have arrived."""
        return peer in self._eager and len(self._eager) == len(self._descriptors)

    def _who_asked_what(self) -> str:
        asked: dict[Descriptor, list[PeerId]] = {}
        for peer, descriptor in self._descriptors.items():
            asked.setdefault(descriptor, []).append(peer)
        claims = [f"{name_peers(peers)} asked for {what}" for what, peers in asked.items()]
        return f"{self._tag}: " + "; ".join(claims)


def _may_be_eager(descriptor: Descriptor, world_size: int) -> bool:
    """Whether a report of a complete result proves that all members have made this request.

    A member that lies about it must not start an operation that others cannot begin yet.
    """
    sent_early = descriptor.near or descriptor.tensor_bytes <= EAGER_BYTES_MAX
    return descriptor.may_begin_early(world_size) and sent_early
