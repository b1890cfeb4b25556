"""Which process is named, so that another one can read the memory of this one."""

from __future__ import annotations

import pytest

from pccl.topology.tracer import ANYONE, process_to_name

SHELL, LAUNCHER, OUTER = 50, 40, 30
OWN = (100, LAUNCHER, OUTER, SHELL, 1)
SIBLING = (101, LAUNCHER, OUTER, SHELL, 1)
COUSIN = (102, 41, OUTER, SHELL, 1)
FAR = (103, 42, SHELL, 1)
STRANGER = (104, 43, 1)
OTHER = (105, 44, 1)
CHILD = (106, 100, LAUNCHER, OUTER, SHELL, 1)
PARENT = (LAUNCHER, OUTER, SHELL, 1)


@pytest.mark.parametrize(
    ("reader", "named", "to_name"),
    [
        # the system lets ancestors read without a name
        (PARENT, None, None),
        ((1,), None, None),
        (OWN, None, None),  # another communicator of this process
        # the nearest common ancestor
        (SIBLING, None, LAUNCHER),
        (COUSIN, None, OUTER),
        (FAR, None, SHELL),
        (CHILD, None, LAUNCHER),
        # it is named already, or one above it
        (SIBLING, LAUNCHER, None),
        (SIBLING, OUTER, None),
        (CHILD, SHELL, None),
        # one farther away covers the readers before as well
        (COUSIN, LAUNCHER, OUTER),
        (FAR, LAUNCHER, SHELL),
        (FAR, OUTER, SHELL),
        # no common ancestor but the first process: the first reader, and no second one
        (STRANGER, None, 104),
        (STRANGER, 104, None),
        (OTHER, 104, None),
        (SIBLING, 104, None),
        (STRANGER, LAUNCHER, None),
        (STRANGER, ANYONE, None),
        ((), None, None),
    ],
)
def test_at_scope_1(reader: tuple[int, ...], named: int | None, to_name: int | None) -> None:
    assert process_to_name(1, OWN, reader, named) == to_name


@pytest.mark.parametrize(
    ("reader", "named", "to_name"),
    [
        (STRANGER, None, ANYONE),
        (SIBLING, LAUNCHER, ANYONE),
        (OTHER, 104, ANYONE),
        (STRANGER, ANYONE, None),
        (PARENT, None, None),
        ((), None, None),
    ],
)
def test_anyone(reader: tuple[int, ...], named: int | None, to_name: int | None) -> None:
    assert process_to_name(1, OWN, reader, named, anyone=True) == to_name


@pytest.mark.parametrize("scope", [None, 0, 2, 3])
@pytest.mark.parametrize("anyone", [False, True])
@pytest.mark.parametrize("reader", [SIBLING, STRANGER, PARENT])
def test_at_other_scopes_a_name_changes_nothing(
    scope: int | None, anyone: bool, reader: tuple[int, ...]
) -> None:
    assert process_to_name(scope, OWN, reader, None, anyone=anyone) is None


def test_an_orphan_has_no_ancestor_but_the_first_process() -> None:
    assert process_to_name(1, (100, 1), (101, 1), None) == 101
    assert process_to_name(1, (100,), (101, 100), None) == 101  # a namespace begins with it
