"""Whoever was admitted, or uses a member's id: a bad word costs one connection, not the run."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import numpy as np
import pytest

import pccl
from pccl.machines.master.ballots import finals, open_ballots
from pccl.protocol import codec
from pccl.protocol.checksum import SEAL_BYTES, payload_hash, seal
from pccl.protocol.codec import encode
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import HEADER_BYTES, FrameHeader, FrameKind, encode_header
from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import (
    EARLY_STORE_BYTES_MAX,
    PROGRESS_BATCH_MAX,
    Timing,
)
from pccl.protocol.messages import (
    Admitted,
    Heartbeat,
    LinkReport,
    MasterHeartbeat,
    Message,
    OperationDone,
    OperationEnded,
    OperationRequest,
    OutcomeQuery,
    Progress,
    Register,
    Resume,
    RoundRequest,
    Withdraw,
)
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp, RoundId, RoundKind
from tests.integration.conftest import Array, Run
from tests.support.claimant import Claimant, greet
from tests.support.insides import engine_of, port_of
from tests.support.patience import LIMIT_S
from tests.support.strangers import is_closed, send

pytestmark = pytest.mark.usefixtures("no_errors")

TIMING = Timing(
    dial_s=1.0, resume_s=0.2, tick_s=0.05, heartbeat_s=0.1, redial_min_s=0.005, redial_max_s=0.02
)
GROUP = 7
"""Of the forged members: nobody else is in it, so nobody else has to do what they ask for."""
DESCRIPTOR = Descriptor(DataType.FLOAT, ReduceOp.SUM, 10)


@pytest.fixture
def run(run_of: Callable[..., Run]) -> Iterator[Run]:
    found = run_of(3, TIMING)
    yield found
    found.until(lambda: found.registered == 3)
    found.check()
    assert [member.peer_id for member in found.members] == [1, 2, 3]


# -- members that the master is wrong to trust --------------------------------------


class ForgedMember(Claimant):
    """A member by hand: it has been admitted, in a group of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.master.address)
        self.say(Register(GROUP, "", 1))
        run.until(lambda: run.registered == 4)
        admitted = run.admit(lambda: self.hears(Admitted))
        assert admitted is not None
        self.view = admitted.roster.view
        self.rounds = {count.kind: count.n for count in admitted.rounds}

    def say(self, *messages: Message) -> None:
        send(self.sock, b"".join(map(encode, messages)))

    def operation(
        self, tag: int = 0, n: int = 0, group: int = GROUP, term: int = 1, later: int = 0
    ) -> OperationId:
        return OperationId(term, group, self.view + later, tag, n)


@pytest.fixture
def forged(run: Run) -> Iterator[ForgedMember]:
    with ForgedMember(run) as member:
        yield member


def request(operation: OperationId) -> OperationRequest:
    return OperationRequest(operation, DESCRIPTOR)


ROUND_FAR_AHEAD = RoundRequest(RoundId(RoundKind.PEERS_PENDING, 1 << 40))
MISDEEDS: dict[str, Callable[[ForgedMember], list[Message]]] = {
    "a future view": lambda m: [request(m.operation(later=1))],
    "a number that is not the next": lambda m: [request(m.operation(n=1))],
    "the largest number": lambda m: [request(m.operation(n=(1 << 64) - 1))],
    "a group of others": lambda m: [request(m.operation(group=0))],
    "a group of nobody": lambda m: [request(m.operation(group=99))],
    "another term": lambda m: [request(m.operation(term=2))],
    "done with nothing": lambda m: [OperationDone(m.operation(), b"digest")],
    "what nobody has begun": lambda m: [OutcomeQuery(m.operation(tag=5))],
    "a withdrawal from others": lambda m: [Withdraw(m.operation(group=0), "mischief")],
    "a round far ahead": lambda m: [ROUND_FAR_AHEAD],
    "an answer that it has": lambda m: [RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 0))],
    "a second registration": lambda m: [Register(GROUP, "", 1)],
    "coming back on the spot": lambda m: [Resume(PeerId(1), 0)],
    "what only masters say": lambda m: [OperationEnded(m.operation(), None, "", (), 1)],
    "a heartbeat of a master": lambda m: [MasterHeartbeat()],
}


@pytest.mark.parametrize("misdeed", MISDEEDS.values(), ids=MISDEEDS)
def test_misdeeds_of_a_member(
    run: Run, forged: ForgedMember, misdeed: Callable[[ForgedMember], list[Message]]
) -> None:
    forged.say(*misdeed(forged))
    assert is_closed(forged.sock)
    run.check()


def test_garbage_of_a_member(run: Run, forged: ForgedMember) -> None:
    send(forged.sock, codec.frame(4, b"\xc1" * (32 << 10)))
    assert is_closed(forged.sock)
    run.check()


def test_what_costs_a_member_nothing(run: Run, forged: ForgedMember) -> None:
    """Old news and news of what is not there: ignored, as after a reconnect."""
    unknown = OperationId(1, 0, 1, 12345, 6)
    forged.say(
        *[
            Heartbeat(
                tuple(Progress(unknown, 1, 2, 3) for _ in range(PROGRESS_BATCH_MAX)),
                (unknown, forged.operation(tag=3)),
                (RoundId(RoundKind.UPDATE_TOPOLOGY, 99),),
            )
            for _ in range(100)  # almost 1 MiB
        ],
        *[LinkReport(PeerId(peer), peer % 2 == 0, "a reason\n") for peer in range(1000)],
    )
    run.check()
    forged.say(Withdraw(forged.operation(), "it is still there"))
    ended = forged.hears(OperationEnded)
    assert ended is not None
    assert ended.operation == forged.operation()


def test_more_operations_than_anybody_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_ballots, "OPERATIONS_OPEN_MAX", 1000)
    forged = ForgedMember(run)
    with closing(forged.sock):
        forged.say(*[request(forged.operation(tag)) for tag in range(1000)])
        run.check()
        forged.say(request(forged.operation(1000)))
        assert is_closed(forged.sock)
    run.check()


def test_a_member_that_does_not_read(
    run: Run, forged: ForgedMember, caplog: pytest.LogCaptureFixture
) -> None:
    forged.say(Withdraw(forged.operation(), "x" * 4000))
    forged.hears(OperationEnded)
    questions = encode(OutcomeQuery(forged.operation())) * 100
    forged.sock.settimeout(LIMIT_S)
    for _ in range(1000):  # each is answered with the 4000 characters
        send(forged.sock, questions)
        if "does not read" in caplog.text:
            break
    run.until(lambda: "the other side does not read its control messages" in caplog.text)
    assert caplog.text.count("the other side does not read its control messages") == 1
    run.check()


def test_a_member_that_acknowledges_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finals, "OWED_MAX", 100)
    forged = ForgedMember(run)
    with closing(forged.sock):
        forged.say(*[Withdraw(forged.operation(tag), "enough") for tag in range(101)])
        assert is_closed(forged.sock)
        run.check()


# -- impostors at the port of a peer -----------------------------------------------

UPSTREAM, DOWNSTREAM = 3, 2
"""Of peer 1, in the ring of three."""
N_ELEMENTS = 30_000
OFFSET, LENGTH = 160_000, 80_000
"""The first segment of the last chunk: what peer 1 receives at step 0."""
_tags = itertools.count(1000)


class Victim:
    """Peer 1 has asked for an operation, the others have not yet: its memory lies open."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._engine = engine_of(run.members[0])
        roster = self._engine.roster
        assert roster is not None
        self.operation = OperationId(1, 0, roster.view, next(_tags), 0)
        self._guarded = np.full(N_ELEMENTS + 2000, -7, np.int64)
        self._call = self._reduce(0, self._guarded[1000:-1000])
        run.until(lambda: self.operation in self._engine.data_plane.transfers)

    def _reduce(self, rank: int, result: Array) -> Future[pccl.ReduceInfo]:
        member, send = self.run.members[rank], np.full(N_ELEMENTS, rank + 1, np.int64)
        return self.run.start(
            member.all_reduce, send, result, tag=self.operation.tag, algorithm="ring"
        )

    def attack(self, source: int, data: bytes, lane: int = 0) -> socket.socket:
        """All at once: lane 0 is the real peer's, who comes back soon and ends this one then."""
        run, victim = self.run, PeerId(1)
        opening = Opening(Channel.LANE, run.machine.run, 1, PeerId(source), victim, lane)
        sock = socket.create_connection(port_of(self.run.members[0]), LIMIT_S)
        greet(sock, run.greeting(opening))
        send(sock, data)
        return sock

    def check(self) -> None:
        """The others ask, too: everybody gets the right result, and nothing beside it changed."""
        results = [np.zeros(N_ELEMENTS, np.int64) for _ in range(2)]
        calls = [self._call, *(self._reduce(rank + 1, r) for rank, r in enumerate(results))]
        for call in calls:
            assert call.result(LIMIT_S).contributors == (1, 2, 3)
        assert all((result == 6).all() for result in (*results, self._guarded[1000:-1000]))
        assert (self._guarded[:1000] == -7).all()
        assert (self._guarded[-1000:] == -7).all()


@pytest.fixture
def victim(run: Run) -> Iterator[Victim]:
    found = Victim(run)
    yield found
    found.check()


def frame(
    operation: OperationId,
    kind: FrameKind = FrameKind.DATA,
    *,
    step: int = 0,
    offset: int = OFFSET,
    length: int = LENGTH,
    payload: bytes | None = None,
) -> bytes:
    content = bytes(length) if payload is None else payload
    header = FrameHeader(kind, operation, step, offset, length)
    return encode_header(header, payload_hash(content)) + content


def changed(data: bytes, position: int, value: int) -> bytes:
    """A frame with another byte in its header, and a checksum that fits."""
    header = data[:position] + bytes([value]) + data[position + 1 : HEADER_BYTES - SEAL_BYTES]
    return seal(header) + data[HEADER_BYTES:]


def answer(
    operation: OperationId, *, number: int = 0, length: int = 1, payload: bytes | None = None
) -> bytes:
    """A bitmap, and the number of the question (the first one is 1)."""
    return frame(operation, FrameKind.HAVE, offset=number, length=length, payload=payload)


NOWHERE = "unexpected segment"
FRAMES: dict[str, tuple[int, Callable[[OperationId], bytes], str]] = {
    "not from upstream": (DOWNSTREAM, frame, "is not upstream"),
    "another step": (UPSTREAM, lambda o: frame(o, step=1), NOWHERE),
    "a step that there is not": (UPSTREAM, lambda o: frame(o, step=65535), NOWHERE),
    "a chunk that comes later": (UPSTREAM, lambda o: frame(o, offset=0), NOWHERE),
    "beside a segment": (UPSTREAM, lambda o: frame(o, offset=OFFSET + 8), NOWHERE),
    "before the tensor": (UPSTREAM, lambda o: frame(o, offset=(1 << 64) - 8), NOWHERE),
    "behind the tensor": (UPSTREAM, lambda o: frame(o, offset=8 * N_ELEMENTS), NOWHERE),
    "over the end": (UPSTREAM, lambda o: frame(o, offset=225_536), NOWHERE),
    "too short": (UPSTREAM, lambda o: frame(o, length=LENGTH - 8), NOWHERE),
    "empty": (UPSTREAM, lambda o: frame(o, length=0), NOWHERE),
    "too long": (UPSTREAM, lambda o: frame(o, length=LENGTH + 8), NOWHERE),
    "as long as can be": (UPSTREAM, lambda o: frame(o, length=16 << 20, payload=b""), NOWHERE),
    "longer": (UPSTREAM, lambda o: frame(o, length=(16 << 20) + 1, payload=b""), "over"),
    "a bitmap too long": (DOWNSTREAM, lambda o: answer(o, length=100), "bitmap of 100 bytes"),
    "a bitmap too short": (DOWNSTREAM, lambda o: answer(o, length=0), "bitmap of 0 bytes"),
    "a bitmap beyond reason": (
        DOWNSTREAM,
        lambda o: answer(o, length=(1 << 20) + 1, payload=b""),
        "a bitmap of 1048577 bytes",
    ),
    "a bitmap that nobody asked for": (
        DOWNSTREAM,
        answer,
        "answered question 0, not one from 1 to 0",
    ),
    "an answer to a question to come": (
        DOWNSTREAM,
        lambda o: answer(o, number=1),
        "answered question 1, not one from 1 to 0",
    ),
    "a query that carries something": (
        UPSTREAM,
        lambda o: frame(o, FrameKind.QUERY),
        "carries no payload",
    ),
    "a kind of its own": (UPSTREAM, lambda o: changed(frame(o), 0, 99), "not a frame header"),
    "a ping that carries something": (
        UPSTREAM,
        lambda o: frame(o, FrameKind.PING),
        "a PING carries no payload",
    ),
    "no kind": (UPSTREAM, lambda o: changed(frame(o), 0, 0), "not a frame header"),
    "flags": (UPSTREAM, lambda o: changed(frame(o), 1, 0x80), "not a frame header"),
    "a header that was damaged": (
        UPSTREAM,
        lambda o: frame(o)[:47] + b"\x80" + frame(o)[48:],
        "damaged on the way",
    ),
    "a payload that was damaged": (
        UPSTREAM,
        lambda o: frame(o)[:-1] + b"\x80",
        "damaged on the way",
    ),
    "far ahead": (
        UPSTREAM,
        lambda o: 5 * frame(replace(o, n=1)),
        f"more than {EARLY_STORE_BYTES_MAX} bytes of frames before",
    ),
    "far ahead without payload": (
        UPSTREAM,
        lambda o: 6000 * frame(replace(o, tag=o.tag + (1 << 40)), length=0),
        f"more than {EARLY_STORE_BYTES_MAX} bytes of frames before",
    ),
}


@pytest.mark.usefixtures("all_log_lines")
@pytest.mark.parametrize(("source", "data", "words"), FRAMES.values(), ids=FRAMES)
def test_frames_that_close_their_connection(
    victim: Victim,
    caplog: pytest.LogCaptureFixture,
    source: int,
    data: Callable[[OperationId], bytes],
    words: str,
) -> None:
    with closing(victim.attack(source, data(victim.operation), lane=1)) as sock:
        assert is_closed(sock)
    victim.run.until(lambda: words in caplog.text)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [words in line.message for line in lines] == [True]


IGNORED: dict[str, tuple[int, Callable[[OperationId], bytes]]] = {
    "another term": (UPSTREAM, lambda o: frame(replace(o, term=2))),
    "another group": (UPSTREAM, lambda o: frame(replace(o, group=GROUP))),
    "a future view": (UPSTREAM, lambda o: frame(replace(o, view=o.view + 1))),
    "a view long gone": (UPSTREAM, lambda o: frame(replace(o, view=0))),
    "a bitmap of something else": (DOWNSTREAM, lambda o: answer(replace(o, n=9), length=100)),
    "a bitmap from the wrong side": (UPSTREAM, lambda o: answer(o, number=1)),
    "a query to the wrong side": (DOWNSTREAM, lambda o: frame(o, FrameKind.QUERY, length=0)),
    "very many queries": (UPSTREAM, lambda o: frame(o, FrameKind.QUERY, length=0) * 20_000),
    "very many bitmaps": (DOWNSTREAM, lambda o: answer(replace(o, n=9)) * 20_000),
    "very many pings": (UPSTREAM, lambda o: frame(o, FrameKind.PING, length=0) * 20_000),
    "an answer to no ping": (UPSTREAM, lambda o: frame(o, FrameKind.PONG, length=0)),
    "half a header": (UPSTREAM, lambda o: frame(o)[:24]),
    "half a frame": (UPSTREAM, lambda o: frame(o)[: LENGTH // 2]),
    "half an early frame": (UPSTREAM, lambda o: frame(replace(o, n=1))[: LENGTH // 2]),
    "half a bitmap": (DOWNSTREAM, lambda o: answer(replace(o, n=9), length=1 << 20)[: 1 << 19]),
}


@pytest.mark.parametrize(("source", "data"), IGNORED.values(), ids=IGNORED)
def test_frames_that_change_nothing(
    victim: Victim, source: int, data: Callable[[OperationId], bytes]
) -> None:
    """The connection goes when the real peer is back."""
    with closing(victim.attack(source, data(victim.operation))) as sock:
        assert is_closed(sock)


def test_an_early_frame_that_turns_out_not_to_fit(
    new_run: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    victim = Victim(new_run(3, TIMING))  # where nothing else was ever sent ahead
    to_come = replace(victim.operation, tag=victim.operation.tag + 1)
    with closing(victim.attack(UPSTREAM, frame(to_come, step=9, length=8), lane=1)) as sock:
        another = Victim(victim.run)
        assert another.operation == to_come
        victim.run.until(lambda: "closed the link to peer 3: unexpected segment" in caplog.text)
        assert is_closed(sock)
    another.check()
    victim.check()


def test_an_impostor_who_comes_again_and_again(victim: Victim) -> None:
    for _ in range(50):
        with closing(victim.attack(UPSTREAM, frame(victim.operation, FrameKind.QUERY, length=0))):
            pass


def test_newcomers_beyond_number(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    upkeep = engine_of(run.members[0]).keeper._upkeep  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(upkeep, "_newcomers", SourceShares[PeerId](5))
    victim = Victim(run)
    with ExitStack() as stack:
        socks = [stack.enter_context(closing(victim.attack(n, b""))) for n in range(100, 110)]
        for sock in socks[:5]:
            assert is_closed(sock)
        for sock in socks[5:]:
            sock.setblocking(False)
            with suppress(BlockingIOError):  # nothing came; or a question for memory
                assert sock.recv(1), "it is closed"
        victim.check()
