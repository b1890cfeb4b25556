"""The numbers in nested dictionaries."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")  # the package needs it

from pccl.bindings.gradient_averager.leaves import numbers_of, with_numbers

NESTED = {"b": [1, (2.5, None)], "a": {"on": True, "name": "cosine"}, "c": math.inf}


def test_numbers_come_in_the_order_of_the_keys() -> None:
    assert list(numbers_of(NESTED)) == [1.0, 1.0, 2.5, math.inf]
    other = {"c": math.inf, "a": {"name": "cosine", "on": True}, "b": [1, (2.5, None)]}
    assert list(numbers_of(other)) == [1.0, 1.0, 2.5, math.inf]


def test_numbers_take_the_places_and_types_of_those_that_were_there() -> None:
    changed = with_numbers(NESTED, iter([0.0, 7.0, 3.0, 0.5]))
    assert changed == {"b": [7, (3.0, None)], "a": {"on": False, "name": "cosine"}, "c": 0.5}
    assert type(changed["a"]["on"]) is bool
    assert type(changed["b"][0]) is int
    assert list(changed) == list(NESTED)


@pytest.mark.parametrize("number", [0.5, math.inf])
def test_an_int_that_becomes_a_fraction_is_a_float(number: float) -> None:
    assert with_numbers([3], iter([number])) == [number]


def test_nothing_is_changed_by_its_own_numbers() -> None:
    assert with_numbers(NESTED, numbers_of(NESTED)) == NESTED
    assert list(numbers_of("text")) == []
    assert with_numbers(None, iter([])) is None
