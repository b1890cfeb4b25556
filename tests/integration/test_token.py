"""The run's token over real sockets: who has it works as ever, who has not is told just that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pccl
from pccl import Timing
from pccl.errors import LinkError, MasterLost, NotAdmitted
from pccl.protocol.checksum import seal
from pccl.protocol.codec import encode
from pccl.protocol.handshake.exchange import PROOF_BYTES, REFUSAL, Handshake
from pccl.protocol.handshake.opening import OPENING_BYTES, Channel, Opening
from pccl.protocol.messages import Refused, Register, Registered, Reported, Resume, Resumed
from pccl.protocol.types import PeerId
from tests.integration.conftest import QUICK, Run
from tests.support.claimant import Claimant, alone, greet, returning
from tests.support.insides import (
    engine_of,
    lanes_of,
    machine_of,
    master_port,
    port_of,
    registered,
    server_of,
    signer_of_member,
)
from tests.support.patience import LIMIT_S, patient
from tests.support.secret_files import keep
from tests.support.secrets import as_sent, secrets_of, signer_of
from tests.support.waiting import until

TOKEN = "the token of these tests"
OTHER = "the token of somebody else"
AT_ONCE_S = patient(3.0)


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_TOKEN", raising=False)
    monkeypatch.delenv("PCCL_TOKEN_FILE", raising=False)


@contextmanager
def master_of(token: str | None, timing: Timing = QUICK) -> Generator[pccl.MasterNode]:
    with pccl.MasterNode("127.0.0.1:0", timing=timing, token=token) as node:
        yield node


def join(address: str, token: str | None, timing: Timing = QUICK) -> pccl.Communicator:
    member = pccl.Communicator(address, timing=timing, token=token)
    member.connect(n_attempts=3)
    member.update_topology()  # the admission counts as this one: the next is a real call
    return member


@pytest.fixture
def pair(new_run: Callable[..., Run]) -> Run:
    """Two members of a run with a token."""
    return new_run(2, token=TOKEN)


def reduce(run: Run) -> None:
    arrays = [np.full(100_000, rank + 1.0, np.float32) for rank in range(len(run.members))]
    run.reduce(arrays)
    assert all((array == sum(range(1, len(arrays) + 1))).all() for array in arrays)


def peers_of(node: pccl.MasterNode) -> int:
    return len(machine_of(node).membership.peers)


def dial(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, LIMIT_S)


def rest_of(sock: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with suppress(ConnectionError):
        while more := sock.recv(1 << 16):
            data += more
    return data


# -- with the token --------------------------------------------------------------------------------


def test_two_peers_that_have_it_reduce(pair: Run) -> None:
    reduce(pair)


def test_from_the_environment_and_from_a_file(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keep(tmp_path / "token", f"{TOKEN}\n")
    monkeypatch.setenv("PCCL_TOKEN", TOKEN)
    run = new_run()
    monkeypatch.delenv("PCCL_TOKEN")
    with pytest.raises(NotAdmitted):
        join(run.master.address, None)
    monkeypatch.setenv("PCCL_TOKEN_FILE", str(tmp_path / "token"))
    for _ in range(2):
        run.join()
    reduce(run)


def test_masters_one_after_another_on_one_port() -> None:
    with master_of(TOKEN) as node:
        address = node.address
        join(address, TOKEN).close()
    for token in (OTHER, None, TOKEN):
        with pccl.MasterNode(address, timing=QUICK, token=token):
            join(address, token).close()


def test_a_member_resumes(pair: Run) -> None:
    """A control connection that breaks is made again, with a new handshake."""
    streams = server_of(pair.master)._streams  # pyright: ignore[reportPrivateUsage]
    before = set(streams)
    first = next(iter(streams.values()))
    node_io = pair.members[0]._session._io  # pyright: ignore[reportPrivateUsage]
    node_io.loop.call_soon_threadsafe(first.connection.abort)
    until(lambda: len(streams) == 2 and set(streams) != before)
    reduce(pair)
    assert pair.registered == 2


# -- without it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "here", "words", "log"),
    [
        (TOKEN, OTHER, "the other side does not accept this token: set PCCL_TOKEN", "its token is"),
        (TOKEN, None, "requires a token: set PCCL_TOKEN, or token=", "it has no token"),
        (None, TOKEN, "has none: start the master with the same token", "this side has none"),
    ],
    ids=["wrong", "missing", "superfluous"],
)
def test_a_newcomer_is_told_at_once(
    new_run: Callable[..., Run],
    there: str | None,
    here: str | None,
    words: str,
    log: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = new_run(2, token=there)
    caplog.clear()
    began_s = time.monotonic()
    with pytest.raises(NotAdmitted, match=words):
        join(run.master.address, here)
    assert time.monotonic() - began_s < AT_ONCE_S
    reduce(run)
    assert run.registered == 2
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [log in warning.getMessage() for warning in warnings] == [True]


def test_nothing_is_parsed_before_the_proof() -> None:
    """A valid Register behind an opening without a proof, or with a wrong one, registers nobody."""
    opening = Opening(Channel.CONTROL, security=1).encode()
    register = encode(Register(0, "", 1))
    with master_of(TOKEN) as node:
        for proof in (b"", REFUSAL, seal(b"\1" * 32)):
            with closing(dial(master_port(node))) as sock:
                sock.sendall(opening + proof + register)
                sock.shutdown(socket.SHUT_WR)
                answer = rest_of(sock)
            assert answer[OPENING_BYTES:] in (b"", REFUSAL)
            assert Opening.decode(answer[:OPENING_BYTES]).security == 1
        assert peers_of(node) == 0
        with Claimant(node.address, TOKEN.encode()) as newcomer:  # the same with a proof
            newcomer.send(register)
            assert newcomer.hears(Registered) is not None
        assert peers_of(node) == 1


def test_a_resume_without_the_token(pair: Run) -> None:
    """Who has overheard a peer's place still cannot take it."""
    machine = engine_of(pair.members[0]).machine
    resume = encode(Resume(machine.peer, 0))
    opening = Opening(Channel.CONTROL, machine.run, 1, machine.peer, security=1)
    with closing(dial(master_port(pair.master))) as sock:
        sock.sendall(as_sent(opening) + REFUSAL + resume)
        assert rest_of(sock)[OPENING_BYTES:] == REFUSAL
    reduce(pair)


def test_a_resume_with_the_token_and_another_key(pair: Run) -> None:
    machine = engine_of(pair.members[0]).machine
    with Claimant(pair.master.address, TOKEN.encode()) as thief:
        thief.say(Resume(machine.peer, 0))
        refused = thief.hears(Refused)
    assert refused is not None
    assert refused.reason == "this master does not know this peer"
    reduce(pair)


def test_a_return_to_a_new_master_with_another_key(tmp_path: Path) -> None:
    """The master has stored the keys of its members, and a thief comes first."""
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK, token=TOKEN, state=tmp_path) as node:
        address = node.address
        member = join(address, TOKEN)
    run = engine_of(member).machine.own.run
    with member, pccl.MasterNode(address, timing=QUICK, token=TOKEN, state=tmp_path) as node:
        with Claimant(address, TOKEN.encode()) as thief:
            thief.say(returning(run, member.peer_id), alone(member.peer_id, thief.key), Reported())
            assert thief.hears(Resumed) is None
        member.update_topology()
        assert member.peer_id == 1
        assert list(machine_of(node).membership.peers) == [1]


@pytest.mark.parametrize("source", [2, 99])
@pytest.mark.parametrize("signed", [b"a", b"x", b""], ids=["its own", "another's", "none"])
def test_a_lane_cannot_be_opened(pair: Run, source: int, signed: bytes) -> None:
    """With the token, and with a certificate, but not as a member, or without a fitting one."""
    first = pair.members[0]
    lanes = lanes_of(first)
    opening = Opening(Channel.LANE, pair.machine.run, 1, PeerId(source), PeerId(1))
    if signed:
        opening = registered(pair.master, opening, signer_of(signed).key)
    with closing(dial(port_of(first))) as sock:
        handshake = Handshake.dial(opening, secrets_of(TOKEN.encode()))
        if (source, signed) == (99, b"a"):  # the others fail for the right reason
            remote = greet(sock, handshake)
            assert (remote.source, remote.target, remote.run) == (1, 99, opening.run)
            until(lambda: lanes_of(first) == lanes + 1)
        else:
            sock.sendall(handshake.take_output() + seal(b"\1" * 96))
            assert len(rest_of(sock)) in (0, OPENING_BYTES)
            assert lanes_of(first) == lanes == 1
    reduce(pair)


def test_a_peer_that_has_left_the_run_opens_no_lane(
    pair: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Its certificate is still good, and it has the token."""
    caplog.set_level("INFO", "pccl.link")
    third = pair.join()
    signer = signer_of_member(third)
    pair.members.remove(third)
    third.close()
    first = pair.members[0]
    until(lambda: lanes_of(first) == 1)
    opening = Opening(Channel.LANE, pair.machine.run, 1, PeerId(3), PeerId(1))
    opening = registered(pair.master, opening, signer.key)
    with closing(dial(port_of(first))) as sock:
        secrets = replace(secrets_of(TOKEN.encode()), signer=signer)
        sock.sendall(Handshake.dial(opening, secrets).take_output())
        assert len(rest_of(sock)) in (0, OPENING_BYTES)
    until(lambda: "peer 3 has left the run" in caplog.text)
    assert lanes_of(first) == 1


# -- an impostor at the master's address -----------------------------------------------------------


@contextmanager
def impostor(serve: Callable[[socket.socket], object], port: int = 0) -> Generator[str]:
    """Somebody who answers at an address."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def run() -> None:
            with suppress(OSError):  # it is shut down in the end
                while True:
                    with closing(server.accept()[0]) as sock, suppress(OSError, AssertionError):
                        sock.settimeout(LIMIT_S)
                        serve(sock)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)


def test_who_answers_without_knowing_the_token_learns_nothing_of_use() -> None:
    heard: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        opening = sock.recv(OPENING_BYTES, socket.MSG_WAITALL)
        sock.sendall(as_sent(Opening(Channel.CONTROL, b"r" * 16, 1, security=1)))
        heard.append(opening + sock.recv(PROOF_BYTES, socket.MSG_WAITALL))
        sock.sendall(seal(b"\1" * 96))
        heard.append(rest_of(sock))

    words = "does not know the token: is the address right"
    with impostor(serve) as address, pytest.raises(NotAdmitted, match=words):
        join(address, TOKEN)
    assert [len(data) for data in heard] == [OPENING_BYTES + PROOF_BYTES, 0]


def test_a_member_is_not_turned_away_by_an_impostor() -> None:
    """It tries on until its master counts as lost, and never resumes with somebody unproven."""
    timing = Timing(heartbeat_s=0.1, tick_s=0.05, master_lost_s=0.5, connect_retry_s=0.01)
    heard: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        sock.recv(OPENING_BYTES, socket.MSG_WAITALL)
        sock.sendall(as_sent(Opening(Channel.CONTROL, b"r" * 16, 1, security=1)))
        sock.recv(PROOF_BYTES, socket.MSG_WAITALL)
        sock.sendall(REFUSAL)
        heard.append(rest_of(sock))

    node = pccl.MasterNode("127.0.0.1:0", timing=timing, token=TOKEN)
    node.run()
    _, port = master_port(node)
    with join(node.address, TOKEN, timing) as member:
        node.interrupt()
        with impostor(serve, port), pytest.raises(MasterLost, match="no message from the master"):
            member.update_topology()
    assert len(heard) > 1
    assert set(heard) == {b""}


def test_a_new_master_of_the_same_token_takes_up_the_run() -> None:
    with master_of(TOKEN) as node:
        address = node.address
        member = join(address, TOKEN)
    with member, pccl.MasterNode(address, timing=QUICK, token=TOKEN):
        member.update_topology()


def test_a_master_that_has_kept_another_run(tmp_path: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0", timing=QUICK, token=TOKEN, state=tmp_path):
        pass
    with master_of(TOKEN) as node:
        address = node.address
        member = join(address, TOKEN)
    with (
        member,
        pccl.MasterNode(address, timing=QUICK, token=TOKEN, state=tmp_path),
        pytest.raises(
            MasterLost, match="does not accept this peer: this master coordinates another"
        ),
    ):
        member.update_topology()


# -- who may listen --------------------------------------------------------------------------------


def test_listening_to_everybody_without_a_token_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pccl.MasterNode("0.0.0.0:0"):
        pass
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    words = record.getMessage()
    assert words.startswith("no token: any process that reaches 0.0.0.0:")
    assert "PCCL_TOKEN" in words
    caplog.clear()
    with pccl.MasterNode("0.0.0.0:0", token=TOKEN), master_of(None):
        pass
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "is empty"), ("short", "too short"), (b"fifteen bytes !", "too short")],
)
def test_a_short_token_is_refused(token: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pccl.MasterNode("127.0.0.1:0", token=token)


def test_two_masters_on_one_port() -> None:
    with master_of(TOKEN) as node, pytest.raises(LinkError, match="address already in use"):
        pccl.MasterNode(node.address, token=TOKEN).run()
