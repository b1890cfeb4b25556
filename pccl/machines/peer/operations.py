"""The open operations of one peer: their numbers, their phases and the calls that wait for them.

State only: ``collectives`` decides which messages to send and what calls return.

* All members derive the same number for the n-th use of a tag in a view. Each outcome uses up its
  number, even if this peer has not requested that operation.
* If other members had a mismatch, or one withdrew, this peer's call for that operation gets the
  same outcome. Otherwise that call would be matched with their next call, which may differ.
* If members committed an operation without this peer, its late call gets that result.
* Phases change only as the table ``TRANSITIONS`` in ``pccl.protocol.operation`` allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from pccl.machines.history import History, InvariantViolation
from pccl.machines.peer import events as ev
from pccl.machines.repair import Gap, find_gaps
from pccl.protocol import messages as msg
from pccl.protocol.guards.contributions import FlaggedContribution
from pccl.protocol.limits import MISSED_KEPT_MAX
from pccl.protocol.operation import TRANSITIONS, BlockLengths, Eager, Phase, Subset, name_tag
from pccl.protocol.shared_state import Elected, Offer, SyncPurpose
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    Descriptor,
    OperationId,
    PeerId,
    Roster,
)
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan

MISSED_CAUSES = (AbortCause.DESCRIPTOR_MISMATCH, AbortCause.WITHDRAWN)
"""Only aborts of these causes are kept for later calls. A loss closes the view, and with it all
numbers. After a lockstep error, this peer must still make the call in which other members
waited."""


@dataclass(frozen=True, slots=True)
class LateCall:
    """A call for an operation that the members committed without this peer."""

    call: int
    descriptor: Descriptor
    detached: bool
    outcome: msg.OperationEnded
    sync: ev.SyncCall | None = None
    """The call, if it is for a synchronization."""
    same: msg.OperationEnded | None = None
    """A synchronization before ``outcome`` whose contents this peer has."""
    after_same: tuple[msg.OperationEnded, ...] = ()
    """The outcomes after that, ``outcome`` among them."""

    @property
    def result(self) -> ev.ReduceResult:
        """What the call returns when the values have arrived."""
        ended, weights = self.outcome, self.outcome.weights
        return ev.ReduceResult(
            ended.operation, ended.contributors, 1, self.descriptor.carrier, weights,
            took_part=False,
        )  # fmt: skip


@dataclass(slots=True)
class OpenOperation:
    """One operation that is posted here and has no outcome yet."""

    id: OperationId
    descriptor: Descriptor
    ring: tuple[PeerId, ...]
    """The participants in ring order: all members of the view, unless it is narrowed."""
    call: int | None
    """None once the caller has left."""
    detached: bool = False
    """Whether the caller reads the outcome later, instead of waiting for it."""
    forgotten: bool = False
    """Whether the handle of this detached operation is gone, so no caller reads the outcome."""
    phase: Phase = Phase.REQUESTED
    digest: bytes = b""
    withdrawn: str | None = None
    in_doubt: bool = False
    """Whether the caller has left, and the next call must wait for the outcome."""
    given_up: str | None = None
    """Why this peer has withdrawn the operation, although its caller waits for the outcome."""
    attempt: int = 0
    waits_for: str = ""
    """The members that the operation waits for, as the master last reported."""
    view_ring: tuple[PeerId, ...] = ()
    """All members of the view, if the operation is narrowed."""
    participants: bytes = b""
    """The ranks of the participants among them."""
    eager: Eager = Eager.NOTHING
    """What the operation sends before its start."""
    weight: float = 0.0
    """Weight of this peer's contribution to a weighted average."""
    norm: float | None = 0.0
    """Norm of that contribution, if the average has a guard; None: not finite."""
    flagged: tuple[FlaggedContribution, ...] = ()
    """The contributions that the master does not trust."""
    weights: tuple[float, ...] = ()
    """One per member in ring order, for a weighted average that has started."""
    blocks: BlockLengths | None = None
    """The lengths of this peer's blocks in an exchange."""
    made: Offer | None = None
    """The offer of a synchronization as its caller made it."""
    offer: Offer | None = None
    """The offer that goes to the other members."""
    elected: Elected | None = None
    """The elected state, once a synchronization has started."""
    among: Subset | None = None
    """The members that take part; None: all members of the view."""
    view_mesh: MeshPlan = EQUAL_MESH
    """Shares and sites of all members of the operation, before it was narrowed."""

    @property
    def mesh(self) -> MeshPlan:
        """The same for the participants, in ring order."""
        if not self.view_ring:
            return self.view_mesh
        return self.view_mesh.among([*map(self.view_ring.index, self.ring)])

    def request(self) -> msg.OperationRequest | msg.SyncRequest:
        """Return the request for the master."""
        if self.offer is not None:
            return msg.SyncRequest(self.id, self.offer, self.descriptor.quorum)
        return msg.OperationRequest(
            self.id,
            self.descriptor,
            eager=self.eager,
            weight=self.weight,
            norm=self.norm,
            participants=self.participants,
            blocks=self.blocks,
            among=self.among,
        )

    def withdrawal(self, reason: str) -> msg.Withdraw:
        """Return the message that withdraws the operation."""
        return msg.Withdraw(self.id, reason, self.among)

    def narrow(self, participants: bytes, ring: tuple[PeerId, ...]) -> None:
        """Continue with some members of the view only.

        Args:
            participants: their ranks among all members.
            ring: their ids.
        """
        self.view_ring = self.view_ring or self.ring
        self.participants, self.ring = participants, ring

    def next_attempt(self, n: int) -> OpenOperation:
        """Return the same operation for another attempt, under the number ``n``."""
        again, attempt = replace(self.id, n=n), self.attempt + 1
        return OpenOperation(
            again, self.descriptor, self.view_ring or self.ring, self.call, self.detached,
            self.forgotten, attempt=attempt, weight=self.weight, norm=self.norm,
            blocks=self.blocks, among=self.among, view_mesh=self.view_mesh,
        )  # fmt: skip

    @property
    def only_looks(self) -> bool:
        """Whether the operation only compares states."""
        return self.offer is not None and self.offer.purpose is SyncPurpose.VERIFY

    @property
    def waits_for_requests(self) -> bool:
        """Whether nothing happens here until other members request this operation."""
        return self.call is not None and self.phase is Phase.REQUESTED

    @property
    def moves_data(self) -> bool:
        """Whether the operation moves data here: it has begun, and was not withdrawn."""
        begun = bool(self.eager) or self.phase in (Phase.STARTED, Phase.DONE)
        return begun and self.withdrawn is None


class OpenOperations:
    """All open operations of one peer, in the order in which they were posted."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: dict[OperationId, OpenOperation] = {}
        self._by_call: dict[int, OpenOperation] = {}
        self._by_tag: dict[int, OpenOperation] = {}
        """The operations that have a caller; only one per tag."""
        self._left: dict[OperationId, OpenOperation] = {}
        """The operations whose callers have left."""
        self._next_n: dict[tuple[int, int], int] = {}
        """(view, tag) -> number of the next operation."""
        self._missed: dict[tuple[int, int], list[msg.OperationEnded]] = {}
        """(view, tag) -> outcomes of operations that this peer has not requested yet."""
        self._unclaimed: OperationId | None = None
        """The last operation whose result this peer lacks for good."""
        self._elsewhere: dict[OperationId, None] = {}
        """Undecided operations that continue without this peer, which has not requested them."""
        self._late: dict[int, LateCall] = {}
        """The calls whose results are being fetched."""

    def __iter__(self) -> Iterator[OpenOperation]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def get(self, operation: OperationId) -> OpenOperation | None:
        """Return the open operation with that id, if there is one."""
        return self._open.get(operation)

    def of_call(self, call: int) -> OpenOperation | None:
        """Return the open operation that a call waits for, if there is one."""
        return self._by_call.get(call)

    def is_tag_in_use(self, tag: int) -> bool:
        """Whether an operation of ``tag`` is open for a caller."""
        return tag in self._by_tag or any(
            late.outcome.operation.tag == tag for late in self._late.values()
        )

    def in_doubt(self) -> list[OpenOperation]:
        """Return the operations that callers have left and that may still be committed."""
        return [known for known in self._left.values() if known.in_doubt] if self._left else []

    def next_n(self, view: int, tag: int) -> int:
        """Return the number of the next operation of ``tag`` in ``view``."""
        return self._next_n.get((view, tag), 0)

    def next_id(self, roster: Roster, group: int, tag: int) -> OperationId:
        """Return the id of the next operation of ``tag`` in the view of ``roster``."""
        n = self._next_n.get((roster.view, tag), 0)
        return OperationId(roster.term, group, roster.view, tag, n)

    def open(self, operation: OpenOperation) -> None:
        """Add the next operation of its tag and view."""
        assert operation.call is not None
        assert operation.id.tag not in self._by_tag
        self.use_up(operation.id)
        self._open[operation.id] = operation
        self._by_call[operation.call] = self._by_tag[operation.id.tag] = operation

    def leave(self, operation: OpenOperation, withdrawn: str | None, *, in_doubt: bool) -> None:
        """Record that the caller of an operation leaves.

        Args:
            operation: the operation.
            withdrawn: why the caller withdraws; None: this peer had done its part.
            in_doubt: whether the operation may still be committed.
        """
        assert operation.call is not None
        self._forget_caller(operation)
        self._left[operation.id] = operation
        operation.call, operation.withdrawn, operation.in_doubt = None, withdrawn, in_doubt

    def forget(self, call: int) -> None:
        """Record that no caller will read the outcome of a detached call."""
        known = self._by_call.get(call)
        if known is not None:
            known.forgotten = True

    def use_up(self, operation: OperationId) -> None:
        """Never derive this number (or a lower one of its tag and view) again."""
        key = (operation.view, operation.tag)
        self._next_n[key] = max(self._next_n.get(key, 0), operation.n + 1)

    def miss(self, message: msg.OperationEnded) -> None:
        """Keep an outcome for a later call of this peer that would request that operation."""
        ended = message.operation
        if ended.n >= self.next_n(ended.view, ended.tag):
            kept = self._missed.setdefault((ended.view, ended.tag), [])
            kept.append(message)
            if len(kept) > MISSED_KEPT_MAX:
                self._give_up([kept.pop(0)])

    def take_missed(self, view: int, tag: int) -> msg.OperationEnded | None:
        """Take the oldest outcome kept for calls of ``tag`` in ``view``; None if there is none."""
        kept = self._missed.get((view, tag))
        return kept.pop(0) if kept else None

    def put_back(self, outcomes: Sequence[msg.OperationEnded]) -> None:
        """Keep outcomes again that were taken last, for the next calls."""
        for message in reversed(outcomes):
            ended = message.operation
            self._missed.setdefault((ended.view, ended.tag), []).insert(0, message)

    @property
    def missed_sync(self) -> OperationId | None:
        """A committed synchronization without this peer, for which it has made no call; or None."""
        kept = [one for key, kept in self._missed.items() if key[1] == SYNC_TAG for one in kept]
        return next((one.operation for one in kept if one.abort is None), None)

    def missed_syncs(self, view: int) -> Iterator[msg.OperationEnded]:
        """Take and yield the outcomes of synchronizations in views up to ``view``, in order."""
        views = sorted(of for of, tag in self._missed if tag == SYNC_TAG and of <= view)
        for of in views:
            while missed := self.take_missed(of, SYNC_TAG):
                yield missed

    def go_on_without(self, operation: OperationId) -> None:
        """Note that an operation continues without this peer, unless its outcome is known."""
        if operation.n >= self.next_n(operation.view, operation.tag):
            self._elsewhere[operation] = None

    def take_elsewhere(self, operation: OperationId) -> bool:
        """Note the outcome of an operation; return whether it continued without this peer."""
        return operation in self._elsewhere and self._elsewhere.pop(operation) is None

    def elsewhere(self, open_views: Collection[int]) -> tuple[OperationId, ...]:
        """Return the undecided operations of closed views that continue without this peer.

        Its calls in a later view wait until it knows whether it lacks their results.
        """
        return tuple(known for known in self._elsewhere if known.view not in open_views)

    def _give_up(self, missed: Iterable[msg.OperationEnded]) -> None:
        for message in missed:
            if message.abort is None and message.operation.tag != SYNC_TAG:
                self._unclaimed = message.operation

    def take_unclaimed(self, view: int) -> OperationId | None:
        """Return an operation whose result this peer will never get; None if there is none.

        Args:
            view: the view that callers see. No call claims results of earlier views.
        """
        for key in [key for key in self._missed if key[0] < view]:
            self._give_up(self._missed.pop(key))
        unclaimed, self._unclaimed = self._unclaimed, None
        return unclaimed

    def forget_missed(self, place: int) -> None:
        """Forget the outcomes before a place, whose state this peer has received."""
        for key, kept in list(self._missed.items()):
            self._missed[key] = [message for message in kept if message.sequence > place]
        self._unclaimed = None

    # -- late calls ------------------------------------------------------------------------------

    def fetch(self, late: LateCall) -> ev.FetchResult:
        """Note a call whose result must be fetched; return the effect that fetches it."""
        self._late[late.call] = late
        elected = late.outcome.elected
        content = late.outcome.digest if elected is None else elected.content
        return ev.FetchResult(late.call, late.outcome.operation, late.descriptor, content)

    def fetched(self, call: int) -> LateCall | None:
        """Forget the late call of this number, and return it; None: there is none."""
        return self._late.pop(call, None)

    def late_calls(self) -> list[LateCall]:
        """Return the calls whose results are being fetched."""
        return list(self._late.values())

    def gaps(self, operation: OperationId, lost: tuple[PeerId, ...]) -> list[Gap]:
        """Return the gaps in the ring of an operation, if it moves data here and is repairable."""
        known = self._open.get(operation)
        if known is None or not known.moves_data or not known.descriptor.is_repairable:
            return []
        return find_gaps(known.ring, lost)

    def answer_holdings(self, asked: msg.HoldingsQuery, own: PeerId) -> ev.CloseGap | ev.Send:
        """Return the effect that closes the gap before this peer, or else a negative answer."""
        lost = len(asked.lost)
        for gap in self.gaps(asked.operation, asked.lost):
            if gap.downstream == own:
                return ev.CloseGap(asked.operation, lost, gap.upstream, gap.size)
        return ev.Send(msg.Holdings(asked.operation, lost, complete=False))

    def send_across(self, asked: msg.Repair, own: PeerId) -> list[ev.SendAcross]:
        """Return the effects that send the missing data across the gaps right after this peer."""
        operation = asked.operation
        return [
            ev.SendAcross(operation, gap.downstream, gap.size)
            for gap in self.gaps(operation, asked.lost)
            if gap.upstream == own
        ]

    def note_wait(self, message: msg.OperationWaits) -> Iterator[ev.ReportWait]:
        """Record for which members an operation waits; yield a report if it has a caller."""
        known = self.get(message.operation)
        if known is None or known.call is None:
            return
        for operation in (known, *map(self.get, message.alike)):
            if operation is not None and operation.phase is Phase.REQUESTED:
                operation.waits_for = message.whom
        what = f"tag {name_tag(known.id.tag, known.among)} ({known.descriptor})"
        if known.offer is not None:
            what = known.offer.purpose.call_name
        count = message.alike_count
        yield ev.ReportWait(known.call, what, message.whom, message.waited_s, count)

    def enter(self, operation: OpenOperation, phase: Phase) -> None:
        """Change the phase of an operation.

        Raises:
            InvariantViolation: the table of phases does not allow the change.
        """
        if phase not in TRANSITIONS[operation.phase]:
            what = f"{operation.id} cannot go from {operation.phase.value} to {phase.value}"
            raise InvariantViolation(what, self._history)
        operation.phase = phase
        operation.waits_for = ""

    def end(self, operation: OperationId, *, committed: bool) -> OpenOperation | None:
        """Remove an operation and set its final phase; return None if it is not open.

        Raises:
            InvariantViolation: the operation was committed before it was done.
        """
        known = self._open.pop(operation, None)
        if known is not None:
            self._left.pop(operation, None)
            if known.call is not None:
                self._forget_caller(known)
            self.enter(known, Phase.COMMITTED if committed else Phase.ABORTED)
        return known

    def forget_closed(self, open_views: tuple[int, ...]) -> None:
        """Forget the numbers and kept aborts of closed views."""
        self._next_n = {key: n for key, n in self._next_n.items() if key[0] in open_views}
        self._missed = {
            key: kept
            for key, kept in self._missed.items()
            if key[0] in open_views or any(message.abort is None for message in kept)
        }

    def unanswered(self) -> Iterator[msg.PeerMessage]:
        """Yield the messages that a reconnect must repeat to the master."""
        for known in self:
            if known.withdrawn is not None:
                yield known.withdrawal(known.withdrawn)
                continue
            yield known.request()
            if known.phase is Phase.DONE:
                yield msg.OperationDone(known.id, known.digest)
            elif known.given_up is not None:
                yield known.withdrawal(known.given_up)

    @property
    def all_wait_for_requests(self) -> bool:
        """Whether every operation waits for another member's request.

        Not counted are operations of which no caller will read the outcome.
        """
        due = self._left or self._late or self._elsewhere
        return not due and all(known.forgotten or known.waits_for_requests for known in self)

    @property
    def have_handles(self) -> bool:
        """Whether any operation is detached, and a caller may still read its outcome."""
        return any(known.detached and not known.forgotten for known in self)

    @property
    def have_callers(self) -> bool:
        """Whether any operation has a caller that waits for it or may read its outcome."""
        return bool(self._late) or any(not one.forgotten for one in self._by_call.values())

    def _forget_caller(self, operation: OpenOperation) -> None:
        assert operation.call is not None
        del self._by_call[operation.call], self._by_tag[operation.id.tag]

    def clear(self) -> None:
        """Forget all operations, because this peer leaves the run."""
        self._open.clear()
        self._by_call.clear()
        self._by_tag.clear()
        self._left.clear()
        self._late.clear()
        self._elsewhere.clear()
        self._next_n.clear()
        self._missed.clear()
