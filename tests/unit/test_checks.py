"""The quorum of a joint call: which arguments make which, and what is wrong with the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pccl
from pccl._api.arguments import list_request, reduce_request, sync_request
from pccl.checks import check_quorum
from pccl.descriptors import ReduceDescriptor, ReduceOpDescriptor
from pccl.protocol.codec import StreamDecoder, encode
from pccl.protocol.messages import RoundRequest
from pccl.protocol.types import Quorum, ReduceOp, RoundId, RoundKind


@pytest.mark.parametrize(
    ("quorum", "grace_s", "meant"),
    [
        (None, "auto", None),
        (2, "auto", Quorum(2)),
        (7, 0, Quorum(7, grace_ms=0)),
        (np.int64(3), 1.5, Quorum(3, grace_ms=1500)),
        (0.5, "auto", Quorum(share=0.5)),
        (1.0, 0.0004, Quorum(share=1.0, grace_ms=0)),
        (1e-3, 3600, Quorum(share=1e-3, grace_ms=3_600_000)),
        (np.float64(0.25), np.float32(0.5), Quorum(share=0.25, grace_ms=500)),
    ],
)
def test_right_ones(quorum: Any, grace_s: Any, meant: Quorum | None) -> None:
    made = check_quorum(quorum, grace_s)
    assert made == meant
    asked = RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 1), made)
    assert list(StreamDecoder().feed(encode(asked))) == [asked]


@pytest.mark.parametrize(
    ("quorum", "grace_s", "error", "names"),
    [
        (True, "auto", TypeError, "quorum must be an integer, not True"),
        ("2", "auto", TypeError, "quorum"),
        ([2], "auto", TypeError, "quorum"),
        (1, "auto", ValueError, "quorum must be from 2 to"),
        (0, "auto", ValueError, "quorum must be"),
        (-1, "auto", ValueError, "quorum must be"),
        (1 << 40, "auto", ValueError, "quorum must be"),
        (0.0, "auto", ValueError, "a share up to 1, not 0.0"),
        (-0.5, "auto", ValueError, "a share up to 1, not -0.5"),
        (1.5, "auto", ValueError, "a share up to 1, not 1.5"),
        (2.0, "auto", ValueError, "a number of members or a share up to 1, not 2.0"),
        (float("nan"), "auto", ValueError, "not nan"),
        (float("inf"), "auto", ValueError, "not inf"),
        (2, "soon", TypeError, 'grace_s must be a number of seconds or "auto"'),
        (2, None, TypeError, "grace_s"),
        (2, True, TypeError, "grace_s"),
        (2, -0.1, ValueError, "grace_s must be from 0 to 3600 s, not -0.1"),
        (2, 3600.1, ValueError, "grace_s must be from 0 to 3600 s"),
        (2, float("nan"), ValueError, "grace_s must be"),
        (None, 1.0, ValueError, "grace_s is for calls with a quorum; pass a quorum, or leave it"),
        (None, 0, ValueError, "grace_s is for calls with a quorum"),
    ],
)
def test_wrong_ones(quorum: Any, grace_s: Any, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        check_quorum(quorum, grace_s)


def values(count: int = 4) -> Any:
    return np.ones(count, np.float32)


QUORUM = Quorum(2, grace_ms=1000)
ASKED: dict[str, Any] = {"quorum": 2, "grace_s": 1.0}


def test_every_call_takes_it() -> None:
    one = reduce_request(values(), values(), **ASKED)
    weighted = reduce_request(values(), values(), op=ReduceOp.AVG, weight=2.0, **ASKED)
    many = list_request([values(), values(3)], [values(), values(3)], **ASKED)
    assert {made.asks.descriptor.quorum for made in (one, weighted, many)} == {QUORUM}
    assert weighted.asks.weight == 2.0
    assert reduce_request(values(), values()).asks.descriptor.quorum is None
    assert str(one.asks.descriptor) == "SUM of 4 x float32 with a quorum of 2 members and 1 s"


@pytest.mark.parametrize("again", [False, True])
def test_in_place_there_is_no_room_for_a_late_result(again: bool) -> None:
    send = values()
    advice = "give the call a recv of its own"
    with pytest.raises(ValueError, match=advice):
        reduce_request(send, send if again else None, **ASKED)
    with pytest.raises(ValueError, match=advice):
        list_request([send], [send] if again else None, **ASKED)
    with pytest.raises(ValueError, match=advice):
        reduce_request(send, send if again else None, op=ReduceOp.AVG, weight=1.0, quorum=0.5)
    assert not any(send != 1)


def test_wrong_ones_are_refused_by_every_call() -> None:
    wrong: dict[str, Any] = {"quorum": 1}
    for make in (
        lambda: reduce_request(values(), values(), **wrong),
        lambda: list_request([values()], [values()], **wrong),
        lambda: sync_request(
            pccl.SharedState([pccl.TensorInfo.from_numpy(values(), "w")]), **wrong
        ),
        lambda: reduce_request(values(), values(), grace_s=1.0),
    ):
        with pytest.raises(ValueError, match="quorum"):
            make()


def test_descriptors_take_it_too() -> None:
    what = ReduceDescriptor(4, ReduceOp.SUM, 0, None, None, quorum=2, grace_s=1.0)
    made = ReduceOpDescriptor.from_numpy(values(), values(), what)
    assert (made.reduce_descriptor.quorum, made.reduce_descriptor.grace_s) == (2, 1.0)
