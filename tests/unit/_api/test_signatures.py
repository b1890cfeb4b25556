"""Methods that are made from one signature: what they show, and what they do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pccl
import pccl.aio
from pccl._api.arguments import join_request, list_request, reduce_request, sync_request
from pccl._api.signatures import asking, blocking

REQUESTS: dict[str, Callable[..., object]] = {
    "connect": join_request,
    "all_reduce": reduce_request,
    "all_reduce_async": reduce_request,
    "all_reduce_many": list_request,
    "sync_shared_state": sync_request,
}


def doubled(number: int, *, times: int = 2) -> int:
    """Check and multiply."""
    if times < 1:
        raise ValueError("times must be 1 or more")
    return number * times


class Face:
    """Where requests go."""

    def __init__(self, *, suspends: bool = False) -> None:
        self.suspends = suspends

    @asking(doubled)
    async def ask(self, request: int) -> str:
        """Ask for it."""
        if self.suspends:
            await Forever()
        return f"{request} came"


class Forever:
    def __await__(self) -> Any:
        yield


class Blocking:
    suspends = False
    ask = blocking(Face.ask)


def test_a_method_shows_the_arguments_and_its_own_docstring() -> None:
    for method in (Face.ask, Blocking.ask):
        assert (
            str(inspect.signature(method)) == "(self, number: 'int', *, times: 'int' = 2) -> 'str'"
        )
        assert (inspect.getdoc(method), method.__name__) == ("Ask for it.", "ask")
    assert inspect.iscoroutinefunction(Face.ask)
    assert not inspect.iscoroutinefunction(Blocking.ask)


def test_both_do_the_same() -> None:
    awaited = Face().ask(4, times=3)
    with pytest.raises(StopIteration) as returned:
        awaited.send(None)
    assert returned.value.value == "12 came"
    assert Blocking().ask(4, times=3) == "12 came"


def test_a_mistake_is_told_when_it_is_awaited_or_called() -> None:
    awaited = Face().ask(4, times=0)
    with pytest.raises(ValueError, match="1 or more"):
        awaited.send(None)
    with pytest.raises(ValueError, match="1 or more"):
        Blocking().ask(4, times=0)


def test_a_blocking_call_waits_in_its_thread_only() -> None:
    face = Blocking()
    face.suspends = True
    with pytest.raises(AssertionError, match=r"Face\.ask suspended"):
        face.ask(4)


@pytest.mark.parametrize("face", [pccl.Communicator, pccl.aio.Communicator])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_methods_are_those_of_the_requests(face: Any, name: str) -> None:
    request_of: Callable[..., object] = REQUESTS[name]
    me, *parameters = inspect.signature(getattr(face, name)).parameters.values()
    assert me.name == "self"
    assert parameters == list(inspect.signature(request_of).parameters.values())


@pytest.mark.parametrize("name", sorted(REQUESTS.keys() - {"all_reduce_async"}))
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(getattr(pccl.Communicator, name)) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): ", arguments, re.MULTILINE)
    assert described == list(inspect.signature(REQUESTS[name]).parameters)


def test_a_request_holds_all_that_was_asked_for() -> None:
    request = reduce_request(np.ones(4), tag=7, retry=True, observable=True, timeout_s=2)
    assert (request.tag, request.retry, request.observable, request.timeout_s) == (7, True, True, 2)
    plain = reduce_request(np.ones(4))
    assert (plain.tag, plain.retry, plain.observable, plain.timeout_s) == (0, False, False, None)
