"""The store at a member: errors, callers that leave, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.machines.key_value.client import KeptEntries
from pccl.machines.key_value.entries import entry_bytes
from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import STORE_OPEN_MAX
from pccl.protocol.messages import KnownEntry, StoreAnswer, StoreChange, StoreOp, StoreRequest
from pccl.protocol.types import PeerId, RemovalCause
from tests.support.peer_stage import ME, PeerStage, raised, sent

OTHER, OWN = PeerId(1), PeerId(ME)


def member() -> PeerStage:
    return PeerStage().registered().member()


def asks(peer: PeerStage, call: int, op: StoreOp, *keys: bytes, **values: bytes) -> list[Any]:
    return sent(peer.do(ev.StoreCall(call, op, keys, **values)))


def returned(effects: list[ev.PeerEffect]) -> list[tuple[int, ev.ReturnValue]]:
    return [(e.call, e.value) for e in effects if isinstance(e, ev.ReturnCall)]


def reported(peer: PeerStage) -> list[KnownEntry]:
    peer.do(ev.ControlClosed("reset"))
    return [m for m in sent(peer.do(ev.ControlOpened(NO_RUN, 0))) if isinstance(m, KnownEntry)]


def test_a_call_asks_and_the_answer_ends_it() -> None:
    peer = member()
    assert asks(peer, 8, StoreOp.ADD, b"n", value=b"1") == [
        StoreRequest(1, StoreOp.ADD, (b"n",), b"1", open=(1,))
    ]
    answer = StoreAnswer(1, value=b"5", change=StoreChange(9, OWN))
    assert returned(peer.do(answer)) == [(8, ev.StoreResult(True, b"5"))]
    assert returned(peer.do(answer)) == []


def test_what_is_open_is_asked_again_on_a_new_connection() -> None:
    peer = member()
    asks(peer, 8, StoreOp.SET, b"a", value=b"1")
    asks(peer, 9, StoreOp.GET, b"b")
    peer.do(StoreAnswer(1, change=StoreChange(9, OWN)))
    asks(peer, 10, StoreOp.GET, b"c")
    peer.do(ev.ControlClosed("reset"))
    peer.do(ev.ControlOpened(peer.machine.run, 1))
    again = [m for m in sent(peer.do(msg.Resumed(1))) if isinstance(m, StoreRequest)]
    assert again == [
        StoreRequest(0, StoreOp.FORGET, open=(2, 3)),
        StoreRequest(2, StoreOp.GET, (b"b",), open=(2, 3)),
        StoreRequest(3, StoreOp.GET, (b"c",), open=(2, 3)),
    ]


def test_who_leaves_a_read_ends_it() -> None:
    peer = member()
    asks(peer, 8, StoreOp.GET, b"k")
    effects = peer.do(ev.LeaveCall(8, "timeout_s=1 ran out"))
    assert sent(effects) == [StoreRequest(0, StoreOp.FORGET)]
    assert isinstance(raised(effects, errors.DeadlineExceeded), errors.DeadlineExceeded)


def test_who_leaves_a_write_leaves_it_open() -> None:
    peer = member()
    asks(peer, 8, StoreOp.SET, b"k", value=b"v")
    effects = peer.do(ev.LeaveCall(8, "cancelled"))
    assert sent(effects) == []
    assert returned(peer.do(StoreAnswer(1, change=StoreChange(9, OWN)))) == []
    assert reported(peer) == [KnownEntry(b"k", b"v", StoreChange(9, OWN))]


def test_it_reports_what_it_wrote_and_read_and_the_newest_of_each_key() -> None:
    peer = member()
    for number, (op, key, value, change) in enumerate(
        (
            (StoreOp.SET, b"mine", b"1", StoreChange(5, OWN)),
            (StoreOp.GET, b"theirs", b"2", StoreChange(6, OTHER)),
            (StoreOp.SET, b"lost", b"3", StoreChange(7, OWN)),
            (StoreOp.GET, b"lost", b"4", StoreChange(8, OTHER)),
            (StoreOp.DELETE, b"gone", None, StoreChange(9, OWN)),
            (StoreOp.GET, b"mine", b"0", StoreChange(4, OTHER)),
        ),
        1,
    ):
        given = {"value": value} if op is StoreOp.SET and value is not None else {}
        asks(peer, number, op, key, **given)
        told = value if op is StoreOp.GET else None
        peer.do(StoreAnswer(number, value=told, change=change))
    assert reported(peer) == [
        KnownEntry(b"mine", b"1", StoreChange(5, OWN)),
        KnownEntry(b"gone", None, StoreChange(9, OWN)),
        KnownEntry(b"theirs", b"2", StoreChange(6, OTHER)),
        KnownEntry(b"lost", b"4", StoreChange(8, OTHER)),
    ]


def test_it_keeps_the_newest_up_to_a_number_of_bytes() -> None:
    kept = KeptEntries(3 * entry_bytes(b"k0", b"value"))
    for n in range(5):
        kept.keep(KnownEntry(b"k%d" % n, b"value", StoreChange(n, OWN)))
    kept.keep(KnownEntry(b"k3", b"other", StoreChange(9, OWN)))
    assert [entry.key for entry in kept] == [b"k2", b"k4", b"k3"]
    kept.keep(KnownEntry(b"k5", None, StoreChange(10, OWN)))
    assert [entry.key for entry in kept] == [b"k4", b"k3", b"k5"]


@pytest.mark.parametrize("refusal", msg.StoreRefusal)
def test_a_refusal_is_an_error_in_words(refusal: msg.StoreRefusal) -> None:
    peer = member()
    asks(peer, 8, StoreOp.ADD, b"the key", value=b"1")
    (effect,) = peer.do(StoreAnswer(1, refusal, done=False))
    assert isinstance(effect, ev.RaiseCall)
    is_argument = refusal in (msg.StoreRefusal.NO_NUMBER, msg.StoreRefusal.TOO_LONG)
    assert isinstance(effect.error, ValueError if is_argument else errors.PCCLError)
    assert "the key" in str(effect.error)
    assert reported(peer) == []


def test_only_so_many_calls_may_be_open() -> None:
    peer = member()
    for call in range(STORE_OPEN_MAX):
        asks(peer, call, StoreOp.GET, b"k")
    effects = peer.do(ev.StoreCall(99, StoreOp.GET, (b"k",)))
    assert raised(effects, errors.PendingOperations)
    assert sent(effects) == []


def test_only_members_may_ask() -> None:
    peer = PeerStage().registered()
    assert raised(peer.do(ev.StoreCall(8, StoreOp.COUNT)), errors.NotConnected)


def test_the_loss_of_the_membership_ends_all_calls_and_is_still_due_to_a_joint_call() -> None:
    peer = member()
    asks(peer, 8, StoreOp.GET, b"k")
    effects = peer.do(msg.Refused(RemovalCause.SILENT, "silent"))
    assert raised(effects, errors.Evicted)
    assert raised(peer.do(ev.StoreCall(9, StoreOp.COUNT)), errors.Evicted)
    assert raised(peer.do(ev.RoundCall(10, ev.RoundKind.UPDATE_TOPOLOGY)), errors.Evicted)
    assert raised(peer.do(ev.StoreCall(11, StoreOp.COUNT)), errors.Evicted)


def test_after_the_end_calls_fail_at_once() -> None:
    peer = member()
    asks(peer, 8, StoreOp.GET, b"k")
    assert raised(peer.do(ev.Close()), errors.NotConnected)
    assert raised(peer.do(ev.StoreCall(9, StoreOp.COUNT)), errors.NotConnected)
