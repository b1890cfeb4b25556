"""Base classes of communicators and subgroups: construction, and the calls that do not wait."""

from __future__ import annotations

import inspect
import weakref
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pccl._api.draining import drain
from pccl._api.exchange_arguments import with_members
from pccl._api.handles import AsyncReduceHandle
from pccl._api.listening import reachable_at, why_unmapped
from pccl._api.reports import Attribute, MemberInfo, Status, members_of
from pccl._api.session import CheckedCall, Session
from pccl.checks import (
    STEP_MAX,
    check_figures,
    check_listener,
    check_loss,
    check_member,
    check_range,
    check_ranks,
    check_timing,
)
from pccl.config import (
    resolve_advertise,
    resolve_drain,
    resolve_drain_s,
    resolve_encrypt,
    resolve_group,
    resolve_interface,
    resolve_lanes,
    resolve_listen,
    resolve_local,
    resolve_map_port,
    resolve_masters,
    resolve_metrics,
    resolve_name,
    resolve_record,
    resolve_stacks,
    resolve_token,
    resolve_upload_max,
)
from pccl.errors import NotConnected
from pccl.observe.logs import show_log
from pccl.observe.process import dump_stacks_on_request
from pccl.protocol.limits import Timing
from pccl.protocol.types import PeerId
from pccl.protocol.vocabulary.tags import hash_of
from pccl.runtime.control.greeting import encryption
from pccl.runtime.requests import ReduceInfo, ReduceRequest
from pccl.telemetry.events import PeerReport

_T = TypeVar("_T")


class CommunicatorBase:
    """One process's membership in a run.

    Args:
        address: the master, ``"host:port"``: a name, an IPv4 or a bracketed IPv6 address. Or
            several, separated by commas: a master and its standbys. None: ``PCCL_MASTER``.
        peer_group: collectives stay inside a group; admission spans the run. None:
            ``PCCL_GROUP``, otherwise 0.
        p2p_connection_pool_size: connections (lanes) per link. If the two peers differ, the larger
            number counts. 0: the number of the other peer. If both have 0: 16 to another machine
            (fewer if more than 16 links are in use), and one inside a machine. None:
            ``PCCL_LANES``, otherwise 0.
        timing: deadlines; None: the defaults.
        token: the secret of the run, 16 characters or more. None: ``PCCL_TOKEN``, or the file
            that ``PCCL_TOKEN_FILE`` names, otherwise no secret.
        advertise: address at which other peers reach this one: ``HOST``, ``HOST:PORT``,
            ``HOST:FIRST-LAST``, ``:PORT`` or ``:FIRST-LAST``. None: ``PCCL_ADVERTISE``, otherwise
            the address that the master sees, and any free port.
        listen: address that this peer binds, in the same forms, if it differs from ``advertise``,
            as behind a port mapping or a proxy. None: ``PCCL_LISTEN``, otherwise the port of
            ``advertise``.
        interface: name of the network interface at which this peer listens, whose addresses it
            announces, and through which it dials; Linux only. None: ``PCCL_INTERFACE``, otherwise
            the system chooses.
        map_port: whether to ask the router of a home network to forward the port of this peer, so
            that others can dial it. Without effect if ``advertise`` or ``listen`` is set, or if the
            peer needs no such port. None: ``PCCL_MAP_PORT``, otherwise True.
        lanes: the same as ``p2p_connection_pool_size``.
        name: what people see of this peer beside its id. None: ``PCCL_NAME``, otherwise
            ``HOST:PID``.
        upload_bytes_per_s_max: how many bytes per second this peer sends at most, over all its
            connections to other machines together, what it relays included. 64000 or more; 0: no
            limit. None: ``PCCL_UPLOAD_MAX``, otherwise no limit.

    Raises:
        ValueError: an address is missing or malformed, or another argument is out of range.
        TypeError: an argument has the wrong type.
        OSError: the address in ``PCCL_METRICS`` cannot be used.
    """

    _within = 1

    def __init__(
        self,
        address: str | None = None,
        peer_group: int | None = None,
        p2p_connection_pool_size: int | None = None,
        *,
        timing: Timing | None = None,
        token: str | bytes | None = None,
        advertise: str | None = None,
        listen: str | None = None,
        interface: str | None = None,
        map_port: bool | None = None,
        lanes: int | None = None,
        name: str | None = None,
        upload_bytes_per_s_max: int | None = None,
    ) -> None:
        self.p2p_connection_pool_size = resolve_lanes(p2p_connection_pool_size, lanes)
        master, *others = resolve_masters(address)
        group = resolve_group(peer_group)
        advertised, bound = resolve_advertise(advertise), resolve_listen(listen)
        reachable = reachable_at(master, advertised, bound, resolve_interface(interface))
        unmapped = why_unmapped(advertised, bound, switched_on=resolve_map_port(map_port))
        local = resolve_local()
        options = replace(
            reachable,
            timing=check_timing(timing),
            lanes=self.p2p_connection_pool_size,
            other_masters=tuple(others),
            token=resolve_token(token),
            name=resolve_name(name),
            pulls=local != "tcp",
            pulled_by_anyone=local == "any",
            encrypts=encryption(always=resolve_encrypt()),
            upload_bytes_per_s_max=resolve_upload_max(upload_bytes_per_s_max),
        )
        drains, notice_s, metrics = resolve_drain(), resolve_drain_s(), resolve_metrics()
        gives_stacks, record_to = resolve_stacks(), resolve_record()
        show_log(options.name)
        if gives_stacks:
            dump_stacks_on_request(options.name)
        self._session = Session(
            self, master, group, options, metrics, record_to, maps_port=not unmapped
        )
        self._engine = self._session.engine
        if drains:
            drain(self._session, notice_s)

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{name}: {self._session.describe()}>"

    @abstractmethod
    async def _run(self, call: CheckedCall[Any, _T]) -> _T:
        """Make a call, and wait for its end."""
        ...

    async def _reduce(self, call_name: str, request: ReduceRequest) -> ReduceInfo:
        return await self._run(CheckedCall(call_name, self._engine.reduce, request))

    async def _start(self, call_name: str, request: ReduceRequest) -> AsyncReduceHandle:
        if request.retry:
            raise ValueError(
                f"{call_name} cannot retry: after a loss the group has changed, and the "
                "handle must report that first. Omit retry, and call again if the handle fails"
            )
        launch = self._session.launch
        ticket = await self._run(CheckedCall(call_name, launch, request, joint=False))
        return AsyncReduceHandle(self._session, ticket, call_name)

    def get_attribute(self, attribute: Attribute | str) -> int:
        """Return a size, as of this peer's last joint call. Local; never blocks.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
            ValueError: no such attribute.
        """
        roster = self._session.roster("get_attribute")
        match check_member("attribute", attribute, Attribute):
            case Attribute.GLOBAL_WORLD_SIZE:
                return roster.global_world_size
            case Attribute.LOCAL_WORLD_SIZE:
                return len(roster.members)
            case Attribute.NUM_DISTINCT_PEER_GROUPS:
                return roster.peer_groups
            case Attribute.LARGEST_PEER_GROUP_WORLD_SIZE:
                return roster.largest_group_size

    @property
    def peer_id(self) -> int:
        """This incarnation's id; peers that join later have larger ids.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        return self._session.peer_id("peer_id")

    @property
    def rank(self) -> int:
        """This peer's place in the ring of its group, from 0, as of its last joint call.

        Raises:
            NotConnected: this peer is not a member, or the communicator is closed.
        """
        return self._rank_in(members_of(self._session.roster("rank")), "rank")

    def _rank_in(self, ring: Sequence[MemberInfo], func: str) -> int:
        me = self._session.peer_id(func)
        for member in ring:
            if member.peer_id == me:
                return member.rank
        raise NotConnected(None, func, "this peer is no member; update_topology() rejoins")

    def _members_at(self, ranks: Sequence[int]) -> tuple[MemberInfo, ...]:
        """Return the members at these ranks of one view. Another thread may see the next view."""
        ring = self.members()
        chosen = check_ranks(ranks, len(ring), self._rank_in(ring, "subgroup"))
        return tuple(ring[rank] for rank in chosen)

    @property
    def world_size(self) -> int:
        """Number of members of this peer's group, as of its last joint call (LOCAL_WORLD_SIZE).

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        return len(self._session.roster("world_size").members)

    @property
    def is_awaited(self) -> bool:
        """Whether a quorum waits for this peer's next ``update_topology``, or left this peer out.

        Or a member that will leave soon waits for it. Local; never blocks. False for a peer that is
        not a member.
        """
        return self._engine.machine.is_awaited

    @property
    def newcomers_wait(self) -> bool:
        """Whether newcomers are ready for admission in the next ``update_topology``.

        Local; never blocks. Members hear of it at slightly different times, and only if they make
        that call with a quorum; in ``are_peers_pending`` they agree on the answer. False for a peer
        that is not a member.
        """
        return self._engine.machine.newcomers_wait

    def members(self) -> tuple[MemberInfo, ...]:
        """Return the members of this peer's group in ring order, as of its last joint call. Local.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        return members_of(self._session.roster("members"))

    def report_step(
        self,
        step: int,
        *,
        loss: float | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Tell the run at which step this program is, for status, logs and metrics. Local.

        The next heartbeat carries it, within a second. ``DiLoCo`` and ``GradientAverager`` call it
        with the step; a program adds the loss: ``comm.report_step(opt.steps, loss=loss.item())``.

        Args:
            step: number of steps that are done.
            loss: loss of the model, for the curves of the page. One that is not finite counts as
                unknown. None: as reported before.
            figures: at most 8 other numbers for the page, by names of at most 64 bytes. Those that
                are not finite are left out. None: as reported before.

        Raises:
            TypeError, ValueError: ``step`` is no int, or not from 0 to 2**62; ``loss`` is
                no number; ``figures`` has too many, or another type.
        """
        self._engine.step = check_range("step", step, 0, STEP_MAX)
        if loss is not None:
            self._engine.loss = check_loss(loss)
        if figures is not None:
            self._engine.figures = check_figures(figures)

    def expect_notice(self, has_work: Callable[[], bool]) -> None:
        """Let this program finish its work after SIGTERM, under ``PCCL_DRAIN=1``. Local.

        If it has work then, ``is_leaving`` becomes true. The program has ``PCCL_DRAIN_S`` (5 s) to
        finish the work, and to close this communicator. ``DiLoCo`` and ``GradientAverager`` call
        this. See "Stopping a peer" in docs/launching.md.

        Args:
            has_work: function, or method of an object that may be collected meanwhile, that returns
                whether there is work. The signal handler calls it.
        """
        if inspect.ismethod(has_work):
            method = weakref.WeakMethod(has_work)

            def bound() -> bool:
                has_work = method()
                return has_work is not None and has_work()

            self._session.has_work = bound
        else:
            self._session.has_work = has_work

    @property
    def is_leaving(self) -> bool:
        """Whether SIGTERM has told this program to finish its work: see ``expect_notice``."""
        return self._session.is_leaving

    def on_event(self, consumer: Callable[[PeerReport], object]) -> Callable[[], None]:
        """Call ``consumer`` with each later event of this peer (:mod:`pccl.observe.events`). Local.

        It is called in a thread of the library, one event after the other, and delays nothing. If
        it falls 10,000 events behind, it misses events. If it raises, the library logs the error,
        and calls it no more. It also ends when this communicator is closed.

        Returns:
            A function that ends this.

        Raises:
            TypeError: ``consumer`` is not callable.
        """
        check_listener("consumer", consumer)
        return self._session.consumers.add(consumer)

    def status(self) -> Status:
        """Return this peer's own view: membership, master, open calls, transfers, links. Local.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        return self._session.status("status")


_Reduce = Callable[[str, ReduceRequest], Coroutine[Any, Any, ReduceInfo]]
_Start = Callable[[str, ReduceRequest], Coroutine[Any, Any, AsyncReduceHandle]]


class SubgroupBase:
    """Some members of a group, with ranks of their own, for collectives of these members only.

    ``Communicator.subgroup`` makes it, without a message. The members that make the same calls must
    name the same members in the same order. Calls of different subgroups are apart, even with the
    same tag; those of two subgroups of the same members share the tags.

    A subgroup has the collectives of the group, which take and return the subgroup's ranks, but
    neither ``retry``, ``quorum`` nor ``observable``. If one of its members is lost, its calls raise
    CollectiveAborted: make a new one. After the loss of another member, call again.
    """

    def __init__(
        self,
        members: Iterable[MemberInfo],
        peer_id: int,
        reduce: _Reduce,
        start: _Start,
    ) -> None:
        self._reduce_in_group, self._start_in_group = reduce, start
        self._members = tuple(replace(one, rank=rank) for rank, one in enumerate(members))
        self._peers = tuple(PeerId(member.peer_id) for member in self._members)
        self._rank = self._peers.index(PeerId(peer_id))
        self._within = hash_of(self._peers)

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{name}: rank {self._rank} of peers {', '.join(map(str, self._peers))}>"

    @property
    def rank(self) -> int:
        """This peer's place in the subgroup, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of members of the subgroup."""
        return len(self._peers)

    @property
    def peer_id(self) -> int:
        """This peer's id when the subgroup was made."""
        return self._peers[self._rank]

    def members(self) -> tuple[MemberInfo, ...]:
        """Return the members in the order of their ranks in the subgroup."""
        return self._members

    async def _reduce(self, call_name: str, request: ReduceRequest) -> ReduceInfo:
        return await self._reduce_in_group(call_name, self._of_members(call_name, request))

    async def _start(self, call_name: str, request: ReduceRequest) -> AsyncReduceHandle:
        return await self._start_in_group(call_name, self._of_members(call_name, request))

    def _of_members(self, call_name: str, request: ReduceRequest) -> ReduceRequest:
        asks = request.asks
        if request.retry or request.observable or asks.descriptor.quorum is not None:
            raise ValueError(
                f"{call_name} of a subgroup takes no retry, quorum or observable; leave them out, "
                "or call it on the communicator"
            )
        return request if asks.among is not None else with_members(request, self._peers)
