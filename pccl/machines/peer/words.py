"""What callers are told: every error that a peer machine raises, with its words.

Each says what happened, to whom, and what to do.
"""

from __future__ import annotations

from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import OPERATIONS_OPEN_MAX
from pccl.protocol.operation import name_peers
from pccl.protocol.types import SYNC_TAG, AbortCause, OperationId, RemovalCause, Roster, RoundKind

# -- what is no error ----------------------------------------------------------------------------


def undialable(reason: str) -> str:
    """Nobody can dial this peer, as its master says."""
    return (
        f"no one can dial this peer {reason}: it dials the others, and works with all that can be "
        "dialled. To work with peers that can't be dialled either, open that port, or advertise "
        "another address"
    )


# -- calls that can't be made now ----------------------------------------------------------------


def connected_already() -> errors.PCCLError:
    """``connect`` on a connected communicator."""
    reason = "this communicator is connected already"
    return errors.PCCLError(errors.Result.INVALID_USAGE, reason=reason)


def not_a_member(loss: errors.PCCLError | None) -> errors.NotConnected:
    """A joint call before ``connect``, or after a ``loss`` that was told."""
    if loss is None:
        return errors.NotConnected(reason="not a member of a run; call connect() first")
    error = errors.NotConnected(
        reason="no longer a member of the run, as another call was told; update_topology() or "
        "connect() joins again"
    )
    error.__cause__ = loss
    return error


def closed() -> errors.NotConnected:
    """The communicator is closed while calls are open."""
    return errors.NotConnected(reason="the communicator was closed")


def operations_open() -> errors.PendingOperations:
    """A joint call that changes the membership, while own collectives are open."""
    reason = "collectives of this peer are still open; wait for them (and their handles) first"
    return errors.PendingOperations(reason=reason)


def same_call_twice(call_name: str) -> errors.PendingOperations:
    """Two threads in one joint call."""
    return errors.PendingOperations(reason=f"another thread is in {call_name} already")


def tag_in_use(tag: int) -> errors.PCCLError:
    """A second collective under a tag that is in flight."""
    reason = f"tag {tag} is in use by a collective that is still open; wait for it, or take another"
    return errors.PCCLError(errors.Result.INVALID_ARGUMENT, reason=reason)


def no_such_root(root: int, size: int) -> ValueError:
    """A broadcast from a rank that the group does not have."""
    return ValueError(f"root must be a rank of the group, from 0 to {size - 1}, not {root}")


def too_many_open() -> errors.PCCLError:
    """More collectives at once than the master keeps apart."""
    reason = f"{OPERATIONS_OPEN_MAX} collectives are open already; wait for some of them first"
    return errors.PCCLError(errors.Result.INVALID_USAGE, reason=reason)


def alone_in_the_group() -> errors.TooFewPeers:
    """A reduce with nobody."""
    return errors.TooFewPeers(reason="alone in the group; wait for others with update_topology()")


def alone_in_the_run() -> errors.TooFewPeers:
    """Nothing to optimize."""
    reason = "alone in the run; wait for others with update_topology()"
    return errors.TooFewPeers(errors.Result.INVALID_USAGE, reason=reason)


# -- calls that were left ------------------------------------------------------------------------


def left(why: str, waits_for: str = "") -> errors.DeadlineExceeded:
    """The caller did not wait any longer; ``waits_for``: for whom, if that is known."""
    return errors.DeadlineExceeded(reason=f"{why}; it waited for {waits_for}" if waits_for else why)


def left_round(why: str, kind: RoundKind, waits_for: str) -> errors.DeadlineExceeded:
    """The same for a round, which waits for this peer's next call of its kind."""
    told = f"the request stands: call {kind.call_name}() again before anything else"
    return errors.DeadlineExceeded(reason=f"{left(why, waits_for).reason}; {told}")


def left_operation(why: str, waits_for: str) -> errors.DeadlineExceeded:
    """The same for an operation that was not done here."""
    told = "the operation is withdrawn for everybody, and the input is what it was"
    return errors.DeadlineExceeded(reason=f"{left(why, waits_for).reason}; {told}")


def left_operation_in_doubt(why: str, waits_for: str) -> errors.OutcomeUnknown:
    """The same where another master may take up the run before this one has heard of it."""
    reason = (
        f"{left(why, waits_for).reason}; the operation is withdrawn, and the input is what it was. "
        "The run has a standby master: a majority of the members has to confirm that nobody gets a "
        "result, and the next joint call waits for that"
    )
    return errors.OutcomeUnknown(reason=reason)


def left_done_operation(why: str, operation: OperationId) -> errors.OutcomeUnknown:
    """The same for one that was done here: the others may get its result."""
    reason = (
        f"{why} after {_what(operation)} was complete here; the others may commit it, and the "
        "next joint call says so; the input is what it was"
    )
    return errors.OutcomeUnknown(reason=reason)


def _what(operation: OperationId) -> str:
    """How its callers know it."""
    return "shared state" if operation.tag == SYNC_TAG else f"tag {operation.tag}"


def left_join(why: str, waits_for: str = "") -> errors.DeadlineExceeded:
    """The same for ``connect``."""
    waits_for = waits_for or "the members' update_topology()"
    reason = f"{why} before this peer was admitted; it waited for {waits_for}"
    return errors.DeadlineExceeded(errors.Result.MASTER_CONNECTION_FAILED, reason=reason)


def resync_required(operation: OperationId) -> errors.ResyncRequired:
    """What joint calls raise from now on."""
    return errors.ResyncRequired(
        reason=f"the members committed {_what(operation)}, which this peer had left, so its state "
        "lacks the result: connect() again to rejoin, then sync_shared_state(). Without connect(), "
        "sync_shared_state() succeeds only if all other members call it as well"
    )


# -- outcomes ------------------------------------------------------------------------------------


def aborted(message: msg.OperationEnded, attempt: int) -> errors.PCCLError:
    """What the caller of an aborted operation gets."""
    what = _what(message.operation)
    match message.abort:
        case AbortCause.DESCRIPTOR_MISMATCH:
            return errors.DescriptorMismatch(reason=f"{message.reason}; make the calls agree")
        case AbortCause.DIGEST_MISMATCH:
            often = ", twice in a row" if attempt else ""
            reason = f"{what}: {message.reason}{often}; inputs are intact"
            return errors.CollectiveAborted(errors.Result.INTERNAL_ERROR, reason=reason)
        case AbortCause.LOCKSTEP:
            return errors.LockstepError(reason=message.reason)
        case AbortCause.STATE_MISMATCH:
            return _mismatch(message)
        case AbortCause.STATE_UNAVAILABLE:
            unavailable = errors.StateUnavailable(reason=message.reason)
            unavailable.is_for_all = True
            return unavailable
        case AbortCause.LINK_BROKEN:
            return errors.LinkError(reason=f"{what}: {message.reason}; inputs are intact")
        case _:
            reason = f"{what}: {message.reason}; inputs are intact, call again"
            return errors.CollectiveAborted(reason=reason)


def lost_before(seen: Roster, newest: Roster) -> errors.CollectiveAborted:
    """What a reduce raises whose caller has not noticed yet that members were lost."""
    gone = sorted(set(seen.ring) - set(newest.ring))
    what = f"the run lost {name_peers(gone)}" if gone else "the run went on to another view"
    size = len(newest.members)
    return errors.CollectiveAborted(
        reason=f"{what} before this call; the world size is now {size}; call again"
    )


def _mismatch(message: msg.OperationEnded) -> errors.StateMismatch:
    error = errors.StateMismatch(reason=f"{message.reason}; nothing was changed")
    if message.difference is not None:
        error.tensor, error.piece = message.difference.tensor, message.difference.piece
    return error


# -- membership ----------------------------------------------------------------------------------


def refused(
    reason: str, cause: RemovalCause | None, ago_s: float, *, member: bool
) -> errors.MembershipError:
    """What this process is told when the master wants nothing of it (any more).

    Args:
        reason: in the master's words.
        cause: why it was removed; None: it was never part of the run.
        ago_s: how long ago it was removed.
        member: whether it believed that it was a member.
    """
    if not member:
        return errors.NotAdmitted(
            reason=f"refused by the master: {reason}; then call connect() again"
        )
    if cause is None:
        text = f"the master of this run is gone; another one answered: {reason}"
        return errors.MasterLost(reason=f"{text}; update_topology() or connect() joins it")
    what_to_do = "update_topology() or connect() rejoins it"
    if cause is RemovalCause.STATE_CONFLICT:
        what_to_do = f"mend the program first, or it is removed again; then {what_to_do}"
    error = errors.Evicted(
        reason=f"the run has gone on without this peer for {ago_s:.1f} s: {reason} "
        f"[{cause.name}]; {what_to_do}"
    )
    error.cause, error.ago_s = cause, ago_s
    return error


def master_lost(silence_s: float, reason: str) -> errors.MasterLost:
    """What this process is told when no master came back within the deadline."""
    return errors.MasterLost(
        reason=f"no word from the master for {silence_s:.1f} s ({reason}); buffers are intact; "
        "update_topology() or connect() rejoins once it is back"
    )
