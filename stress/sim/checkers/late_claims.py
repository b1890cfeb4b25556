"""``LateClaims``: checks that a process misses no result that members committed without it.

Its calls must return these results in order. Otherwise, before the process takes part in a later
operation, a call must raise ``ResyncRequired``, or a later synchronization must return: then the
process has fetched its contents, or had them already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from pccl.machines.peer.events import (
    ControlMessage,
    FetchResult,
    PeerEffect,
    PeerEvent,
    Post,
    RaiseCall,
    ReduceResult,
    ResultFetched,
    ReturnCall,
    SyncResult,
)
from pccl.protocol.errors import ResyncRequired
from pccl.protocol.messages import OperationEnded, OperationNarrowed
from pccl.protocol.types import SYNC_TAG, OperationId, PeerId
from pccl.stress.sim.checkers.outcomes import Violation


class LateClaims:
    """The results that one process has missed and not received yet.

    Args:
        name: name of the process.
        done: counts what calls came to.
        first_view: returns the view with which a master admitted the process; it has no part in
            earlier ones. The process itself may not know it, because a later master repeats a lost
            admission with a later view.
    """

    def __init__(self, name: str, done: Counter[str], first_view: Callable[[], int]) -> None:
        self._name = name
        self._done = done
        self._first_view = first_view
        self._peer = PeerId(0)
        self._owed: list[OperationId] = []
        self._seen: set[OperationId] = set()
        """All operations of which it has learned that members committed them without it."""
        self._owed_before: dict[OperationId, list[OperationId]] = {}
        """Synchronization without it -> the results that it had missed before."""

    def saw(self, peer: PeerId, event: PeerEvent, effects: Iterable[PeerEffect]) -> None:
        """Check what the machine of the process does after an event; ``peer``: its id."""
        if peer != self._peer:  # another life, which begins with the state of the members
            self._peer = peer
            self._owed.clear()
            self._seen.clear()
            self._owed_before.clear()
        match event:
            case ControlMessage(OperationEnded(operation=ended) as outcome):
                is_late = outcome.abort is None and peer not in outcome.contributors
                is_late = is_late and ended.view >= self._first_view()
                if is_late and ended.tag != SYNC_TAG and ended not in self._seen:
                    self._seen.add(ended)
                    self._owed.append(ended)
                elif is_late and ended.tag == SYNC_TAG:
                    self._owed_before.setdefault(ended, list(self._owed))
            case ControlMessage(OperationNarrowed()):
                self._done["narrowed"] += any(isinstance(one, Post) for one in effects)
            case ResultFetched(_, has_arrived=False):
                self._done["late result is gone"] += 1
            case _:
                pass
        is_fetched = isinstance(event, ResultFetched)
        for effect in effects:
            match effect:
                case Post(_, operation):
                    self._goes_on(operation)
                case ReturnCall(_, ReduceResult(operation, took_part=False)):
                    if operation not in self._seen:
                        raise Violation(f"{self._name} got {operation}, which it had not missed")
                    self._owed = [owed for owed in self._owed if owed != operation]
                    self._goes_on(operation)
                case FetchResult(_, operation):  # its call gets it, or ResyncRequired
                    self._owed = [owed for owed in self._owed if owed != operation]
                case ReturnCall(_, SyncResult(members=members)) if peer in members or is_fetched:
                    self._owed.clear()
                case ReturnCall(_, SyncResult(operation)):  # it has the contents already
                    before = self._owed_before.get(operation, [])
                    self._owed = [owed for owed in self._owed if owed not in before]
                case RaiseCall(_, ResyncRequired()):
                    self._owed.clear()
                case _:
                    pass

    def _goes_on(self, operation: OperationId) -> None:
        """Check that the process lacks no earlier result that its calls would have to return."""
        for owed in self._owed:
            same = (owed.view, owed.tag) == (operation.view, operation.tag)
            if owed.view < operation.view or (same and owed.n < operation.n):
                raise Violation(f"{self._name} is in {operation}, but lacks the result of {owed}")
