"""How the application of a simulated peer synchronizes and changes its shared state.

All members synchronize right after each admission; for newcomers this is the first call. Then all
members change their state as a function of the synchronization. Whether they then compare their
states also depends on the synchronization only, so all members make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from pccl.protocol.errors import PCCLError, ResyncRequired, StateMismatch, StateUnavailable
from pccl.protocol.shared_state import ResumePolicy, SharedStateSyncStrategy, SyncPurpose
from pccl.runtime.requests import SharedStateSyncInfo
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.runtime.state.sync import SyncOptions
from pccl.stress.sim.checkers.state import Before, outcome_of
from pccl.stress.sim.faults.base import MS
from pccl.stress.sim.parts import RunParts
from pccl.stress.sim.process import PeerProcess
from pccl.stress.sim.workloads.application import name_of
from pccl.stress.sim.workloads.calls import ATTEMPTS_MAX, SimCalls
from pccl.stress.sim.workloads.syncs import Recipe, SimState

_PAUSE_NS = 50 * MS
"""Pause before the next attempt when no source sends the state."""
_WAITS = 0.5
"""Share of late members that wait for the next synchronization, before they join again."""
_NOBODY_SENDS = "all of them are RECEIVE_ONLY"


class StateWork:
    """Synchronizes and changes the shared state of one process.

    Args:
        parts: shared objects of a run that synchronizes.
        process: the process.
        calls: makes its calls.
        starts: whether the process exists from the start.
    """

    def __init__(
        self, parts: RunParts, process: PeerProcess, calls: SimCalls, *, starts: bool
    ) -> None:
        scenario, syncs, checkers = parts.scenario, parts.scenario.syncs, parts.checkers.state
        assert syncs is not None
        assert checkers is not None
        self._syncs = syncs
        self._scenario = scenario
        self._seed = scenario.seed
        self._process = process
        self._checkers = checkers
        self._calls = calls
        self._rng = rng = Random(f"{scenario.seed}/state of {process.name}:{process.address.port}")
        self._resync_rng = Random(f"{scenario.seed}/resync of {process.name}")
        self._prefetch_rng = Random(f"{scenario.seed}/prefetch of {process.name}")
        self._sends = False
        common = starts and rng.random() < 0.5
        self.state = SimState(syncs, scenario.seed, rng, process.name, is_common=common)
        checkers.owns(self.state)
        self._in_step = False
        """Whether the process holds what all members of the last synchronization hold."""

    def prefetch(self) -> PrefetchRequest | None:
        """Return a request to fetch the state before the admission; None: do not prefetch."""
        if self._prefetch_rng.random() >= self._syncs.prefetches:
            return None
        self.state.has_prefetched = True
        return PrefetchRequest(self.state.memory, FetchedPieces(self.state.memory, 1 << 20))

    async def joins(self, connect: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Join the run; check that this does not write into the tensors."""
        before = self.state.contents()
        try:
            await connect()
        finally:
            self._checkers.unwritten(self._who, before, self.state)

    @property
    def _who(self) -> str:
        return name_of(self._process)

    def begin_anew(self) -> None:
        """Prepare to join again with the present contents, because the process lost its place."""
        self._in_step = self._sends = False

    async def run(self) -> None:
        """Synchronize, perhaps compare, and change the state.

        Raises:
            PCCLError: the process must join again.
        """
        state, rng = self.state, self._rng
        if rng.random() < self._syncs.drifts:
            state.drift()
            self._in_step = False
        info = await self._synchronize()
        await self._verify(info)
        if rng.random() < self._syncs.lags:
            self._in_step = False
        else:
            state.advance(outcome_of(info).operation)
        if self._syncs.recipe is Recipe.SENDERS:
            self._sends = True

    async def _synchronize(self) -> SharedStateSyncInfo:
        state = self.state
        expects = self._in_step and self._rng.random() < self._syncs.expects
        quorum = self._scenario.quorum if self._syncs.keeps_step else None
        may_wait = quorum is not None and self._resync_rng.random() < _WAITS
        for attempt in range(ATTEMPTS_MAX):
            await self._calls.pause(attempt)
            self._checkers.look_at(state)
            if quorum is not None:
                await self._calls.nap()
            in_place = state.lineage is None and self._rng.random() < self._syncs.in_place
            state.is_lent_in_place = in_place
            request = SyncOptions(
                state,
                SyncPurpose.SYNC,
                self._strategy,
                ResumePolicy.HIGHEST,
                expect_unchanged=expects,
                in_place=in_place,
                timeout_s=self._calls.budget_s(),
                quorum=quorum,
            )
            process, before = self._process, Before.of(state)
            term = process.engine.machine.term
            self._checkers.calls(process.name)
            try:
                info = await self._calls.make(process.engine.sync(request))
            except Exception as error:  # noqa: BLE001 - also an interruption
                self._checkers.unchanged(self._who, state, before, error)
                if isinstance(error, StateMismatch):
                    expects = False
                if isinstance(error, ResyncRequired) and may_wait:
                    self._checkers.waits_for_next()
                    may_wait = False
                else:
                    await self._after(error)
                continue
            state.is_lent_in_place = False
            self._checkers.synchronized(self._who, process.run, process.peer, info, state)
            state.has_prefetched = False
            self._checkers.survived(
                info,
                lost=set(info.members) != set(process.sync_ring),
                restarted=process.engine.machine.term != term,
            )
            self._in_step = True
            return info
        raise AssertionError(f"{self._who}: {ATTEMPTS_MAX} failed attempts of a synchronization")

    @property
    def _strategy(self) -> SharedStateSyncStrategy:
        if self._syncs.recipe is Recipe.POPULAR:
            return SharedStateSyncStrategy.ENFORCE_POPULAR
        if self._sends:
            return SharedStateSyncStrategy.SEND_ONLY
        return SharedStateSyncStrategy.RECEIVE_ONLY

    async def _after(self, error: Exception) -> None:
        if isinstance(error, StateMismatch):  # a member expected to receive nothing
            self._mismatch(error, clean=not self._syncs.has_drift)
        elif isinstance(error, StateUnavailable):
            self._checkers.unavailable()
            await self._calls.sleep(_PAUSE_NS)
            if _NOBODY_SENDS in str(error):
                # All senders are gone: each member goes on from the same checkpoint.
                self._sends = True
                self.state.load(Random(f"{self._seed}/contents"))
        else:
            # A member that is late, and finds no source, cannot know whether it needs anything.
            if isinstance(error, ResyncRequired) and self._scenario.quorum is None:
                self._checkers.out_of_step(self._process.name)
            await self._calls.again(error)

    async def _verify(self, synchronized: SharedStateSyncInfo) -> None:
        """Compare with all other members, after a random share of the synchronizations.

        No member leaves early, because then it could not know whether the other members continue.
        """
        operation = outcome_of(synchronized).operation
        rng = Random(f"{self._seed}/verify/{operation}")
        if rng.random() >= self._syncs.verifies:
            return
        culprit = None
        if rng.random() < self._syncs.spoils:
            culprit = rng.choice(sorted(synchronized.members))
        if culprit == self._process.peer:
            self.state.drift()
            self._in_step = False
        state = self.state
        for attempt in range(ATTEMPTS_MAX):
            await self._calls.pause(attempt)
            before = Before.of(state)
            request = SyncOptions(state, SyncPurpose.VERIFY)
            self._checkers.calls(self._process.name)
            try:
                info = await self._process.engine.sync(request)
            except StateMismatch as error:
                self._checkers.unchanged(self._who, state, before, error)
                self._mismatch(error, clean=culprit is None)
                return
            except PCCLError as error:
                self._checkers.unchanged(self._who, state, before, error)
                await self._calls.again(error)
                continue
            self._checkers.unchanged(self._who, state, before, None)
            self._checkers.verified(self._who, self._process.run, info)
            return
        raise AssertionError(f"{self._who}: {ATTEMPTS_MAX} failed attempts of a comparison")

    def _mismatch(self, error: StateMismatch, *, clean: bool) -> None:
        self._checkers.mismatch(self._who, self._process.posted_sync, error, clean=clean)
