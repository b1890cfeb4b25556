"""Planted bugs: what the simulator must be able to see.

Each breaks one promise of the library in one place, as a careless change would. A test replays a
recorded seed of each and expects a violation; ``python -m pccl.stress sim --planted NAME`` searches
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pccl.collectives.reductions import Reduction
from pccl.collectives.ring import RingSchedule
from pccl.collectives.route import Route
from pccl.machines.master.ballots.ballot import Commit, Decision
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.kept import Kept
from pccl.machines.master.lockstep import Finding, LockstepWatch, Wait
from pccl.machines.master.peer_links import PeerLinks
from pccl.machines.master.registration import Registration
from pccl.machines.master.rounds import JointRounds
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovery import Recovery
from pccl.machines.peer.calls import JointCall, OneTimeError, Refusals
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.membership import KnownMembership
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.ticks import Ticks, Wakefulness
from pccl.protocol import codec
from pccl.protocol import messages as msg
from pccl.protocol.checksum import SEAL_BYTES
from pccl.protocol.errors import PCCLError
from pccl.protocol.operation import Phase
from pccl.protocol.shared_state import DIGEST_BYTES, Expected, Offer
from pccl.protocol.types import Descriptor, OperationId, PeerId
from pccl.runtime.collective.chain_transfer import ChainTransfer
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.transfer import Inlet, Placement, Transfer
from pccl.runtime.links.keeper import LinkKeeper
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.memory.stock import Stock
from pccl.runtime.state.session import StateSession
from pccl.state import election
from pccl.state.digests import PieceMap
from pccl.stress.sim.planted_training import PLANTED_IN_TRAINING
from pccl.transports.lane import Lane, Sink
from pccl.transports.link import Link


def _commit_before_all_reported(stack: ExitStack) -> None:
    """The master commits as soon as the first member is done."""

    def hasty(
        ballot: CollectiveBallot, peer: PeerId, digest: bytes, now_ns: int
    ) -> Decision | None:
        if ballot.phase is not Phase.STARTED:
            return None
        ballot.phase = Phase.COMMITTED
        return Commit()

    stack.enter_context(patch.object(CollectiveBallot, "done", hasty))


def _done_ahead_ignored(stack: ExitStack) -> None:
    """The master takes no done report before all requests are here."""

    def is_ahead(ballot: CollectiveBallot, peer: PeerId) -> bool:
        return False

    stack.enter_context(patch.object(CollectiveBallot, "_is_ahead", is_ahead))


def _ahead_in_unknown_views(stack: ExitStack) -> None:
    """Data goes ahead in a view of which others have not heard yet."""
    take = EagerBudget.take

    def hasty(budget: EagerBudget, operation: OperationId, what: Descriptor, world: int) -> bool:
        budget.all_asked(operation)
        return take(budget, operation, what, world)

    stack.enter_context(patch.object(EagerBudget, "take", hasty))


def _no_fencing(stack: ExitStack) -> None:
    """A frame is taken for the present operation of its tag, whatever attempt it is of."""

    class ByTag(dict[OperationId, Transfer]):
        def get(self, operation: OperationId, default: Any = None) -> Any:
            return next((t for o, t in self.items() if o.tag == operation.tag), default)

    begin = DataPlane.__init__

    def careless(plane: DataPlane, *args: Any) -> None:
        begin(plane, *args)
        plane.transfers = ByTag()

    stack.enter_context(patch.object(DataPlane, "__init__", careless))


def _no_restore_after_completion(stack: ExitStack) -> None:
    """After an abort only a peer that had not finished its part restores its input."""
    restore = getattr(Transfer, "_restore")  # noqa: B009

    def careless(transfer: Transfer) -> None:
        if transfer.lacking:
            restore(transfer)

    stack.enter_context(patch.object(Transfer, "_restore", careless))


def _second_copy_added(stack: ExitStack) -> None:
    """A segment that arrives twice counts twice."""
    begin = Inlet.__init__

    class Forgetful(set[int]):
        """What is here counts as missing all the same."""

        def __contains__(self, index: object) -> bool:
            return True

    def forgetful(inlet: Inlet, route: Route) -> None:
        begin(inlet, route)
        inlet.missing = Forgetful(inlet.missing)

    stack.enter_context(patch.object(Inlet, "__init__", forgetful))


def _write_after_return(stack: ExitStack) -> None:
    """A frame that began to arrive is read into the caller's memory to its end."""

    def stubborn(placement: Placement, received: int) -> memoryview:
        segment, result = placement.segment, placement.transfer.result
        if placement.buffer is not None:
            return placement.buffer[received:]
        return result.beginning(segment.offset + received, segment.offset + segment.length)

    stack.enter_context(patch.object(Placement, "memory", stubborn))


def _mistakes_undiagnosed(stack: ExitStack) -> None:
    """Members that wait for different things wait for ever."""

    def look(
        watch: LockstepWatch, waits: Sequence[Wait], blocked: Iterable[PeerId], now_ns: int
    ) -> list[Finding]:
        return []

    stack.enter_context(patch.object(LockstepWatch, "look", look))


def _only_the_younger_dials(stack: ExitStack) -> None:
    """Of two peers the elder never dials, also when it alone has lost the link."""
    bring_up = getattr(LinkKeeper, "_bring_up")  # noqa: B009

    def idle(keeper: LinkKeeper, peer: PeerId) -> None:
        if peer < getattr(keeper, "_identity").peer:  # noqa: B009
            bring_up(keeper, peer)

    stack.enter_context(patch.object(LinkKeeper, "_bring_up", idle))


def _elders_are_not_asked(stack: ExitStack) -> None:
    """A newcomer that cannot dial an older peer waits until it is refused: nobody dials it."""

    def ignore(links: PeerLinks, elder: object, newcomer: object) -> bool:
        return True

    stack.enter_context(patch.object(PeerLinks, "ask", ignore))


def _world_changes_unseen(stack: ExitStack) -> None:
    """The outcome of a launched reduce changes the world before its caller looks at it."""

    def show(membership: KnownMembership, call: int, version: int, *, detached: bool) -> None:
        membership.see(version)

    stack.enter_context(patch.object(KnownMembership, "show", show))


def _nothing_for_others_after_leaving(stack: ExitStack) -> None:
    """Who leaves after he was done takes along what his neighbour still lacks."""
    detach = Transfer.detach

    def selfish(transfer: Transfer) -> None:
        detach(transfer)
        for outlet in transfer.outlets.values():
            outlet.revoke()
        transfer.begun = False

    stack.enter_context(patch.object(Transfer, "detach", selfish))


def _dead_lane_unnoticed(stack: ExitStack) -> None:
    """Whoever has sent everything never asks whether it can have arrived."""

    def sends_to(transfer: Transfer, peer: PeerId) -> bool:
        return False

    stack.enter_context(patch.object(Transfer, "sends_to", sends_to))


def _lost_lane_forgotten(stack: ExitStack) -> None:
    """What a lane that is lost was given counts as arrived."""

    def lane_lost(plane: DataPlane, lane: Lane) -> None:
        return

    stack.enter_context(patch.object(DataPlane, "lane_lost", lane_lost))


def _partly_sent_forgotten(stack: ExitStack) -> None:
    """The last segment that a lost lane was given counts as arrived, whole or not."""
    lane_lost = DataPlane.lane_lost

    def careless(plane: DataPlane, lane: Lane) -> None:
        for numbers in lane.carried.values():
            del numbers[-1:]
        lane_lost(plane, lane)

    stack.enter_context(patch.object(DataPlane, "lane_lost", careless))


def _vote_counted_twice(stack: ExitStack) -> None:
    """A second copy of a report stands for a member that has not reported."""
    done = CollectiveBallot.done

    def generous(
        ballot: CollectiveBallot, peer: PeerId, digest: bytes, now_ns: int
    ) -> Decision | None:
        missing = ballot.waiting_for()
        if ballot.phase is Phase.STARTED and missing and peer not in missing:
            peer = missing[0]
        return done(ballot, peer, digest, now_ns)

    stack.enter_context(patch.object(CollectiveBallot, "done", generous))


def _resume_token_ignored(stack: ExitStack) -> None:
    """Whoever knows the number of a peer is taken for it."""
    resume = Registration.resume

    def trusting(registration: Registration, connection: int, message: msg.Resume) -> None:
        peer = registration.membership.peers.get(message.peer)
        if peer is not None:
            message = replace(message, token=peer.token)
        resume(registration, connection, message)

    stack.enter_context(patch.object(Registration, "resume", trusting))


def _late_tick_judged(stack: ExitStack) -> None:
    """A process that slept shifts no deadline, and judges at once."""

    def note(ticks: Ticks, now_ns: int, busy_ns: int) -> Wakefulness:
        return Wakefulness(0, may_judge=True)

    stack.enter_context(patch.object(Ticks, "note", note))


def _busy_is_asleep(stack: ExitStack) -> None:
    """A process that was busy takes the time for sleep, and judges nobody as long as it is."""
    note = Ticks.note

    def drowsy(ticks: Ticks, now_ns: int, busy_ns: int) -> Wakefulness:
        awake = note(ticks, now_ns, 0)
        return Wakefulness(awake.slept_ns, may_judge=not awake.slept_ns)

    stack.enter_context(patch.object(Ticks, "note", drowsy))


def _outcome_not_kept(stack: ExitStack) -> None:
    """A member that was away when an operation ended never learns how."""

    def owed_to(kept: Kept[Any, Any], peer: PeerId) -> list[Any]:
        return []

    def owed(kept: Kept[Any, Any], key: Any, peer: PeerId) -> Any:
        return None

    stack.enter_context(patch.object(Kept, "owed_to", owed_to))
    stack.enter_context(patch.object(Kept, "owed", owed))


def _partial_taken_for_final(stack: ExitStack) -> None:
    """Across a gap comes a partial result for a chunk that a lost member had finished."""

    def irreplaceable_count(ring: RingSchedule, gap: int) -> int:
        steps = ring.world_size - 2 + gap
        return sum(
            len(ring.layout.chunk((ring.rank - s - 1) % ring.world_size)) for s in range(steps)
        )

    stack.enter_context(patch.object(RingSchedule, "irreplaceable_count", irreplaceable_count))


def _holdings_overstated(stack: ExitStack) -> None:
    """Whoever is behind a gap says that it can go on, whatever it lacks."""

    def lacks(transfer: ChainTransfer, gap: int) -> bool:
        return False

    stack.enter_context(patch.object(ChainTransfer, "lacks_irreplaceable", lacks))


def _gap_not_bridged(stack: ExitStack) -> None:
    """Whoever is before a gap says nothing to the one behind it."""

    def send_across(transfer: ChainTransfer, downstream: Link, gap: int) -> None:
        return

    stack.enter_context(patch.object(ChainTransfer, "send_across", send_across))


def _weights_in_any_order(stack: ExitStack) -> None:
    """The master tells the weights of an average in the order in which they came."""

    def weights(ballot: CollectiveBallot) -> tuple[float, ...]:
        told: dict[PeerId, float] = getattr(ballot, "_weights")  # noqa: B009 - not ours
        return tuple(told.values())

    stack.enter_context(patch.object(CollectiveBallot, "weights", property(weights)))


def _weights_not_waited_for(stack: ExitStack) -> None:
    """What comes before the weights is combined at once."""
    lacks = property(lambda reduction: False)
    stack.enter_context(patch.object(Reduction, "lacks_weights", lacks))


def _unverified_piece_accepted(stack: ExitStack) -> None:
    """A piece of shared state is taken for what it should be."""

    class Anything(bytes):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    def digest(content: memoryview) -> bytes:
        return Anything(DIGEST_BYTES)

    stack.enter_context(patch("pccl.runtime.state.intake.piece_digest", digest))


def _staging_skipped(stack: ExitStack) -> None:
    """Pieces of shared state go straight into the tensors, also where that was not wanted."""
    init = Stock.__init__

    def hasty(stock: Stock, *args: Any, **options: Any) -> None:
        init(stock, *args, **{**options, "in_place": True})

    stack.enter_context(patch.object(Stock, "__init__", hasty))


def _lineage_ignored(stack: ExitStack) -> None:
    """A revision counts wherever it comes from."""

    def meets(offer: Offer, expected: Expected) -> bool:
        return offer.revision == expected.revision and not offer.stale

    stack.enter_context(patch.object(election, "_meets", meets))


def _outdated_elected(stack: ExitStack) -> None:
    """Contents win by votes, whatever their revisions."""
    footing = getattr(election, "_footing")  # noqa: B009

    def generous(
        members: Mapping[PeerId, Offer], standing: Mapping[PeerId, Offer], expected: Expected
    ) -> object:
        found = footing(members, standing, expected)
        return found and replace(found, valid=frozenset(members))

    stack.enter_context(patch.object(election, "_footing", generous))


def _stock_of_another_election(stack: ExitStack) -> None:
    """Pieces that were fetched under another election are given for those of this one."""

    def stocks(session: StateSession, number: int) -> bool:
        return number in session.stock.verified

    stack.enter_context(patch.object(StateSession, "_stocks", stocks))


def _stock_forgotten(stack: ExitStack) -> None:
    """Every attempt of a synchronization fetches everything anew."""
    prepare = Stock.prepare

    def forgetful(stock: Stock, wanted: Sequence[int], wanted_map: PieceMap) -> None:
        stock.verified.clear()
        prepare(stock, wanted, wanted_map)

    stack.enter_context(patch.object(Stock, "prepare", forgetful))


def _starving_forgotten(stack: ExitStack) -> None:
    """That nobody gives what is missing is said once, whether or not it arrives."""
    unanswered = OpenOperations.unanswered

    def terse(operations: OpenOperations) -> Iterator[msg.PeerMessage]:
        for operation in operations:
            operation.starved = None
        return unanswered(operations)

    stack.enter_context(patch.object(OpenOperations, "unanswered", terse))


def _partly_placed_unnoticed(stack: ExitStack) -> None:
    """What a failed call has written in place is taken for what was there before."""
    prepare, touch = Stock.prepare, StateMemory.touch

    def careless(stock: Stock, wanted: Sequence[int], wanted_map: PieceMap) -> None:
        def overlook(memory: StateMemory, index: int) -> None:
            return

        with patch.object(StateMemory, "touch", overlook if stock.in_place else touch):
            prepare(stock, wanted, wanted_map)

    stack.enter_context(patch.object(Stock, "prepare", careless))


def _missed_sync_repeated(stack: ExitStack) -> None:
    """A synchronization that was left, and committed, is made once more, by one member alone."""
    require = Refusals.require_resync

    def silent(refusals: Refusals, operation: OperationId) -> None:
        require(refusals, operation)
        refusals.sync_missed = False

    stack.enter_context(patch.object(Refusals, "require_resync", silent))


def _damage_unnoticed(stack: ExitStack) -> None:
    """The payload of a frame counts, whatever its checksum says."""

    def trust(lane: Lane, sink: Sink) -> None:
        pass

    stack.enter_context(patch.object(Lane, "_verify", trust))


def _damaged_messages_believed(stack: ExitStack) -> None:
    """A control message is acted on, whatever its checksum says."""

    def trust(sealed: Any, func: str, what: str) -> bytes:
        return bytes(sealed[:-SEAL_BYTES])

    class AnyNumber(int):
        __hash__ = int.__hash__

        def __ne__(self, other: object) -> bool:
            return False

    stack.enter_context(patch.object(codec, "unseal", trust))

    def fits(*parts: bytes) -> int:
        return AnyNumber()

    stack.enter_context(patch.object(codec, "payload_hash", fits))


def _abort_told_at_once(stack: ExitStack) -> None:
    """A master with a standby tells every outcome before anybody has stored it."""

    def propose(ratification: Ratification, *final: object, sends: bool = True) -> None:
        return

    stack.enter_context(patch.object(Ratification, "propose", propose))


def _newcomers_speak_for_all(stack: ExitStack) -> None:
    """A master takes the oldest roster that it hears of for one that a majority had.

    And it admits newcomers into a run without members, wherever those may have gone.
    """
    admit = JointRounds.admit_into_empty_run

    def hasty(rounds: JointRounds, *, at_tick: bool = False) -> None:
        with patch.object(Ratification, "has_consent", True):
            admit(rounds, at_tick=at_tick)

    stack.enter_context(patch.object(Recovery, "ratified", property(lambda recovery: 0)))
    stack.enter_context(patch.object(JointRounds, "admit_into_empty_run", hasty))


def _loss_told_to_one_launch(stack: ExitStack) -> None:
    """The first call after a loss takes it, also one that is launched: others are strangers."""
    refuse = Refusals.refuse

    def hasty(refusals: Refusals, event: JointCall, peer: PeerId) -> PCCLError | None:
        error, loss = refuse(refusals, event, peer), refusals.loss
        if loss is not None and error is loss.error:
            loss.ends(event.call, detached=False)
        return error

    once = property(lambda error: not error.is_reported)
    stack.enter_context(patch.object(Refusals, "refuse", hasty))
    stack.enter_context(patch.object(OneTimeError, "is_due", once))


PLANTED: dict[str, Callable[[ExitStack], None]] = {
    "commit_before_all_reported": _commit_before_all_reported,
    "abort_told_at_once": _abort_told_at_once,
    "newcomers_speak_for_all": _newcomers_speak_for_all,
    "ahead_in_unknown_views": _ahead_in_unknown_views,
    "damage_unnoticed": _damage_unnoticed,
    "damaged_messages_believed": _damaged_messages_believed,
    "done_ahead_ignored": _done_ahead_ignored,
    "no_fencing": _no_fencing,
    "only_the_younger_dials": _only_the_younger_dials,
    "elders_are_not_asked": _elders_are_not_asked,
    "no_restore_after_completion": _no_restore_after_completion,
    "gap_not_bridged": _gap_not_bridged,
    "holdings_overstated": _holdings_overstated,
    "dead_lane_unnoticed": _dead_lane_unnoticed,
    "lost_lane_forgotten": _lost_lane_forgotten,
    "mistakes_undiagnosed": _mistakes_undiagnosed,
    "nothing_for_others_after_leaving": _nothing_for_others_after_leaving,
    "partial_taken_for_final": _partial_taken_for_final,
    "partly_sent_forgotten": _partly_sent_forgotten,
    "world_changes_unseen": _world_changes_unseen,
    "second_copy_added": _second_copy_added,
    "write_after_return": _write_after_return,
    "vote_counted_twice": _vote_counted_twice,
    "resume_token_ignored": _resume_token_ignored,
    "late_tick_judged": _late_tick_judged,
    "busy_is_asleep": _busy_is_asleep,
    "loss_told_to_one_launch": _loss_told_to_one_launch,
    "outcome_not_kept": _outcome_not_kept,
    "unverified_piece_accepted": _unverified_piece_accepted,
    "weights_in_any_order": _weights_in_any_order,
    "weights_not_waited_for": _weights_not_waited_for,
    "staging_skipped": _staging_skipped,
    "lineage_ignored": _lineage_ignored,
    "outdated_elected": _outdated_elected,
    "stock_of_another_election": _stock_of_another_election,
    "stock_forgotten": _stock_forgotten,
    "starving_forgotten": _starving_forgotten,
    "partly_placed_unnoticed": _partly_placed_unnoticed,
    "missed_sync_repeated": _missed_sync_repeated,
    **PLANTED_IN_TRAINING,
}


@contextmanager
def planted(name: str | None) -> Generator[None, None, None]:
    """Run with the bug ``name`` in place (None: without any)."""
    with ExitStack() as stack:
        if name is not None:
            PLANTED[name](stack)
        yield
