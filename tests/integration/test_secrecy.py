"""What a device on the path learns of a run, and what it can change."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import pccl
from pccl.addresses import parse_address
from pccl.bindings.diloco import DiLoCo
from pccl.errors import PCCLError
from pccl.protocol.codec import encode
from pccl.protocol.handshake.exchange import PROOF_BYTES, REFUSAL
from pccl.protocol.handshake.opening import OPENING_BYTES, Opening
from pccl.protocol.messages import Goodbye
from tests.support.patience import LIMIT_S, patient
from tests.support.ports import free_ports
from tests.support.waiting import until
from tests.support.wiretap import Meddle, Wiretap

TOKEN = "9f3c1e5b7a2d4860b1c8e0f7"
NAMES = ("alice-of-berlin", "bob-of-lagos")
MARK = 0.7390851332151607
"""A number that all tensors are full of."""

Work = Callable[[pccl.Communicator, int], Any]


class Run:
    """A master and two peers; all that they say passes through wiretaps."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        meddle: Meddle | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.master = stack.enter_context(pccl.MasterNode(f"{host}:0", token=TOKEN))
        self.door = stack.enter_context(Wiretap(self.master.address, meddle))
        self.taps = [self.door]
        self.comms: list[pccl.Communicator] = []
        for name, port in zip(NAMES, free_ports(2), strict=True):
            listen = f"{host}:{port}"
            tap = stack.enter_context(Wiretap(listen, meddle))
            self.taps.append(tap)
            comm = pccl.Communicator(
                self.door.address, token=TOKEN, name=name, listen=listen, advertise=tap.address
            )
            self.comms.append(stack.enter_context(comm))
        self._threads = stack.enter_context(ThreadPoolExecutor(2))

    def both(self, call: Work) -> list[Any]:
        calls = [self._threads.submit(call, comm, rank) for rank, comm in enumerate(self.comms)]
        return [one.result(LIMIT_S) for one in calls]

    def heard(self) -> bytes:
        return b"".join(tap.heard for tap in self.taps)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    monkeypatch.setenv("PCCL_LOCAL", "tcp")
    with contextlib.ExitStack() as stack:
        yield stack


def use(comm: pccl.Communicator, rank: int) -> None:
    """Join, reduce, and share state."""
    comm.connect(min_peers=2)
    tensor = np.full(50_000, MARK)
    comm.all_reduce(tensor, np.empty_like(tensor))
    weights = np.full(50_000, MARK if rank else 0.0)
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "the-secret-weights")])
    state.revision = rank + 1
    comm.sync_shared_state(state)


def train(comm: pccl.Communicator, rank: int) -> None:
    """Join, and train with DiLoCo."""
    model = torch.nn.Linear(200, 200, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, MARK)
    inner = torch.optim.SGD(model.parameters(), lr=float(rank))
    named = [("the-secret-weights", model.weight), ("bias", model.bias)]
    with DiLoCo(named, inner=inner, comm=comm, sync_every=1, min_peers=2) as optimizer:
        optimizer.join()
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward(MARK * model.weight.sum())
            optimizer.step()
        optimizer.finish()


def secrets_in(heard: bytes) -> set[str]:
    mark = np.full(2, MARK).tobytes()
    words = {"a tensor": mark, "the token": TOKEN.encode(), "a name": NAMES[0].encode()}
    words |= {"another name": NAMES[1].encode(), "a state's name": b"the-secret-weights"}
    return {what for what, word in words.items() if word in heard}


def own_address() -> str:
    """An address of this machine that is not loopback; empty if it has none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))  # sends nothing
        host = str(sock.getsockname()[0])
        return "" if host.startswith("127.") else host
    return ""


def check_secret(run: Run) -> None:
    heard = run.heard()
    assert len(heard) > 600_000, "all of the run went by"
    assert secrets_in(heard) == set()
    said = [bytes(side) for tap in run.taps for side in (*tap.sent, *tap.answered)]
    assert all(side.startswith(b"PCCL") for side in said if side)


@pytest.mark.skipif(not own_address(), reason="this machine has no address but loopback")
@pytest.mark.parametrize("work", [use, train])
def test_what_does_not_stay_on_loopback_is_encrypted_unasked(
    stack: contextlib.ExitStack, work: Work
) -> None:
    run = Run(stack, host=own_address())
    run.both(work)
    check_secret(run)


@pytest.mark.parametrize("work", [use, train])
def test_a_recorded_run_has_nothing_but_handshakes_and_ciphertext(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, work: Work
) -> None:
    monkeypatch.setenv("PCCL_ENCRYPT", "1")
    run = Run(stack)
    run.both(work)
    check_secret(run)


@pytest.mark.parametrize("work", [use, train])
def test_inside_one_machine_the_same_is_in_the_clear(
    stack: contextlib.ExitStack, work: Work
) -> None:
    """So the search above finds what there is to find."""
    run = Run(stack)
    run.both(work)
    assert secrets_in(run.heard()) == {"a tensor", "a name", "another name"}


KEY = b"\x07" * 32


@pytest.mark.parametrize("sent", [True, False], ids=["the dialler's", "the acceptor's"])
@pytest.mark.parametrize(
    "changes",
    [
        {"flags": 0},
        {"share": KEY},
        {"key": KEY},
        {"term": 7},
        {"run": KEY[:16]},
        {"source": 3},
        {"certificate": KEY * 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_nobody_on_the_path_can_change_an_opening(
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    *,
    sent: bool,
) -> None:
    """Not to turn encryption off, nor to put another key in the place of one's own."""
    monkeypatch.setenv("PCCL_ENCRYPT", "1")
    changed: set[int] = set()

    def change(number: int, is_diallers: bool, data: bytes) -> bytes:
        if is_diallers is not sent or number in changed:
            return data
        changed.add(number)
        opening = Opening.decode(data[:OPENING_BYTES])
        return replace(opening, **changes).encode() + data[OPENING_BYTES:]

    run = Run(stack, change)
    with pytest.raises(PCCLError):
        run.comms[0].connect(min_peers=1, timeout_s=patient(2.0))
    assert changed


def test_a_recorded_handshake_cannot_be_used_again(stack: contextlib.ExitStack) -> None:
    run = Run(stack)
    run.both(lambda comm, rank: comm.connect(min_peers=2))
    recorded = bytes(run.door.sent[0][: OPENING_BYTES + PROOF_BYTES])
    address = parse_address(run.master.address)
    with socket.create_connection((address.host, address.port), LIMIT_S) as again:
        again.sendall(recorded)
        answer = b""
        while data := again.recv(4096):
            answer += data
    assert answer[OPENING_BYTES:] == REFUSAL


def test_nobody_on_the_path_can_say_goodbye_for_a_peer(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was put into the stream ends the connection; the peer dials again, and stays."""
    monkeypatch.setenv("PCCL_ENCRYPT", "1")
    injects, injected = threading.Event(), threading.Event()

    def inject(number: int, is_diallers: bool, data: bytes) -> bytes:
        if is_diallers and injects.is_set() and not injected.is_set():
            injected.set()
            return encode(Goodbye()) + data
        return data

    run = Run(stack)
    run.door.meddle = inject
    run.both(lambda comm, rank: comm.connect(min_peers=2))
    dials = len(run.door.sent)
    injects.set()
    assert injected.wait(LIMIT_S)
    ids = [comm.status().peer_id for comm in run.comms]
    until(lambda: len(run.door.sent) > dials)
    run.both(lambda comm, rank: comm.all_reduce(np.ones(8), np.empty(8)))
    size = pccl.Attribute.GLOBAL_WORLD_SIZE
    assert [comm.get_attribute(size) for comm in run.comms] == [2, 2]
    assert [comm.status().peer_id for comm in run.comms] == ids
