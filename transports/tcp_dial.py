"""Dialling over TCP: several addresses of one process, and two processes that dial each other.

``TcpDialler`` decides when which attempt begins; :mod:`pccl.transports.tcp` makes the attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from itertools import zip_longest
from typing import Protocol

from pccl.protocol.errors import LinkError
from pccl.transports.base import Address, Connection
from pccl.transports.datagrams import interface_hosts
from pccl.transports.tcp_socket import (
    ELSEWHERE,
    Resolved,
    SocketAddress,
    bind_to_interface,
    is_own,
    reason_of,
    to_address,
)

ATTEMPT_PAUSE_S = 0.25
"""Pause before the next attempt of a race, as RFC 8305 recommends."""

CANDIDATES_MAX = 8
"""Addresses that one dial tries: a name may have thousands."""

PUNCH_PAUSES_S = (0.07, 0.11)
"""Pauses before a refused attempt of a simultaneous open is repeated. Those of the two sides
differ, so that they do not miss each other again and again."""

_WILDCARDS = {"::": (socket.AF_INET6, socket.AF_INET), "0.0.0.0": (socket.AF_INET,)}
"""Host of a listening port -> the families of the addresses at which it accepts."""


def own_hosts(bound: str, interface: str = "") -> tuple[str, ...]:
    """Return the addresses that packets of this machine to other networks would have.

    Args:
        bound: the host that a port listens on; unless it is a wildcard, it says all.
        interface: the interface through which the packets leave; empty: the system chooses.
    """
    families = _WILDCARDS.get(bound, ())
    if interface and families:
        is_v4_only = socket.AF_INET6 not in families
        return tuple(one for one in interface_hosts(interface) if not (is_v4_only and ":" in one))
    found: list[str] = []
    for family in families:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((ELSEWHERE[family], 9))  # this sends nothing
            found.append(probe.getsockname()[0])
    return tuple(found)


def leave_through(
    sock: socket.socket, to: Resolved, interface: str, origin: Resolved | None
) -> SocketAddress | None:
    """Let a new socket dial through an interface; empty: the system chooses.

    Returns the address to bind, if any: that of ``origin``, or that of the interface, if the other
    side is on this machine, where no interface leads to.

    Raises:
        OSError: the interface cannot be used.
    """
    is_here = bool(interface) and is_own(to[0], to[4])
    if interface and not is_here:
        bind_to_interface(sock, interface)
    if origin is not None or not is_here:
        return None if origin is None else origin[4]
    hosts = interface_hosts(interface)
    return next(((one, 0) for one in hosts if (":" in one) == (to[0] == socket.AF_INET6)), None)


def in_turns(candidates: Sequence[Resolved]) -> list[Resolved]:
    """Return the candidates with their address families in turns, as in RFC 8305, section 4."""
    firsts = [one for one in candidates if one[0] == candidates[0][0]]
    others = [one for one in candidates if one[0] != candidates[0][0]]
    return [one for pair in zip_longest(firsts, others) for one in pair if one is not None]


def _abort(attempt: asyncio.Future[Connection]) -> None:
    """End a connection whose dial was given up."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort()


class _Connect(Protocol):
    def __call__(
        self,
        resolved: Resolved,
        timeout_s: float,
        origin: Resolved | None = None,
        segment_bytes: int = 0,
    ) -> Awaitable[Connection]: ...


class TcpDialler:
    """Dials for one transport.

    Args:
        loop: the loop of the transport.
        resolve: looks an address up, with flags of ``getaddrinfo``.
        connect: makes one attempt, from a local address or any; raises OSError.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        resolve: Callable[[Address, int], Awaitable[Sequence[Resolved]]],
        connect: _Connect,
    ) -> None:
        self._loop = loop
        self._resolve = resolve
        self._connect = connect

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        hosts: Sequence[str],
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to the first address that answers; see ``Transport.dial``.

        Raises:
            LinkError: no process listens there, or none answered within ``timeout_s``.
        """
        deadline, reasons = self._loop.time() + timeout_s, dict[str, None]()
        found: list[Resolved] = []
        for host in (address.host, *hosts):
            flags = 0 if host == address.host else socket.AI_NUMERICHOST  # those are no names
            try:
                async with asyncio.timeout_at(deadline):
                    found += await self._resolve(Address(host, address.port), flags)
            except TimeoutError:
                reasons["the name lookup timed out"] = None
            except (OSError, ValueError, OverflowError) as error:
                reasons[reason_of(error)] = None
        allowed = [one for one in dict.fromkeys(found) if may_dial(to_address(one[4]).host)]
        if found and not allowed:
            reasons["this address is valid only on its own machine or network"] = None
        connection = await self._race(
            in_turns(allowed)[:CANDIDATES_MAX], deadline, segment_bytes, reasons
        )
        if connection is None:
            reason = f"cannot reach {address}: {', '.join(reasons)}"
            raise LinkError(func="dial", reason=reason)
        return connection

    async def _race(
        self,
        candidates: Sequence[Resolved],
        deadline: float,
        segment_bytes: int,
        reasons: dict[str, None],
    ) -> Connection | None:
        """Connect to the first candidate that answers; note why others did not.

        A further attempt begins after a pause, or when one has failed (RFC 8305, section 5).
        """
        waiting, running = deque(candidates), set[asyncio.Future[Connection]]()
        connected: list[Connection] = []
        try:
            while not connected and (waiting or running):
                if waiting:
                    left_s = deadline - self._loop.time()
                    attempt = self._connect(waiting.popleft(), left_s, segment_bytes=segment_bytes)
                    running.add(asyncio.ensure_future(attempt))
                pause_s = ATTEMPT_PAUSE_S if waiting else None
                ended, running = await asyncio.wait(
                    running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in ended:
                    try:
                        connected.append(attempt.result())
                    except OSError as error:
                        reasons[reason_of(error)] = None
        except BaseException:
            for one in connected:
                one.abort()
            raise
        finally:
            for loser in running:
                loser.add_done_callback(_abort)
                loser.cancel()
        for late in connected[1:]:
            late.abort()
        return connected[0] if connected else None

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int,
    ) -> Connection:
        """Connect to a process that dials this one at the same time; see ``Transport.punch``.

        A translator may refuse what comes too early, so a refused attempt is repeated.

        Raises:
            LinkError: the two have not met within ``timeout_s``.
        """
        deadline, reason = self._loop.time() + timeout_s, "its address may not be dialled"
        try:
            numeric = socket.AI_NUMERICHOST  # a relay names the address; it may start no lookup
            here, there = [(await self._resolve(one, numeric))[0] for one in (local, address)]
            if here[0] != there[0]:
                raise OSError("the two reach the relay by different versions of IP")
            host = to_address(there[4]).host
            # Inside one machine nothing translates, and nothing would make the two meet.
            is_allowed = may_dial(host) and not ip_address(host.partition("%")[0]).is_loopback
            while is_allowed and (left_s := deadline - self._loop.time()) > 0:
                try:
                    return await self._connect(there, left_s, here, segment_bytes)
                except OSError as error:
                    reason = reason_of(error)
                await asyncio.sleep(min(left_s, PUNCH_PAUSES_S[local.port < address.port]))
        except (OSError, ValueError, OverflowError) as error:
            reason = reason_of(error)
        raise LinkError(func="dial", reason=f"cannot reach {address} from {local}: {reason}")
