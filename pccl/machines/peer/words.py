"""The errors that a peer machine raises in its callers, with their texts.

Each text says what happened, to which peer or tag, and what to do.
"""

from __future__ import annotations

from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import (
    OPERATIONS_OPEN_MAX,
    STORE_BYTES_MAX,
    STORE_MEMBER_BYTES_MAX,
    STORE_OPEN_MAX,
    STORE_VALUE_BYTES_MAX,
)
from pccl.protocol.operation import Subset, name_peers, name_tag
from pccl.protocol.shared_state import Offer
from pccl.protocol.types import (
    SYNC_TAG,
    AbortCause,
    Collective,
    Descriptor,
    OperationId,
    PeerId,
    RemovalCause,
    Roster,
    RoundKind,
)

_NOT_FINITE = "are not finite, although it declared a finite contribution"
"""Why an operation was withdrawn that no retry helps."""

_NAMED_MAX = 3
"""Keys of the store that an error names."""

STARTED_TWICE = "another master has started it with other contributors"
"""Why an operation is withdrawn that two masters have started."""

LATE_SYNC = "this peer lacks results, and the members wait for other calls"
"""Why a synchronization is withdrawn that the members will not make."""


# -- calls ---------------------------------------------------------------------------------------


def call_name(event: ev.CallEvent) -> tuple[str, int | None]:
    """Return the name of a call in the API, and the tag of a collective."""
    match event:
        case ev.ReduceCall(tag=tag, descriptor=what, detached=detached, among=among):
            tag = tag if among is None else among.tag
            return what.collective.name.lower() + ("_async" if detached else ""), tag
        case ev.RoundCall(kind=kind):
            return kind.call_name, None
        case ev.SyncCall(offer=offer):
            return offer.purpose.call_name, None
        case ev.StoreCall(op=op):
            return f"store.{op.label}", None
        case ev.JoinCall(rejoins=rejoins):
            return "update_topology" if rejoins else "connect", None


# -- warnings ------------------------------------------------------------------------------------


def undialable(reason: str) -> str:
    """Return the warning that no peer can dial this peer; ``reason``: from its master."""
    return (
        f"peers cannot dial this peer {reason}. This peer dials them instead, and another process "
        "forwards what it sends to peers that cannot be dialled either. For direct links to them, "
        "open that port, or advertise another address"
    )


# -- calls that are rejected ---------------------------------------------------------------------


def connected_already() -> errors.PCCLError:
    """Return the error of ``connect`` on a connected communicator."""
    reason = "this communicator is connected already; call connect() only once"
    return errors.PCCLError(errors.Result.INVALID_USAGE, reason=reason)


def not_a_member(loss: errors.PCCLError | None) -> errors.NotConnected:
    """Return the error of a joint call before ``connect``, or after a reported ``loss``."""
    if loss is None:
        return errors.NotConnected(reason="this peer is not in a run; call connect() first")
    error = errors.NotConnected(
        reason="this peer is no longer a member of the run, as another call has reported; "
        "update_topology() or connect() rejoins it"
    )
    error.__cause__ = loss
    return error


def closed() -> errors.NotConnected:
    """Return the error of calls that are open when the communicator is closed."""
    return errors.NotConnected(reason="the communicator was closed")


def operations_open() -> errors.PendingOperations:
    """Return the error of a joint call that is made while collectives of this peer are open."""
    reason = "collectives of this peer are still open; wait for them (and their handles) first"
    return errors.PendingOperations(reason=reason)


def store_refused(refusal: msg.StoreRefusal, key: bytes) -> errors.PCCLError | ValueError:
    """Return the error of a call that the run's store has refused."""
    name = key.decode("utf-8", "replace")
    match refusal:
        case msg.StoreRefusal.FULL:
            reason = f"the store of the run has {STORE_BYTES_MAX >> 20} MiB, the maximum"
        case msg.StoreRefusal.MEMBER_FULL:
            reason = f"this peer has {STORE_MEMBER_BYTES_MAX >> 20} MiB in the store, the maximum"
        case msg.StoreRefusal.NO_NUMBER:
            return ValueError(f"add({name!r}): the value, or the sum, is no 64-bit number")
        case msg.StoreRefusal.TOO_LONG:
            longest = STORE_VALUE_BYTES_MAX
            return ValueError(f"append({name!r}): a value must have at most {longest} bytes")
    reason = f"{reason}, so {name!r} was not set; delete keys that are not needed any more"
    return errors.PCCLError(errors.Result.INVALID_USAGE, reason=reason)


def store_calls_open() -> errors.PendingOperations:
    """Return the error of a call with too many open calls to the store."""
    reason = f"{STORE_OPEN_MAX} calls to the store are open; wait for one of them first"
    return errors.PendingOperations(reason=reason)


def same_call_twice(call_name: str) -> errors.PendingOperations:
    """Return the error of a second thread in the same joint call."""
    return errors.PendingOperations(reason=f"another thread is in {call_name} already; wait for it")


def tag_in_use(tag: int, among: Subset | None) -> errors.PCCLError:
    """Return the error of a second collective under a tag in flight."""
    reason = (
        f"tag {name_tag(tag, among)} is in use by a collective that is still open; wait for it, or "
        "use another"
    )
    return errors.PCCLError(errors.Result.INVALID_ARGUMENT, reason=reason)


def no_such_root(root: int, size: int) -> ValueError:
    """Return the error of a broadcast from a rank that the group does not have."""
    return ValueError(f"root must be a rank of the group, from 0 to {size - 1}, not {root}")


def root_lost(root: int, size: int) -> errors.CollectiveAborted:
    """Return the error of a retry in a group that has become too small for the root."""
    reason = (
        f"the group now has {size} members, without a rank {root}; call again with another root"
    )
    return errors.CollectiveAborted(
        errors.Result.INVALID_ARGUMENT, reason=reason
    )  # no more retries


def group_changed(size: int) -> errors.CollectiveAborted:
    """Return the error of a call whose buffers fit the group as its caller saw it, but no more."""
    reason = (
        f"the group has changed, and has {size} members now, by a joint call that this caller had "
        "left; read rank and world_size again, and call with buffers for it"
    )
    return errors.CollectiveAborted(reason=reason)


def member_lost_between() -> errors.CollectiveAborted:
    """Return the error of a call that another one prepared, among other members."""
    reason = "a member was lost between the two steps of this call; call again"
    return errors.CollectiveAborted(reason=reason)


def subset_lost(gone: list[PeerId]) -> errors.CollectiveAborted:
    """Return the error of a call with members of a subgroup, or with a rank, that are lost."""
    reason = f"the run lost {name_peers(gone)}; make a new subgroup, or read the ranks again"
    return errors.CollectiveAborted(reason=reason)


def too_many_open() -> errors.PCCLError:
    """Return the error of too many open collectives."""
    reason = f"{OPERATIONS_OPEN_MAX} collectives are open already; wait for some of them first"
    return errors.PCCLError(errors.Result.INVALID_USAGE, reason=reason)


def alone(*, of_subgroup: bool = False) -> errors.TooFewPeers:
    """Return the error of a reduce without other members in the group, or in a subgroup."""
    if of_subgroup:
        return errors.TooFewPeers(reason="this peer is alone in its subgroup; make a larger one")
    reason = "this peer is alone in its group; call update_topology() to wait for peers"
    return errors.TooFewPeers(reason=reason)


def alone_in_the_run() -> errors.TooFewPeers:
    """Return the error of ``optimize_topology`` without other members in the run."""
    reason = "this peer is alone in the run; call update_topology() to wait for peers"
    return errors.TooFewPeers(errors.Result.INVALID_USAGE, reason=reason)


# -- calls that were left ------------------------------------------------------------------------


def left(why: str, waits_for: str = "") -> errors.DeadlineExceeded:
    """Return the error of a caller that stopped waiting; ``waits_for``: members, if known."""
    return errors.DeadlineExceeded(reason=f"{why}; it waited for {waits_for}" if waits_for else why)


def left_store(why: str, request: msg.StoreRequest) -> errors.DeadlineExceeded:
    """Return the error of a caller that stopped waiting for the run's store."""
    if request.op not in (msg.StoreOp.GET, msg.StoreOp.WAIT):
        return left(why, "the master")
    names = ", ".join(repr(key.decode("utf-8", "replace")) for key in request.keys[:_NAMED_MAX])
    more = f" and {len(request.keys) - _NAMED_MAX} more" if request.keys[_NAMED_MAX:] else ""
    return left(why, f"a member to set {names}{more}")


def left_round(why: str, kind: RoundKind, waits_for: str) -> errors.DeadlineExceeded:
    """Return the error of a caller that left a round; the request stays open."""
    told = f"the request is open: call {kind.call_name}() again before other joint calls"
    return errors.DeadlineExceeded(reason=f"{left(why, waits_for).reason}; {told}")


def left_operation(why: str, waits_for: str) -> errors.DeadlineExceeded:
    """Return the error of a caller that left an operation not done here."""
    told = "the operation is withdrawn for all members, and the input is intact"
    return errors.DeadlineExceeded(reason=f"{left(why, waits_for).reason}; {told}")


BY_STANDBY = (
    "The run has a standby master, so a majority of the members must confirm that no member gets a "
    "result"
)
BY_QUORUM = "The call has a quorum, so the members may have committed a result without this peer"


def left_operation_in_doubt(why: str, waits_for: str, doubt: str) -> errors.OutcomeUnknown:
    """Return the error of a caller that left an operation that may still be committed.

    Args:
        why: why the caller left.
        waits_for: members that it waited for, if known.
        doubt: why the outcome is not known: ``BY_STANDBY`` or ``BY_QUORUM``.
    """
    reason = (
        f"{left(why, waits_for).reason}; the operation is withdrawn, and the input is intact. "
        f"{doubt}. The next joint call waits for that"
    )
    return errors.OutcomeUnknown(reason=reason)


def left_done_operation(
    why: str, operation: OperationId, among: Subset | None
) -> errors.OutcomeUnknown:
    """Return the error of a caller that left an operation done here, which may be committed."""
    reason = (
        f"{why} after {_what(operation, among)} was complete here; the input is intact. The other "
        "members may still commit it, and the next joint call reports that"
    )
    return errors.OutcomeUnknown(reason=reason)


def left_late(why: str, operation: OperationId) -> errors.OutcomeUnknown:
    """Return the error of a caller that left a late call, whose result was on its way."""
    reason = (
        f"{why} while the result of {_what(operation)} was fetched; the input is intact. The other "
        "members have committed it without this peer, and the next joint call reports that"
    )
    return errors.OutcomeUnknown(reason=reason)


def _what(operation: OperationId, among: Subset | None = None) -> str:
    """Return the name by which callers know an operation."""
    return "shared state" if operation.tag == SYNC_TAG else f"tag {name_tag(operation.tag, among)}"


def left_join(why: str, waits_for: str = "") -> errors.DeadlineExceeded:
    """Return the error of a caller that left ``connect``."""
    waits_for = waits_for or "the members' update_topology()"
    reason = f"{why} before this peer was admitted; it waited for {waits_for}"
    return errors.DeadlineExceeded(errors.Result.MASTER_CONNECTION_FAILED, reason=reason)


def resync_required(operation: OperationId, *, was_left: bool) -> errors.ResyncRequired:
    """Return the error of joint calls while this peer lacks a committed result."""
    why = "which this peer had left" if was_left else "without this peer, which was late"
    return errors.ResyncRequired(
        reason=f"the members committed {_what(operation)}, {why}, so its state lacks "
        "the result: connect() again to rejoin, then sync_shared_state(). Without connect(), "
        "sync_shared_state() succeeds only if all other members call it as well"
    )


# -- outcomes ------------------------------------------------------------------------------------


def not_finite(peer: PeerId) -> str:
    """Say why a member withdraws an operation: the contribution of ``peer`` is not finite."""
    return f"values of peer {peer} {_NOT_FINITE} (or a sum of finite contributions has overflowed)"


def aborted(
    message: msg.OperationEnded,
    asked: Descriptor | Offer,
    attempt: int = 0,
    among: Subset | None = None,
) -> errors.PCCLError:
    """Return the error for the caller of an aborted operation.

    Args:
        message: the outcome.
        asked: what this peer requests in the operation. The master may have decided before.
        attempt: how often the operation was tried before.
        among: the members that take part; None: all members of the view.
    """
    what = _what(message.operation, among)
    is_send = isinstance(asked, Descriptor) and asked.collective is Collective.SEND_RECV
    match message.abort:
        case AbortCause.DESCRIPTOR_MISMATCH:
            reason = f"{message.reason}; this peer asked for {asked}; make the calls agree"
            return errors.DescriptorMismatch(reason=reason)
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
        case AbortCause.WITHDRAWN if _NOT_FINITE in message.reason:
            reason = f"{what}: {message.reason}; inputs are intact"  # a retry would end likewise
            return errors.CollectiveAborted(errors.Result.INTERNAL_ERROR, reason=reason)
        case AbortCause.MEMBER_LOST if among is not None and not is_send:
            reason = f"{what}: {message.reason}; inputs are intact, make a new subgroup"
            return errors.CollectiveAborted(reason=reason)
        case _:
            reason = f"{what}: {message.reason}; inputs are intact, call again"
            return errors.CollectiveAborted(reason=reason)


def lost_before(seen: Roster, newest: Roster) -> errors.CollectiveAborted:
    """Return the error of a collective whose caller does not know yet that its view closed."""
    gone = sorted(set(seen.ring) - set(newest.ring))
    what = f"the run lost {name_peers(gone)}" if gone else "the master opened another view"
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
    """Return the error after the master refused or evicted this process.

    Args:
        reason: the master's text.
        cause: why the master evicted this peer; None: it did not evict this peer.
        ago_s: seconds since the eviction.
        member: whether this process was a member, to its own knowledge.
    """
    if not member:
        remedy = "" if cause is RemovalCause.EXPELLED else "; to try again, call connect()"
        return errors.NotAdmitted(reason=f"the master refused this peer: {reason}{remedy}")
    if cause is None:
        text = f"the master that answered does not accept this peer: {reason}"
        return errors.MasterLost(reason=f"{text}; update_topology() or connect() joins its run")
    what_to_do = "update_topology() or connect() rejoins it"
    if cause is RemovalCause.STATE_CONFLICT:
        what_to_do = f"fix the program first, or it is evicted again; then {what_to_do}"
    elif cause is RemovalCause.EXPELLED:
        what_to_do = "this process may not come back"
    error = errors.Evicted(
        reason=f"the run evicted this peer {ago_s:.1f} s ago: {reason} [{cause.name}]; {what_to_do}"
    )
    error.cause, error.ago_s = cause, ago_s
    return error


def master_lost(silence_s: float, reason: str) -> errors.MasterLost:
    """Return the error after no master returned within the deadline."""
    error = errors.MasterLost(
        reason=f"no message from the master for {silence_s:.0f} s ({reason}). Tensors and shared "
        "state are intact: save a checkpoint now. When a master is back, update_topology() or "
        "connect() rejoins"
    )
    error.is_gone = True
    return error
