"""What every ``LocalMemory`` must do: one suite over real processes and the simulator's."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pccl.protocol.limits import ANNOUNCED_PARTS_MAX
from pccl.transports.announcement import (
    PROOF_BYTES,
    Announcement,
    decode_announcement,
)
from pccl.transports.base import LocalMemory
from pccl.transports.local.process_memory import ProcessMemory, process_memory
from pccl.transports.sim.memory import SimMemories, SimMemory
from tests.support.peers import PeerProcess, obey

PROOF = bytes(range(PROOF_BYTES))


# -- the owner, which is another process -----------------------------------------------------------


class Owner:
    """Announces memory when the test asks for it. Leases, memory and proofs have names."""

    def __init__(self, memory: LocalMemory) -> None:
        self._memory = memory
        self._leases = {"": memory.lease()}
        self._data: dict[str, bytearray] = {}
        self._shown = {"": memory.show(PROOF)}

    def ancestry(self) -> list[int]:
        return list(self._memory.ancestry)

    def write(self, name: str, text: str) -> None:
        """Put text into new memory, or into memory of the same length."""
        data = text.encode()
        self._data.setdefault(name, bytearray(len(data)))[:] = data

    def lease(self, name: str) -> None:
        self._leases[name] = self._memory.lease()

    def announce(self, lease: str, *names: str) -> str:
        views = [memoryview(self._data[name]) for name in names]
        return self._leases[lease].announce(views).hex()

    def revoke(self, lease: str) -> None:
        self._leases[lease].revoke()

    def release(self, lease: str) -> None:
        self._leases.pop(lease).release()

    def show(self, name: str, proof: str) -> list[int]:
        shown = self._shown[name] = self._memory.show(bytes.fromhex(proof))
        return list(shown.place)


# -- both kinds --------------------------------------------------------------------------------


class Pair(ABC):
    """A reader in this process, and an owner."""

    def __init__(self, reader: LocalMemory) -> None:
        self.reader = reader

    @abstractmethod
    def ask(self, name: str, *arguments: object) -> Any:
        """Let the owner do something."""

    @abstractmethod
    def kill(self) -> None:
        """End the owner."""

    @property
    def pid(self) -> int:
        pid: int = self.ask("ancestry")[0]
        return pid

    def announce(self, lease: str, *names: str) -> Announcement:
        payload = self.ask("announce", lease, *names)
        return decode_announcement(bytes.fromhex(payload))

    def pull(self, where: Announcement, *lengths: int) -> str | None:
        """The text that was pulled into memory of these lengths; None: withdrawn."""
        into = [memoryview(bytearray(length)) for length in lengths or (where.length,)]
        return b"".join(into).decode() if self.reader.pull(self.pid, where, into) else None


class SimPair(Pair):
    def __init__(self) -> None:
        memories = SimMemories()
        memories.machines = {"a": "m", "b": "m"}
        self._lives = True
        owner, reader = memories.boot("a", lambda: self._lives), memories.boot("b", lambda: True)
        assert owner is not None
        assert reader is not None
        super().__init__(reader)
        self._owner = Owner(owner)

    def ask(self, name: str, *arguments: object) -> Any:
        return getattr(self._owner, name)(*arguments)

    def kill(self) -> None:
        self._lives = False


class ProcessPair(Pair):
    def __init__(self, reader: ProcessMemory) -> None:
        super().__init__(reader)
        self._pid = 0
        self.owner = PeerProcess(__name__)

    @property
    def pid(self) -> int:
        self._pid = self._pid or super().pid
        return self._pid

    def ask(self, name: str, *arguments: object) -> Any:
        return self.owner.ask(name, *arguments)

    def kill(self) -> None:
        assert self.pid
        self.owner.process.kill()
        self.owner.process.wait()


@contextmanager
def pair_of(kind: str) -> Generator[Pair]:
    with ExitStack() as stack:
        if kind == "sim":
            yield SimPair()
            return
        memory = process_memory()
        if memory is None:
            pytest.skip("this system has no process_vm_readv")
        pair = ProcessPair(memory)
        stack.callback(pair.owner.end)
        place = pair.ask("show", "", PROOF.hex())
        if not memory.prove(place[0], place[1], PROOF):
            pytest.skip("this system forbids to read the memory of a child")
        yield pair


@pytest.fixture(params=["sim", "process"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(kind: str) -> Iterator[Pair]:
    """Shared by the tests; each uses names of its own."""
    with pair_of(kind) as pair:
        yield pair


# -- the suite -------------------------------------------------------------------------------------


def test_what_was_announced_is_pulled(pair: Pair) -> None:
    pair.ask("write", "a", "hello")
    where = pair.announce("", "a")
    assert where.length == 5
    assert pair.pull(where) == "hello"
    assert pair.pull(where) == "hello"


def test_parts_need_not_be_the_destinations(pair: Pair) -> None:
    pair.ask("write", "b", "012345")
    pair.ask("write", "c", "6789")
    where = pair.announce("", "b", "c", "b")
    assert [length for _, length in where.parts] == [6, 4, 6]
    for lengths in ((16,), (6, 4, 6), (1, 9, 6), (1,) * 16, (15, 1)):
        assert pair.pull(where, *lengths) == "0123456789012345"
    many = ["c"] * ANNOUNCED_PARTS_MAX
    assert pair.pull(pair.announce("", *many)) == "6789" * len(many)


def test_the_reader_gets_what_is_there_now(pair: Pair) -> None:
    pair.ask("write", "d", "before")
    where = pair.announce("", "d")
    pair.ask("write", "d", "after!")
    assert pair.pull(where) == "after!"


def test_revoked(pair: Pair) -> None:
    pair.ask("write", "e", "secret")
    pair.ask("lease", "revoked")
    first, second = (pair.announce("revoked", "e") for _ in range(2))
    assert (first.word, first.generation) == (second.word, second.generation)
    pair.ask("revoke", "revoked")
    assert pair.pull(first) is None
    assert pair.pull(second) is None
    third = pair.announce("revoked", "e")
    assert third.word == first.word
    assert third.generation != first.generation
    assert pair.pull(third) == "secret"
    assert pair.pull(first) is None


def test_leases_are_revoked_one_by_one(pair: Pair) -> None:
    pair.ask("write", "f", "shared")
    for name in ("one", "two"):
        pair.ask("lease", name)
    one, two = (pair.announce(name, "f") for name in ("one", "two"))
    assert one.word != two.word
    pair.ask("revoke", "one")
    assert pair.pull(one) is None
    assert pair.pull(two) == "shared"


def test_released(pair: Pair) -> None:
    pair.ask("write", "g", "released")
    old: list[Announcement] = []
    for _ in range(20):
        pair.ask("lease", "again")
        where = pair.announce("again", "g")
        assert pair.pull(where) == "released"
        pair.ask("release", "again")
        old.append(where)
        assert [pair.pull(each) for each in old] == [None] * len(old)


def test_revoking_what_was_never_announced(pair: Pair) -> None:
    pair.ask("write", "h", "kept")
    pair.ask("lease", "unused")
    pair.ask("revoke", "unused")
    assert pair.pull(pair.announce("unused", "h")) == "kept"
    pair.ask("lease", "given back")
    pair.ask("release", "given back")


def test_another_generation(pair: Pair) -> None:
    pair.ask("write", "i", "here")
    where = pair.announce("", "i")
    for generation in (where.generation + 1, where.generation - 1, 0):
        assert pair.pull(Announcement(where.word, generation, where.parts)) is None


def test_memory_that_is_not_there(pair: Pair) -> None:
    pair.ask("write", "j", "here")
    where = pair.announce("", "j")
    parts = [*where.parts, (1 << 60, 4)]
    with pytest.raises(OSError, match=r"can be read|bad address"):
        pair.pull(Announcement(where.word, where.generation, parts))
    assert pair.pull(where) == "here"


def test_proofs(pair: Pair) -> None:
    other = PROOF[::-1]
    place, elsewhere = pair.ask("show", "1", PROOF.hex()), pair.ask("show", "2", other.hex())
    pid, address = place
    prove = pair.reader.prove
    assert pid == pair.pid
    assert prove(pid, address, PROOF)
    assert prove(pid, elsewhere[1], other)
    assert not prove(pid, address, other)
    assert not prove(pid, elsewhere[1], PROOF)
    assert not prove(pair.reader.ancestry[0], address, PROOF)
    assert not prove((1 << 31) - 1, address, PROOF)
    assert not prove(pid, 1 << 60, PROOF)


def test_own_memory_can_be_pulled(pair: Pair) -> None:
    """Two communicators of one process."""
    reader, data = pair.reader, memoryview(bytearray(b"own"))
    lease = reader.lease()
    where, into = decode_announcement(lease.announce([data])), memoryview(bytearray(3))
    assert reader.pull(reader.ancestry[0], where, [into])
    assert bytes(into) == b"own"
    lease.release()
    assert not reader.pull(reader.ancestry[0], where, [into])


def test_a_process_that_has_ended(kind: str) -> None:
    with pair_of(kind) as pair:
        pair.ask("write", "a", "hello")
        where, place = pair.announce("", "a"), pair.ask("show", "1", PROOF.hex())
        pid = pair.pid
        assert pair.pull(where) == "hello"
        pair.kill()
        with pytest.raises(ProcessLookupError):
            pair.reader.pull(pid, where, [memoryview(bytearray(5))])
        assert not pair.reader.prove(place[0], place[1], PROOF)


def test_both_are_local_memories() -> None:
    """To the type checkers."""
    memories: list[type[LocalMemory]] = [ProcessMemory, SimMemory]
    assert memories


if __name__ == "__main__" and len(sys.argv) == 1:
    obey(Owner(ProcessMemory()))
