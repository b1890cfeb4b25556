"""Which of several addresses is dialled when, and what becomes of the attempts that lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from contextlib import closing
from typing import Any, TypeVar, cast

import pytest

from pccl.protocol.errors import LinkError
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.tcp_dial import CANDIDATES_MAX, TcpDialler, in_turns
from pccl.transports.tcp_socket import Resolved

_T = TypeVar("_T")

PORT = 4000


def found_at(host: str) -> Resolved:
    if ":" in host:
        return socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host, PORT, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, PORT)


class StubConnection:
    """A connection that knows whether it was aborted."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class Net:
    """A network in virtual time: each host answers or refuses after its own time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.names: dict[str, list[str]] = {}
        self.answers: dict[str, float | tuple[float, str]] = {}
        """Host -> after how many seconds it answers, or refuses with this reason."""
        self.dialled: list[tuple[float, str]] = []
        self.made: list[StubConnection] = []
        self.looked_up: list[tuple[str, int]] = []
        self.dialler = TcpDialler(self.loop, self._resolve, self._connect)

    async def _resolve(self, address: Address, flags: int) -> list[Resolved]:
        self.looked_up.append((address.host, flags))
        return [found_at(host) for host in self.names.get(address.host, [address.host])]

    async def _connect(
        self,
        resolved: Resolved,
        timeout_s: float,
        origin: Resolved | None = None,
        segment_bytes: int = 0,
    ) -> Connection:
        host = str(resolved[4][0])
        self.dialled.append((self.loop.time(), host))
        answer = self.answers.get(host, 1e9)
        pause_s, reason = answer if isinstance(answer, tuple) else (answer, "")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(pause_s)
        except TimeoutError:
            raise OSError(110, "no answer") from None
        if reason:
            raise OSError(111, reason)
        self.made.append(StubConnection(host))
        return cast("Connection", self.made[-1])

    async def dial(self, host: str, *hosts: str, timeout_s: float = 5.0) -> str:
        """Return the host that was reached."""
        made = await self.dialler.dial(Address(host, PORT), timeout_s, lambda _: True, hosts)
        return cast("StubConnection", made).host

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self.loop.run_until_complete(work)


@pytest.fixture
def net() -> Iterator[Net]:
    with closing(VirtualLoop()) as loop:
        yield Net(loop)


def test_a_silent_host_delays_the_next_by_a_quarter_of_a_second(net: Net) -> None:
    net.answers = {"10.0.0.2": 0.1}
    assert net.run(net.dial("10.0.0.1", "10.0.0.2", "10.0.0.3")) == "10.0.0.2"
    assert net.dialled == [(0.0, "10.0.0.1"), (0.25, "10.0.0.2")]


def test_a_refusal_starts_the_next_at_once(net: Net) -> None:
    net.answers = {"10.0.0.1": (0.01, "connection refused"), "10.0.0.2": 0.1}
    assert net.run(net.dial("10.0.0.1", "10.0.0.2")) == "10.0.0.2"
    assert net.dialled == [(0.0, "10.0.0.1"), (0.01, "10.0.0.2")]


def test_the_first_answer_wins_though_it_began_later(net: Net) -> None:
    net.answers = {"10.0.0.1": 0.5, "10.0.0.2": 0.1}
    assert net.run(net.dial("10.0.0.1", "10.0.0.2")) == "10.0.0.2"
    assert [one.host for one in net.made] == ["10.0.0.2"], "the other attempt was given up"


def test_of_two_answers_at_once_one_is_closed(net: Net) -> None:
    net.answers = {"10.0.0.1": 0.5, "10.0.0.2": 0.25}
    first = net.run(net.dial("10.0.0.1", "10.0.0.2"))
    assert {one.host: one.aborted for one in net.made if one.host != first} in (
        {},
        {"10.0.0.1": True},
        {"10.0.0.2": True},
    )
    assert [one.aborted for one in net.made if one.host == first] == [False]


@pytest.mark.parametrize("turns", range(1, 12))
def test_a_dial_that_is_cancelled_leaves_no_connection_open(net: Net, turns: int) -> None:
    """Whenever the caller gives up: before an answer, in its turn of the loop, or soon after."""
    net.answers = {"10.0.0.1": 0.0, "10.0.0.2": 0.0}

    async def give_up() -> str | None:
        dial = asyncio.ensure_future(net.dial("10.0.0.1", "10.0.0.2"))
        for _ in range(turns):
            await asyncio.sleep(0)
        dial.cancel()
        try:
            won = await dial
        except asyncio.CancelledError:
            won = None
        await asyncio.sleep(1)
        return won

    won = net.run(give_up())
    assert [one.host for one in net.made if not one.aborted] == ([won] if won else [])


def test_a_race_ends_at_the_time_limit_and_says_all_reasons(net: Net) -> None:
    net.answers = {"10.0.0.1": (0.1, "no route to host")}
    with pytest.raises(LinkError, match="no route to host, no answer"):
        net.run(net.dial("10.0.0.1", "10.0.0.2", timeout_s=2.0))
    assert net.loop.time() == 2.0


def test_only_the_first_host_may_be_a_name(net: Net) -> None:
    net.names = {"home": ["10.0.0.1"]}
    net.answers = {"10.0.0.1": 0.1}
    net.run(net.dial("home", "10.0.0.2"))
    assert net.looked_up == [("home", 0), ("10.0.0.2", socket.AI_NUMERICHOST)]


def test_a_host_that_is_named_twice_is_dialled_once(net: Net) -> None:
    net.names = {"home": ["10.0.0.1", "10.0.0.1"]}
    net.answers = {"10.0.0.1": (0.0, "connection refused")}
    with pytest.raises(LinkError, match="connection refused"):
        net.run(net.dial("home", "10.0.0.1"))
    assert net.dialled == [(0.0, "10.0.0.1")]


def test_a_name_with_many_addresses_is_dialled_at_a_few(net: Net) -> None:
    net.names = {"home": [f"10.0.1.{number}" for number in range(100)]}
    net.answers = dict.fromkeys(net.names["home"], (0.0, "connection refused"))
    with pytest.raises(LinkError):
        net.run(net.dial("home"))
    assert len(net.dialled) == CANDIDATES_MAX


def test_both_families_have_their_turns() -> None:
    hosts = ["2001:db8::1", "2001:db8::2", "2001:db8::3", "192.0.2.1"]
    found = [str(one[4][0]) for one in in_turns([found_at(host) for host in hosts])]
    assert found == ["2001:db8::1", "192.0.2.1", "2001:db8::2", "2001:db8::3"]
    assert in_turns([]) == []
