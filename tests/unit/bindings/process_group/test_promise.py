"""Futures of works, their callbacks, and the numbers of the collectives in these."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from pccl.bindings.process_group.promise import Branch, Promise, RunFuture


def nothing() -> None:
    """Settle nothing."""


def doubled(future: Any) -> Any:
    return future.value() * 2


def test_a_wait_settles_also_through_callbacks() -> None:
    future = RunFuture(0, lambda: future.complete(lambda: 3))
    chained = future.then(doubled).then(doubled)
    assert chained.wait() == 12
    assert future.wait() == 3


def test_what_a_future_settles_with_is_freed_with_its_outcome() -> None:
    promise = Promise([torch.ones(1)])
    chained = promise.get_future().then(doubled)
    assert chained._settle is not None
    promise.end()
    assert promise.get_future()._settle is None
    assert chained._settle is None


def test_an_error_reaches_all_that_is_chained() -> None:
    promise, error = Promise([torch.ones(1)]), KeyError("lost")
    future = promise.get_future()
    chained = future.then(doubled)
    promise.end(error)
    for one in (future, chained):
        with pytest.raises(RuntimeError, match="KeyError: 'lost'"):
            one.wait()
    with pytest.raises(RuntimeError) as caught:
        future.value()
    assert caught.value.__cause__ is error


def test_collectives_in_callbacks_have_numbers_of_their_own() -> None:
    """They follow from the program, in whatever order the callbacks run."""

    def numbers_of(order: list[int]) -> dict[int, list[int]]:
        futures = [RunFuture(tag, nothing) for tag in range(40)]
        numbers: dict[int, list[int]] = {}

        def call(place: int, future: Any) -> None:
            branch = Branch.current.get()
            assert branch is not None
            numbers[place] = [branch.number() for _ in range(3)]

        for place, future in enumerate(futures):
            future.then(partial(call, 2 * place))
            future.then(doubled).add_done_callback(partial(call, 2 * place + 1))
        for place in order:
            futures[place].complete(lambda: 1)
        assert Branch.current.get() is None
        return numbers

    there, back = numbers_of(list(range(40))), numbers_of(list(range(39, -1, -1)))
    assert there == back
    every = [number for numbers in there.values() for number in numbers]
    assert len(set(every)) == len(every) == 240


def test_many_collectives_of_one_callback_take_few_numbers() -> None:
    branch = Branch(7, "/0")
    assert len({branch.number() for _ in range(100)}) == 8
