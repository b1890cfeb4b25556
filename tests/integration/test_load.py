"""A connection that sends as much as it may: survivors of a stopped peer go on all the same.

The master lives in the test's process; members and attackers are processes of their own. This file
is also the attackers' program.
"""

from __future__ import annotations

import itertools
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from pccl.protocol import messages as msg
from pccl.protocol.codec import encode, frame
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import (
    FLOWS_MAX,
    HEARTBEAT_BYTES_MAX,
    LINKS_BATCH_MAX,
    NEWCOMER_BYTES_MAX,
    OPERATIONS_OPEN_MAX,
)
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import Descriptor, OperationId, PeerId, ReduceOp, RoundId, RoundKind
from tests.support.claimant import Claimant
from tests.support.peers import PeerProcess, report

GROUP = 7
"""Of the attacker: nobody else is in it."""

# -- the attackers' program ------------------------------------------------------------------------


def heartbeat(nbytes: int) -> bytes:
    """One of at most so many bytes, and as much to decode as they can hold."""
    flow, room = msg.Flow(PeerId(1), 1, 1), (nbytes - 300) // 4  # such a flow has four bytes
    counts = [min(FLOWS_MAX, room - start) for start in range(0, room, FLOWS_MAX)]
    operation = OperationId(1, 0, 1, 1, 1)
    return encode(
        msg.Heartbeat(tuple(msg.Progress(operation, 1, 2, 3, (flow,) * n) for n in counts))
    )


def flood(sock: socket.socket, words: Iterator[bytes]) -> int:
    """Send until the connection is closed; return how many bytes went out."""
    threading.Thread(target=_read, args=(sock,), daemon=True).start()
    sent = 0
    with suppress(OSError):
        for word in words:
            sock.sendall(word)
            sent += len(word)
    return sent


def _read(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(1 << 16):
            pass


def operations(view: int) -> Iterator[bytes]:
    """As many as may be open, then signs of life."""
    descriptor = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
    for tag in range(OPERATIONS_OPEN_MAX):
        operation = OperationId(1, GROUP, view, tag, 0)
        yield encode(msg.OperationRequest(operation, descriptor))
    yield from itertools.repeat(heartbeat(HEARTBEAT_BYTES_MAX))


def words_of(kind: str, view: int) -> Iterator[bytes]:
    links = tuple(
        MeasuredLink(PeerId(n), LinkMeasure(1, 1))
        for n in range(1 << 40, (1 << 40) + LINKS_BATCH_MAX)
    )
    match kind:
        case "a mebibyte":  # what nobody may send
            progress = b"\x95\x95\x01\x00\x01\x01\x01\x01\x02\x03\x90"
            large = b"\x96\xdd" + (90_000).to_bytes(4, "big") + progress * 90_000
            large += b"\x90\x90\xc2\x00\x00"
            return itertools.repeat(frame(4, large))
        case "long heartbeats":
            return itertools.repeat(heartbeat(NEWCOMER_BYTES_MAX))
        case "short heartbeats":
            return itertools.repeat(encode(msg.Heartbeat()) * 100)
        case "link reports":
            return itertools.repeat(encode(msg.LinkReport(PeerId(1), up=False, reason="")) * 100)
        case "measured links":
            return itertools.repeat(encode(msg.LinksMeasured(links)))
        case "member: heartbeats":
            return itertools.repeat(heartbeat(HEARTBEAT_BYTES_MAX))
        case "member: operations":
            return operations(view)
        case "member: rounds":
            asked = RoundId(RoundKind.PEERS_PENDING, 0)
            return itertools.repeat(encode(msg.RoundRequest(asked)) * 100)
        case _:
            raise ValueError(kind)


def attack(address: str, kind: str) -> None:
    """Register, say so, and flood; again and again, if the master closes the connection."""
    while True:
        attacker = Claimant(address)
        attacker.say(msg.Register(GROUP, "", 1))
        assert attacker.hears(msg.Registered)
        report("registered")
        view = 0
        if kind.startswith("member"):
            admitted = attacker.hears(msg.Admitted)
            assert admitted is not None
            view = admitted.roster.view
            report("admitted")
        flood(attacker.sock, words_of(kind, view))


if __name__ == "__main__":
    attack(sys.argv[1], sys.argv[2])
else:
    import pytest

    from tests.integration.test_frozen import QUICK, Crew
    from tests.support.patience import patient

    SLACK_S = patient(2.0)
    LOADS = (
        *("a mebibyte", "long heartbeats", "short heartbeats", "link reports", "measured links"),
        *("member: heartbeats", "member: operations", "member: rounds"),
    )

    @pytest.fixture
    def crew() -> Iterator[Crew]:
        made = Crew("quick")
        yield made
        made.close()

    @pytest.fixture
    def attack_on(crew: Crew) -> Iterator[Callable[[str], PeerProcess]]:
        attacks: list[PeerProcess] = []

        def begin(kind: str) -> PeerProcess:
            attacks.append(PeerProcess(__name__, crew.address, kind))
            assert attacks[-1].hear()[1] == "registered"
            return attacks[-1]

        yield begin
        for one in attacks:
            one.end()

    @pytest.mark.parametrize("kind", LOADS)
    def test_survivors_go_on_whatever_one_connection_sends(
        crew: Crew, attack_on: Callable[[str], PeerProcess], kind: str
    ) -> None:
        crew.connect(3)
        attacker = attack_on(kind)
        if kind.startswith("member"):
            for peer in crew.peers:
                peer.tell("grow", len(crew.peers) + 1)
            for peer in crew.peers:
                peer.answer()
            assert attacker.hear()[1] == "admitted"
        time.sleep(0.3)  # the load has begun
        victim = crew.peers[1]
        stopped_s = victim.stop()
        survivors = [peer for peer in crew.peers if peer is not victim]
        for peer in survivors:
            peer.tell("reduce", 1000)
        for peer in survivors:
            came_s, told = peer.hear()
            print(f"{kind}: a result {came_s - stopped_s:.2f} s after the stop")  # noqa: T201
            assert told["exact"]
            assert victim.id not in told["contributors"]
            assert came_s - stopped_s < QUICK.deadline_s + SLACK_S
        assert victim.id not in {member.peer for member in crew.seen().members}
        victim.thaw()
