"""The memory that simulated processes of one machine share."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.announcement import decode_announcement
from pccl.transports.base import Address
from pccl.transports.sim.memory import SimMemories, SimMemory
from pccl.transports.sim.network import SimNetwork

PROOF = bytes(range(16))


class Machine:
    """Two processes of one machine."""

    def __init__(self) -> None:
        self.memories = SimMemories()
        self.memories.machines = {"a": "m", "b": "m", "far": "other"}
        self.lives = True
        owner = self.memories.boot("a", lambda: self.lives)
        reader = self.memories.boot("b", lambda: True)
        assert owner is not None
        assert reader is not None
        self.owner: SimMemory = owner
        self.reader: SimMemory = reader
        self.pid = owner.ancestry[0]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def room(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def test_only_hosts_that_share_a_machine_have_memory(machine: Machine) -> None:
    assert machine.memories.boot("alone", lambda: True) is None
    ends: Any = type("Ends", (), {"local": Address("a", 1), "remote": Address("b", 1)})()
    assert machine.reader.reaches(ends)
    for host in ("far", "alone"):
        ends.remote = Address(host, 1)
        assert not machine.reader.reaches(ends)
    ends.local = Address("alone", 1)
    assert not machine.reader.reaches(ends)


def test_what_is_pulled_is_what_is_there_at_that_moment(machine: Machine) -> None:
    data = bytearray(b"before")
    lease = machine.owner.lease()
    where = decode_announcement(lease.announce([memoryview(data)[:2], memoryview(data)[2:]]))
    data[:] = b"after!"
    into = [room(3), room(3)]
    assert machine.reader.pull(machine.pid, where, into)
    assert b"".join(into) == b"after!"


def test_a_withdrawn_segment_leaves_other_bytes(machine: Machine) -> None:
    lease = machine.owner.lease()
    where = decode_announcement(lease.announce([room(4)]))
    lease.revoke()
    into = room(4)
    assert not machine.reader.pull(machine.pid, where, [into])
    assert bytes(into) == b"\xa5\xa5\xa5\xa5"
    again = decode_announcement(lease.announce([room(4)]))
    assert machine.reader.pull(machine.pid, again, [into])
    assert into == bytes(4)
    lease.release()
    assert not machine.reader.pull(machine.pid, again, [into])


def test_memory_that_nobody_announced(machine: Machine) -> None:
    where = decode_announcement(machine.owner.lease().announce([room(4)]))
    with pytest.raises(OSError, match="bad address"):
        machine.reader.pull(machine.pid, replace(where, parts=[(1 << 40, 4)]), [room(4)])
    assert not machine.reader.pull(machine.pid, replace(where, word=1 << 40), [room(4)])
    assert not machine.reader.pull(machine.pid, replace(where, generation=7), [room(4)])


def test_proofs(machine: Machine) -> None:
    pid, address = machine.owner.show(PROOF).place
    assert pid == machine.pid
    assert machine.reader.prove(pid, address, PROOF)
    assert not machine.reader.prove(pid, address + 1, PROOF)
    assert not machine.reader.prove(pid, address, PROOF[::-1])
    assert not machine.reader.prove(machine.reader.ancestry[0], address, PROOF)
    assert not machine.reader.prove(99, address, PROOF)


def test_a_process_that_has_ended(machine: Machine) -> None:
    place = machine.owner.show(PROOF).place
    where = decode_announcement(machine.owner.lease().announce([room(4)]))
    machine.lives = False
    assert not machine.reader.prove(*place, PROOF)
    with pytest.raises(ProcessLookupError):
        machine.reader.pull(machine.pid, where, [room(4)])


def test_a_process_that_may_not_read(machine: Machine) -> None:
    place = machine.owner.show(PROOF).place
    where = decode_announcement(machine.owner.lease().announce([room(4)]))
    machine.reader.forbidden = True
    assert not machine.reader.prove(*place, PROOF)
    with pytest.raises(PermissionError):
        machine.reader.pull(machine.pid, where, [room(4)])


def test_a_host_that_starts_again_is_another_process() -> None:
    loop = VirtualLoop()
    network = SimNetwork(loop, Random(1))
    network.memories.machines = {"a": "m", "b": "m"}
    first, other = network.host("a").memory, network.host("b").memory
    assert first is not None
    assert other is not None
    where = decode_announcement(first.lease().announce([room(4)]))
    assert other.pull(first.ancestry[0], where, [room(4)])
    network.hosts["a"].crash()
    second = network.host("a").memory
    assert second is not None
    assert second.ancestry != first.ancestry
    with pytest.raises(ProcessLookupError):
        other.pull(first.ancestry[0], where, [room(4)])
    assert not other.pull(second.ancestry[0], where, [room(4)])
    assert network.host("alone").memory is None
    loop.close()
