"""The store at the master: what each request gets, and what is refused."""

from __future__ import annotations

import pytest

from pccl.machines.history import History
from pccl.machines.key_value.server import TERM_SHIFT, StoreServer
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import REPORTED_MAX, STORE_OPEN_MAX, STORE_VALUE_BYTES_MAX, TERM_MAX
from pccl.protocol.messages import (
    KnownEntry,
    StoreAnswer,
    StoreChange,
    StoreOp,
    StoreReceipt,
    StoreRefusal,
    StoreRequest,
)
from pccl.protocol.types import PeerId

A, B = PeerId(1), PeerId(2)
SET, GET, ADD, SWAP = StoreOp.SET, StoreOp.GET, StoreOp.ADD, StoreOp.COMPARE_SET
FORGET = StoreRequest(0, StoreOp.FORGET)


class Bench:
    """A store, and the numbers of two members."""

    def __init__(self) -> None:
        self.server = StoreServer()
        self.numbers = {A: 0, B: 0}

    def take(self, peer: PeerId, request: StoreRequest) -> list[tuple[PeerId, StoreAnswer]]:
        answers = self.server.take(peer, request, term=1)
        self.server.check(History("test"))
        return answers

    def ask(
        self, peer: PeerId, op: StoreOp, *keys: bytes, value: bytes = b"", expected: bytes = b""
    ) -> list[tuple[PeerId, StoreAnswer]]:
        self.numbers[peer] += 1
        request = StoreRequest(self.numbers[peer], op, keys, value, expected)
        return self.take(peer, request)

    def result(self, *what: object, **values: bytes) -> tuple[bool, bytes | None]:
        ((_, answer),) = self.ask(A, *what, **values)  # type: ignore[arg-type]
        assert answer.refusal is None
        return answer.done, answer.value


def test_the_operations() -> None:
    bench = Bench()
    assert bench.result(ADD, b"n", value=b"3") == (True, b"3")
    assert bench.result(ADD, b"n", value=b"-5") == (True, b"-2")
    assert bench.result(GET, b"n") == (True, b"-2")
    bench.result(SET, b"k", value=b"v")
    assert bench.result(StoreOp.COUNT) == (True, b"2")
    assert bench.result(StoreOp.CHECK, b"n", b"k") == (True, None)
    assert bench.result(StoreOp.CHECK, b"n", b"absent") == (False, None)
    assert bench.result(StoreOp.WAIT, b"n", b"k") == (True, None)
    assert bench.result(StoreOp.DELETE, b"k")[0]
    assert not bench.result(StoreOp.DELETE, b"k")[0]
    assert bench.result(StoreOp.COUNT) == (True, b"1")


def test_compare_set() -> None:
    bench = Bench()
    assert bench.result(SWAP, b"k", value=b"new", expected=b"old") == (False, None)
    assert bench.result(SWAP, b"k", value=b"one")[0]
    assert bench.result(SWAP, b"k", value=b"two", expected=b"no") == (False, b"one")
    assert bench.result(SWAP, b"k", value=b"two") == (False, b"one")
    assert bench.result(SWAP, b"k", value=b"two", expected=b"one")[0]
    assert bench.result(GET, b"k") == (True, b"two")


def test_append() -> None:
    bench = Bench()
    assert bench.result(StoreOp.APPEND, b"k", value=b"a") == (True, b"a")
    one = StoreRequest(90, StoreOp.APPEND, (b"k",), b"b")
    ((_, first),), ((_, again),) = bench.take(A, one), bench.take(A, one)
    assert first == again == StoreAnswer(90, value=b"ab", change=first.change)
    bench.ask(B, SET, b"k", value=b"other")
    assert bench.take(A, one) == [(A, StoreAnswer(90))]  # another member has the value to keep
    long = bytes(STORE_VALUE_BYTES_MAX - 4)
    ((_, refused),) = bench.take(A, StoreRequest(91, StoreOp.APPEND, (b"k",), long))
    assert refused.refusal is StoreRefusal.TOO_LONG
    assert bench.result(GET, b"k") == (True, b"other")


def test_who_waits_is_answered_when_the_last_key_comes() -> None:
    bench = Bench()
    assert bench.ask(B, StoreOp.WAIT, b"x", b"y") == []
    assert bench.ask(B, GET, b"y") == []  # the first request has ended
    bench.ask(A, SET, b"x", value=b"1")
    answers = bench.ask(A, SET, b"y", value=b"2")
    assert [(peer, answer.value) for peer, answer in answers] == [(A, b""), (B, b"2")]


def test_a_wait_for_several_keys_goes_from_key_to_key() -> None:
    bench = Bench()
    assert bench.ask(B, StoreOp.WAIT, b"x", b"y") == []
    assert [peer for peer, _ in bench.ask(A, SET, b"x", value=b"1")] == [A]
    bench.ask(A, StoreOp.DELETE, b"x")
    assert [peer for peer, _ in bench.ask(A, SET, b"y", value=b"1")] == [A]
    assert [peer for peer, _ in bench.ask(A, SET, b"x", value=b"1")] == [A, B]


def test_a_repeated_write_is_carried_out_once() -> None:
    bench = Bench()
    add = StoreRequest(1, ADD, (b"n",), b"1")
    first, again = bench.take(A, add), bench.take(A, add)
    assert [answer.value for _, answer in (*first, *again)] == [b"1", b"1"]
    assert bench.ask(B, GET, b"n")[0][1].value == b"1"


def test_a_receipt_ends_with_a_later_request() -> None:
    bench = Bench()
    bench.take(A, StoreRequest(1, ADD, (b"n",), b"1"))
    ((_, seen),) = bench.ask(B, GET, b"n")
    assert seen.change is not None
    assert [(one.peer, one.number) for one in seen.change.receipts] == [(A, 1)]
    bench.take(A, FORGET)
    ((_, seen),) = bench.ask(B, GET, b"n")
    assert seen.change is not None
    assert seen.change.receipts == ()


def test_a_request_that_is_no_longer_open_waits_no_more() -> None:
    bench = Bench()
    bench.take(A, StoreRequest(1, GET, (b"k",), open=(1,)))
    bench.take(A, StoreRequest(2, GET, (b"k",), open=(1, 2)))
    bench.take(A, StoreRequest(0, StoreOp.FORGET, open=(2,)))
    answers = bench.ask(B, SET, b"k", value=b"v")
    assert [(peer, answer.number) for peer, answer in answers] == [(B, 1), (A, 2)]


def test_a_removed_member_waits_no_more_and_its_keys_stay() -> None:
    bench = Bench()
    bench.take(A, StoreRequest(1, SET, (b"mine",), b"1", open=(1,)))
    bench.take(A, StoreRequest(2, GET, (b"k",), open=(1, 2)))
    bench.server.forget([A])
    assert [peer for peer, _ in bench.ask(B, SET, b"k", value=b"v")] == [B]
    assert bench.ask(B, GET, b"mine")[0][1].value == b"1"


@pytest.mark.parametrize(
    ("present", "amount"),
    [(b"no number", b"1"), (b"9223372036854775807", b"1"), (b"1", b"one"), (b"", b"1")],
)
def test_only_numbers_are_added(present: bytes, amount: bytes) -> None:
    bench = Bench()
    bench.ask(A, SET, b"n", value=present)
    ((_, answer),) = bench.ask(A, ADD, b"n", value=amount)
    assert answer.refusal is StoreRefusal.NO_NUMBER
    assert bench.result(GET, b"n") == (True, present)


def test_a_full_store_refuses_in_words() -> None:
    bench, value = Bench(), bytes(STORE_VALUE_BYTES_MAX)
    answers = [bench.ask(A, SET, b"%d" % n, value=value) for n in range(20)]
    assert answers[-1][0][1].refusal is StoreRefusal.MEMBER_FULL
    assert bench.ask(B, SET, b"k", value=value)[0][1].refusal is None


@pytest.mark.parametrize(
    "request_",
    [
        StoreRequest(1, SET, (), b"v"),
        StoreRequest(1, GET, (b"a", b"b")),
        StoreRequest(1, StoreOp.WAIT, ()),
        StoreRequest(1, StoreOp.COUNT, (b"a",)),
        StoreRequest(1, GET, (b"a",), b"v"),
        StoreRequest(1, SET, (b"a",), b"v", b"expected"),
    ],
)
def test_what_no_member_sends(request_: StoreRequest) -> None:
    with pytest.raises(RemoteProtocolError):
        Bench().take(A, request_)


@pytest.mark.parametrize("op", [GET, SET])
def test_too_many_open_requests(op: StoreOp) -> None:
    bench = Bench()
    numbers = tuple(range(1, STORE_OPEN_MAX + 3))
    *honest, one_more = [StoreRequest(n, op, (b"%d" % n,), open=numbers) for n in numbers]
    for request in honest:
        bench.take(A, request)
    with pytest.raises(RemoteProtocolError, match="too many"):
        bench.take(A, one_more)


def test_another_master_goes_on_from_the_reports() -> None:
    bench = Bench()
    receipt = StoreReceipt(B, 7, 5, b"2")
    bench.server.take_up(
        [KnownEntry(b"n", b"3", StoreChange(6, A, (receipt, StoreReceipt(PeerId(9), 1, 2))))],
        [A, B],
    )
    bench.server.check(History("test"))
    ((_, again),) = bench.take(B, StoreRequest(7, ADD, (b"n",), b"1"))
    assert (again.value, again.change) == (b"2", StoreChange(5, B))
    ((_, new),) = bench.take(B, StoreRequest(8, ADD, (b"n",), b"1"))
    assert new.value == b"4"
    assert new.change == StoreChange((1 << TERM_SHIFT) + 1, B)


def test_the_places_of_all_terms_are_credible() -> None:
    assert (TERM_MAX << TERM_SHIFT) < REPORTED_MAX
