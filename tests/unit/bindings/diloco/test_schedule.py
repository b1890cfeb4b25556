"""Which fragment a round has, how far rounds lie apart, and how parameters are spread."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.bindings.diloco.schedule import Schedule, partition, schedule


@pytest.mark.parametrize(
    ("sync_every", "fragments", "gaps"),
    [
        (100, 1, [100, 100, 100]),
        (100, 3, [33, 33, 34, 33, 33, 34]),
        (5, 4, [1, 1, 1, 2, 1, 1, 1, 2]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_rounds_share_the_steps_of_a_cycle(
    sync_every: int, fragments: int, gaps: list[int]
) -> None:
    made = schedule(sync_every, fragments, 0)
    assert [made.steps_before(number) for number in range(len(gaps))] == gaps


@given(data=st.data(), sync_every=st.integers(1, 500), first=st.integers(0, 10**9))
def test_every_fragment_has_one_round_in_a_cycle_of_sync_every_steps(
    data: st.DataObject, sync_every: int, first: int
) -> None:
    fragments = data.draw(st.integers(1, sync_every))
    made = schedule(sync_every, fragments, 0)
    cycle = range(first, first + fragments)
    gaps = [made.steps_before(number) for number in cycle]
    assert sorted(made.fragment(number) for number in cycle) == list(range(fragments))
    assert sum(gaps) == sync_every
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("2min", 120.0),
        ("2m", 120.0),
        ("1.5h", 5400.0),
        (" 0.25 s ", 0.25),
    ],
)
def test_a_time_budget_is_divided_among_fragments(text: str, seconds: float) -> None:
    made = schedule(text, 4, 7)
    assert made == Schedule(fragments=4, sync_steps=0, sync_s=seconds, delay=7)
    assert made.seconds_between == seconds / 4


@pytest.mark.parametrize("text", ["", "30", "s", "-1s", "0s", "0.0ms", "1e3s", "30 days", "s30"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    said = f"sync_every must be a number of inner steps or a time such as '30s', .*{text!r}"
    with pytest.raises(ValueError, match=said):
        schedule(text, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ((0, 1, 0), ValueError, "sync_every must be from 1 to 2147483647, not 0"),
        ((100, 0, 0), ValueError, "fragments must be from 1 to 2147483647, not 0"),
        ((100, 1, -1), ValueError, "delay must be from 0 to 2147483647, not -1"),
        ((100, 1, 101), ValueError, r"delay must be at most sync_every \(100\).*not 101"),
        ((3, 4, 0), ValueError, r"fragments must be at most sync_every \(3\).*not 4"),
        ((1.5, 1, 0), TypeError, "sync_every must be an integer, not 1.5"),
        ((True, 1, 0), TypeError, "sync_every must be an integer, not True"),
        ((100, 2.0, 0), TypeError, "fragments must be an integer, not 2.0"),
        ((100, 1, None), TypeError, "delay must be an integer, not None"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    arguments: tuple[Any, Any, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        schedule(*arguments)


def test_the_limits_themselves_are_possible() -> None:
    assert schedule(3, 3, 3) == Schedule(fragments=3, sync_steps=3, sync_s=0.0, delay=3)


# -- fragments -----------------------------------------------------------------------------------

TWO_LAYERS = [1, 1, 12, 4, 1, 1, 16, 16] * 2
"""As of a transformer: norms, what makes queries, keys and values, and so on. Every fourth tensor
would make fragments of 56, 40, 4 and 4."""


@pytest.mark.parametrize(
    ("order", "sizes", "fragments", "parts"),
    [
        ("strided", [9, 1, 1, 1, 1], 2, ((0,), (1, 2, 3, 4))),
        ("strided", [5, 5, 5, 5, 5, 5], 3, ((0, 3), (1, 4), (2, 5))),
        ("strided", [0, 0, 0], 2, ((0, 2), (1,))),
        ("strided", TWO_LAYERS, 4, ((2, 6), (7, 10), (0, 3, 4, 8, 12, 14), (1, 5, 9, 11, 13, 15))),
        ("sequential", [9, 1, 1, 1, 1], 2, ((0,), (1, 2, 3, 4))),
        ("sequential", [1, 1, 1, 1, 9], 2, ((0, 1, 2, 3), (4,))),
        ("sequential", [5, 5, 5, 5, 5, 5], 3, ((0, 1), (2, 3), (4, 5))),
        ("sequential", [1, 100, 1], 3, ((0,), (1,), (2,))),
        ("sequential", [0, 0, 0], 2, ((0, 1), (2,))),
        ("strided", [4], 1, ((0,),)),
    ],
)
def test_parameters_are_spread(
    order: str, sizes: list[int], fragments: int, parts: tuple[tuple[int, ...], ...]
) -> None:
    assert partition(sizes, fragments, order) == parts


@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    order=st.sampled_from(["strided", "sequential"]),
)
def test_every_parameter_is_in_one_fragment_and_none_is_empty(
    data: st.DataObject, sizes: list[int], order: str
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    parts = partition(sizes, fragments, order)
    assert len(parts) == fragments
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    assert all(list(part) == sorted(part) for part in parts)
    if order == "sequential":
        assert [index for part in parts for index in part] == list(range(len(sizes)))


@given(data=st.data(), sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_fragments_that_are_dealt_differ_by_one_tensor_at_most(
    data: st.DataObject, sizes: list[int]
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in partition(sizes, fragments, "strided")]
    assert max(sums) - min(sums) <= max(sizes)


@given(data=st.data(), sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_neighbours_make_parts_of_about_the_same_size(
    data: st.DataObject, sizes: list[int]
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    largest = max(sum(sizes[i] for i in part) for part in partition(sizes, fragments, "sequential"))
    least_possible = max(max(sizes), sum(sizes) / fragments)
    assert largest <= 2 * least_possible


def test_a_partition_that_cannot_be_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"one of strided, sequential, .*, not 'random'"):
        partition([1, 1], 1, "random")
    with pytest.raises(ValueError, match="at most 2, the number of parameter tensors, not 3"):
        partition([1, 1], 3, "strided")
    with pytest.raises(ValueError, match="at most 1, the number of blocks, not 2"):
        partition([1, 1], 2, "strided-blocks", ["layers.0.w", "layers.0.b"])


GPT = ["embed.w", *(f"net.layers.{layer}.{name}" for layer in range(5) for name in "wb"), "head.w"]
"""Two parameters of each of five layers, as 1 and 2, 3 and 4, ...; before and after them one."""


@pytest.mark.parametrize(
    ("order", "fragments", "parts"),
    [
        # layers 0, 2, 4 (30) and 1, 3 (20): the embedding (20) joins 1 and 3, the head the first
        ("strided-blocks", 2, ((1, 2, 5, 6, 9, 10, 11), (0, 3, 4, 7, 8))),
        # 20, 20 and 10: the embedding joins the last, the head the first
        ("strided-blocks", 3, ((1, 2, 7, 8, 11), (3, 4, 9, 10), (0, 5, 6))),
        ("strided-blocks", 7, ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (0,), (11,))),
        ("sequential-blocks", 2, ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9, 10, 11))),  # 40 and 34
    ],
)
def test_blocks_stay_whole(order: str, fragments: int, parts: tuple[tuple[int, ...], ...]) -> None:
    sizes = [20, *[9, 1] * 5, 4]
    assert partition(sizes, fragments, order, GPT) == parts


@given(
    data=st.data(),
    names=st.lists(st.sampled_from(["a.0.w", "a.0.b", "a.1.w", "b.w", "b.c.w", "7", "w"])),
    order=st.sampled_from(["strided-blocks", "sequential-blocks"]),
)
def test_every_parameter_of_a_block_is_in_its_fragment(
    data: st.DataObject, names: list[str], order: str
) -> None:
    names = ["a.0.x", *names]
    blocks = {"a.0.x": "a.0", "a.0.w": "a.0", "a.0.b": "a.0", "a.1.w": "a.1"}
    blocks |= {"b.w": "b", "b.c.w": "b.c", "7": "7", "w": ""}
    fragments = data.draw(st.integers(1, len({blocks[name] for name in names})))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(names), max_size=len(names)))
    parts = partition(sizes, fragments, order, names)
    assert all(parts)
    assert sorted(index for part in parts for index in part) == list(range(len(names)))
    places = {(blocks[names[index]], turn) for turn, part in enumerate(parts) for index in part}
    assert len(places) == len({block for block, _ in places})
