"""``PeerEngine``: a ``PeerMachine`` with its control connection, links and data plane.

The engine carries out effects in order and feeds events to the machine; it decides nothing. All
methods run on the loop; other threads use ``io_thread``. The same class runs in the simulator.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from pccl.machines.batch import may_succeed_again
from pccl.machines.peer.eager import EagerBudget
from pccl.machines.peer.events import (
    AskCallers,
    Begin,
    BeginSync,
    CallersAsked,
    Close,
    CloseControl,
    CloseGap,
    CompareSync,
    Detach,
    DialControl,
    End,
    FetchResult,
    ForgetEarly,
    GiveEvidence,
    HoldingsKnown,
    JoinCall,
    KeepResult,
    LeaveCall,
    LeavesSoon,
    LinkChanged,
    LinkMeasurements,
    NotFinite,
    PeerEffect,
    PeerEvent,
    Post,
    PostSync,
    RaiseCall,
    ReduceDone,
    ReduceResult,
    ReportUndialable,
    ReportWait,
    ReturnCall,
    RoundCall,
    Send,
    SendAcross,
    SetLinks,
    StoreResult,
    Tick,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.peer.reporter import PeerReporter
from pccl.machines.reachability import MeetPeer, TryAddress
from pccl.protocol import errors
from pccl.protocol.limits import STORE_KEYS_NAMED_MAX
from pccl.protocol.publication.versions import AnnounceVersions
from pccl.protocol.run_messages import EvidenceReply
from pccl.protocol.status_report import Figures
from pccl.protocol.types import (
    HOSTS_MAX,
    SYNC_TAG,
    Member,
    OperationId,
    PeerId,
    Roster,
    RoundKind,
)
from pccl.runtime.calls import Calls
from pccl.runtime.clock import ThreadClock, Ticker
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.reduce_many import ReduceMany
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.control.keeper import ControlKeeper
from pccl.runtime.evidence import EvidenceSource, gathered
from pccl.runtime.hashing import Hasher, InlineHasher
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.keeper import LinkKeeper
from pccl.runtime.links.listening import listen
from pccl.runtime.links.meter import LinkMeter
from pccl.runtime.links.port_mapping import FIRST_WAIT_NS, PortMapping
from pccl.runtime.links.pulls import Pulls
from pccl.runtime.publishing.publisher import Publisher, PublishRequest
from pccl.runtime.requests import (
    Deadline,
    JoinRequest,
    PeerOptions,
    ReduceInfo,
    ReduceManyRequest,
    ReduceRequest,
    RunRequest,
    SharedStateSyncInfo,
    StoreQuestion,
)
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.service import StateService
from pccl.runtime.state.sync import SyncOptions
from pccl.runtime.tasks import Tasks
from pccl.runtime.waiting import next_turn
from pccl.telemetry.events import LargePacketsLost, NoRoom, PortForwarded, PortNotForwarded
from pccl.telemetry.names import Names
from pccl.telemetry.recorder import Recorder
from pccl.telemetry.stream import EventStream
from pccl.topology.link_steps import TellLink
from pccl.transports.base import Address, Listener, Traffic, Transport
from pccl.transports.link import Link, Links
from pccl.transports.pacing.transport import limited

CLOSED = "the communicator was closed; make a new one"


class PeerEngine:
    """One peer of a run, without its API.

    Args:
        loop: event loop that the engine runs on.
        clock: gives the time.
        transport: the network.
        master: address of the master; ``options`` may name other masters.
        group: number of the peer group.
        options: settings of the peer, such as deadlines.
        observer: called with each event and its effects after they were carried out (traces).
        make_link: makes the link to a peer; the simulator passes a faulty one.
        hasher: does long CPU work; None: the loop's own thread does it.
        port_mapping: asks the router for a port; None: no router is asked.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: ThreadClock,
        transport: Transport,
        master: Address,
        group: int,
        options: PeerOptions,
        observer: Callable[[PeerEvent, list[PeerEffect]], None] | None = None,
        make_link: Callable[[PeerId], Link] = Link,
        hasher: Hasher | None = None,
        port_mapping: PortMapping | None = None,
    ) -> None:
        self.group = group
        self.step = 0
        self.loss: float | None = None
        self.figures: Figures = ()
        """Step and loss of the program, if it reports them; any thread may set them."""
        self.revision = 0
        """Revision of the shared state that this peer synchronized or compared last."""
        self.narrow_links: dict[PeerId, int] = {}
        """Peers to which large packets vanish, and the segment size that passes."""
        self.ended_lanes = Traffic()
        """Bytes of all lanes that have ended."""
        self._relayed_bytes = 0
        """Bytes that this peer forwarded for others in earlier runs."""
        self.evidence: EvidenceSource | None = None
        """Answers questions of people about this process; None: it answers none."""
        self._loop = loop
        self._clock = clock
        self._transport = limited(transport, clock, options.upload_bytes_per_s_max)
        self._options = options
        self._timing = options.timing
        self._observer = observer
        self._make_link = make_link
        self._tasks = Tasks(loop)
        self._listener: Listener | None = None
        self._credentials = Credentials(
            options.token, options.random_bytes, options.curves, encrypts=options.encrypts
        )
        self._control = ControlKeeper(
            clock,
            self._transport,
            (master, *options.other_masters),
            self._timing.dial_s,
            self._credentials,
            lambda: self.machine,
            self.feed,
            self._tasks.create,
            self._hosts,
        )
        self._ticker = Ticker(clock, self._timing.ns(self._timing.tick_s), self._tick)
        self.events = EventStream()
        self.names = Names()
        self.recorder = Recorder()
        self.calls = Calls(loop, clock, self.feed, self.events, self.names)
        self._announced_port = 0
        """The port that other peers dial; the router may forward it."""
        self._port_mapping = port_mapping
        self._has_mapped_port = False
        """Whether peers dial a port of the router, which still forwards it."""
        if port_mapping is not None:
            port_mapping.on_changed = self._on_port_mapping
        self._reporter = PeerReporter(self.events, self.names, self.recorder, self._timing)
        self._posted: dict[OperationId, int] = {}
        self._callers_blocked = options.callers_blocked or (lambda: self.calls.work.is_undecided)
        self._has_been_member = False
        self._queue: deque[PeerEvent] = deque()
        self._busy = False
        self._closed = False
        self._state = StateService(
            clock,
            self.calls,
            self.feed,
            group,
            hasher or InlineHasher(),
            self._tasks,
            self._timing.ns(self._timing.deadline_s) // 4,
            partial(self.join_again, prefetches=True),
        )
        self._leaves_soon = False
        self.publisher = Publisher(
            clock,
            self._transport,
            group,
            hasher or InlineHasher(),
            self._tasks,
            self._timing.ns(self._timing.lane_stall_s),
            lambda versions: self.feed(AnnounceVersions(versions)),
            make_link,
        )
        self._enter_run(None)

    def _enter_run(self, lost: PeerMachine | None) -> None:
        """Make a new machine and new links, to join as a newcomer. ``lost``: the old machine."""
        loss, left = (lost.loss, lost.left_sync) if lost is not None else (None, None)
        segment_bytes = self._options.segment_bytes
        eager = EagerBudget(self._options.eager_bytes_max, segment_bytes)
        self.machine: PeerMachine = PeerMachine(self._timing, self.now_ns(), eager, loss, left)
        self.links = Links(self._make_link, self.ended_lanes)
        self._meter = LinkMeter(self._clock, self.links)
        may_come = self.machine.collectives.may_come
        self._memory = memory = self._transport.memory if self._options.pulls else None
        self.data_plane = DataPlane(
            self.links.to, may_come, self._on_done, segment_bytes, memory, self._on_not_finite
        )
        pulls = Pulls(
            memory,
            self._options.random_bytes,
            self.data_plane.pulls_failed,
            anyone=self._options.pulled_by_anyone,
        )
        if lost is not None:
            self.recorder.former.append(lost.peer)
            self._relayed_bytes = self.relayed_bytes
            self.exchange.close()
        self._state.enter_run(self.machine, self.links)
        self.keeper = LinkKeeper(
            self._clock,
            self._transport,
            self._timing,
            self.machine,
            self.links,
            FrameRouter(self.data_plane, self._state.exchange, pulls),
            self._on_link_change,
            self._tasks.create,
            self._credentials,
            self._options.lanes,
            self.machine.has_left,
            partial(self._control.may_dial, self._options.advertise_host),
            lambda: self._control.address,
            self.names.explain,
            self.recorder.segments,
            lambda: self._has_mapped_port,
            self._on_narrow_link,
            self.publisher.accept,
        )
        if self._leaves_soon:
            self.feed(LeavesSoon())
        if lost is not None:
            self.publisher.say_again()

    def _on_narrow_link(self, peer: PeerId, segment_bytes: int) -> None:
        self.narrow_links[peer] = segment_bytes
        name = self.names.of(peer)
        event = LargePacketsLost(peer_id=peer, name=name, segment_bytes=segment_bytes)
        self.events.put(event, self.now_ns())

    @property
    def exchange(self) -> StateExchange:
        """Exchange of shared state with the other members."""
        return self._state.exchange

    @property
    def master(self) -> Address:
        """Address of the master that this peer is connected to, or will try next."""
        return self._control.address

    @property
    def own_host(self) -> str:
        """Address of this machine toward the last master; empty: it has connected to none yet."""
        return self._control.met_from

    @property
    def control_traffic(self) -> Traffic:
        """Bytes of all connections to masters."""
        return self._control.traffic

    def _hosts(self) -> tuple[str, ...]:
        """Return the addresses of this machine at which others may dial this peer."""
        listener, port = self._listener, self._announced_port
        if self._options.advertise_host or listener is None or listener.address.port != port:
            return ()
        return self._transport.hosts(listener.address)[:HOSTS_MAX]

    @property
    def upload_bytes_per_s_max(self) -> int | None:
        """What this peer sends to other machines, at most; None: no limit."""
        return self._options.upload_bytes_per_s_max

    @property
    def relayed_bytes(self) -> int:
        """Bytes that this peer has forwarded for others, in both directions."""
        return self._relayed_bytes + self.keeper.relay.carried_bytes

    # -- calls ---------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster | None:
        """Membership as the caller has seen it; None before the first admission."""
        return self.machine.seen

    async def connect(self, request: JoinRequest) -> None:
        """Join the run; return when the master has admitted this peer.

        Raises:
            MasterLost: no master answered in time.
            NotAdmitted: the master refused this peer; the reason says why.
            LinkError: this peer cannot open its port.
            DeadlineExceeded: ``request.timeout_s`` ran out.
        """
        if self._closed:
            raise errors.NotConnected(reason=CLOSED)
        if self.machine.standing is Standing.LOST or self.machine.needs_resync or self.calls.bug:
            self.feed(Close())
            self.keeper.close()
            self.calls.bug = None
            self._enter_run(self.machine)
        joins = partial(self._join, request, self.deadline(request.timeout_s))
        if request.prefetch is None:
            await joins()
        else:
            await self._state.fetch_before(request.prefetch, partial(joins, prefetches=True))

    async def _join(
        self,
        request: JoinRequest,
        deadline: Deadline | None,
        *,
        rejoins: bool = False,
        prefetches: bool = False,
    ) -> None:
        if self._listener is None:
            self._listener = await listen(
                self._transport, self._options, lambda connection: self.keeper.accept(connection)
            )
            self._ticker.start()
        host, port = await self._announced(self._listener.address.port, deadline)
        self._announced_port = port
        if self._closed:
            raise errors.NotConnected(reason=CLOSED)
        event = JoinCall(
            call=0,
            group=self.group,
            host=host,
            port=port,
            attempts=request.attempts,
            min_peers=request.min_peers,
            rejoins=rejoins,
            masters=self._control.masters_count,
            prefetches=prefetches,
            machine=self._memory.machine if self._memory is not None else 0,
            name=self._options.name,
        )
        await self.calls.wait(event, deadline)
        self._has_been_member = True

    async def _announced(self, own_port: int, deadline: Deadline | None) -> tuple[str, int]:
        """Return the host and the port that other peers dial. The router may forward the port."""
        if self._port_mapping is not None:
            wait_ns = FIRST_WAIT_NS
            if deadline is not None:
                wait_ns = min(wait_ns, deadline.when_ns - self.now_ns())
            forwarded = await self._port_mapping.start(own_port, self.master, wait_ns)
            self._has_mapped_port = forwarded is not None
            if forwarded is not None:
                return forwarded.public_host, forwarded.port
        return self._options.advertise_host, self._options.advertise_port or own_port

    def _on_port_mapping(self, event: PortForwarded | PortNotForwarded) -> None:
        self._has_mapped_port &= isinstance(event, PortForwarded)
        self.events.put(event, self.now_ns())

    async def round(self, request: RunRequest) -> bool:
        """Make a joint call of all members; return whether newcomers are pending, if asked.

        If the caller knows that this peer lost its membership, ``update_topology`` joins again.
        """
        deadline = self.deadline(request.timeout_s)
        knows = self._has_been_member and self.machine.knows_its_loss and not self._closed
        if knows and request.kind is RoundKind.UPDATE_TOPOLOGY:
            await self.join_again(deadline)
            return False
        return bool(await self.calls.wait(RoundCall(0, request.kind, request.quorum), deadline))

    def reduce(self, request: ReduceRequest) -> Coroutine[Any, Any, ReduceInfo]:
        """Make a joint call of all members of the group: a reduce, a broadcast or a barrier.

        Raises:
            ValueError: another call uses the memory or the residual, or the group has no such root.
        """
        timeout_s = request.timeout_s
        deadline = None if timeout_s is None else self.deadline(timeout_s)
        return self.reduce_while(request, deadline, lambda: request.retry)

    async def reduce_while(
        self, request: ReduceRequest, deadline: Deadline | None, may_retry: Callable[[], bool]
    ) -> ReduceInfo:
        """Do the same as :meth:`reduce` until ``deadline``; retry while ``may_retry`` allows it."""
        self._check_request(request)
        residual = request.open_residual() if request.open_residual is not None else None
        call = self.calls.new(request.operand)
        call.residual, call.observable = residual, request.observable
        event = request.asks
        ranges = request.operand.ranges if request.operand is not None else ()
        self.calls.lent.add(ranges)
        try:
            while True:
                peer = self.machine.own.peer
                try:
                    info = await self.calls.wait(event, deadline, call)
                except errors.CollectiveAborted as error:
                    if not (may_retry() and may_succeed_again(error)):
                        raise
                    event = replace(event, begun_by=event.begun_by or peer)
                    self.calls.renew(call, request.operand)
                    if request.operand is not None:  # a synchronization may use the memory now
                        self._state.check_apart(request.operand)
                    continue
                assert isinstance(info, ReduceInfo)
                return info
        finally:
            self.calls.lent.remove(ranges)
            if residual is not None:
                residual.drop()

    async def reduce_many(self, request: ReduceManyRequest) -> ReduceInfo:
        """Make several reduces, and retry each after a loss; see :class:`ReduceMany`."""
        deadline = self.deadline(request.timeout_s)
        many = ReduceMany(
            self._loop,
            self.calls,
            lambda one, may_retry: self.reduce_while(one, deadline, may_retry),
            self.withdraw_unless_started,
            self.machine.peer,
            request,
        )
        return await many.run()

    def withdraw_unless_started(self, operand: Operand, reason: str) -> None:
        """Leave the call that borrows ``operand``, unless its operation has started."""
        number, operation = self.calls.of_operand(operand)
        if number and not self.machine.has_started(operation):
            self.feed(LeaveCall(number, reason))

    async def sync(self, request: SyncOptions) -> SharedStateSyncInfo:
        """Make a joint call of the group that makes shared states equal, or compares them.

        Raises:
            ValueError: another call uses the state, or the memory of one of its tensors has moved.
        """
        try:
            info = await self._state.sync(request, self.deadline(request.timeout_s))
        except (OSError, MemoryError) as error:
            if not isinstance(error, errors.PCCLError):  # some are of the kind TimeoutError
                self.events.put(NoRoom(reason=str(error)), self.now_ns())
            raise
        self.revision = info.revision
        return info

    async def publish(self, request: PublishRequest) -> int:
        """Copy a state for readers outside the run; return the number of its version.

        Raises:
            NotConnected: this peer is not a member.
            ValueError: another call uses the state, or the memory of one of its tensors has moved.
        """
        if self.machine.standing is not Standing.MEMBER:
            raise errors.NotConnected(reason="this peer is not a member yet; call connect() first")
        return await self.publisher.publish(request)

    async def ask_store(self, question: StoreQuestion) -> StoreResult:
        """Ask the run's store; the last answer counts, or the first one that is not ``done``."""
        asks, deadline = question.asks, self.deadline(question.timeout_s)
        result = StoreResult(done=True, value=None)
        for first in range(0, max(1, len(asks.keys)), STORE_KEYS_NAMED_MAX):
            keys = asks.keys[first : first + STORE_KEYS_NAMED_MAX]
            result = await self.calls.wait(replace(asks, keys=keys), deadline)
            assert isinstance(result, StoreResult)
            if not result.done:
                break
        return result

    async def join_again(self, deadline: Deadline | None, *, prefetches: bool = False) -> None:
        """Join again as a newcomer. To the machine, this is a call of ``update_topology``."""
        self.keeper.close()
        self._enter_run(self.machine)
        attempts = int(self._timing.master_lost_s / self._timing.connect_retry_s)
        request = JoinRequest(max(attempts, 1))
        await self._join(request, deadline, rejoins=True, prefetches=prefetches)

    def launch(self, request: ReduceRequest) -> int:
        """Begin a reduce without a waiter; return its ticket in ``calls``.

        This reports mistakes in the call; :meth:`finish` raises errors of the run.

        Raises:
            ValueError: another call of this peer uses the memory or the residual.
            PCCLError: the call cannot be made now.
        """
        self._check_request(request)
        residual = request.open_residual() if request.open_residual is not None else None
        call = self.calls.new(request.operand)
        call.observable = request.observable
        if residual is not None:
            call.residual = residual
            call.future.add_done_callback(lambda _: residual.drop())
        event = replace(request.asks, detached=True)
        return self.calls.launch(event, self.deadline(request.timeout_s), call)

    async def finish(self, ticket: int) -> ReduceInfo:
        """Wait for a launched reduce. Its outcome counts as seen when this returns or raises it.

        A cancelled wait does not cancel the reduce. Any number of coroutines may wait.
        """
        info = await self.calls.finish(ticket)
        assert isinstance(info, ReduceInfo)
        return info

    def leave_soon(self) -> None:
        """Let the master notify the members that are missing in this peer's rounds from now on."""
        self._leaves_soon = True
        self.feed(LeavesSoon())

    def now_ns(self) -> int:
        """Return the current time of the engine's clock."""
        return self._clock.now_ns()

    def deadline(self, timeout_s: float | None) -> Deadline | None:
        """Return the end of a time budget that begins now; None: no limit."""
        if timeout_s is None:
            return None
        return Deadline(self._clock.now_ns() + self._timing.ns(timeout_s), timeout_s)

    def _check_request(self, request: ReduceRequest) -> None:
        if request.operand is not None:
            self._state.check_apart(request.operand)
            self.calls.check_free(request.operand.ranges)

    async def close(self) -> None:
        """Leave the run and release all resources; idempotent."""
        if self._closed:
            return
        self.feed(Close())
        self._closed = True
        self._ticker.stop()
        self._control.close("the communicator is closed")
        if self._listener is not None:
            self._listener.close()
        self.keeper.close()
        self.publisher.close()
        if self._port_mapping is not None:
            await self._port_mapping.close()
        await self._tasks.cancel()
        await self._state.close()
        for _ in range(2):  # let the transport report that the connections are closed
            await next_turn(self._loop)

    # -- the machine ---------------------------------------------------------------------------

    def feed(self, event: PeerEvent) -> None:
        """Handle an event, after all events that are already queued."""
        if self.calls.bug is not None:
            return
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        except errors.RemoteProtocolError:
            raise  # the code that delivered the bytes closes that connection
        except Exception as error:  # noqa: BLE001 - reported below
            self._break_down(error)
        finally:
            self._busy = False

    def _break_down(self, error: Exception) -> None:
        """End this peer after a bug in ``pccl``: free every buffer, fail every call, leave the run.

        Otherwise the caller or the other members would wait for ever.
        """
        self._queue.clear()
        reason = f"internal error, please report it: {error!r}; connect() again to rejoin"
        bug = errors.LocalProtocolError(reason=reason)
        bug.__cause__ = error
        for operation in list(self.data_plane.transfers):
            self.data_plane.end(operation, committed=False)
        self._state.break_down()
        self._posted.clear()
        self._reporter.broke_down(bug, self.now_ns())
        self.calls.break_down(bug)
        self._control.close("internal error")
        self.keeper.close()
        self.publisher.close()
        self._loop.call_exception_handler({"message": reason, "exception": error})

    def _step(self, event: PeerEvent) -> None:
        now_ns = self._clock.now_ns()
        effects = self.machine.handle(event, now_ns)
        self._reporter.note(self.machine, event, effects, now_ns)
        for effect in effects:
            self._carry_out(effect)
        if self._observer is not None:
            self._observer(event, effects)

    def _carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case Send(message):
                self._control.send(message)
            case DialControl(delay_ns):
                self._control.dial(delay_ns)
            case CloseControl(reason):
                self._control.close(reason)
            case SetLinks(peers):
                self._set_links(peers)
            case Post():
                self._post(effect)
            case Begin():
                self._begin(effect)
            case CloseGap(operation, lost, upstream, size):
                complete = self.data_plane.close_gap(operation, upstream, size)
                if complete:
                    self.keeper.use((upstream,))
                self.feed(HoldingsKnown(operation, lost, complete))
            case SendAcross(operation, downstream, size):
                self.data_plane.send_across(operation, downstream, size)
                self.keeper.use((downstream,))
            case Detach(operation):
                self._part_of(operation).detach(operation)
            case End(operation, committed):
                self._end(operation, committed)
            case ForgetEarly():
                self.data_plane.forget_early()
            case AskCallers(query):
                self.feed(CallersAsked(query, self._callers_blocked()))
            case ReportWait() | ReportUndialable():
                pass  # the reporter has put it into the stream
            case GiveEvidence():
                self._tasks.create(self._give_evidence(effect))
            case TryAddress() | MeetPeer():
                self._dial_for_master(effect)
            case ReturnCall(number, value):
                call = self.calls.open.get(number)
                if isinstance(value, ReduceResult) and call is not None:
                    self._state.note_result(call, value)
                self.calls.resolve(number, value)
            case RaiseCall(number, error):
                self.calls.reject(number, error)
            case FetchResult() | KeepResult() | PostSync() | BeginSync() | CompareSync():
                self._move_state(effect)

    def _dial_for_master(self, effect: TryAddress | MeetPeer) -> None:
        match effect:
            case TryAddress():
                self._control.probe(effect)
            case MeetPeer(member, relay):
                self.keeper.meet(member, relay)

    def _set_links(self, peers: tuple[Member, ...]) -> None:
        self.keeper.want(peers)
        if not self.machine.own.takes_part:
            self.keeper.close()  # members that have not heard of it still dial this peer

    async def _give_evidence(self, asked: GiveEvidence) -> None:
        data, refusal = b"", "this peer gives no evidence"
        if self.evidence is not None:
            data, refusal = await gathered(self.evidence(asked.kind))
        self._control.send(EvidenceReply(asked.query, data, refusal))

    def _post(self, post: Post) -> None:
        call = self.calls.open.get(post.call)
        assert call is not None
        call.operation = post.operation
        if post.operation in self._posted:
            self.data_plane.end(post.operation, committed=False)
        self._posted[post.operation] = post.call
        partners = self.data_plane.post(
            post.operation,
            post.descriptor,
            call.operand,
            ring=post.ring,
            own=self.machine.own.peer,
            residual=call.residual,
            blocks=post.blocks,
            mesh=post.mesh,
        )
        self.keeper.use(partners)

    def _begin(self, begin: Begin) -> None:
        if not begin.eager:
            self.calls.moves(self._posted[begin.operation])
        self.data_plane.begin(
            begin.operation, eager=begin.eager, weights=begin.weights, infinite=begin.infinite
        )

    def _move_state(
        self, effect: FetchResult | KeepResult | PostSync | BeginSync | CompareSync
    ) -> None:
        match effect:
            case FetchResult(number, operation, _, content) if operation.tag == SYNC_TAG:
                self._state.fetch_state(number, content)
            case FetchResult():
                self._state.fetch_result(effect)
            case KeepResult(operation):
                self._state.keep_result(effect, self.data_plane.transfers[operation])
            case PostSync(number, operation, ring):
                self._posted[operation] = number
                self._state.post(number, operation, ring)
            case BeginSync():
                self._begin_sync(effect)
            case CompareSync(operation, reference):
                self.exchange.compare(operation, reference)

    def _begin_sync(self, begin: BeginSync) -> None:
        self.calls.moves(self._posted[begin.operation])
        self.keeper.use(self._state.partners(begin.operation, begin.elected))
        self.exchange.begin(begin.operation, begin.elected)

    def _part_of(self, operation: OperationId) -> DataPlane | StateExchange:
        return self.exchange if operation.tag == SYNC_TAG else self.data_plane

    def _end(self, operation: OperationId, committed: bool) -> None:
        call = self.calls.open.get(self._posted.pop(operation))
        if operation.tag == SYNC_TAG:
            self.exchange.end(operation)
            return
        transfer = self.data_plane.end(operation, committed=committed)
        self._state.result_ended(operation, committed=committed)
        if call is not None:
            call.take_back(transfer)

    def _tick(self, busy_ns: int) -> None:
        if self.calls.bug is not None:
            return
        self.keeper.look(busy_ns)
        if measured := self._meter.look(self.machine.own.peer):
            self.feed(LinkMeasurements(measured))
        self._state.tick()
        progress = (*self.data_plane.progress(), *self.exchange.progress())
        reports = self.step, self.loss, self.figures
        self.feed(Tick(progress, self._callers_blocked(), busy_ns, *reports))

    def _on_link_change(self, link: TellLink) -> None:
        if link.reason is not None:
            self._meter.forget(link.peer)
            self.narrow_links.pop(link.peer, None)
        elif measured := self._meter.look_at(self.links.to(link.peer)):
            self.feed(LinkMeasurements(measured))  # first, for the view that the link may open
        self.feed(LinkChanged(link.peer, link.reason, link.relay, link.path))
        self._state.link_changed(link.peer, up=link.reason is None)

    def _on_done(self, operation: OperationId, digest: bytes) -> None:
        self.feed(ReduceDone(operation, digest))

    def _on_not_finite(self, operation: OperationId, peer: PeerId) -> None:
        self.feed(NotFinite(operation, peer))
