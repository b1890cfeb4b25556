"""The actor that starts, watches and replaces the peers of a run, and its master."""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pccl.addresses import parse_address
from pccl.bindings.ray.actors import MasterActor, PeerActor
from pccl.bindings.ray.library import draining_nodes, is_alive, on_node, ray
from pccl.bindings.ray.policy import (
    LATE_S,
    EndKind,
    PeerEnd,
    SlotAction,
    SlotRestarts,
    is_late,
    peer_environment,
)

_log = logging.getLogger("pccl.ray")

POLL_S = 1.0
"""How often the supervisor asks Ray which nodes will be removed, in seconds."""

KILL_S = 5.0
"""How much longer than ``drain_s`` the peers of a stopped run may take, in seconds."""

MASTER_PAUSE_S = 1.0
"""Pause between attempts to start the master again, in seconds."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run consists of.

    Attributes:
        train: the function of all peers, pickled.
        peers: number of peers.
        options: options of their actors.
        environment: variables of the user, for all peers.
        master: address of a master outside; None: the run starts its own.
        token: the run's secret; None: the master outside needs none.
        drain_s: seconds after SIGTERM in which a peer may still contribute its work.
        failures_max: failures of a slot in a row that do not fail the run.
    """

    train: bytes
    peers: int
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    master: str | None
    token: str | None
    drain_s: float
    failures_max: int


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """One slot of a run, at one instant.

    Attributes:
        slot: its number, which the peer reads in ``PCCL_PEER_INDEX``.
        node: id of the Ray node on which its peer runs; None: no peer runs.
        starts: number of peers that have been started in this slot.
    """

    slot: int
    node: str | None
    starts: int


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        results: a reference to the result of each slot; None: the slot has none.
        failure: reference to the failed call; None: the run did not fail.
    """

    results: tuple[Any, ...]
    failure: Any


@dataclass(slots=True)
class _Slot:
    number: int
    restarts: SlotRestarts
    starts: int = 0
    result: Any = None
    actor: Any = None
    node: str | None = None
    began_s: float = 0.0
    is_late: bool = False
    told: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Keeps a peer in each slot until the peers return. An asyncio actor; its end ends the peers.

    Args:
        plan: what the run consists of.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._slots = [
            _Slot(number, SlotRestarts(plan.failures_max)) for number in range(plan.peers)
        ]
        self._notices: dict[int, asyncio.Event] = {}
        self._numbers = itertools.count()
        self._master = plan.master or ""
        self._master_actor: Any = None
        self._is_ending = self._is_stopping = False
        self._no_more = asyncio.Event()
        self._failure: Any = None
        self._first_s: float | None = None
        self._train: Any = None
        self._state = tempfile.TemporaryDirectory(prefix="pccl-ray-", ignore_cleanup_errors=True)
        self._watches: list[asyncio.Task[None]] = []
        self._whole: asyncio.Task[None]

    async def start(self) -> None:
        """Start the master and the peers; return when the master runs.

        Raises:
            RayError: the master cannot be started.
        """
        self._train = ray.put(self._plan.train)
        if self._plan.master is None:
            self._master = await self._start_master(0)
            self._watches.append(asyncio.create_task(self._keep_master()))
        self._watches.append(asyncio.create_task(self._watch_nodes()))
        self._whole = asyncio.create_task(self._keep_all())

    async def master(self) -> str:
        """Return the address of the master."""
        return self._master

    async def peers(self) -> tuple[PeerPlace, ...]:
        """Return where the peers run now."""
        return tuple(PeerPlace(slot.number, slot.node, slot.starts) for slot in self._slots)

    async def notice(self, number: int) -> None:
        """Return when this peer must leave, or has ended."""
        await self._notices[number].wait()

    async def wait(self) -> RunOutcome:
        """Return when all peers have ended."""
        await asyncio.shield(self._whole)
        return RunOutcome(tuple(slot.result for slot in self._slots), self._failure)

    async def stop(self) -> None:
        """Tell all peers to leave; kill those that do not; end the master."""
        self._stop()
        await asyncio.shield(self._whole)

    # -- peers -----------------------------------------------------------------------------------

    async def _keep_all(self) -> None:
        await asyncio.gather(*(self._keep(slot) for slot in self._slots))
        for task in self._watches:
            task.cancel()
        if self._master_actor is not None:
            ray.kill(self._master_actor)
            with suppress(ray.exceptions.RayError):  # when it no longer writes into the folder
                await self._master_actor.address.remote()
        self._state.cleanup()

    async def _keep(self, slot: _Slot) -> None:
        while not self._no_more.is_set():
            kind, reference = await self._live(slot)
            lived_s = asyncio.get_running_loop().time() - slot.began_s
            end = PeerEnd(kind, lived_s, slot.is_late)
            if self._is_stopping and kind is not EndKind.RETURNED:
                return
            follows, pause_s = slot.restarts.after(end, is_ending=self._is_ending)
            _log.warning("p%d %s after %.0f s: %s", slot.number, kind.value, lived_s, follows.value)
            match follows:
                case SlotAction.FINISH:
                    slot.result = reference
                    self._end()
                case SlotAction.FAIL:
                    self._failure = self._failure or reference
                    self._stop()
                case SlotAction.REPLACE:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._no_more.wait(), pause_s)
                case SlotAction.ABANDON:
                    pass

    async def _live(self, slot: _Slot) -> tuple[EndKind, Any]:
        """Run one peer; return how it ended, and a reference to what it returned or raised."""
        number = next(self._numbers)
        told = slot.told = self._notices[number] = asyncio.Event()
        loop = asyncio.get_running_loop()
        slot.began_s = loop.time()
        environment = peer_environment(
            slot.number,
            peers=self._plan.peers,
            master=self._master,
            token=self._plan.token,
            drain_s=self._plan.drain_s,
            given=self._plan.environment,
        )
        actor = slot.actor = ray.remote(PeerActor).options(**self._plan.options).remote()
        reference = actor.node.remote()
        try:
            slot.node = await reference  # waits until the cluster has the resources
            slot.began_s = loop.time()
            self._first_s = slot.began_s if self._first_s is None else self._first_s
            slot.is_late = is_late(slot.starts, slot.began_s - self._first_s)
            slot.starts += 1
            own = ray.get_runtime_context().current_actor
            call = actor.run.options(num_returns=2)
            ended, reference = call.remote(own, number, self._train, environment)
            return await ended, reference
        except ray.exceptions.RayTaskError as error:
            _log.warning("p%d: %s", slot.number, error)
            return EndKind.RAISED, reference
        except ray.exceptions.RayError as error:
            _log.warning("p%d: %s", slot.number, error)
            if told.is_set():  # perhaps before it had a communicator
                return EndKind.LEFT, reference
            lost = slot.node is not None and not await asyncio.to_thread(is_alive, slot.node)
            return EndKind.NODE_LOST if lost else EndKind.DIED, reference
        finally:
            slot.node = slot.actor = None
            told.set()
            del self._notices[number]
            ray.kill(actor)

    # -- ends ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """A peer has returned: start no more peers, and let the others end."""
        if not self._is_ending:
            self._is_ending = True
            self._no_more.set()
            self._kill_waiting()
            asyncio.get_running_loop().call_later(LATE_S, self._tell_late)

    def _tell_late(self) -> None:
        for slot in self._slots:
            if slot.is_late:
                slot.told.set()

    def _stop(self) -> None:
        """Tell all peers to leave, and kill those that have not left in time."""
        if not self._is_stopping:
            self._is_stopping = True
            self._no_more.set()
            self._kill_waiting()
            for slot in self._slots:
                slot.told.set()
            loop = asyncio.get_running_loop()
            loop.call_later(self._plan.drain_s + KILL_S, self._kill_all)

    def _kill_waiting(self) -> None:
        for slot in self._slots:
            if slot.actor is not None and slot.node is None:
                ray.kill(slot.actor)

    def _kill_all(self) -> None:
        for slot in self._slots:
            if slot.actor is not None:
                ray.kill(slot.actor)

    # -- nodes and the master --------------------------------------------------------------------

    async def _watch_nodes(self) -> None:
        """Tell the peers of nodes that Ray will remove to leave."""
        while True:
            try:
                leaving = await asyncio.to_thread(draining_nodes)
            except ray.exceptions.RayError as error:
                _log.warning("Ray does not tell which nodes drain: %s", error)
                leaving = ()
            for slot in self._slots:
                if slot.node in leaving and not slot.told.is_set():
                    _log.warning("p%d leaves, because Ray will remove its node", slot.number)
                    slot.told.set()
            await asyncio.sleep(POLL_S)

    async def _start_master(self, port: int) -> str:
        assert self._plan.token is not None
        place = on_node(ray.get_runtime_context().get_node_id())
        options = ray.remote(MasterActor).options(num_cpus=0, scheduling_strategy=place)
        self._master_actor = options.remote(self._plan.token, port, self._state.name)
        address: str = await self._master_actor.address.remote()
        return address

    async def _keep_master(self) -> None:
        """Whenever the master dies, start it again at its address, for which the peers look."""
        while True:
            try:
                await self._master_actor.serve.remote()
            except ray.exceptions.RayError as error:
                _log.warning("the master ended, and starts again: %s", error)
            try:
                await self._start_master(parse_address(self._master).port)
            except ray.exceptions.RayError:
                await asyncio.sleep(MASTER_PAUSE_S)
