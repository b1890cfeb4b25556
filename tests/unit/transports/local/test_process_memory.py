"""Pulls by process_vm_readv(2): from this process, and from real processes of this machine."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl.transports.announcement import (
    PROOF_BYTES,
    Announcement,
    decode_announcement,
    encode_announcement,
)
from pccl.transports.base import Address
from pccl.transports.local import process_memory as module
from pccl.transports.local.process_memory import ProcessMemory, address_of, process_memory
from tests.support.paths import ROOT
from tests.support.patience import LIMIT_S
from tests.support.processes import wait_stopped
from tests.support.waiting import until

PROOF = bytes(range(100, 100 + PROOF_BYTES))
OWN = os.getpid()

OWNER = """
import os, sys, numpy as np
from pccl.transports.local.process_memory import ProcessMemory
memory = ProcessMemory()
lease, data = memory.lease(), np.arange(50_000, dtype=np.int32)
shown = memory.show(bytes.fromhex(sys.argv[1]))
print(lease.announce([data.view(np.uint8).data]).hex(), *shown.place, flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


def may_pull() -> bool:
    memory = process_memory()
    if memory is None:
        return False
    with owner() as (process, announcement, _):
        try:
            return memory.pull(process.pid, announcement, [room(200_000)])
        except OSError:
            return False


def room(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


@contextmanager
def owner() -> Generator[tuple[subprocess.Popen[str], Announcement, tuple[int, int]]]:
    """A process that announces 50,000 int32 and shows ``PROOF``."""
    command = [sys.executable, "-c", OWNER, PROOF.hex()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            announced, pid, address = process.stdout.readline().split()
            where = decode_announcement(bytes.fromhex(announced))
            yield process, where, (int(pid), int(address))
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.fixture
def memory() -> ProcessMemory:
    found = process_memory()
    if found is None:
        pytest.skip("this system has no process_vm_readv")
    return found


@pytest.fixture(scope="module")
def others_memory() -> None:
    if not may_pull():
        pytest.skip("this system forbids to read the memory of a child")


# -- from this process -----------------------------------------------------------------------


def test_one_part(memory: ProcessMemory) -> None:
    data, into = bytearray(os.urandom(5000)), room(5000)
    lease = memory.lease()
    where = decode_announcement(lease.announce([memoryview(data)]))
    assert where.length == 5000
    assert memory.pull(OWN, where, [into])
    assert into == data


@pytest.mark.parametrize("lengths", [[6000], [1, 5999], [2000, 1, 3999], [1] * 60 + [5940]])
@pytest.mark.parametrize("parts", [[6000], [5999, 1], [3000, 2999, 1], [100] * 60])
def test_parts_and_destinations(
    memory: ProcessMemory, lengths: list[int], parts: list[int]
) -> None:
    datas = [os.urandom(length) for length in parts]
    into = [room(length) for length in lengths]
    views = [memoryview(bytearray(data)) for data in datas]
    where = decode_announcement(memory.lease().announce(views))
    assert memory.pull(OWN, where, into)
    assert b"".join(into) == b"".join(datas)


def test_views_that_are_read_only(memory: ProcessMemory) -> None:
    data = np.arange(1000, dtype=np.int32)
    data.flags.writeable = False
    view = data.view(np.uint8).data[4:]
    assert view.readonly
    assert address_of(view) == data.ctypes.data + 4
    into = room(3996)
    assert memory.pull(OWN, decode_announcement(memory.lease().announce([view])), [into])
    assert into == view


def test_withdrawn(memory: ProcessMemory) -> None:
    view = memoryview(bytearray(100))
    lease = memory.lease()
    where = decode_announcement(lease.announce([view]))
    lease.revoke()
    assert not memory.pull(OWN, where, [room(100)])
    again = decode_announcement(lease.announce([view]))
    assert again.generation != where.generation
    assert memory.pull(OWN, again, [room(100)])
    assert not memory.pull(OWN, where, [room(100)])
    lease.release()
    assert not memory.pull(OWN, again, [room(100)])


def test_the_next_lease_of_the_same_word(memory: ProcessMemory) -> None:
    view = memoryview(bytearray(100))
    first = memory.lease()
    old = decode_announcement(first.announce([view]))
    first.release()
    second = memory.lease()
    new = decode_announcement(second.announce([view]))
    assert new.word == old.word
    assert not memory.pull(OWN, old, [room(100)])
    assert memory.pull(OWN, new, [room(100)])


def test_a_word_that_was_not_used_keeps_its_generation(memory: ProcessMemory) -> None:
    lease = memory.lease()
    lease.revoke()
    lease.release()
    view = memoryview(bytearray(1))
    where = decode_announcement(memory.lease().announce([view]))
    assert memory.pull(OWN, where, [room(1)])


def test_generations_count_modulo_two_to_the_64(memory: ProcessMemory) -> None:
    view, lease = memoryview(bytearray(1)), memory.lease()
    word = decode_announcement(lease.announce([view])).word
    ctypes.c_uint64.from_address(word).value = (1 << 64) - 1
    lease.revoke()
    first = decode_announcement(lease.announce([view]))
    assert first.generation == 0
    assert memory.pull(OWN, first, [room(1)])
    last = Announcement(word, (1 << 64) - 1, first.parts)
    assert not memory.pull(OWN, last, [room(1)])


def test_many_leases_have_words_of_their_own(memory: ProcessMemory) -> None:
    view = memoryview(bytearray(1))
    leases = [memory.lease() for _ in range(1500)]
    found = [decode_announcement(lease.announce([view])) for lease in leases]
    assert len({where.word for where in found}) == 1500
    assert len({where.generation for where in found}) == 1500
    leases[700].revoke()
    pulled = [memory.pull(OWN, where, [room(1)]) for where in found]
    assert pulled == [number != 700 for number in range(1500)]


def test_a_word_that_is_not_mapped(memory: ProcessMemory) -> None:
    view = memoryview(bytearray(100))
    real = decode_announcement(memory.lease().announce([view]))
    with pytest.raises(OSError, match="Bad address") as caught:
        memory.pull(OWN, Announcement(8, 1, real.parts), [room(100)])
    assert caught.value.errno == errno.EFAULT


def test_a_part_that_is_not_mapped(memory: ProcessMemory) -> None:
    """An honest owner withdraws memory before it gives it back to the system."""
    view, page = memoryview(bytearray(100)), mmap.PAGESIZE
    lease = memory.lease()
    real = decode_announcement(lease.announce([view]))
    torn = mmap.mmap(-1, 2 * page)
    address = address_of(memoryview(torn))
    torn.close()
    parts = [*real.parts, (address, 2 * page)]
    where = Announcement(real.word, real.generation, parts)
    with pytest.raises(OSError, match=r"only \d+ of \d+ bytes"):
        memory.pull(OWN, where, [room(100 + 2 * page)])
    lease.revoke()
    assert not memory.pull(OWN, where, [room(100 + 2 * page)])


def test_proofs(memory: ProcessMemory) -> None:
    shown = memory.show(PROOF)
    pid, address = shown.place
    assert pid == OWN
    assert memory.prove(pid, address, PROOF)
    assert not memory.prove(pid, address + 1, PROOF)
    assert not memory.prove(pid, address, PROOF[::-1])
    assert not memory.prove(pid, 8, PROOF)
    assert not memory.prove(pid, (1 << 64) - 1, PROOF)
    assert not memory.prove((1 << 31) - 1, address, PROOF)


# -- from other processes ----------------------------------------------------------------------


@pytest.mark.usefixtures("others_memory")
def test_a_child(memory: ProcessMemory) -> None:
    into = np.zeros(50_000, np.int32)
    view = into.view(np.uint8).data
    with owner() as (process, where, (pid, address)):
        assert pid == process.pid
        assert memory.prove(pid, address, PROOF)
        assert not memory.prove(pid, address, bytes(PROOF_BYTES))
        assert not memory.prove(OWN, address, PROOF)
        assert memory.pull(pid, where, [view])
        assert (into == np.arange(50_000)).all()
        process.send_signal(signal.SIGSTOP)
        wait_stopped(pid)
        assert memory.pull(pid, where, [view[:4], view[4:]])
        process.send_signal(signal.SIGCONT)
        tell(process, "lease.revoke(); data[:] = -1")
        assert not memory.pull(pid, where, [view])
        process.kill()
        process.wait(LIMIT_S)
        assert not memory.prove(pid, address, PROOF)
        with pytest.raises(ProcessLookupError):
            memory.pull(pid, where, [view])


@pytest.mark.usefixtures("others_memory")
def test_the_program_of_a_process_is_replaced(memory: ProcessMemory) -> None:
    with owner() as (process, where, (pid, _)):
        tell(process, "print('done', flush=True); os.execvp('sleep', ['sleep', '1000'])")
        comm = Path(f"/proc/{pid}/comm")
        until(lambda: comm.read_text() == "sleep\n")
        with suppress(OSError):
            assert not memory.pull(pid, where, [room(where.length)])


@pytest.mark.usefixtures("others_memory")
def test_a_fork_of_the_owner_changes_nothing_for_the_reader(memory: ProcessMemory) -> None:
    """The child has a copy of memory and word; the reader reads those of the parent."""
    fork = "if os.fork() == 0:\\n data[:] = -1\\n lease.revoke()\\n os._exit(0)"
    into = np.zeros(50_000, np.int32)
    with owner() as (process, where, (pid, _)):
        tell(process, f"exec('{fork}'); os.wait()")
        assert memory.pull(pid, where, [into.view(np.uint8).data])
        assert (into == np.arange(50_000)).all()
        tell(process, "lease.revoke()")
        assert not memory.pull(pid, where, [room(where.length)])


def test_the_ancestry_and_the_machine_of_a_forked_child(memory: ProcessMemory) -> None:
    own = memory.ancestry
    assert own[:2] == (OWN, os.getppid())
    assert own is memory.ancestry
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, repr((*memory.ancestry[:2], memory.machine)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert 0 < memory.machine < 1 << 16
    assert os.read(read, 100) == repr((child, OWN, memory.machine)).encode()
    os.close(read)
    os.close(write)


# -- who may read ------------------------------------------------------------------------------


class Prctl:
    """Notes the calls, and answers them."""

    def __init__(self, answer: int) -> None:
        self.calls: list[list[int]] = []
        self._answer = answer

    def prctl(self, option: int, *arguments: Any) -> int:
        self.calls.append([option, *(argument.value for argument in arguments)])
        return self._answer


@pytest.mark.parametrize(("pid", "argument"), [(1234, 1234), (-1, (1 << 64) - 1)])
def test_a_process_is_named(
    memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch, pid: int, argument: int
) -> None:
    libc = Prctl(0)
    monkeypatch.setattr(memory, "_libc", libc)
    assert memory.named is None
    memory.name(pid)
    assert libc.calls == [[0x59616D61, argument, 0, 0, 0]]
    assert memory.named == pid


def test_a_process_that_cannot_be_named(
    memory: ProcessMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that no process has: the one permission is still there for others."""
    monkeypatch.setattr(memory, "_libc", Prctl(-1))
    memory.name(1234)
    assert memory.named is None


@pytest.mark.parametrize(
    ("text", "scope"), [("0\n", 0), ("1\n", 1), ("3\n", 3), ("", None), ("x", None), (None, None)]
)
def test_the_scope_of_yama(
    memory: ProcessMemory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str | None,
    scope: int | None,
) -> None:
    path = tmp_path / "ptrace_scope"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(module, "_YAMA", path)
    assert memory.scope == scope


def test_what_may_be_on_this_machine(memory: ProcessMemory) -> None:
    class Ends:
        local = Address("10.0.0.1", 5000)
        remote = Address("10.0.0.1", 6000)

    ends: Any = Ends()
    assert memory.reaches(ends)
    ends.remote = Address("10.0.0.2", 5000)
    assert not memory.reaches(ends)


def test_systems_without_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_memory() is None
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", repr)  # a library without functions
    assert process_memory() is None


def test_encoding_fits(memory: ProcessMemory) -> None:
    lease, view = memory.lease(), memoryview(bytearray(8))
    where = decode_announcement(lease.announce([view, view[4:]]))
    parts = [(address_of(view), 8), (address_of(view) + 4, 4)]
    assert lease.announce([view, view[4:]]) == encode_announcement(
        where.word, where.generation, parts
    )
