"""Planted bugs of calls with a quorum, of exchanges, pulls, samples and notices; see ``planted``.

Members that a call goes on without are in no trace of it. So each bug breaks what the others, a
later master or the late call itself must do for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pccl.bindings.data.reader import LeaseReader
from pccl.bindings.data.sample_ledger import SampleLedger
from pccl.machines.master.ballots import sync_ballot
from pccl.machines.master.ballots.ballot import Ballot
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.rounds import JointRounds
from pccl.machines.peer.events import FetchResult, ReduceResult, ResultFetched
from pccl.machines.peer.operations import LateCall, OpenOperation, OpenOperations
from pccl.machines.peer.synchronization import Synchronizations
from pccl.protocol import messages as msg
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.collective.transfers.exchange import ExchangeTransfer
from pccl.runtime.hashing import hash_here
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import LateResults
from pccl.runtime.state.service import StateService
from pccl.state.digests import PieceMap
from pccl.state.fetch.target import ShownTarget
from pccl.stress.sim.planting import change, does, private, says
from pccl.transports.sim.memory import SimMemory


@does(CollectiveBallot, "_narrowed_request")
def participants_not_adopted(
    narrowed_request: Any, ballot: CollectiveBallot, peer: PeerId, ranks: bytes
) -> Any:
    """A new master ignores for whom members have posted their buffers."""
    if private(ballot, "_inherited") and not private(ballot, "_is_narrowed"):
        asked = len(private(ballot, "_descriptors"))
        start = private(ballot, "_start")
        return start() if asked == len(ballot.members) else None
    return narrowed_request(ballot, peer, ranks)


@does(Finals, "end")
def left_out_not_told(
    end: Any,
    finals: Finals,
    ended: msg.OperationEnded,
    peers: Sequence[PeerId],
    *more: Any,
    **how: Any,
) -> None:
    """The master does not tell the outcome to members that the operation went on without."""
    told = [peer for peer in peers if ended.abort is not None or peer in ended.contributors]
    end(finals, ended, told, *more, **how)


@does(LateCall, "result")
def late_weights_forgotten(result: Any, late: LateCall) -> ReduceResult:
    """A late call does not return the weights of the contributors."""
    told: ReduceResult = result.fget(late)
    return replace(told, weights=())


# A result that no call claims any more is forgotten, and nobody has to synchronize.
says("unclaimed_forgotten", OpenOperations, "_give_up")


@does(OpenOperations, "take_missed")
def newest_missed_first(
    take_missed: Any, operations: OpenOperations, view: int, tag: int
) -> msg.OperationEnded | None:
    """A late call gets the newest result that it has missed."""
    missed: dict[tuple[int, int], list[msg.OperationEnded]] = private(operations, "_missed")
    kept = missed.get((view, tag))
    return kept.pop() if kept else None


@does(StateService, "fetch_result")
def own_input_for_late_result(fetch_result: Any, service: StateService, fetch: FetchResult) -> None:
    """A late call returns the values that it has brought."""
    calls, feed = private(service, "_calls"), private(service, "_feed")
    operand = calls.open[fetch.call].operand
    operand.target.write(0, operand.source.copy())
    feed(ResultFetched(fetch.call, has_arrived=True))


@does(LateResults, "ended")
def late_values_unverified(
    ended: Any, late: LateResults, operation: OperationId, now_ns: int, *, committed: bool
) -> None:
    """Members keep other values than those of the result, and a late one takes them."""
    memory: StateMemory | None = vars(late)["_staged"].get(operation)
    if memory is not None and memory.layout.nbytes:
        memory.view(memory.layout.piece(0))[0] ^= 1
        hash_here(memory, [0])
    ended(late, operation, now_ns, committed=committed)


_TAKE_MAP = ShownTarget.take_map


def _believe(target: ShownTarget, peer: PeerId, theirs: PieceMap, *, idle: bool) -> PieceMap | None:
    known = vars(target)
    only, known["_only"] = known["_only"], b""
    found = _TAKE_MAP(target, peer, theirs, idle=idle)
    known["_only"] = only
    if only and found is not None:
        target.content = known["_shown"][peer] = only
    return found


change("late_values_unverified", ShownTarget, "take_map", _believe)


@does(OpenOperation, "narrow")
def posted_for_all(narrow: Any, operation: OpenOperation, ranks: bytes, ring: Any) -> None:
    """A participant posts its buffers for all members again."""
    narrow(operation, ranks, operation.ring)


# A member that is late for a synchronization waits for the next one, whatever its members wait for.
says("late_sync_never_given_up", Synchronizations, "give_up_late")


@does(OpenOperations, "all_wait_for_requests")
def late_syncs_not_asked_for_handles(waits: Any, operations: OpenOperations) -> bool:
    """While members wait for handles, nobody asks those in a late synchronization to give way."""
    return bool(waits.fget(operations)) and not operations.have_handles


# Members elect a state, although only a member that is late may hold the one of the group.
says("newcomers_elect_alone", sync_ballot, "has_valid", True)


@does(JointRounds, "_quorum")
def quorum_of_all_groups(quorum: Any, rounds: JointRounds, kind: Any) -> Any:
    """A round goes on if the groups together have enough."""
    found = quorum(rounds, kind)
    if found is not None:
        return found
    members = private(rounds, "_membership").members()
    quorums = private(rounds, "_quorums")[kind]
    requested = rounds.requested[kind]
    if not requested or len(quorums) < len(requested):
        return None
    last = next(reversed(quorums.values()))
    return last if len(requested) >= last.of(len(members)) else None


@does(JointRounds, "request")
def leaving_not_told(request: Any, *args: Any, leaves: bool) -> None:
    """The master does not notify members of the rounds of a process that leaves soon."""
    request(*args, leaves=False)


@does(ExchangeTransfer, "_keep")
def own_block_forgotten(keep: Any, transfer: ExchangeTransfer, count: int) -> None:
    """A member does not copy the block that it gives to itself."""


@does(SimMemory, "pull")
def withdrawn_pull_counted(pull: Any, *args: Any) -> bool:
    """A pull counts although the announcement was withdrawn meanwhile."""
    pull(*args)
    return True


# The master waits for an operation of some members after the loss of another one.
says("subsets_outlive_their_view", Ballot, "ends_with_view", answer=False)


# A process that was cut off keeps its work, even if other processes have the samples of it now.
says("lost_lease_unnoticed", LeaseReader, "keeps", True)


@does(SampleLedger, "close")
def samples_of_lost_members_done(
    close: Any, ledger: SampleLedger, counts: Mapping[int, float], patience: int = 0
) -> None:
    """Samples of a member that is not in a round count as done, instead of going to others."""
    for row in private(ledger, "_rows")[: int(ledger.record[1])]:
        if row[2] and row[2] - 1 not in counts and row[3] >= patience:
            row[0] = row[1]
    close(ledger, counts, patience)
