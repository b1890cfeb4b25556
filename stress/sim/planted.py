"""Planted bugs, which the checkers must detect.

Each bug breaks one promise of the library in one place, as a careless change would. A test replays
a recorded seed of each bug, and expects a violation. ``python -m pccl.stress sim --planted NAME``
searches for new seeds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pccl.bindings.diloco.ledger import Ledger, Revisions
from pccl.bindings.diloco.pipeline import Pipeline
from pccl.collectives.reductions import Reduction
from pccl.collectives.residual import Residual
from pccl.collectives.route import Route
from pccl.collectives.schedules.ring import RingSchedule
from pccl.error_feedback import ErrorFeedback
from pccl.machines.master.ballots.ballot import Commit, Decision
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.kept import Kept
from pccl.machines.master.ballots.norms import NormHistory
from pccl.machines.master.links.meetings import Meetings
from pccl.machines.master.links.peer_links import PeerLinks
from pccl.machines.master.lockstep import LockstepWatch
from pccl.machines.master.rounds import JointRounds
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovery import Recovery
from pccl.machines.peer.calls import JointCall, OneTimeError, Refusals
from pccl.machines.peer.contact import MasterLiveness
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.membership import KnownMembership
from pccl.machines.peer.operations import OpenOperations
from pccl.machines.peer.reporter import PeerReporter
from pccl.machines.ticks import Ticks, Wakefulness
from pccl.protocol import codec
from pccl.protocol import messages as msg
from pccl.protocol.checksum import SEAL_BYTES
from pccl.protocol.errors import PCCLError
from pccl.protocol.operation import Phase
from pccl.protocol.shared_state import DIGEST_BYTES, Expected, Offer
from pccl.protocol.types import Descriptor, Member, OperationId, PeerId
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.outlet import Outlet
from pccl.runtime.collective.plans import Plan, Plans
from pccl.runtime.collective.transfers.chain import ChainTransfer
from pccl.runtime.collective.transfers.inlet import Inlet, Placement
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.runtime.collective.weighted_ranks import WeightedRanks
from pccl.runtime.state import receiver
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.session import StateSession
from pccl.state import election
from pccl.stress.sim import planted_quorums as planted_quorums
from pccl.stress.sim.planting import PLANTED, change, does, private, says
from pccl.stress.sim.publication import planted_publication as planted_publication
from pccl.stress.sim.store import planted_store as planted_store
from pccl.topology.link_steps import LeaveRelay
from pccl.topology.link_upkeep import LinkUpkeep
from pccl.topology.segment_limit import SegmentLimit
from pccl.topology.wanted_link import LaneDial
from pccl.transports.link import Lane
from pccl.transports.sim.memory import SimLease


@contextmanager
def planted(bug: str | None) -> Generator[None, None, None]:
    """Run the block with this bug; None: without a bug."""
    with ExitStack() as stack:
        for change in PLANTED[bug] if bug is not None else ():
            stack.enter_context(patch.object(*change))
        yield


# -- decisions of the master --------------------------------------------------------------------


@does(CollectiveBallot, "done")
def commit_before_all_reported(
    done: Any, ballot: CollectiveBallot, peer: PeerId, digest: bytes, now_ns: int
) -> Decision | None:
    """The master commits as soon as the first member is done."""
    if ballot.phase is not Phase.STARTED:
        return None
    ballot.phase = Phase.COMMITTED
    return Commit()


@does(CollectiveBallot, "done")
def vote_counted_twice(
    done: Any, ballot: CollectiveBallot, peer: PeerId, digest: bytes, now_ns: int
) -> Decision | None:
    """The master counts a second copy of a report for a member that has not reported."""
    missing = ballot.waiting_for()
    if ballot.phase is Phase.STARTED and missing and peer not in missing:
        peer = missing[0]
    decision: Decision | None = done(ballot, peer, digest, now_ns)
    return decision


# The master ignores done reports that arrive before all requests.
says("done_ahead_ignored", CollectiveBallot, "_is_ahead", False)


@does(CollectiveBallot, "wait_for_start")
def announcers_not_started(_: Any, ballot: CollectiveBallot) -> list[PeerId]:
    """The master does not tell the start to members that only announce their segments."""
    eager = private(ballot, "_eager")
    return [peer for peer in ballot.survivors if peer not in eager]


@does(CollectiveBallot, "weights")
def weights_in_any_order(weights: Any, ballot: CollectiveBallot) -> tuple[float, ...]:
    """The master announces the weights of an average in the order of their arrival."""
    told: dict[PeerId, float] = private(ballot, "_weights")
    return tuple(told.values())


# Members that wait in different calls wait for ever.
says("mistakes_undiagnosed", LockstepWatch, "look", ())

# The master does not ask older peers to dial a newcomer that cannot dial them.
says("elders_are_not_asked", PeerLinks, "ask", True)

# The master never tells two peers that cannot dial each other where to meet.
says("meetings_forgotten", Meetings, "_meet", ())

# A master judges the norms of each round by themselves.
says("earlier_norms_forgotten", NormHistory, "past", ())

# A member that was away when an operation ended never learns its outcome.
says("outcome_not_kept", Kept, "owed_to", ())
says("outcome_not_kept", Kept, "owed")

# A master with a standby announces every outcome before another process has stored it.
says("abort_told_at_once", Ratification, "propose")


@does(JointRounds, "admit_into_empty_run")
def newcomers_speak_for_all(admit: Any, rounds: JointRounds, *, at_tick: bool = False) -> None:
    """A master treats the oldest roster that it receives as the roster of a majority.

    It also admits newcomers into a run whose members have not returned yet.
    """
    with patch.object(Ratification, "has_consent", True):
        admit(rounds, at_tick=at_tick)


says("newcomers_speak_for_all", Recovery, "ratified", 0)


# -- time ----------------------------------------------------------------------------------------

# A process that slept extends no deadline, and judges peers at once.
says("late_tick_judged", Ticks, "note", Wakefulness(0, may_judge=True))


@does(Ticks, "note")
def busy_is_asleep(note: Any, ticks: Ticks, now_ns: int, busy_ns: int) -> Wakefulness:
    """A busy process counts the time as sleep, and judges no peer while it is busy."""
    slept_ns = note(ticks, now_ns, 0).slept_ns
    return Wakefulness(slept_ns, may_judge=not slept_ns)


# A peer waits for ever on a dead connection to its master.
says("silent_master_trusted", MasterLiveness, "is_silent", False)

# -- knowledge of a peer -------------------------------------------------------------------------


@does(EagerBudget, "take")
def ahead_in_unknown_views(
    take: Any, budget: EagerBudget, operation: OperationId, *what: Any
) -> Any:
    """A peer sends data early in a view that other members do not know yet."""
    budget.all_asked(operation)
    return take(budget, operation, *what)


@does(PeerReporter, "_learn")
def losses_while_away_untold(learn: Any, reporter: Any, machine: Any, why: Any, *at: int) -> None:
    """A peer does not report members that were lost while it had no connection to the master."""
    present = {member.peer: member for member in machine.newest.members}
    if not why and reporter._members.keys() - present.keys():
        reporter._members = present
    learn(reporter, machine, why, *at)


@does(KnownMembership, "show")
def world_changes_unseen(
    show: Any, membership: KnownMembership, call: int, version: int, *, detached: bool
) -> None:
    """The outcome of a launched reduce changes the world size before its caller waits for it."""
    membership.see(version)


@does(Refusals, "refuse")
def loss_told_to_one_launch(
    refuse: Any, refusals: Refusals, event: JointCall, peer: PeerId
) -> PCCLError | None:
    """Only the first call after a loss gets the error, even if no caller waits for that call."""
    error: PCCLError | None = refuse(refusals, event, peer)
    loss = refusals.loss
    if loss is not None and error is loss.error:
        loss.ends(event.call, detached=False)
    return error


def _is_unreported(error: OneTimeError) -> bool:
    return not error.is_reported


change("loss_told_to_one_launch", OneTimeError, "is_due", _is_unreported)


@does(Refusals, "require_resync")
def missed_sync_repeated(require: Any, refusals: Refusals, *what: Any, **how: Any) -> None:
    """A member that left a synchronization, which then committed, repeats it alone."""
    require(refusals, *what, **how)
    refusals.sync_missed = False


@does(OpenOperations, "unanswered")
def starving_forgotten(unanswered: Any, operations: OpenOperations) -> Iterator[msg.PeerMessage]:
    """A peer does not report again, after a reconnect, that no source has a missing piece."""
    for operation in operations:
        operation.given_up = None
    answers: Iterator[msg.PeerMessage] = unanswered(operations)
    return answers


# -- data transfer -------------------------------------------------------------------------------


class _ByTag(dict[OperationId, Transfer]):
    def get(self, operation: OperationId, default: Any = None) -> Any:
        return next((t for o, t in self.items() if o.tag == operation.tag), default)


@does(DataPlane, "__init__")
def no_fencing(begin: Any, plane: DataPlane, *args: Any) -> None:
    """A peer uses a frame for the current operation of its tag, whatever attempt it belongs to."""
    begin(plane, *args)
    plane.transfers = _ByTag()


@does(Transfer, "_restore")
def no_restore_after_completion(restore: Any, transfer: Transfer) -> None:
    """After an abort only a peer that had not finished its part restores its input."""
    if transfer.lacking:
        restore(transfer)


@does(Plans, "find")
def stale_plan(find: Any, plans: Plans, descriptor: Descriptor, *ring: Any) -> Plan:
    """A peer uses the plan of an earlier view, with other members or in another order."""
    made: dict[Descriptor, Plan] = vars(plans).setdefault("made", {})
    return made.setdefault(descriptor, find(plans, descriptor, *ring))


class _AllMissing(set[int]):
    def __contains__(self, index: object) -> bool:
        return True


@does(Inlet, "__init__")
def second_copy_added(begin: Any, inlet: Inlet, route: Route) -> None:
    """A segment that arrives twice counts twice."""
    begin(inlet, route)
    inlet.missing = _AllMissing(inlet.missing)


@does(Placement, "memory")
def write_after_return(memory: Any, placement: Placement, received: int) -> memoryview:
    """A peer reads a frame that began to arrive into the caller's memory, even after the return."""
    segment, result = placement.hop.segment, placement.transfer.result
    if placement.view is not None:
        return placement.view[received:]
    return result.beginning(segment.offset + received, segment.offset + segment.length)


@does(Transfer, "detach")
def nothing_for_others_after_leaving(detach: Any, transfer: Transfer) -> None:
    """A peer that leaves after it was done drops the data that its neighbour still lacks."""
    detach(transfer)
    for outlet in transfer.outlets.values():
        outlet.revoke()
    transfer.begun = False


# A peer that has sent all data never asks whether the data can have arrived.
says("dead_lane_unnoticed", Transfer, "sends_to", False)

# Data that was queued on a lost lane counts as arrived.
says("lost_lane_forgotten", DataPlane, "lane_lost")


@does(DataPlane, "lane_lost")
def partly_sent_forgotten(lane_lost: Any, plane: DataPlane, lane: Lane) -> None:
    """The last segment that was queued on a lost lane counts as arrived, even if sent in part."""
    for numbers in lane.carried.values():
        del numbers[-1:]
    lane_lost(plane, lane)


@does(RingSchedule, "irreplaceable_count")
def partial_taken_for_final(count: Any, ring: RingSchedule, gap: int) -> int:
    """A peer sends a partial result across a gap for a chunk that a lost member had finished."""
    world, steps = ring.world_size, ring.world_size - 2 + gap
    return sum(len(ring.layout.chunk((ring.rank - step - 1) % world)) for step in range(steps))


# A peer behind a gap reports that it can continue, whatever it lacks.
says("holdings_overstated", ChainTransfer, "lacks_irreplaceable", False)

# A peer before a gap sends nothing to the peer behind it.
says("gap_not_bridged", ChainTransfer, "send_across")
says("announced_segments_forgotten", Outlet, "withdraw")
says("lease_not_revoked", SimLease, "revoke")


@does(Reduction, "__init__")
def weights_not_waited_for(begin: Any, reduction: Reduction, *args: Any, **options: Any) -> None:
    """A peer combines early data at once, without waiting for the weights."""
    begin(reduction, *args, **options)
    reduction.lacks_weights = False


@does(LinkUpkeep, "_bring_up")
def only_the_younger_dials(bring_up: Any, upkeep: LinkUpkeep, link: Any) -> object:
    """The elder of two peers never dials, even if only the elder has lost the link."""
    is_younger = link.member.peer < private(upkeep, "_own")
    return bring_up(upkeep, link) if is_younger else []


@does(LinkUpkeep, "want")
def left_relays_kept(want: Any, *how: Any) -> list[Any]:
    """A peer keeps the lane through a relay that has left the run."""
    return [step for step in want(*how) if not isinstance(step, LeaveRelay)]


@does(LaneDial, "where")
def local_addresses_ignored(where: Any, dial: LaneDial, member: Member) -> Member:
    """A peer dials another one only where the master sees it, even inside one local network."""
    return replace(member, hosts=())


# A link on which large packets vanish never gets smaller segments.
says("large_packets_unnoticed", SegmentLimit, "stuck", False)

# A peer accepts a payload whose checksum is wrong.
says("damage_unnoticed", Lane, "_refuse_damaged")


class _AnyNumber(int):
    __hash__ = int.__hash__

    def __ne__(self, other: object) -> bool:
        return False


@does(codec, "unseal")
def damaged_messages_believed(unseal: Any, sealed: Any, func: str, what: str) -> bytes:
    """A process obeys a control message whose checksum is wrong."""
    return bytes(sealed[:-SEAL_BYTES])


says("damaged_messages_believed", codec, "bytes_hash", _AnyNumber())


# -- shared state --------------------------------------------------------------------------------


class _Anything(bytes):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


# A peer accepts any piece of shared state as the right one.
says("unverified_piece_accepted", receiver, "piece_digest", _Anything(DIGEST_BYTES))


@does(FetchedPieces, "__init__")
def staging_skipped(init: Any, fetched: FetchedPieces, *args: Any, **options: Any) -> None:
    """A peer writes fetched pieces straight into the tensors, even if the caller forbids that."""
    init(fetched, *args, **{**options, "in_place": True})


@does(election, "_meets")
def lineage_ignored(meets: Any, offer: Offer, expected: Expected) -> bool:
    """A revision counts in an election, whatever its lineage."""
    return offer.revision == expected.revision and not offer.stale


@does(election, "_footing")
def outdated_elected(
    footing: Any,
    members: Mapping[PeerId, Offer],
    standing: Mapping[PeerId, Offer],
    expected: Expected,
    commits: int,
) -> Any:
    """Contents win an election by votes, whatever their revisions."""
    found = footing(members, standing, expected, commits)
    return found and replace(found, valid=frozenset(members))


@does(StateSession, "_has_fetched")
def pieces_of_another_election(has_fetched: Any, session: StateSession, number: int) -> bool:
    """A peer sends pieces that it fetched for another election as pieces of this one."""
    return number in session.fetched.verified


@does(FetchedPieces, "prepare")
def pieces_forgotten(prepare: Any, fetched: FetchedPieces, *wanted: Any) -> None:
    """Every attempt of a synchronization fetches all pieces again."""
    fetched.verified.clear()
    prepare(fetched, *wanted)


@does(FetchedPieces, "prepare")
def partly_placed_unnoticed(prepare: Any, fetched: FetchedPieces, *wanted: Any) -> None:
    """A peer treats bytes that a failed call wrote in place as its contents before that call."""

    def overlook(memory: StateMemory, index: int) -> None:
        return

    with patch.object(StateMemory, "touch", overlook if fetched.in_place else StateMemory.touch):
        prepare(fetched, *wanted)


# -- guards --------------------------------------------------------------------------------------

# A contribution that is not finite counts, if its member has declared it finite.
says("lies_believed", WeightedRanks, "refuses", False)

# A lie about values that only the liar itself adds up is not seen by others.
says("lies_in_the_result_believed", WeightedRanks, "must_all_be_finite", False)


@does(WeightedRanks, "begin")
def excluded_values_read(begin: Any, ranks: WeightedRanks, muted: Any, infinite: Any) -> None:
    """A member adds excluded contributions, times 0."""
    begin(ranks, frozenset(), infinite - muted)


# -- training ------------------------------------------------------------------------------------

# A process that was cut off in a reduce takes its work for applied.
says("doubt_taken_for_applied", Ledger, "has_applied", True)

# A process that was cut off in a reduce takes its work for lost.
says("doubt_taken_for_lost", Ledger, "has_applied", False)

# A process that leaves soon hands over only the work that is in flight.
says("work_left_behind", Pipeline, "has_work", answer=False)


# A process forgets its work in flight when it enters the run again.
says("flights_forgotten", Pipeline, "in_flight", ())


@does(Ledger, "close")
def contributors_kept_back(close: Any, ledger: Ledger, contributors: Sequence[int]) -> None:
    """The ledger does not list the contributors of a round."""
    close(ledger, ())


@does(Revisions, "next")
def rounds_not_counted(following: Any, revisions: Revisions) -> int:
    """The revision does not count rounds since the last synchronization."""
    known = vars(revisions)
    if known["_synced"] is None:
        return int(following(revisions))
    return int(max(known["_synced"], known["_ledger"].number)) + 1


@does(Residual, "commit")
def residual_stays(commit: Any, residual: Residual) -> None:
    """A process does not add the rounding error of a round to the next round."""
    residual.drop()


@does(Residual, "drop")
def residual_advances_always(drop: Any, residual: Residual) -> None:
    """A process adds the rounding error of a failed round to the next round."""
    with suppress(AssertionError):
        residual.commit()


# A process keeps a residual that it paid in a round which the ledger shows as applied.
says("residual_paid_twice", ErrorFeedback, "forget")
