"""``MasterServer``: a ``MasterMachine`` on a transport. It moves messages and decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial

from pccl.machines.master.connections import ANSWERED, REMOVED
from pccl.machines.master.events import (
    Announce,
    AskMaster,
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    ConnectionPaused,
    ForgetRun,
    InspectProcess,
    MasterAnswered,
    MasterEffect,
    MasterEvent,
    MasterTick,
    MasterUnanswered,
    ProcessInspected,
    Remember,
    SendAddress,
    SendStatus,
    SendTo,
    Warn,
)
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.origin import Origin
from pccl.machines.master.succession.vouched import NOT_TOLD, Vouched
from pccl.machines.reachability import AddressTried, CallerTried, TryAddress, TryCaller
from pccl.protocol import messages as msg
from pccl.protocol.errors import PCCLError
from pccl.protocol.guards.allowance import CHARGED, PEERS_BYTES_MAX, SharedAllowance
from pccl.protocol.guards.source_shares import SourceShares, source_of
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.keys import CURVE25519, SECRET_BYTES, Curves, fingerprint_of
from pccl.protocol.handshake.opening import NO_RUN, RUN_BYTES, Channel, Opening
from pccl.protocol.handshake.proxy_header import IPNetwork
from pccl.protocol.limits import (
    INCUMBENT_BYTES,
    NEWCOMERS_BURST_BYTES,
    NEWCOMERS_BYTES_PER_S,
    Timing,
)
from pccl.protocol.messages import MasterAddress
from pccl.protocol.types import NOBODY, Member, PeerId
from pccl.runtime.clock import ThreadClock, Ticker, Timer
from pccl.runtime.control.greeting import Credentials, Reception, leaves_machine
from pccl.runtime.control.master_keys import MasterKeys
from pccl.runtime.control.probe import CALLER_SHARE, probe
from pccl.runtime.control.question import ask_run
from pccl.runtime.control.status_desk import Question, StatusDesk
from pccl.runtime.control.stranger_log import StrangerLog
from pccl.runtime.control.stream import ControlStream
from pccl.runtime.evidence import gathered
from pccl.runtime.keys_file import KeysFile
from pccl.runtime.links.relay import Relay
from pccl.runtime.master_store import MasterStore, Remembered, StoredState
from pccl.runtime.tasks import Tasks
from pccl.telemetry.events import RunChanged
from pccl.telemetry.evidence import pack_evidence
from pccl.telemetry.names import Names
from pccl.telemetry.stream import EventStream
from pccl.transports.base import Address, Connection, Listener, Traffic, Transport

_log = logging.getLogger("pccl.master")


class MasterServer:
    """Coordinates one run over ``transport``.

    Args:
        clock: gives the time.
        transport: the network.
        timing: deadlines.
        random_bytes: source of the run id and of secrets.
        curves: computes with keys.
        secret: the secret of the run's key; None: a new one.
        encrypts: whether this side wants a connection to be encrypted.
        observer: called with each event and its effects after they were carried out (traces).
        token: text of a token of the run, or a plain secret; None: any process may join, unless
            ``keys`` has tokens.
        store: stores the state of the master across restarts; None: the master stores nothing.
        standbys: addresses of standby masters, which this master sends to the peers.
        standby_of: addresses of the masters that this one may replace; empty: this is no standby.
        tests_addresses: whether the master dials newcomers, to test that peers can reach them.
        keys: file with the key and the tokens of the run; None: they are in memory only.
        relays: whether it forwards between peers that cannot dial each other.
        proxies: the proxies in front of its port; see ``Reception``.

    Raises:
        LocalProtocolError: the store cannot be read or written.
    """

    def __init__(
        self,
        clock: ThreadClock,
        transport: Transport,
        timing: Timing,
        random_bytes: Callable[[int], bytes],
        observer: Callable[[MasterEvent, list[object]], None] | None = None,
        token: bytes | None = None,
        store: MasterStore | None = None,
        standbys: tuple[MasterAddress, ...] = (),
        standby_of: Sequence[Address] = (),
        *,
        curves: Curves = CURVE25519,
        secret: bytes | None = None,
        encrypts: Callable[[Connection], bool] = leaves_machine,
        tests_addresses: bool = True,
        keys: KeysFile | None = None,
        relays: bool = False,
        proxies: Sequence[IPNetwork] = (),
    ) -> None:
        self._tests_addresses = tests_addresses
        patience_ns, stall_ns = timing.ns(timing.dial_s), timing.ns(timing.lane_stall_s)
        self.relay = Relay(clock, patience_ns, stall_ns, self._has_left) if relays else None
        """What it forwards; None: it is no relay."""
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._observer = observer
        self._state = StoredState(store)
        self._standby_of = tuple(standby_of)
        self.keys = MasterKeys(keys, token, secret or random_bytes(SECRET_BYTES))
        secret = self.keys.known.secret
        self._credentials = Credentials(None, random_bytes, curves, secret, encrypts)
        own_key = self._credentials.signer.key
        self._fingerprint = b"" if keys is None else fingerprint_of(own_key)
        self.machine = self._make_machine(random_bytes, standbys)
        self.keys.apply(self._credentials, self.machine)
        self._tasks: Tasks | None = None
        """Questions to other masters, and test dials of newcomers."""
        self._reception = Reception(
            clock, patience_ns, transport.port_limits.unproven, self._credentials, self._identify,
            self._on_proven, self._judge, proxies,
        )  # fmt: skip
        self._strangers = StrangerLog(clock, _log)
        self.events = EventStream()
        self.traffic = Traffic()
        """Bytes of all control connections, without the handshakes."""
        self.inspect_process: Callable[[str], Awaitable[object]] | None = None
        """Returns what the system knows of the process of a peer by name; None: nothing."""
        self._names = Names()
        self._ticker = Ticker(clock, timing.ns(timing.tick_s), self._tick)
        self._listener: Listener | None = None
        self._streams: dict[int, ControlStream] = {}
        self._silent: dict[int, Timer] = {}
        """Timers that close connections without a handled message since their handshake."""
        self._silent_shares: SourceShares[int] = SourceShares(transport.port_limits.newcomers)
        self._desk = StatusDesk(clock, self._answer)
        rate, burst = NEWCOMERS_BYTES_PER_S, NEWCOMERS_BURST_BYTES
        self._newcomers = SharedAllowance(rate, burst, clock.now_ns())
        self._last_connection = 0
        self._queue: deque[MasterEvent] = deque()
        self._busy = False

    def _make_machine(
        self,
        random_bytes: Callable[[int], bytes],
        standbys: tuple[MasterAddress, ...],
    ) -> MasterMachine:
        known = self._state.found
        vouched = NOT_TOLD
        if known is not None:
            known.check_key(self._fingerprint)
        is_standby = bool(self._standby_of)
        if known is not None and (known.coordinated or is_standby):
            origin = Origin.RESTARTED if known.coordinated else Origin.STANDBY
            run, term, incumbent = known.run, known.term + 1, known.incumbent
            vouched = known.vouched
        elif is_standby:
            run, term, origin, incumbent = NO_RUN, 1, Origin.STANDBY, random_bytes(INCUMBENT_BYTES)
        else:
            run, term, origin = random_bytes(RUN_BYTES), 1, Origin.BLANK
            incumbent = random_bytes(INCUMBENT_BYTES)
        if origin is not Origin.STANDBY:
            self._state.begin(Remembered(run, term, incumbent, True, vouched, self._fingerprint))
        now_ns = self._clock.now_ns()
        return MasterMachine(
            self._timing,
            run,
            term,
            random_bytes,
            now_ns,
            origin,
            incumbent,
            standbys,
            tuple(str(address) for address in self._standby_of),
            vouched,
            signer=self._credentials.signer,
            tokens=self.keys.known.tokens,
            tests_addresses=self._tests_addresses,
            relays=self.relay is not None,
        )

    def _members_of(self, run: bytes) -> Vouched:
        """Return the members of ``run``; during a recovery, the members that were stored last."""
        machine, wanted = self.machine, self._state.wanted
        if machine.run == run and not machine.recovering and machine.membership.version:
            return machine.vouched()
        return wanted.vouched if wanted is not None and wanted.run == run else NOT_TOLD

    def _keep_members(self) -> None:
        """Store the members before announcing a change: after a restart, only they may return."""
        machine, wanted = self.machine, self._state.wanted
        if machine.recovering or not machine.membership.size:
            return
        known = wanted.vouched.version if wanted is not None and wanted.run == machine.run else None
        if machine.membership.version != known:
            us, members = machine.incarnation, machine.vouched()
            self._state.keep(
                Remembered(us.run, us.term, us.incumbent, True, members, self._fingerprint)
            )

    @property
    def address(self) -> Address:
        """Address that the master listens on."""
        assert self._listener is not None, "not started"
        return self._listener.address

    async def start(self, address: Address) -> None:
        """Listen on ``address``, and start the ticks.

        Raises:
            LinkError: the address cannot be used.
        """
        self._listener = await self._transport.listen(address, self._reception.accept)
        self._tasks = Tasks(asyncio.get_running_loop())
        self._ticker.start()
        _log.info("master listens on %s", self._listener.address)

    def close(self) -> None:
        """Stop at once. The peers see that their connections are lost."""
        self._ticker.stop()
        if self._tasks is not None:
            self._tasks.abandon()
        if self._listener is not None:
            self._listener.close()
        self._reception.close()
        if self.relay is not None:
            self.relay.close()
        self._strangers.close()
        self._desk.close()
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        for stream in list(self._streams.values()):
            stream.close()
        self._streams.clear()

    # -- connections ---------------------------------------------------------------------------

    def _identify(self) -> Opening:
        return Opening(Channel.CONTROL, self.machine.shown_run, self.machine.shown_term)

    def _judge(self, remote: Opening) -> str:
        """Return why the sender of an opening may not connect: here, why it is not forwarded."""
        if remote.channel is not Channel.RELAY:
            return ""  # the machine judges it later, by its first message
        if self.relay is None:
            return "this master forwards nothing: start it with --relay"
        peers = self.machine.membership.peers
        known, target = peers.get(remote.source), peers.get(remote.target)
        if known is None or known.member.key != remote.key:
            return "the master has not registered it"
        if remote.target and (target is None or target.group != known.group):
            return "the other peer is not in its group"
        return self.relay.refusal(remote.source, remote.target)

    def _has_left(self, peer: PeerId) -> bool:
        return peer not in self.machine.membership.peers

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        if remote.channel is Channel.RELAY and self.relay is not None:
            self.relay.accept(connection, remote.source, remote.target)
            return
        self._last_connection += 1
        number = self._last_connection
        self._feed(ConnectionOpened(number, connection.remote.host, remote.key, remote.token_id))

        def on_message(message: msg.Message) -> None:
            if number in self._silent:
                if isinstance(message, Question | msg.AddressQuery):
                    self._on_question(number, connection.remote.host, message)
                    return
                self._has_spoken(number)
            if isinstance(message, msg.Damaged):
                stream.close()
                self._streams.pop(number, None)
                reason = "a message from the master was damaged on the way to the peer"
                self._feed(ConnectionClosed(number, reason, damaged=True))
            else:
                self._feed(ConnectionMessage(number, message))

        def on_closed(reason: str) -> None:
            self._has_spoken(number)
            self._streams.pop(number, None)
            self._feed(ConnectionClosed(number, reason, stream.was_damaged))

        stream = self._streams[number] = ControlStream(
            connection,
            on_message,
            on_closed,
            self._clock,
            partial(self._bytes_max, number),
            spend=partial(self._spend, number, source_of(connection.remote.host)),
            log=self._strangers.write,
            traffic=self.traffic,
        )
        goes = self._silent_shares.add(number, connection.remote.host)
        if goes is not None:
            self._dismiss(goes, "too many newer connections came before it registered")
        reason = "the other side sent no message in time"
        self._silent[number] = self._clock.call_at_ns(deadline_ns, self._dismiss, number, reason)

    def _bytes_max(self, number: int, kind: type[msg.Message]) -> int:
        return PEERS_BYTES_MAX[self.machine.trust_in(number)].get(kind, 0)

    def _spend(self, number: int, source: str, cost_bytes: int) -> int:
        if self.machine.trust_in(number) not in CHARGED:
            return 0
        now_ns = self._clock.now_ns()
        wait_ns = self._newcomers.spend(source, cost_bytes, now_ns)
        if wait_ns:
            self._feed(ConnectionPaused(number, now_ns + wait_ns))
        return wait_ns

    def _has_spoken(self, number: int) -> None:
        self._desk.forget(number)
        self._silent_shares.remove(number)
        if (timer := self._silent.pop(number, None)) is not None:
            timer.cancel()

    def _dismiss(self, number: int, reason: str) -> None:
        self._has_spoken(number)
        stream = self._streams.pop(number)
        stream.abort()
        self._feed(ConnectionClosed(number, reason))
        self._tell_closed(stream, reason)

    def _tell_closed(self, stream: ControlStream, reason: str) -> None:
        level = logging.DEBUG if reason in (ANSWERED, REMOVED) else logging.INFO
        remote = stream.connection.remote
        self._strangers.write(level, "closed the connection of %s: %s", remote, reason)

    def _on_question(self, number: int, host: str, question: Question | msg.AddressQuery) -> None:
        """Answer a short question at once, and queue a long one.

        Until the answer, the connection counts as silent.
        """
        known = msg.RunQuery(self.machine.run, self.machine.membership.version)
        if isinstance(question, msg.AddressQuery) or question == known:
            self._feed(ConnectionMessage(number, question))
        elif number not in self._desk:
            self._desk.ask(number, host, question)

    def _answer(self, number: int, question: Question) -> None:
        self._has_spoken(number)
        self._feed(ConnectionMessage(number, question))

    def _tick(self, busy_ns: int) -> None:
        if changed := self.keys.look(self._clock, self.machine):
            self._feed(changed)
            self.keys.apply(self._credentials, self.machine)
        self._feed(MasterTick(busy_ns))

    # -- other masters -------------------------------------------------------------------------

    async def _ask(self, master: int, query: msg.RunQuery) -> None:
        address, patience_s = self._standby_of[master], self._timing.dial_s
        try:
            answer = await ask_run(
                self._clock, self._transport, address, self._credentials, patience_s, query
            )
        except PCCLError as error:
            self._feed(MasterUnanswered(master, error.reason))
        else:
            self._feed(MasterAnswered(master, answer))

    async def _inspect(self, asked: InspectProcess) -> None:
        data, refusal = await gathered(self._known_of(asked))
        self._feed(ProcessInspected(asked.query, data, refusal))

    async def _known_of(self, asked: InspectProcess) -> tuple[bytes, str]:
        control, inspect = self._streams.get(asked.connection or 0), self.inspect_process
        path = control.connection.measure() if control is not None else None
        known = {
            "path": None if path is None else asdict(path),
            "process": None if inspect is None else await inspect(asked.name),
        }
        return pack_evidence(known), ""

    async def _probe(self, test: TryAddress) -> None:
        self._feed(await self._tried(test, self._timing.ns(self._timing.dial_s)))

    async def _tried(self, test: TryAddress, patience_ns: int) -> AddressTried:
        machine, credentials = self.machine, self._credentials

        def greet(connection: Connection) -> Handshake:
            own = Opening(Channel.PROBE, machine.run, machine.term, target=test.member.peer)
            key = test.member.key
            return credentials.dial(connection, own, fingerprint_of(key) if key else b"")

        return await probe(self._transport, self._clock, test, greet, patience_ns, test.seen)

    async def _probe_caller(self, test: TryCaller) -> None:
        member = Member(NOBODY, test.host, test.port)
        patience_ns = self._timing.ns(self._timing.dial_s * CALLER_SHARE)
        tried = await self._tried(TryAddress(member, (test.host,), test.seen), patience_ns)
        self._feed(CallerTried(test.connection, "" if tried.host else tried.reason))

    # -- the machine ---------------------------------------------------------------------------

    def _feed(self, event: MasterEvent) -> None:
        self._queue.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                event = self._queue.popleft()
                effects = self.machine.handle(event, self._clock.now_ns())
                self.keys.keep(self.machine)
                if self._state.is_kept:
                    self._keep_members()
                    if isinstance(event, MasterTick):
                        self._state.keep(self._state.wanted)
                for effect in effects:
                    self._carry_out(effect)
                if self._observer is not None:
                    self._observer(event, list(effects))
        finally:
            self._busy = False

    def _carry_out(self, effect: MasterEffect) -> None:
        match effect:
            case SendTo(connection, message):
                if (stream := self._streams.get(connection)) is not None:
                    stream.send(message)
                    if isinstance(message, msg.Admitted) and stream.read_on():
                        self._feed(ConnectionPaused(connection, self._clock.now_ns()))
            case SendAddress(connection, seen, dialled, reason, pad):
                if (stream := self._streams.get(connection)) is not None:
                    port, relays = stream.connection.remote.port, self.relay is not None
                    now_us = time.time_ns() // 1000
                    stream.send(msg.AddressIs(seen, dialled, reason, now_us, port, relays, pad))
            case SendStatus(connection):
                self._carry_out(SendTo(connection, self.machine.status()))
            case CloseConnection(connection, reason):
                self._has_spoken(connection)
                if (stream := self._streams.pop(connection, None)) is not None:
                    stream.close()
                    self._tell_closed(stream, reason)
            case Remember(run, term, incumbent, coordinated, vouched):
                if coordinated:
                    vouched = self._members_of(run)
                known = Remembered(run, term, incumbent, coordinated, vouched, self._fingerprint)
                self._state.keep(known)
                what = "coordinates" if coordinated else "stands by for"
                _log.info("this master %s the run %s in term %d", what, run.hex(), term)
            case InspectProcess():
                assert self._tasks is not None, "not started"
                self._tasks.create(self._inspect(effect))
            case AskMaster(master, query):
                assert self._tasks is not None, "not started"
                self._tasks.create(self._ask(master, query))
            case Warn(text):
                _log.warning("%s", text)
            case TryCaller():
                assert self._tasks is not None, "not started"
                self._tasks.create(self._probe_caller(effect))
            case TryAddress():
                assert self._tasks is not None, "not started"
                self._tasks.create(self._probe(effect))
            case ForgetRun():
                self._state.keep(None)
                _log.info("no member is left: the run is over")
            case Announce(what, peer, name, group, text, cause):
                self._names.note(peer, name)
                if what == "removed" and self.relay is not None:
                    self.relay.forget(peer)
                told = RunChanged(
                    what=what,
                    peer_id=peer,
                    name=name,
                    group=group,
                    cause="" if cause is None else cause.name,
                    reason=self._names.explain(text),
                )
                self.events.put(told, self._clock.now_ns())
