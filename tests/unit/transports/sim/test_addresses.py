"""Who has which address, and who has it no more."""

from __future__ import annotations

import pytest

from pccl.protocol.errors import LinkError
from pccl.transports.base import SILENCE_MAX_S, Address, Connection
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.nat import FULL_CONE
from tests.unit.transports.sim.test_network import LATENCY, S, World, scenario


def ignore(connection: Connection) -> None:
    """Accept, and do nothing."""


def test_who_moves_is_dialled_at_its_new_address_and_seen_there() -> None:
    async def main(world: World) -> None:
        addresses, listener = world.network.addresses, await world.b.listen(Address("b", 0), ignore)
        old = listener.address
        assert world.network.move("b") == ["b"]
        new = Address(addresses.address_of("b"), old.port)
        with pytest.raises(LinkError, match="no answer in time"):
            await world.a.dial(old, 1.0)
        await world.a.dial(new, 1.0)
        there, here = await world.link(world.b, world.a)
        assert here.connection.remote.host == new.host
        assert there.connection.remote == here.connection.local
        assert addresses.name_of(new.host) == addresses.name_of("b") == "b"
        world.network.move("b")
        with pytest.raises(LinkError, match="no answer in time"):
            await world.a.dial(new, 1.0)

    scenario(main)


def test_what_was_sent_to_who_has_moved_never_arrives() -> None:
    """In the end the kernels give up."""

    async def main(world: World) -> None:
        a, b = await world.link(world.a, world.b)
        a.send(b"on its way")
        world.network.move("b")
        b.send(b"from the new address")
        await world.sleep_until(world.now + (SILENCE_MAX_S - 1) * S)
        assert a.lost == b.lost == []
        await world.sleep_until(world.now + 2 * S)
        assert a.received == b.received == b""
        assert all("timed out" in str(error) for _, error in (*a.lost, *b.lost))
        assert len(a.lost) == len(b.lost) == 1

    scenario(main)


def test_a_router_moves_all_that_are_behind_it_but_not_their_local_network() -> None:
    async def main(world: World) -> None:
        addresses = world.network.addresses
        addresses.translate(FULL_CONE, "a", "b", outside="home")
        addresses.local = {"a": 1, "b": 1}
        listener = await world.b.listen(Address("b", 0), ignore)
        near = await world.a.dial(Address("b.local", listener.address.port), 1.0)
        assert isinstance(near, SimConnection)
        there, here = await world.link(world.a, world.c)
        assert here.connection.remote.host == "home"
        assert sorted(world.network.move("b")) == ["a", "b"]
        await world.sleep_until(world.now + LATENCY)
        ends = {end.is_cut for end in (there.connection, here.connection)}
        assert (ends, near.is_cut) == ({True}, False)
        _, again = await world.link(world.a, world.c)
        assert again.connection.remote.host == addresses.address_of("b") != "home"

    scenario(main)
