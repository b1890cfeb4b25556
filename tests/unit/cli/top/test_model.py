"""``pccl top`` without a terminal: what keys and answers change."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from pccl.cli.top.model import COLUMNS, Model
from tests.support.statuses import SAMPLE, member

NOW_S = 100.0
MODEL = Model("127.0.0.1:48148").answered(SAMPLE, NOW_S)


def press(model: Model, *pressed: str) -> Model:
    return reduce(Model.press, pressed, model)


def order(model: Model) -> list[int]:
    return [one.peer for one in model.members()]


def test_q_quits_and_other_letters_change_nothing() -> None:
    assert press(MODEL, "q").ended
    assert press(MODEL, "x") == MODEL
    assert press(Model("m"), "down", "enter", "s", "1").members() == []


@pytest.mark.parametrize(
    ("column", "peers"),
    [
        ("peer", [1, 2, 3, 4]),
        ("name", [1, 2, 3, 4]),
        ("rank", [1, 3, 2, 4]),
        ("step", [4, 2, 3, 1]),
        ("steps/s", [4, 2, 1, 3]),
        ("state", [4, 2, 1, 3]),
    ],
)
def test_members_are_sorted_by_each_column(column: str, peers: list[int]) -> None:
    at = list(COLUMNS).index(column)
    model = press(MODEL, *"s" * at)
    assert (model.sort, order(model)) == (column, peers)
    assert press(model, "r").members() == sorted(model.members(), key=COLUMNS[column], reverse=True)
    assert press(model, *"S" * at).sort == "peer"


def test_the_choice_moves_and_stays_with_its_member() -> None:
    model = press(MODEL, "down", "down")
    assert (model.chosen, model.place()) == (3, 2)
    assert press(model, "page down").chosen == 4
    assert press(model, "page up", "up").chosen == 1
    sorted_again = press(model, "s", "s", "s")
    assert (sorted_again.chosen, sorted_again.place()) == (3, 1)


def test_enter_and_a_number_show_details() -> None:
    assert press(MODEL, "enter").details
    assert not press(MODEL, "enter", "enter").details
    chosen = press(MODEL, "3")
    assert (chosen.chosen, chosen.details) == (3, True)
    assert not press(chosen, "escape").details
    many = replace(SAMPLE, members=tuple(member(n, "x") for n in (1, 12, 2)))
    model = MODEL.answered(many, NOW_S)
    assert [press(model, *typed).chosen for typed in ("1", "12", "122", "19", "9")] == [
        1, 12, 2, 1, None,
    ]  # fmt: skip
